"""Number of warps of a Triton program: by default Triton uses 4 (128 threads), however much the program holds."""

from __future__ import annotations

_ELEMENTS_OF_A_WARP = 512
"""Elements per warp, 16 per thread: the norm's backward pass then takes 71 registers, where 64 elements took 254 and 128
spilled (sm_90)."""
_MOST = 16
"""Most warps; a thread can then have 128 registers, as the widest norm needs with its 32 elements."""


def warps_for(elements: int) -> int:
    """Number of warps (32 threads) for a program that holds arrays of `elements`, a power of two: 4 to 16."""
    return min(_MOST, max(4, elements // _ELEMENTS_OF_A_WARP))
