"""A trace against the same steps for real, on forked ranks over gloo: every allocation, message, FLOP and action."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from agree.layouts import EXPERTS, MODEL
from agree.traced import changes_of, messages_of, really, run_of, taken
from ranks import run_ranks

from ultrascale.spec.layout import Layout
from ultrascale.spec.run import Run
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.record import RankTrace

STEPS = 2
MOST_HELD = 2
"""Buffers that gloo's thread may not have let go of when the last step ends."""
SHORT, SHORT_EXPERTS = replace(MODEL, num_hidden_layers=2), replace(EXPERTS, num_hidden_layers=2)


def all_really(rank: int, runs: list[Run]) -> list[RankTrace]:
    return [really(rank, run, STEPS) for run in runs]


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
        run_of(SHORT_EXPERTS, Layout(dp=2, ep=2, zero_stage=1)),
        run_of(SHORT_EXPERTS, Layout(tp=2, expert_tp=2)),
    ],
    4: [
        run_of(SHORT, Layout(dp=4, dp_shard=2, zero_stage=2, precision="bf16")),
        run_of(MODEL, Layout(dp=2, pp=2, schedule="interleaved", virtual_stages=2, zero_stage=3), num_micro_batches=4),
        run_of(SHORT_EXPERTS, Layout(dp=2, tp=2, ep=4, recompute="full")),
        run_of(SHORT, Layout(tp=2, pp=2, schedule="zb-h1", precision="fp8"), num_micro_batches=4),
    ],
}


@pytest.mark.parametrize("world", RUNS)
def test_a_trace_is_what_really_happens_to_the_byte(world: int) -> None:
    for rank, found in enumerate(run_ranks(world, all_really, RUNS[world], timeout_seconds=200)):
        for run, real in zip(RUNS[world], found, strict=True):
            traced, name = trace_rank(run, rank, device="cpu", steps=STEPS), f"{run.layout}, rank {rank}"
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
