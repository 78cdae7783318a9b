"""The C library's heap, where it is glibc's: kept for the next step of training, kept small where text is tokenized.

Left alone, malloc gives the end of its heap back as soon as that is free, and the system hands out the same pages again, each
zeroed and by a fault of its own: 21,000 a step on the last stage of a small pipeline, a tenth of its CPU time. The peak, which
is what memory must be there for, is the same.

A tokenizer suffers from the opposite. malloc maps large blocks one by one until the first of them is freed, and then takes all
below 32 MiB from the heap. There the small strings that live on split what the vectors of a window leave: 25 MiB in use became
1.6 GiB over the 230 windows of a document of 60 MB.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of the parameters in malloc.h."""
_LARGEST_INT = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc takes no more. It is where its own threshold climbs to, until somebody sets one."""
_SMALL_MMAP_THRESHOLD = 256 * 2**10


def keep_freed_memory() -> None:
    """Let freed memory stay with this process."""
    _set({_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _TRIM_THRESHOLD: _LARGEST_INT})


def map_large_blocks() -> None:
    """Let blocks from 256 KiB on lie outside the heap, so that they go back to the system when freed and fragment nothing."""
    _set({_MMAP_THRESHOLD: _SMALL_MMAP_THRESHOLD})


def return_free_memory() -> None:
    """Give the heap's free pages back to the system.

    The compiler leaves 100 MB of them, in pieces too small for a step's tensors, for which the heap would then grow: the peak
    of a small model was 3 to 5 percent higher.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _set(parameters: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)
