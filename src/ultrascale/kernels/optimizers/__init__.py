"""Kernels of updates: narrow moments, stochastic rounding.

narrow_moments, block_quantise   AdamW's moments in 2 or 1 bytes; rounding with bits that depend on the place
triton_adamw       an update in one pass
"""
