"""What the planner counts of a pipeline against the executor: activations in flight, and data parallel collectives."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel.pipelines import MODEL, Running, Step, build, layout_of
from ranks import run_ranks

from ultrascale.parallel.data.collectives import DirectAllGather, DirectReduceScatter
from ultrascale.plan.pipeline.play import in_flight

SCHEDULES = (
    ("afab", 1), ("1f1b", 1), ("interleaved", 2), ("breadth-first", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2),
)  # fmt: skip


class Saved:
    """What autograd keeps of each micro-batch in each stage, and how much of it lives."""

    def __init__(self, running: Running):
        self.bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.most, self.by_stage = 0, Counter()
        self._passes, self._seen = running.passes, set()
        self._weights = {p.untyped_storage()._cdata for s in running.pipeline.stages.values() for p in s.parameters()}
        running.passes = self.passes
        running.pipeline.on_action = lambda action: self.look()

    def passes(self, stage: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if tensor.shape == (MODEL.vocab_size, MODEL.hidden_size):
                return tensor  # the head's gradient, which stays as that
            if tensor.is_floating_point() and storage._cdata not in self._weights | self._seen:
                key, size = storage._cdata, storage.nbytes()
                self._seen.add(key)
                self.bytes[stage, number] += size
                weakref.finalize(storage, self._gone, key, (stage, number), size)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return self._passes(stage, number, hidden)

    def _gone(self, key: int, where: tuple[int, int], size: int) -> None:
        self._seen.discard(key)
        self.bytes[where] -= size

    def look(self) -> None:
        alive = [stage for (stage, _), size in self.bytes.items() if size]
        self.most = max(self.most, len(alive))
        for stage, count in Counter(alive).items():
            self.by_stage[stage] = max(self.by_stage[stage], count)


def saved_of(rank: int, steps: list[Step]) -> list[tuple[int, dict[int, int], int]]:
    found = []
    for step in steps:
        running = build(rank, step)
        saved = Saved(running)
        running.train()
        found.append((saved.most, dict(saved.by_stage), sum(saved.bytes.values())))
    return found


@pytest.mark.parametrize("pp", [2, 4])
def test_activations_in_flight_on_every_rank_and_stage_are_those_the_planner_counts(pp):
    steps = []
    for name, virtual in SCHEDULES:
        stages = pp * virtual
        layout = layout_of(name, pp, virtual, layers_per_stage=(1,) * stages)
        steps.append(Step(layout, 6, replace(MODEL, num_hidden_layers=stages)))
    by_rank = run_ranks(pp, saved_of, steps)
    for index, step in enumerate(steps):
        planned = in_flight(step.layout.schedule, pp, step.layout.virtual_stages, 6)
        for rank, rows in enumerate(by_rank):
            most, by_stage, left = rows[index]
            name = f"{step.layout.schedule}, rank {rank}"
            assert (name, most, by_stage) == (name, planned[rank].total, planned[rank].by_stage)
            assert left == 0


def waiting_for_weights(rank: int, step: Step) -> tuple[int, int]:
    """Bytes of a micro-batch in a stage before I, and after it."""
    running = build(rank, step)
    saved = Saved(running)
    seen: dict[str, int] = {}

    def look(action: Any) -> None:
        if (action.stage, action.micro_batch) == (1, 0):
            seen[action.kind.value] = saved.bytes[1, 0]

    running.pipeline.on_action = look
    running.train()
    return seen.get("I", 0), seen.get("W", 0)


def test_between_the_input_gradient_and_the_weight_gradient_only_the_inputs_of_products_are_left():
    step = Step(layout_of("zb-h1", 2, layers_per_stage=(0, 4)), 3)
    whole, left = run_ranks(2, waiting_for_weights, step)[1]
    # Per token and block: the normed input of q, k and v, that of gate and up, what attention gives, what SwiGLU gives.
    d, f = MODEL.hidden_size, MODEL.intermediate_size
    assert left == MODEL.num_hidden_layers * 10 * (d + d + MODEL.query_size + f) * 8
    assert left < 0.4 * whole


def collectives_of(rank: int, steps: list[Step]) -> list[dict[str, int]]:
    """Gathers and reductions of a step by kind."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = owner.__call__

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(self, *arguments, **options)

        owner.__call__ = call

    counted(DirectAllGather, "gathers")
    counted(DirectReduceScatter, "reductions")
    found = []
    for step in steps:
        running = build(rank, step)
        counts.clear()
        running.train()
        found.append(dict(counts))
    return found


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_parameters_are_gathered_and_gradients_reduced_as_often_as_the_planner_counts(name, virtual):
    count, blocks = 5, 2
    steps = [Step(layout_of(name, 2, virtual, dp=2, zero_stage=zero), count) for zero in (1, 2, 3)]
    for rows in run_ranks(4, collectives_of, steps):
        buckets = blocks + 1  # each of the two ranks holds one end of the model
        once, every_micro_batch = rows[0], rows[1]
        assert once == {"gathers": buckets, "reductions": buckets}
        assert every_micro_batch == {"gathers": buckets, "reductions": buckets * count}
        assert rows[2]["reductions"] == buckets * count
        # Both passes gather a block. What is outside stays from the forward pass to the backward pass after it.
        assert blocks * 2 * count < rows[2]["gathers"] <= (blocks * 2 + 1) * count
