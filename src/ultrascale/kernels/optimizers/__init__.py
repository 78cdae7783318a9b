"""Optimizer kernels: narrow moments, stochastic rounding.

narrow_moments, block_quantise   AdamW's moments in 2 or 1 bytes; stochastic rounding with position-dependent bits
triton_adamw       a fused update in one pass
"""
