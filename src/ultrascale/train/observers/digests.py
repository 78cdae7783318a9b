"""Silent data corruption: ranks that hold the same part of the same tensor must hold the same bits.

    digest     64 bits for each part, on its device: rows of 64-bit words are summed, then their sums with odd weights, modulo
               2^64. One pass over memory. A single flipped bit always shows: a power of two times an odd number is not zero
    compare    all-gather of each part's key and digest, as JSON; equal parts have equal keys
    blame      the majority is right; if only two ranks differ, both are named

State that ZeRO shards over all ranks has no replica, and is not compared.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ultrascale.checkpoint import Slice
from ultrascale.description.units import first_few
from ultrascale.parallel.mesh import Ranks

ROW = 4096
"""Number of 64-bit words in a row."""
MOST_NAMED = 3


@dataclass(frozen=True)
class ReplicaComparison:
    """Result of comparing replicas; equal on every rank, except for the tensors that `differing` names."""

    num_compared: int
    """Parts that more than one rank holds."""
    differing: dict[str, tuple[int, ...]]
    """Ranks to blame by the name of the tensor, for tensors that this rank holds."""
    blamed: tuple[int, ...]

    def text(self, step: int) -> str:
        """One line about the difference."""
        several = len(self.blamed) > 1
        ranks = (
            f"ranks {', '.join(map(str, self.blamed))} do not hold the same bits"
            if several
            else (f"rank {self.blamed[0]} does not hold the bits of its copies")
        )
        names = first_few(sorted(self.differing), MOST_NAMED)
        return f"after step {step}: {ranks}" + (f" in {names}" if names else "")


def digest(tensor: Tensor) -> Tensor:
    """64-bit digest of the bits of `tensor`, any dtype and device: 0-d int64."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = len(data) // 8 * 8
    words = data[:whole].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:whole].clone().view(torch.int64)
    rows = len(words) // ROW
    sums = torch.cat([words[: rows * ROW].view(rows, ROW).sum(1), words[rows * ROW :], data[whole:].to(torch.int64)])
    weights = torch.arange(len(sums), device=sums.device, dtype=torch.int64) * 0x1E3779B97F4A7C16 + 1
    return (sums * weights).sum()


def compare(tensors: dict[str, list[Slice]], ranks: Ranks) -> ReplicaComparison:
    """Compare this rank's parts with every other rank's. Collective."""
    local_parts = [(name, part) for name, parts in sorted(tensors.items()) for part in parts]
    keys = [_key(name, part) for name, part in local_parts]
    digests = torch.stack([digest(part.tensor) for _, part in local_parts]).tolist() if local_parts else []
    names = {key: name for key, (name, _) in zip(keys, local_parts, strict=True)}
    return judge([[*zip(*pair, strict=True)] for pair in ranks.gather_json([keys, digests])], names)


def judge(of_ranks: list[list[tuple[int, int]]], names: dict[int, str]) -> ReplicaComparison:
    """Find the ranks to blame. `of_ranks`: every rank's keys and digests, by rank. `names`: tensor name of each known key."""
    digests: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, pairs in enumerate(of_ranks):
        for key, value in pairs:
            digests[key][rank] = value
    blamed: set[int] = set()
    differing: dict[str, tuple[int, ...]] = {}
    for key, by_rank in digests.items():
        value, count = Counter(by_rank.values()).most_common(1)[0]
        if count == len(by_rank):
            continue
        odd = [rank for rank, other in by_rank.items() if other != value] if count * 2 > len(by_rank) else list(by_rank)
        blamed |= set(odd)
        if key in names:
            differing[names[key]] = tuple(sorted(odd))
    return ReplicaComparison(sum(len(by_rank) > 1 for by_rank in digests.values()), differing, tuple(sorted(blamed)))


def _key(name: str, part: Slice) -> int:
    """Key of a part of a tensor: 64 bits, equal on every rank that holds the part."""
    text = f"{name} {part.offsets} {tuple(part.tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
