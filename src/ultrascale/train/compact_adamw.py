"""AdamW whose moments take 2 or 1 bytes: bf16, or 8 bits with a scale for every 256 (Dettmers et al. 2022).

An update reads moments, widens them, computes as AdamW does in the master's dtype, and rounds them back stochastically
(`kernels.stochastic`): rounded to the nearest, bf16 would swallow every change of a second moment below 0.2 percent of it, and
at beta2 = 0.999 a change is a thousandth. Which way a moment is rounded follows from the run's seed, the number of the update,
the weight's name and the element's place in the whole weight. So no layout, and no resumption, changes a bit of it.

    bytes per parameter     master   moments            (AdamW: 4 + 8)
    adamw-bf16              4        4
    adamw-8bit              4        2 + 8/256

Vectors (norms, biases) keep fp32: they are few, and ZeRO cuts them inside blocks. Few rows of a matrix are worked on at
a time, so that wide copies stay small. Checkpoints hold what 8-bit codes stand for in fp32, so that any layout and
AdamW itself can go on from them, and this form gets its own codes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.kernels.block_quantise import BLOCK, Widest, dequantise, itself, num_blocks, quantise
from ultrascale.kernels.device_kind import kind_of
from ultrascale.kernels.stochastic import noise, positions, round_to_bf16, rounding_key
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import Held, Share, local
from ultrascale.parallel.whole_matrices import shard_rows, spans_over
from ultrascale.spec.run import Optimizer
from ultrascale.spec.stack import UPDATED_TOGETHER

ZERO_CODE = 127
"""Of the signed table, which is symmetric: 127 numbers are below zero."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
Kind = Literal["bf16", "8bit"]


class Box(NamedTuple):
    """What this rank holds of a weight."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


def box_of(one: Held) -> Box:
    """Of a parameter, ZeRO's cut counted in."""
    rows = shard_rows(one.parameter)
    offsets = (one.place.offsets[0] + rows.first, *one.place.offsets[1:])
    return Box(offsets, (rows.length, *one.place.shape[1:]), one.weight.shape)


class CompactAdamW(torch.optim.Optimizer):
    """Over the parameters of a share, in two groups, with and without weight decay."""

    def __init__(self, share: Share, settings: Optimizer, kind: Kind, *, seed: int):
        decays, others = ([one for one in share.held if one.weight.decay is wanted] for wanted in (True, False))
        groups = [
            {"params": [one.parameter for one in some], "weight_decay": decay}
            for some, decay in ((decays, settings.weight_decay), (others, 0.0))
            if some
        ]
        super().__init__(groups, {"lr": settings.learning_rate})
        self.settings, self.seed, self.share = settings, seed, share
        self.kind: Kind = kind
        self.held = {one.parameter: one for one in share.held}
        self.updates_done = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        self.updates_done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(self.held[parameter], group["lr"], group["weight_decay"])

    def _update(self, one: Held, rate: float, decay: float) -> None:
        parameter, gradient = rows_of(local(one.parameter)), rows_of(local(one.parameter.grad))  # pyright: ignore
        store, settings, count = self.store(one), self.settings, self.updates_done
        keys = [rounding_key(self.seed, count, one.name, moment) for moment in (FIRST, SECOND)]
        for part in store.chunks():
            weights, gradients = parameter[part], gradient[part]
            first, second = (store.read(moment, part).to(weights.dtype) for moment in (FIRST, SECOND))
            first.lerp_(gradients, 1 - settings.beta1)
            second.mul_(settings.beta2).addcmul_(gradients, gradients, value=1 - settings.beta2)
            spread = (second / (1 - settings.beta2**count)).sqrt_().add_(settings.eps)
            weights.mul_(1 - rate * decay)
            weights.addcdiv_(first, spread, value=-rate / (1 - settings.beta1**count))
            for moment, values, key in zip((FIRST, SECOND), (first, second), keys, strict=True):
                store.write(moment, part, values, key)

    def store(self, one: Held) -> Moments:
        """Where the moments of a parameter are."""
        return Moments(self.state[one.parameter], box_of(one), self._widest(one))

    def create_state(self, steps_done: int) -> None:
        """Give every parameter its moments (zero)."""
        self.updates_done = steps_done
        for one in self.held.values():
            self.state[one.parameter] = empty_moments(box_of(one), self.kind, local(one.parameter))

    def _widest(self, one: Held) -> Widest:
        """Scales of blocks that tp cuts are the largest of its ranks': one process would have found that."""
        dim, whole = one.weight.tp_dim, one.weight.shape
        group = self.share.mesh.group("expert_tp" if one.weight.is_expert else "tp")
        if group is None or dim != len(whole) - 1 or one.place.shape[-1] == whole[-1] or self.kind != "8bit":
            return itself
        if all(span.first % BLOCK == 0 for span in spans_over(self.share, one, group)):
            return itself
        before, count = one.place.offsets[-1] // BLOCK, num_blocks(whole[-1])

        def widest(scales: Tensor) -> Tensor:
            every = scales.new_zeros(len(scales), count)
            every[:, before : before + scales.shape[1]] = scales
            with waiting("scales of blocks that tp cuts", group):
                dist.all_reduce(every, op=dist.ReduceOp.MAX, group=group)
            return every[:, before : before + scales.shape[1]]

        return widest


class Moments:
    """Both moments of one parameter's part on this rank, as rows: all dimensions but the last together."""

    def __init__(self, state: dict[str, Tensor], box: Box, widest: Widest = itself):
        self.state, self.box, self.widest = state, box, widest
        self.columns = box.shape[-1]
        self.rows = positions(box.shape, box.offsets, box.whole, state[FIRST].device)

    def chunks(self) -> Iterator[slice]:
        """Rows of so many elements at most (of one row at least); none of an empty part."""
        # Ranks of tp, which share blocks, go through the same rows together.
        together = max(1, UPDATED_TOGETHER[kind_of(self.rows)] // self.box.whole[-1])
        count = len(self.rows) if self.columns else 0
        return (slice(start, start + together) for start in range(0, count, together))

    def read(self, moment: str, part: slice) -> Tensor:
        """[rows, columns] fp32, or the dtype of the master where that is wider and nothing is rounded."""
        stored = rows_of(self.state[moment])[part]
        if stored.dtype == torch.uint8:
            scales = self.state[f"{moment}_scale"][part]
            values = dequantise(stored, scales, signed=moment == FIRST, first=self.box.offsets[-1])
            return values if moment == FIRST else values.square_()
        return stored.float() if stored.dtype == torch.bfloat16 else stored.clone()

    def write(self, moment: str, part: slice, values: Tensor, key: int | None) -> None:
        """Keep [rows, columns] of a moment, rounded by `key`; None: to the nearest."""
        stored = rows_of(self.state[moment])[part]
        if stored.dtype not in (torch.uint8, torch.bfloat16):
            stored.copy_(values)
            return
        values = values.float()
        random = None if key is None else noise(self.rows[part], self.columns, key)
        if stored.dtype == torch.bfloat16:
            stored.copy_(values if random is None else round_to_bf16(values, random))
            return
        values = values if moment == FIRST else values.sqrt_()
        codes, scales = quantise(values, signed=moment == FIRST, first=self.box.offsets[-1], random=random, widest=self.widest)
        stored.copy_(codes)
        self.state[f"{moment}_scale"][part] = scales

    def whole(self, moment: str) -> Tensor:
        """The part of this rank, of its own shape, widened, on the CPU."""
        stored = self.state[moment]
        wide = torch.empty(stored.shape, dtype=torch.float32 if stored.dtype == torch.uint8 else stored.dtype)
        for part in self.chunks():
            rows_of(wide)[part] = self.read(moment, part).to(wide.dtype).cpu()
        return wide

    def take_back(self, moment: str, values: Tensor) -> None:
        """What `whole` gave, exactly."""
        for part in self.chunks():
            self.write(moment, part, rows_of(values)[part].to(self.state[moment].device), None)


def empty_moments(box: Box, kind: Kind, like: Tensor) -> dict[str, Tensor]:
    """Zero moments of `box`, on the device of `like`; of vectors in its dtype."""
    if len(box.whole) == 1:
        return {moment: torch.zeros(box.shape, dtype=like.dtype, device=like.device) for moment in (FIRST, SECOND)}
    if kind == "bf16":
        return {moment: torch.zeros(box.shape, dtype=torch.bfloat16, device=like.device) for moment in (FIRST, SECOND)}
    found: dict[str, Tensor] = {}
    for moment in (FIRST, SECOND):
        zero = 0 if moment == SECOND else ZERO_CODE
        found[moment] = torch.full(box.shape, zero, dtype=torch.uint8, device=like.device)
        found[f"{moment}_scale"] = torch.zeros(
            prod(box.shape[:-1]), num_blocks(box.shape[-1], box.offsets[-1]), device=like.device
        )
    return found


def rows_of(tensor: Tensor) -> Tensor:
    """A view of all dimensions but the last as one, [rows, columns]; a vector is one row."""
    return (
        tensor.view(1, -1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.view(0, 1)
    )


def as_kept(values: Tensor, kind: Kind, moment: str, key: int) -> Tensor:
    """What is read again of a whole moment that was kept."""
    whole = tuple(values.shape)
    box = Box((0,) * len(whole), whole, whole)
    store = Moments(empty_moments(box, kind, values), box)
    for part in store.chunks():
        store.write(moment, part, rows_of(values)[part], key)
    return store.whole(moment).to(values)
