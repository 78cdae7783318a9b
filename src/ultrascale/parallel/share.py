"""Share of a model: the part that one rank holds, and what ranks that hold the same must still do together after a backward
pass.

A rank holds the stages that the pipeline gives it; of each weight of theirs the part that tensor and expert parallelism leave
it (`work.sharding.places`); of that, between steps, the part that ZeRO leaves it (FSDP2's DTensors). Data parallelism sums
gradients as the backward pass goes (`parallel.data.data_parallel`). Three sums are left for the end of a step, all
but the last small:

    copies along tp     norms under sequence parallelism, heads of keys and values that several ranks hold: each rank computed a
                        share of the gradient
    tied embedding      the first stage and the last one hold it, and each computed its share; so with multi-token prediction
    mirrors             DualPipe's two ranks of every stage, each with the gradient of half of the micro-batches, exchange what
                        ZeRO leaves them: both update, so that state and bits are those of one

All are all-gathered or exchanged and added in order of ranks, so that copies stay equal to the bit.
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
"""Elements whose squares are summed at once, in fp32, on the CPU: torch adds to running sums there, which loses 3e-5 of the
norm of 2M elements, so that it would depend on the cut; 1e-7 of so many. CUDA's kernel cuts tensors itself, and 70,000 pieces
of a model of 5B parameters cost its host half a second a step."""


class LocalParameter(NamedTuple):
    """A parameter of this rank, with its line in the table of weights and the part of it that is here."""

    name: str
    parameter: nn.Parameter
    weight: Weight
    place: WeightShard
    is_second: bool = False
    """True if it is the head's copy of a tied embedding, which the first stage holds too."""


@dataclass
class Share:
    """A rank's share of a model."""

    model: Model
    layout: Layout
    mesh: Mesh
    stages: dict[int, Decoder]
    """Stages by number in the whole pipeline."""
    local_parameters: list[LocalParameter] = field(default_factory=list)
    amax_history: AmaxHistory | None = None
    """History of fp8 with delayed scaling."""
    gathered_weights: GatheredWeights | None = None
    """Weights that are all-gathered in fp8, if any are."""

    @property
    def decoder(self) -> Decoder:
        """The only stage. Raises ValueError if this rank has several."""
        (decoder,) = self.stages.values()
        return decoder

    @property
    def mirror(self) -> int:
        """The pipeline rank that holds the same as this one; this one if none does."""
        return mirror_of(self.layout, self.mesh.coordinates.pp)

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of this rank, cut as ZeRO says."""
        return [held.parameter for held in self.local_parameters]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its global name; a tied embedding once."""
        names: set[str] = set()
        for held in self.local_parameters:
            if held.name not in names:
                names.add(held.name)
                yield held.name, held.parameter

    def finish_gradients(self) -> None:
        """Add up what the ranks that hold copies have each computed of a gradient. Collective; once a step."""
        self._sum_copies()
        self._sum_tied()
        if self.mirror != self.mesh.coordinates.pp:
            self._sum_mirrors()
        if self.amax_history is not None:
            self.amax_history.agree(self.layout.world_size)
        self.expect_other_weights()

    def expect_other_weights(self) -> None:
        """Weights may change before the next forward pass, on all ranks alike: what is known of them is forgotten."""
        if self.gathered_weights is not None:
            self.gathered_weights.forget()

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the whole gradient, 0-d fp64 on the device, the same bits on every rank. Collective.

        Every element counts once: on the first of the ranks that hold it.
        """
        nothing = torch.zeros(1, device=self.mesh.device)
        grads = [
            grad
            for held in self.local_parameters
            if self._counts(held) and (grad := local_gradient(held.parameter)) is not None and grad.numel()
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

    def _counts(self, held: LocalParameter) -> bool:
        """True if this rank adds `held` to the norm: of the ranks that hold the same elements, only the first does."""
        if held.is_second or held.place.replica or self.mirror < self.mesh.coordinates.pp:
            return False
        mesh = held.parameter.device_mesh if isinstance(held.parameter, DTensor) else None
        return mesh is None or mesh.get_local_rank("dp_replicate") == 0

    def _sum_copies(self) -> None:
        """Sum gradients of weights that several ranks hold whole, of which each rank computed only a share."""
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for held in self.local_parameters:
            if held.place.is_partial:
                groups[held.place.num_replicas].append(_gradient_or_zeros(held.parameter))
        for num_replicas in sorted(groups):
            _sum_over(groups[num_replicas], self.mesh.neighbours(num_replicas))

    def _sum_tied(self) -> None:
        """Sum the two gradients of an embedding that is also the head, where first and last stage both hold it."""
        tied = [held.parameter for held in self.local_parameters if held.name == TIED]
        if len(tied) == 2:  # both ends are here, as in a V-shaped schedule
            first, last = map(_gradient_or_zeros, tied)
            last.copy_(first.add_(last))
            return
        if not tied or not shares_embedding(self.model, self.layout):
            return
        gradient = _gradient_or_zeros(tied[0])
        for number, other in enumerate(ranks_sharing_embedding(self.layout, self.mesh.coordinates.pp)):
            # One of two mirrors gets it and the other zeros: they add up what they have.
            self._add_received(gradient, other, Tag.TIED_EMBEDDING, torch.zeros_like(gradient) if number else gradient)

    def _sum_mirrors(self) -> None:
        """Sum gradients of weights that another rank of the pipeline holds too, one after the other; of a tied embedding that
        both ends of this rank have the sum of both."""
        firsts: dict[str, Tensor] = {}
        for held in self.local_parameters:
            gradient = _gradient_or_zeros(held.parameter)
            if held.is_second and held.name in firsts:
                gradient.copy_(firsts[held.name])
            elif gradient.numel():
                firsts[held.name] = gradient
                self._add_received(gradient, self.mirror, Tag.MIRROR, gradient)

    def _add_received(self, gradient: Tensor, other: int, tag: Tag, sent: Tensor) -> None:
        """Add to `gradient` what the pipeline rank `other` sends, which adds `sent`: the order of two does not matter."""
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
    """This rank's part of a tensor; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    return None if parameter.grad is None else local(parameter.grad)


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient, which exists from now on: others may have one to add."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def _sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum `tensors` over the ranks of `group`, in place, in one message for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for same_dtype in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in same_dtype])
        if not flat.numel():  # shards of weights shorter than the ranks that they are cut over; of all of the group alike
            continue
        with waiting("the sum of copies along tp", group, tensor=flat):
            dist.all_reduce(flat, group=group)
        for tensor, part in zip(same_dtype, flat.split([tensor.numel() for tensor in same_dtype]), strict=True):
            tensor.copy_(part.view_as(tensor))
