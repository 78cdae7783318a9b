"""Number of threads of a Triton program: Triton takes 128 unless it is given another, however much the program holds."""

from __future__ import annotations

_ELEMENTS_OF_A_WARP = 512
"""16 of each thread: the norm's backward pass then takes 71 registers, where 64 elements took 254 and 128 spilled (sm_90)."""
_MOST = 16
"""Warps, of which a thread can have 128 registers, as the widest norm takes with its 32 elements."""


def warps_for(elements: int) -> int:
    """Warps of 32 threads for a program that holds arrays of so many elements, a power of two: 4 to 16."""
    return min(_MOST, max(4, elements // _ELEMENTS_OF_A_WARP))
