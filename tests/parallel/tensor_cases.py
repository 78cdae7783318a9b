"""One model on several ranks of tensor parallelism and on one: how far apart loss and gradients are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from drawn import initial_value
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.kernels.fp8.fp8_matrices import Scaling
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.parallel.precision.fp8_products import apply_fp8
from ultrascale.parallel.tensor.tensor_parallel import apply_tensor_parallel
from ultrascale.work.sharding.places import Coordinates, WeightShard, shard_of

BATCH = 2
ROUNDING_SCALE = 1e-3


@dataclass(frozen=True)
class Case:
    model: Model
    sequence_parallel: bool = True
    length: int = 20
    recompute: str = "none"
    documents: bool = False
    compiled: bool = False
    fault: Callable[[], None] | None = None
    """Breaks this rank before it computes."""
    sum_copies: bool = True
    fp8: Scaling | None = None
    """In fp8, with float64 between products and inside them."""


class WholeWorld(NamedTuple):
    """In place of a mesh: all ranks are one group of tp."""

    coordinates: Coordinates

    def group(self, axis: str, /) -> dist.ProcessGroup | None:
        return dist.group.WORLD if axis == "tp" and dist.get_world_size() > 1 else None


class OneRank(NamedTuple):
    """The same, of one process."""

    coordinates: Coordinates = Coordinates.of(Layout(), 0)

    def group(self, axis: str, /) -> dist.ProcessGroup | None:
        return None


def divisible(model: Model, tp: int) -> Model:
    """`model` with heads and widths that `tp` divides."""
    if tp != 3:
        return model
    heads = replace(model, num_attention_heads=6, intermediate_size=model.intermediate_size // 16 * 15)
    return replace(heads, num_key_value_heads={1: 1, 2: 3, 4: 6}[model.num_key_value_heads])


def errors_of(rank: int, cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """Of every case, the error of the loss and of each gradient of this rank, relative to the whole's largest element."""
    return {name: errors(rank, case) for name, case in cases.items()}


def errors(rank: int, case: Case) -> dict[str, float]:
    words: dict[str, Any] = {} if case.fp8 is None else {"precision": "fp8", "fp8_scaling": case.fp8}
    words |= {"sequence_parallel": case.sequence_parallel, "recompute": case.recompute}
    layout, whole = Layout(tp=dist.get_world_size(), **words), decoder_of(case.model)
    apply_fp8(whole, layout, OneRank())
    expected_loss, expected = computed(whole, case)
    if case.fault is not None:
        case.fault()
    decoder = tensor_parallel_decoder(case.model, layout, rank)
    loss, found = computed(decoder, case)
    # The gradient of a key's bias is zero but for rounding, so no gradient is measured by less than this.
    least = ROUNDING_SCALE * max(float(gradient.abs().max()) for gradient in expected.values())
    result = {"loss": float((loss - expected_loss).abs() / expected_loss)}
    for name, (gradient, part) in finished(found, case.model, layout, rank, case.sum_copies).items():
        error = (gradient - slice_of(expected[name], part)).abs()
        result[name] = float(error.max() / expected[name].abs().max().clamp(min=least)) if error.numel() else 0.0
    return result


def decoder_of(model: Model) -> Decoder:
    decoder = Decoder(model).double()
    fill(decoder, {weight.name: WeightShard((0,) * len(weight.shape), weight.shape) for weight in weights(model)})
    return decoder


def tensor_parallel_decoder(model: Model, layout: Layout, rank: int) -> Decoder:
    coordinates = Coordinates.of(layout, rank)
    with torch.device("meta"):
        decoder = Decoder(model).double()
    apply_tensor_parallel(decoder, layout, WholeWorld(coordinates))
    apply_fp8(decoder, layout, WholeWorld(coordinates))
    apply_recompute(decoder, layout)
    decoder.to_empty(device="cpu")
    fill(decoder, {weight.name: shard_of(weight, layout, coordinates) for weight in weights(model)})
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, places: dict[str, WeightShard]) -> None:
    """Random values for every weight, biases and norms too: zeros and ones would hide much."""
    parameters = dict(decoder.named_parameters())
    for buffer in decoder.buffers():
        buffer.zero_()
    for weight in weights(decoder.spec):
        drawn = replace(weight, init_std=weight.init_std or 0.3)
        parameters[weight.name].copy_(slice_of(initial_value(drawn, 1) + weight.init_fill, places[weight.name]))


def computed(decoder: Decoder, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a batch, and gradients of a multiple of it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(case.model.vocab_size, (BATCH, case.length + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 2:5] = -100
    options: dict[str, Any] = {"targets": targets}
    if case.documents:
        options["document_ids"] = (torch.arange(case.length) > case.length // 3).long().expand(BATCH, -1)
        options["positions"] = torch.where(options["document_ids"] == 0, 0, -(case.length // 3) - 1) + torch.arange(case.length)
    if case.compiled:
        for _, block in decoder.blocks():
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    loss = decoder(inputs, **options)
    (loss / 7).backward()
    return loss.detach(), {name: grad_of(parameter) for name, parameter in decoder.named_parameters()}


def grad_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def finished(
    found: dict[str, Tensor], model: Model, layout: Layout, rank: int, sum_copies: bool
) -> dict[str, tuple[Tensor, WeightShard]]:
    """Gradients summed over the ranks that each have a share of them, and where they lie in the whole."""
    table, result = {weight.name: weight for weight in weights(model)}, {}
    for name, gradient in found.items():
        part = shard_of(table[name], layout, Coordinates.of(layout, rank))
        if table[name].is_expert:
            part = part._replace(num_tp_copies=layout.tp, tp_copy=rank, is_partial=True)
        if part.is_partial and sum_copies:
            every = [torch.empty_like(gradient) for _ in range(layout.tp)]
            dist.all_gather(every, gradient)
            gradient = sum(every[rank - part.tp_copy : rank - part.tp_copy + part.num_tp_copies], torch.zeros_like(gradient))
        result[name] = (gradient, part)
    return result


def slice_of(whole: Tensor, part: WeightShard) -> Tensor:
    return whole[tuple(slice(first, first + count) for first, count in zip(part.offsets, part.shape, strict=True))]
