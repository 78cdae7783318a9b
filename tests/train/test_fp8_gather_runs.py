"""Runs whose weights are gathered in fp8: checkpoints, stops and the compiler see none of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from agree import axes
from agree.axes import Case, RankStep
from agree.layouts import MODEL
from ranks import run_ranks
from train.small_runs import same, small_run, state, stop_at, train_in_turn

from ultrascale.config.rules.run_rules import run_notes
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run
from ultrascale.parallel import apply
from ultrascale.train.optimizers.optimizer import build_optimizer

GATHERED = Layout(dp=2, zero_stage=3, precision="fp8", fp8_all_gather=True)


@pytest.mark.parametrize("scaling", ["tensor", "delayed"])
def test_a_stopped_run_goes_on_to_the_bits_of_one_that_gathers_in_bf16(home, scaling: Any) -> None:
    layout = replace(GATHERED, fp8_scaling=scaling)
    changes: dict[str, Any] = {"steps": 4}
    changes["optimizer"] = replace(small_run(home).optimizer, warmup_steps=1, decay_steps=2)
    plain = small_run(home, name="plain", layout=replace(layout, fp8_all_gather=False), **changes)
    run = small_run(home, name="stopped", layout=layout, **changes)
    outcomes = train_in_turn([(plain, None), (run, stop_at(2)), (run, None)])
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [4, 2, 4]
    assert same(state(run), state(plain))


def losses(rank: int, case: Case, compiled: bool) -> list[torch.Tensor]:
    axes.build_share = partial(apply.build_share, compile_blocks=compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of what this process compiled before it was forked
    step = RankStep(case, rank)
    optimizer = build_optimizer(step.share, Optimizer())
    found = []
    for _ in range(2):
        found += step.passes.train(step.batches(), 1000)
        step.share.finish_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert not torch._dynamo.utils.counters["graph_break"]
    return found


@pytest.mark.timeout(900)  # a graph is compiled, which takes minutes where many share a machine
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_blocks_read_what_was_gathered_in_fp8(compiled_by, backend: str) -> None:
    """Graphs and gradients here; kernels of C++ at night."""
    compiled_by(backend)
    case = Case(replace(MODEL, num_hidden_layers=1), GATHERED, num_micro_batches=1)
    eager, compiled = (torch.stack(run_ranks(2, losses, case, on, timeout_seconds=800)[0]) for on in (False, True))
    torch.testing.assert_close(compiled, eager, rtol=2e-4, atol=0)
    assert abs(float(compiled[1] - compiled[0])) > 1  # of weights that an update changed


def test_a_gather_in_fp8_of_nothing_is_told() -> None:
    run = Run(MODEL, layout=GATHERED)
    assert not any("fp8_all_gather" in note for note in run_notes(run))
    for changes, why in (
        ({"zero_stage": 0}, "every rank keeps whole weights"), ({"dp": 1}, "there is a single replica"),
        ({"dp_shard": 1}, "every rank keeps whole weights"), ({"precision": "bf16"}, "layout.precision = bf16"),
    ):  # fmt: skip
        (told,) = [note for note in run_notes(replace(run, layout=replace(GATHERED, **changes))) if "fp8_all_gather" in note]
        assert why in told
