"""AdamW with 2-byte or 1-byte moments: bf16, or 8 bits with a scale for every 256 (Dettmers et al. 2022).

An update reads moments, widens them, computes, and rounds them back stochastically (`kernels.optimizers.narrow_moments`). The
random bits of the rounding follow from the run's seed, the number of the update, the weight's name and the element's index in
the unsharded weight. So neither the layout nor a resume changes a bit of it.

    bytes per parameter     master   moments            (AdamW: 4 + 8)
    adamw-bf16              4        4
    adamw-8bit              4        2 + 8/256

Moments of vectors (norms, biases) stay fp32: they are few, and ZeRO cuts them inside blocks. Checkpoints hold 8-bit moments
dequantized to fp32, so that any layout and AdamW itself can resume from them; this optimizer recovers the same codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.description.run import Optimizer
from ultrascale.kernels.optimizers.block_quantise import BLOCK, ReduceScales, identity, num_blocks, rounding_key
from ultrascale.kernels.optimizers.narrow_moments import (
    FIRST,
    SECOND,
    Kind,
    Moments,
    Update,
    WeightBox,
    empty_moments,
    rows_of,
    update_,
)
from ultrascale.models.initialise import shard_boxes
from ultrascale.parallel.data.gathered_matrices import spans_over
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import LocalParameter, Share, local
from ultrascale.train.optimizers.host_optimizer import adamw_groups


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with narrow moments over a share's parameters, in two groups: with and without weight decay."""

    def __init__(self, share: Share, settings: Optimizer, kind: Kind, *, seed: int):
        super().__init__(adamw_groups(share.local_parameters, settings), {})
        self.settings, self.seed, self.share = settings, seed, share
        self.kind: Kind = kind
        self.shards = {shard.parameter: shard for shard in share.local_parameters}
        self.updates_done = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        self.updates_done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(self.shards[parameter], group["lr"], group["weight_decay"])

    def _update(self, shard: LocalParameter, rate: float, decay: float) -> None:
        parameter, gradient = rows_of(local(shard.parameter)), rows_of(local(shard.parameter.grad))  # pyright: ignore
        settings, count = self.settings, self.updates_done
        first, second = (rounding_key(self.seed, count, shard.name, moment) for moment in (FIRST, SECOND))
        update = Update(rate, decay, settings.beta1, settings.beta2, settings.eps, count, (first, second))
        update_(parameter, gradient, self.store(shard), update)

    def store(self, shard: LocalParameter) -> Moments:
        """Moments of a parameter, with the boxes of the unsharded weight that they cover."""
        local_boxes = shard_boxes(shard.parameter, shard.weight_shard)
        boxes = [WeightBox(offsets, tuple(box.shape), shard.weight.shape) for offsets, box in local_boxes]
        return Moments(self.state[shard.parameter], *boxes, widest=self._widest(shard))

    def create_state(self) -> None:
        """Give every parameter zero moments."""
        for shard in self.shards.values():
            part = local(shard.parameter)
            box = WeightBox(
                shard.weight_shard.offsets, tuple(part.shape), shard.weight.shape
            )  # only its shape and the width of its dtype matter here
            self.state[shard.parameter] = empty_moments(box, self.kind, part)

    def _widest(self, shard: LocalParameter) -> ReduceScales:
        """Reduction of the scales of blocks that tp cuts: the maximum over its ranks, as without tp."""
        dim, shape = shard.weight.tp_dim, shard.weight.shape
        group = self.share.mesh.group("expert_tp" if shard.weight.is_expert else "tp")
        if group is None or dim != len(shape) - 1 or shard.weight_shard.shape[-1] == shape[-1] or self.kind != "8bit":
            return identity
        if all(span.first % BLOCK == 0 for span in spans_over(self.share, shard, group)):
            return identity
        before, count = shard.weight_shard.offsets[-1] // BLOCK, num_blocks(shape[-1])

        def widest(scales: Tensor) -> Tensor:
            every = scales.new_zeros(len(scales), count)
            every[:, before : before + scales.shape[1]] = scales
            with waiting("scales of blocks that tp cuts", group):
                dist.all_reduce(every, op=dist.ReduceOp.MAX, group=group)
            return every[:, before : before + scales.shape[1]]

        return widest
