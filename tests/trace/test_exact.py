"""A trace against the same steps for real, on forked ranks over gloo: every allocation, message, FLOP and action."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from agree.layouts import EXPERTS, MODEL
from agree.traced import changes_of, messages_of, really, run_of, taken
from ranks import run_ranks

from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.recording.record import RankTrace

STEPS = 2
MOST_HELD = 2
"""Buffers that gloo's thread may not have let go of when the last step ends."""
SHORT, SHORT_EXPERTS = replace(MODEL, num_hidden_layers=2), replace(EXPERTS, num_hidden_layers=2)


def all_really(rank: int, runs: list[Run], documents: int | None = None) -> list[RankTrace]:
    return [really(rank, run, STEPS, documents=documents) for run in runs]


RUNS = {
    1: [run_of(SHORT, Layout(precision="bf16", recompute="selective")), run_of(SHORT_EXPERTS, Layout())],
    2: [
        run_of(SHORT, Layout(tp=2)),
        run_of(SHORT, Layout(tp=2, sequence_parallel=False, precision="bf16"), documents=True),
        run_of(SHORT, Layout(cp=2, recompute="selective")),
        run_of(SHORT, Layout(cp=2, cp_method="all-to-all"), documents=True),
        run_of(SHORT, Layout(dp=2, zero_stage=3, recompute="full", precision="bf16")),
        run_of(SHORT, Layout(pp=2, schedule="zb-h1", precision="bf16"), num_micro_batches=4),
        run_of(SHORT, Layout(tp=2, precision="fp8", recompute="selective")),
        run_of(MODEL, Layout(pp=2, schedule="dualpipe-v", virtual_stages=2), num_micro_batches=4),
        run_of(SHORT, Layout(pp=2, schedule="zb-h1", precision="bf16", pipeline_runtime="torch"), num_micro_batches=4),
        run_of(SHORT_EXPERTS, Layout(dp=2, ep=2, zero_stage=1)),
        run_of(SHORT_EXPERTS, Layout(tp=2, expert_tp=2)),
    ],
    4: [
        run_of(SHORT, Layout(dp=4, dp_shard=2, zero_stage=2, precision="bf16")),
        run_of(MODEL, Layout(dp=2, pp=2, schedule="interleaved", virtual_stages=2, zero_stage=3), num_micro_batches=4),
        run_of(SHORT_EXPERTS, Layout(dp=2, tp=2, ep=4, recompute="full")),
        run_of(SHORT, Layout(tp=2, pp=2, schedule="zb-h1", precision="fp8"), num_micro_batches=4),
        run_of(replace(SHORT_EXPERTS, num_experts=3), Layout(dp=4, zero_stage=3, precision="bf16")),
    ],
}


def over_cp(length: int = 64, **layout: object) -> Run:
    """Two sequences in a micro-batch."""
    own = Layout(micro_batch_size=2, **layout)  # pyright: ignore[reportArgumentType]
    return run_of(SHORT, own, length=length, documents=True)


PACKED = {
    2: [over_cp(cp=2, cp_method=method) for method in ("ring", "all-gather", "all-to-all")],
    3: [over_cp(63, cp=2, precision="bf16", recompute="selective"), over_cp(63, cp=2, cp_method="all-gather")],
    12: [over_cp(cp=4, cp_method="ring+all-to-all", cp_heads=2)],
}
"""By documents in each sequence."""


@pytest.mark.parametrize("world", RUNS)
def test_a_trace_is_what_really_happens_to_the_byte(world: int) -> None:
    expect_equal(world, RUNS[world])


@pytest.mark.parametrize("documents", PACKED)
def test_several_documents_over_cp_are_traced_with_the_masks_that_they_really_have(documents: int) -> None:
    runs = PACKED[documents]
    alone = [trace_rank(run, 0, device="cpu") for run in runs]
    assert all(one.documents == "one document" for one in alone)
    packed = expect_equal(runs[0].layout.world_size, runs, documents=documents)
    assert all(taken(one) != taken(other) for one, other in zip(alone, packed, strict=True))


def expect_equal(world: int, runs: list[Run], *, documents: int | None = None) -> list[RankTrace]:
    """Of every rank: the trace and the real steps. Returns the traces of rank 0."""
    first = []
    for rank, found in enumerate(run_ranks(world, all_really, runs, documents, timeout_seconds=200)):
        for run, real in zip(runs, found, strict=True):
            traced = trace_rank(run, rank, device="cpu", steps=STEPS, documents=documents)
            name = f"{run.layout}, {traced.documents or 'no documents'}, rank {rank}"
            first += [traced] if rank == 0 else []
            assert len(taken(traced)) > 200, name
            assert taken(traced) == taken(real), name
            still_held = Counter(changes_of(traced))
            still_held.subtract(changes_of(real))
            assert min(still_held.values()) == 0 and still_held.total() <= MOST_HELD, name
            if changes_of(traced) == changes_of(real):
                assert traced.peak_bytes(1) == real.peak_bytes(1), name
                assert traced.by_category(traced.peak_at(1)) == real.by_category(real.peak_at(1)), name
            else:  # gloo's thread has held on to a buffer for a moment longer
                assert traced.peak_bytes(1) <= real.peak_bytes(1) < 1.1 * traced.peak_bytes(1), name
            assert messages_of(traced) == messages_of(real), name
            assert traced.flops == real.flops, name
            assert [traced.actions(step) for step in range(STEPS)] == [real.actions(step) for step in range(STEPS)], name
    return first
