"""The largest numbers that a description may hold: what is accepted starts, trains and saves, or ends with an error of ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz.confined import sound
from train.small_runs import at_step, rows, small_run, train_here, train_ranks

from ultrascale.config.ranges import LONGEST_WAIT, MOST
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.config.rules.run_rules import MOST_MICRO_BATCHES
from ultrascale.description.layout import Layout
from ultrascale.description.progress import tokens_after
from ultrascale.description.run import Batch, Checkpoint, Faults, Log, LossScale, Optimizer, Run
from ultrascale.train.trainer import Trainer

MOST_STEPS = MOST // (8 * 11)


def accepted(run: Run, home) -> Run:
    """The run as a user's file gives it."""
    (home / f"{run.name}.toml").write_text(to_toml(run))
    return resolve(home / f"{run.name}.toml").run


@pytest.mark.catalogue(60)
def test_a_run_with_every_count_and_wait_at_its_bound_starts_steps_and_saves_on_two_ranks(home):
    run = small_run(
        home, steps=MOST_STEPS, seed=2**63 - 1, layout=Layout(dp=2, micro_batch_size=2), batch=Batch(11, 8),
        collective_timeout_seconds=LONGEST_WAIT, loss_scale=LossScale(growth_steps=MOST),
        optimizer=Optimizer(warmup_steps=MOST_STEPS - 1),
        checkpoint=Checkpoint(every_steps=MOST, keep=MOST, keep_every_steps=MOST, failures_allowed=MOST, export=False),
        log=Log(memory_steps=MOST),
        faults=Faults(
            hang_seconds=LONGEST_WAIT, digest_every_steps=MOST, repeat_every_steps=MOST, straggler_steps=MOST,
            spike_factor=1e300,
        ),
    )  # fmt: skip
    assert MOST - 8 * 11 < tokens_after(run.batch, run.steps) <= MOST
    outcomes = train_ranks(accepted(run, home), before_step=at_step(2, Trainer.request_stop))
    assert [(one.get("steps_done"), one.get("stopped")) for one in outcomes] == [(2, True)] * 2, outcomes
    assert rows(run, "step") == [(1,), (2,)]
    assert [path.name for path in (home / "small" / "checkpoints").glob("step-*")] == ["step-00000002"]


@pytest.mark.catalogue(60)
def test_a_run_with_the_most_micro_batches_in_a_step_starts(home):
    run = small_run(home, batch=Batch(11, MOST_MICRO_BATCHES * 2), optimizer=Optimizer())
    outcome = train_here(accepted(run, home), before_step=at_step(0, Trainer.request_stop))
    assert (outcome.steps_done, outcome.stopped) == (0, True)


@pytest.mark.catalogue(60)
@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "eps", "clip_grad_norm"])
def test_an_optimizer_with_a_number_at_the_end_of_doubles_trains_or_ends_with_an_error_of_ours(home, key):
    run = small_run(home, steps=2, batch=Batch(11, 8), optimizer=replace(Optimizer(), **{key: 1e300}))
    outcome = sound(lambda: train_here(accepted(run, home)))
    assert outcome is None or outcome.steps_done == 2
