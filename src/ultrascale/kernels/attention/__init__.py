"""The attention core, in several forms.

attention_core     one name for callers: begin here
attention_spans, attention_flex, flash_packages   documents by spans; masks by blocks; the flash-attn packages
attention_with_lse parts of the keys, joined by log-sum-exp
attention_contest  the fastest for a run's shapes
"""
