"""Attention, norm, RoPE, SwiGLU and loss: callers use one name for each, whichever kernel runs.

A kernel with its own backward pass documents what it saves for it. Under torch.compile the plain form is traced instead, as the
compiler fuses it and chooses what to save.
"""
