"""Kernels of updates: narrow moments, stochastic rounding, orthogonal matrices.

narrow_moments, block_quantise   AdamW's moments in 2 or 1 bytes
stochastic         rounding with bits that depend on the place
newton_schulz      the nearest orthogonal matrix
triton_adamw       an update in one pass
"""
