"""AdamW's moments in 2 or 1 bytes: bf16, or 8 bits with a scale for every 256 (Dettmers et al. 2022), and their update.

An update widens the moments, computes AdamW in the master weight's dtype, and rounds them back stochastically
(`kernels.optimizers.block_quantise`): with rounding to nearest, bf16 would lose every change of a second moment below 0.2
percent of it, and at beta2 = 0.999 a change is a thousandth.

    bytes moved per element        at least    here, counted    `triton_adamw`
    bf16                           20          1,212         20
    8 bits                         16          1,696         16

Here every torch operation is a pass over memory, most of them over 8-byte integers; few rows are processed at a time, so that
wide copies stay small. On CUDA the fused form does all of it in one pass (`kernels.choice.implementation` chooses). torch's
fused AdamW has neither narrow moments nor stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ultrascale.catalogue.stacks.stack import UPDATED_TOGETHER
from ultrascale.kernels.choice.device_kind import kind_of
from ultrascale.kernels.choice.implementation import Kernel, form_of
from ultrascale.kernels.optimizers.block_quantise import (
    ReduceScales,
    dequantise,
    identity,
    noise,
    num_blocks,
    positions,
    quantise,
    round_to_bf16,
)

ZERO_CODE = 127
"""Code of zero in the signed table, which is symmetric: 127 values are negative."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
Kind = Literal["bf16", "8bit"]


FUSED: dict[torch.dtype, Kernel] = {torch.bfloat16: "adamw-bf16", torch.uint8: "adamw-8bit"}


class WeightBox(NamedTuple):
    """Box of a weight that this rank holds."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


class Update(NamedTuple):
    """Settings of one AdamW update of a weight."""

    rate: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    count: int
    """Number of updates, including this one."""
    keys: tuple[int, int]
    """Rounding keys of both moments (`kernels.optimizers.block_quantise.rounding_key`)."""


def update_(weights: Tensor, gradients: Tensor, store: Moments, update: Update) -> None:
    """AdamW update of weights [rows, columns] in the master dtype and of their moments, in place."""
    if store.is_fusable(weights, gradients):
        from ultrascale.kernels.optimizers.triton_adamw import update_ as fused_

        fused_(weights, gradients, store.state, store.rows, update)
        return
    for part in store.chunks():
        _update_rows(weights[part], gradients[part], store, part, update)


def _update_rows(weights: Tensor, gradients: Tensor, store: Moments, part: slice, update: Update) -> None:
    first, second = (store.read(moment, part).to(weights.dtype) for moment in (FIRST, SECOND))
    first.lerp_(gradients, 1 - update.beta1)
    second.mul_(update.beta2).addcmul_(gradients, gradients, value=1 - update.beta2)
    spread = (second / (1 - update.beta2**update.count)).sqrt_().add_(update.eps)
    weights.mul_(1 - update.rate * update.decay)
    weights.addcdiv_(first, spread, value=-update.rate / (1 - update.beta1**update.count))
    for moment, values, key in zip((FIRST, SECOND), (first, second), update.keys, strict=True):
        store.write(moment, part, values, key)


class Moments:
    """Both moments of this rank's part of a parameter, as rows: all dimensions but the last are flattened."""

    def __init__(self, state: dict[str, Tensor], *boxes: WeightBox, widest: ReduceScales = identity):
        """`boxes`: stacked, they form the part; all have one width."""
        self.state, self.box, self.widest = state, boxes[0], widest
        self.columns = self.box.shape[-1]
        rows = [positions(box.shape, box.offsets, box.whole, state[FIRST].device) for box in boxes]
        self.rows = rows[0] if len(rows) == 1 else torch.cat(rows)

    def is_fusable(self, weights: Tensor, gradients: Tensor) -> bool:
        """True if the fused form runs: it was chosen, and no communication with other ranks is needed between its parts."""
        dtype = self.state[FIRST].dtype
        if dtype not in FUSED or self.widest is not identity or form_of(FUSED[dtype], weights) != "triton":
            return False
        return all(tensor.is_contiguous() and tensor.numel() > 0 for tensor in (weights, gradients))

    def chunks(self) -> Iterator[slice]:
        """Row ranges of limited size (at least one row each); none for an empty part."""
        # tp ranks that share blocks process the same rows at the same time.
        together = max(1, UPDATED_TOGETHER[kind_of(self.rows)] // self.box.whole[-1])
        count = len(self.rows) if self.columns else 0
        return (slice(start, start + together) for start in range(0, count, together))

    def read(self, moment: str, part: slice) -> Tensor:
        """A moment's [rows, columns] in fp32, or in the master's dtype if that is wider and nothing is rounded."""
        stored = rows_of(self.state[moment])[part]
        if stored.dtype == torch.uint8:
            scales = self.state[f"{moment}_scale"][part]
            values = dequantise(stored, scales, signed=moment == FIRST, first=self.box.offsets[-1])
            return values if moment == FIRST else values.square_()
        return stored.float() if stored.dtype == torch.bfloat16 else stored.clone()

    def write(self, moment: str, part: slice, values: Tensor, key: int | None) -> None:
        """Store [rows, columns] of a moment, rounded stochastically by `key`; None: to nearest."""
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
        """This rank's part of a moment in its original shape, widened, on the CPU."""
        stored = self.state[moment]
        wide = torch.empty(stored.shape, dtype=torch.float32 if stored.dtype == torch.uint8 else stored.dtype)
        for part in self.chunks():
            rows_of(wide)[part] = self.read(moment, part).to(wide.dtype).cpu()
        return wide

    def load_values(self, moment: str, values: Tensor) -> None:
        """Store values that `whole` returned, exactly."""
        for part in self.chunks():
            self.write(moment, part, rows_of(values)[part].to(self.state[moment].device), None)


def empty_moments(box: WeightBox, kind: Kind, like: Tensor) -> dict[str, Tensor]:
    """Zero moments of `box`, on the device of `like`; for vectors in its dtype."""
    if len(box.whole) == 1:
        return {moment: torch.zeros(box.shape, dtype=like.dtype, device=like.device) for moment in (FIRST, SECOND)}
    if kind == "bf16":
        return {moment: torch.zeros(box.shape, dtype=torch.bfloat16, device=like.device) for moment in (FIRST, SECOND)}
    moments: dict[str, Tensor] = {}
    for moment in (FIRST, SECOND):
        zero = 0 if moment == SECOND else ZERO_CODE
        moments[moment] = torch.full(box.shape, zero, dtype=torch.uint8, device=like.device)
        moments[f"{moment}_scale"] = torch.zeros(
            prod(box.shape[:-1]), num_blocks(box.shape[-1], box.offsets[-1]), device=like.device
        )
    return moments


def rows_of(tensor: Tensor) -> Tensor:
    """View of a tensor as [rows, columns], with all dimensions but the last flattened; a vector is one row."""
    return (
        tensor.view(1, -1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.view(0, 1)
    )


def round_trip(values: Tensor, kind: Kind, moment: str, key: int) -> Tensor:
    """Values read back after storing a whole moment."""
    shape = tuple(values.shape)
    box = WeightBox((0,) * len(shape), shape, shape)
    store = Moments(empty_moments(box, kind, values), box)
    for part in store.chunks():
        store.write(moment, part, rows_of(values)[part], key)
    return store.whole(moment).to(values)
