"""A step of a pipeline on forked ranks, beside the same step on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout, Precision
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.parallel.data.data_parallel import apply_data_parallel
from ultrascale.parallel.pipeline.pipeline_parallel import Pipeline, pipeline_of
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE, apply_mixed_precision
from ultrascale.schedules.build import stages_of_ranks

MODEL = Model(
    vocab_size=53, hidden_size=12, intermediate_size=20, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1,
    head_dim=4, max_position_embeddings=32,
)  # fmt: skip
LENGTH = 10


@dataclass(frozen=True)
class Step:
    """One step to be done."""

    layout: Layout
    num_micro_batches: int
    model: Model = MODEL
    documents: bool = False


def layout_of(schedule: str, pp: int, virtual_stages: int = 1, precision: Precision = "fp64", **options: Any) -> Layout:
    return Layout(schedule=schedule, pp=pp, virtual_stages=virtual_stages, precision=precision, **options)


def cut(model: Model, layout: Layout) -> list[range]:
    """Given, or some uneven cut."""
    stages = layout.num_stages
    even = [model.num_hidden_layers // stages + (k < model.num_hidden_layers % stages) for k in range(stages)]
    ends = [0, *accumulate(layout.layers_per_stage or even)]
    return [range(*pair) for pair in pairwise(ends)]


def whole(model: Model) -> Decoder:
    torch.manual_seed(1)
    return Decoder(model).double()


def batch(step: Step, dp: int, micro_batch: int) -> dict[str, Any]:
    """Arguments of the decoder for one micro-batch of one data parallel rank."""
    generator = torch.Generator().manual_seed(1000 * dp + micro_batch)
    size = (step.layout.micro_batch_size, LENGTH + 1)
    tokens = torch.randint(0, step.model.vocab_size, size, generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    found: dict[str, Any] = {"inputs": tokens[:, :-1], "targets": targets}
    if step.documents:
        begins = torch.rand(targets.shape, generator=generator) < 0.3
        ids = begins.long().cumsum(1)
        starts = torch.where(begins, torch.arange(LENGTH), 0).cummax(1).values
        found |= {"document_ids": ids, "positions": torch.arange(LENGTH) - starts}
    return found


def one_process(step: Step) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch."""
    decoder, total = whole(step.model), 0.0
    for dp in range(step.layout.dp):
        for k in range(step.num_micro_batches):
            loss = decoder(**batch(step, dp, k)) / 100
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@dataclass
class Running:
    """A rank that is ready to do steps."""

    step: Step
    pipeline: Pipeline
    dp: int
    losses: dict[int, float]
    micro_batch: Callable[[int], int] = lambda number: number

    def passes(self, stage: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        given = batch(self.step, self.dp, self.micro_batch(number))
        if hidden is not None:
            given["inputs"] = hidden
        decoder = self.pipeline.stages[stage]
        if not decoder.is_last:
            return decoder(**given)
        loss = decoder(**given) / 100
        self.losses[number] = loss.item()
        return loss

    def train(self) -> None:
        size = (self.step.layout.micro_batch_size, LENGTH, self.step.model.hidden_size)
        dtype = TORCH_DTYPE[self.step.layout.precision]
        self.pipeline.train(self.step.num_micro_batches, self.passes, shape=size, dtype=dtype)

    def evaluate(self) -> None:
        size = (self.step.layout.micro_batch_size, LENGTH, self.step.model.hidden_size)
        self.pipeline.evaluate(self.step.num_micro_batches, self.passes, shape=size, dtype=torch.float64)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole, of this rank's stages; a weight that two of them hold is summed."""
        found: dict[str, torch.Tensor] = {}
        for decoder in self.pipeline.stages.values():
            for name, parameter in decoder.named_parameters():
                if (gradient := parameter.grad) is not None:
                    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    found[name] = found[name] + gradient if name in found else gradient
        return found


def build(rank: int, step: Step) -> Running:
    layout, model = step.layout, step.model
    grid = init_device_mesh("cpu", (layout.pp, layout.dp), mesh_dim_names=("pp", "dp"))
    group, pipeline_rank, dp = grid.get_group("pp"), rank // layout.dp, rank % layout.dp
    layers, source = cut(model, layout), whole(model).state_dict()
    stages: dict[int, Decoder] = {}
    names = ("pp", "dp_replicate", "dp_shard")
    data = init_device_mesh("cpu", (layout.pp, layout.dp_replicate, layout.shard_size), mesh_dim_names=names)[names[1:]]
    for stage in stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)[pipeline_rank]:
        decoder = Decoder(model, layers=layers[stage], is_first=stage == 0, is_last=stage == layout.num_stages - 1)
        decoder.to(TORCH_DTYPE[layout.master_dtype])
        decoder.load_state_dict({name: source[name] for name in decoder.state_dict()})
        apply_recompute(decoder, layout)
        if layout.dp > 1:
            apply_data_parallel(decoder, layout, data)
        elif layout.precision != layout.master_dtype:
            apply_mixed_precision(decoder, TORCH_DTYPE[layout.precision])
        stages[stage] = decoder
    return Running(step, pipeline_of(layout)(layout, stages, (group, group), torch.device("cpu")), dp, {})


def rank_step(rank: int, step: Step) -> tuple[float, dict[str, torch.Tensor]]:
    running = build(rank, step)
    running.train()
    dist.barrier()
    return sum(running.losses.values()), running.gradients()


def whole_of(step: Step, results: list[tuple[float, dict[str, torch.Tensor]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all ranks together: copies of a weight in different stages are summed."""
    gradients: dict[str, torch.Tensor] = {}
    for rank, (_, found) in enumerate(results):
        if rank % step.layout.dp == 0:  # ranks of one stage have the same
            for name, gradient in found.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return sum(loss for loss, _ in results), gradients


def worst_difference(step: Step, results: list[tuple[float, dict[str, torch.Tensor]]]) -> float:
    """Between the pipeline and one process: of the loss and of each gradient, relative."""
    (loss, gradients), (expected_loss, expected) = whole_of(step, results), one_process(step)
    assert gradients.keys() == expected.keys()
    errors = [float((gradients[name] - expected[name]).norm() / expected[name].norm()) for name in expected]
    return max(abs(loss - expected_loss) / expected_loss, *errors)


def tied(step: Step) -> Step:
    return replace(step, model=replace(step.model, tie_word_embeddings=True))
