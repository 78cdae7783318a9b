"""Share of a model: the part that one rank holds, and the gradient sums that remain after the backward pass.

A rank holds its pipeline stages; of each of their weights the tensor- and expert-parallel shard (`work.sharding.places`); of
that, between steps, the ZeRO shard (FSDP2's DTensors). Data parallelism sums gradients during the backward pass
(`parallel.data.data_parallel`). Three sums are left for the end of a step, all but the last small:

    copies along tp     norms under sequence parallelism, and key/value heads that several ranks hold: each rank has a partial
                        gradient
    tied embedding      held by the first and the last stage, each with a partial gradient; so too with multi-token prediction
    mirrors             DualPipe's two ranks of every stage, each with the gradient of half of the micro-batches, exchange
                        their ZeRO shards of it: both update, so that state and bits are those of one

All are all-gathered or exchanged and summed in rank order, so that copies stay equal to the bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight
from ultrascale.description.layout import Layout
from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.precision.fp8_gather import GatheredWeights
from ultrascale.parallel.precision.fp8_history import AmaxHistory
from ultrascale.parallel.tags import Tag
from ultrascale.parallel.time_limits import wait_for
from ultrascale.schedules.ends import mirror_of, ranks_sharing_embedding, shares_embedding
from ultrascale.torch_private import norms_of
from ultrascale.work.sharding.places import WeightShard

TIED = "embed_tokens.weight"
NORM_PIECE = 1 << 16
"""Elements whose squares are summed at once, in fp32, on the CPU. Torch accumulates sequentially there: over 2M elements the
norm loses 3e-5 and would depend on the sharding; over this many it loses 1e-7. CUDA's kernel splits tensors itself, and 70,000
pieces of a 5B-parameter model cost its host half a second a step."""


class LocalParameter(NamedTuple):
    """A parameter of this rank, with its row in the table of weights and the shard of it that is here."""

    name: str
    parameter: nn.Parameter
    weight: Weight
    weight_shard: WeightShard
    is_second: bool = False
    """True for the head's copy of a tied embedding, which the first stage holds too."""


@dataclass
class Share:
    """A rank's share of a model."""

    model: Model
    layout: Layout
    mesh: Mesh
    stages: dict[int, Decoder]
    """Stages by their number in the pipeline."""
    local_parameters: list[LocalParameter] = field(default_factory=list)
    amax_history: AmaxHistory | None = None
    """Amax history of fp8 with delayed scaling."""
    gathered_weights: GatheredWeights | None = None
    """Weights that are all-gathered in fp8, if any are."""

    @property
    def decoder(self) -> Decoder:
        """The rank's only stage. Raises ValueError if it has several."""
        (decoder,) = self.stages.values()
        return decoder

    @property
    def mirror(self) -> int:
        """Pipeline rank that holds the same stages as this one; this rank itself if none does."""
        return mirror_of(self.layout, self.mesh.coordinates.pp)

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of this rank, sharded by ZeRO."""
        return [shard.parameter for shard in self.local_parameters]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its global name; a tied embedding appears once."""
        names: set[str] = set()
        for shard in self.local_parameters:
            if shard.name not in names:
                names.add(shard.name)
                yield shard.name, shard.parameter

    def finish_gradients(self) -> None:
        """Sum the partial gradients of ranks that hold the same weights. Collective; once a step."""
        self._sum_copies()
        self._sum_tied()
        if self.mirror != self.mesh.coordinates.pp:
            self._sum_mirrors()
        if self.amax_history is not None:
            self.amax_history.agree(self.layout.world_size)
        self.expect_other_weights()

    def expect_other_weights(self) -> None:
        """Discard values cached from the weights, which may change before the next forward pass. All ranks must call it."""
        if self.gathered_weights is not None:
            self.gathered_weights.forget()

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, 0-d fp64 on the device, with the same bits on every rank. Collective.

        Every element counts once, on the first rank that holds it.
        """
        nothing = torch.zeros(1, device=self.mesh.device)
        grads = [
            grad
            for shard in self.local_parameters
            if self._counts(shard) and (grad := local_gradient(shard.parameter)) is not None and grad.numel()
        ]
        is_cut = not is_cuda(self.mesh.device)
        pieces = [piece for gradient in grads for piece in gradient.flatten().split(NORM_PIECE)] if is_cut else grads
        squares = norms_of(pieces or [nothing]).double().square().sum()
        if self.amax_history is not None:  # in fp8 an infinite input saturates, and would show in no gradient
            squares += self.amax_history.largest.double().sum() * 0.0
        if self.layout.world_size > 1:
            with waiting("the norm of the gradient", tensor=squares):
                dist.all_reduce(squares)
        return squares.sqrt()

    def _counts(self, shard: LocalParameter) -> bool:
        """True if this rank adds `shard` to the norm: only the first of the ranks with the same elements does."""
        if shard.is_second or shard.weight_shard.tp_copy or self.mirror < self.mesh.coordinates.pp:
            return False
        mesh = shard.parameter.device_mesh if isinstance(shard.parameter, DTensor) else None
        return mesh is None or mesh.get_local_rank("dp_replicate") == 0

    def _sum_copies(self) -> None:
        """Sum gradients of weights that several ranks hold whole and each computed only partially."""
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for shard in self.local_parameters:
            if shard.weight_shard.is_partial:
                groups[shard.weight_shard.num_tp_copies].append(_gradient_or_zeros(shard.parameter))
        for num_tp_copies in sorted(groups):
            _sum_over(groups[num_tp_copies], self.mesh.neighbours(num_tp_copies))

    def _sum_tied(self) -> None:
        """Sum the two gradients of a tied embedding, if the first and the last stage both hold it."""
        tied = [shard.parameter for shard in self.local_parameters if shard.name == TIED]
        if len(tied) == 2:  # both ends are here, as in a V-shaped schedule
            first, last = map(_gradient_or_zeros, tied)
            last.copy_(first.add_(last))
            return
        if not tied or not shares_embedding(self.model, self.layout):
            return
        gradient = _gradient_or_zeros(tied[0])
        for number, other in enumerate(ranks_sharing_embedding(self.layout, self.mesh.coordinates.pp)):
            # Mirrors later sum their gradients, so one of them gets this one and the other zeros.
            self._add_received(gradient, other, Tag.TIED_EMBEDDING, torch.zeros_like(gradient) if number else gradient)

    def _sum_mirrors(self) -> None:
        """Sum gradients of weights that another pipeline rank (the mirror) also holds, one after the other; a tied embedding
        whose two ends are on this rank gets the sum of both."""
        firsts: dict[str, Tensor] = {}
        for shard in self.local_parameters:
            gradient = _gradient_or_zeros(shard.parameter)
            if shard.is_second and shard.name in firsts:
                gradient.copy_(firsts[shard.name])
            elif gradient.numel():
                firsts[shard.name] = gradient
                self._add_received(gradient, self.mirror, Tag.MIRROR, gradient)

    def _add_received(self, gradient: Tensor, other: int, tag: Tag, sent: Tensor) -> None:
        """Exchange with the pipeline rank `other`: send `sent`, and add what it sends to `gradient`. The order of two summands
        does not matter."""
        group = self.mesh.group("pp")
        assert group is not None
        theirs = torch.empty_like(gradient)
        operations = [dist.P2POp(dist.isend, sent, group=group, group_peer=other, tag=tag)]
        operations.append(dist.P2POp(dist.irecv, theirs, group=group, group_peer=other, tag=tag))
        with waiting(tag.what, group, [other]):
            for work in dist.batch_isend_irecv(operations):
                wait_for(work, group)
        gradient.add_(theirs)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's shard of a parameter's gradient."""
    return None if parameter.grad is None else local(parameter.grad)


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a parameter's gradient, created as zeros if missing: peers may have a gradient to add."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def _sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum `tensors` over the ranks of `group`, in place, in one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for same_dtype in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in same_dtype])
        if not flat.numel():  # weights with fewer rows than ranks leave empty shards, on all ranks of the group alike
            continue
        with waiting("the sum of copies along tp", group, tensor=flat):
            dist.all_reduce(flat, group=group)
        for tensor, part in zip(same_dtype, flat.split([tensor.numel() for tensor in same_dtype]), strict=True):
            tensor.copy_(part.view_as(tensor))
