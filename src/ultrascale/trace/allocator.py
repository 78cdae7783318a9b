"""Model of torch's caching allocator, run on a trace: memory reserved from CUDA beyond the bytes that tensors need.

    block     a multiple of 512 bytes
    segment   memory from CUDA: 2 MiB for blocks up to 1 MiB, 20 MiB for those below 10 MiB, else a multiple of 2 MiB
    pool      free blocks by stream and size (small: up to 1 MiB); the smallest that fits is taken, at the lowest address
    split     the rest of a block becomes a free block: always in the small pool, in the large pool if above 1 MiB
    join      a freed block joins free neighbours of its segment

So a tensor may hold up to 1 MiB more than it needs, which `max_memory_allocated` counts: 2 percent of a step of SmolLM2 135M.
Segments are kept. Follows c10/cuda/CUDACachingAllocator.cpp with its default settings (torch 2.11 to 2.13); expandable segments
would reserve less. Not modelled: releasing segments when the device is full, and blocks that wait for another stream's event.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from ultrascale.trace.recording.record import RankTrace

ROUND = 512
SMALL = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
LARGE_FROM = 10 * 2**20
LARGE_ROUND = 2 * 2**20

Pool = tuple[str, bool]
Key = tuple[int, int]
"""Key of a free block: size, address."""


@dataclass(slots=True)
class SegmentBlock:
    """A block of a segment, in use or free."""

    address: int
    size: int
    is_free: bool = False
    before: SegmentBlock | None = None
    after: SegmentBlock | None = None


class Allocator:
    """State of the allocator: addresses of blocks, and reserved bytes."""

    def __init__(self) -> None:
        self.reserved = self.peak_reserved = self.allocated = self.peak_allocated = 0
        self._next = ROUND
        self._free: defaultdict[Pool, list[Key]] = defaultdict(list)
        self._chunks: dict[int, SegmentBlock] = {}
        self.segments: list[tuple[int, int, str]] = []
        """(address, bytes, stream) of each segment, in the order of allocation."""

    def take(self, num_bytes: int, stream: str) -> tuple[int, Pool]:
        """Allocate a block. Returns its address, and the pool to which it returns when freed."""
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        pool = (stream, size <= SMALL)
        chunk = self._best(pool, size) or self._new_segment(pool, size)
        left = chunk.size - size
        if left >= ROUND if pool[1] else left > SMALL:
            self._split(chunk, size, pool)
        chunk.is_free = False
        self.allocated += chunk.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._chunks[chunk.address] = chunk
        return chunk.address, pool

    def give_back(self, address: int, pool: Pool) -> None:
        """Free the block at `address`."""
        chunk = self._chunks.pop(address)
        self.allocated -= chunk.size
        for other in (chunk.before, chunk.after):
            if other is not None and other.is_free:
                self._forget(other, pool)
                chunk = _joined(chunk, other)
        chunk.is_free = True
        insort(self._free[pool], (chunk.size, chunk.address))
        self._chunks[-chunk.address] = chunk

    def _best(self, pool: Pool, size: int) -> SegmentBlock | None:
        free = self._free[pool]
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        _, address = free.pop(index)
        return self._chunks.pop(-address)

    def _new_segment(self, pool: Pool, size: int) -> SegmentBlock:
        num_bytes = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT if size < LARGE_FROM else -(-size // LARGE_ROUND) * LARGE_ROUND
        address, self._next = self._next, self._next + num_bytes
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segments.append((address, num_bytes, pool[0]))
        return SegmentBlock(address, num_bytes)

    def _split(self, chunk: SegmentBlock, size: int, pool: Pool) -> None:
        remainder = SegmentBlock(chunk.address + size, chunk.size - size, True, chunk, chunk.after)
        if remainder.after is not None:
            remainder.after.before = remainder
        chunk.size, chunk.after = size, remainder
        insort(self._free[pool], (remainder.size, remainder.address))
        self._chunks[-remainder.address] = remainder

    def _forget(self, chunk: SegmentBlock, pool: Pool) -> None:
        free = self._free[pool]
        del free[bisect_left(free, (chunk.size, chunk.address))]
        del self._chunks[-chunk.address]


def _joined(chunk: SegmentBlock, other: SegmentBlock) -> SegmentBlock:
    """Two neighbours as one, at the address of the lower."""
    low, high = (chunk, other) if chunk.address < other.address else (other, chunk)
    low.size, low.after = low.size + high.size, high.after
    if low.after is not None:
        low.after.before = low
    return low


def reserved_bytes(trace: RankTrace) -> int:
    """Peak bytes that torch would reserve during the trace: `torch.cuda.max_memory_reserved`."""
    return placed(trace)[0].peak_reserved


def allocated_bytes(trace: RankTrace) -> int:
    """Peak bytes of allocated blocks: `torch.cuda.max_memory_allocated`. Includes the unused rest of blocks that are not
    split."""
    return placed(trace)[0].peak_allocated


def placed(trace: RankTrace) -> tuple[Allocator, list[tuple[int, int, int, int]]]:
    """Allocator after the trace, and every change as (tick, block, address, bytes): positive for allocation, negative for
    free."""
    allocator, living, placements = Allocator(), {}, []
    for tick, number, change in trace.changes:
        if number in living:
            address, pool, size = living.pop(number)
            allocator.give_back(address, pool)
            placements.append((tick, number, address, -size))
            change += size
        if change > 0:
            address, pool = allocator.take(change, trace.blocks[number].stream)
            living[number] = (address, pool, change)
            placements.append((tick, number, address, change))
    return allocator, placements
