"""The attention core, in several forms.

attention_core     one function for callers: begin here
attention_spans, attention_flex, flash_packages   documents by spans; block masks; the flash-attn packages
attention_with_lse partial attention, merged by log-sum-exp
attention_contest  measures the fastest core for a run's shapes
"""
