"""Attention, norm, rotary positions, SwiGLU and loss: one name each for callers, whatever runs underneath.

Where a kernel has its own backward pass, it says what it saves for it; under torch.compile the plain form is traced instead,
because the compiler fuses it and chooses what to save itself.
"""
