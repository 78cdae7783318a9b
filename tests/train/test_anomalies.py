"""NaN, spikes and flipped bits: the same decision on every rank, and the bits that a run without them has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.families import EXPERT_FAMILIES as FAMILIES
from train.small_runs import (
    STEPS,
    BeforeStep,
    at_step,
    curve,
    rows,
    same,
    small_run,
    state,
    stop_at,
    train_here,
    train_ranks,
)

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Checkpoint, Faults, Log, Optimizer, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import local
from ultrascale.train.observers.anomalies import FEWEST, MOST_IN_A_ROW, AnomalousStepError, Norms
from ultrascale.train.observers.digests import digest, judge
from ultrascale.train.trainer import Trainer

ZERO_2 = Layout(dp=2, zero_stage=2, micro_batch_size=2)
COPIES = Layout(dp=2, zero_stage=0, micro_batch_size=2)


def spoil_next_loss(trainer: Trainer, factor: float = float("nan")) -> None:
    """Of one micro-batch, once."""
    forward = trainer.passes.forward

    def spoilt(*arguments, **at):
        trainer.passes.forward = forward  # type: ignore[method-assign]
        return forward(*arguments, **at) * factor

    trainer.passes.forward = spoilt  # type: ignore[method-assign]


def spoil_every_loss(trainer: Trainer) -> None:
    forward = trainer.passes.forward
    trainer.passes.forward = lambda *arguments, **at: forward(*arguments, **at) * float("nan")  # type: ignore[method-assign]


def flip_a_bit(trainer: Trainer) -> None:
    weight = dict(trainer.share.named())["norm.weight"]
    local(weight.detach()).view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def run_of(home: Path, name: str, layout: Layout = ZERO_2, **faults) -> Run:
    run = small_run(home, name=name, layout=layout, checkpoint=Checkpoint(every_steps=3, keep=0, export=False))
    return replace(run, faults=Faults(**faults))


def events(run: Run, kind: str) -> list[dict]:
    path = Path(run.folder) / run.name / "events.jsonl"
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["event"] == kind]


def spoil_loss_alone(trainer: Trainer) -> None:
    """Of one micro-batch, once; its gradient is as it was."""
    forward = trainer.passes.forward

    def spoilt(*arguments, **at):
        trainer.passes.forward = forward  # type: ignore[method-assign]
        return forward(*arguments, **at) + float("nan")

    trainer.passes.forward = spoilt  # type: ignore[method-assign]


CAUSES = {spoil_next_loss: "loss nan, norm of the gradient nan", spoil_loss_alone: "loss nan, norm of the gradient 0."}


@pytest.mark.catalogue(49)
@pytest.mark.parametrize("spoil, cause", CAUSES.items(), ids=["with its gradient", "loss alone"])
def test_a_skipped_step_leaves_weights_moments_and_their_count_as_they_were_on_every_rank(home, spoil, cause):
    seen: list[bool] = []

    def step(trainer: Trainer) -> None:
        if trainer.steps_done == 7:
            spoil(trainer) if trainer.ranks.rank == 1 else None
            seen.clear()
        if trainer.steps_done == 8 and not seen:
            seen.append(True)
            after = {name: local(one.detach()).clone() for name, one in trainer.share.named()}
            assert all(torch.equal(after[name], before) for name, before in remembered.items())
        remembered.clear()
        remembered.update({name: local(one.detach()).clone() for name, one in trainer.share.named()})

    remembered: dict[str, torch.Tensor] = {}
    run = run_of(home, "skips", on_anomaly="skip")
    outcomes = train_ranks(run, before_step=step)
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [STEPS] * 2
    skips = events(run, "skip")
    assert [one["step"] for one in skips] == [8] and skips[0]["cause"].startswith(cause)
    assert {row["train/skipped_steps"] for row in read(run)[8:]} == {1}
    again = run_of(home, "stopped and resumed", on_anomaly="skip")
    nan_at_7 = at_step(7, spoil, rank=1)
    train_ranks(replace(again, steps=STEPS), before_step=both(nan_at_7, at_step(9, Trainer.request_stop)))
    train_ranks(again)
    assert same(state(again), state(run))


def both(*acts: BeforeStep) -> BeforeStep:
    def act_all(trainer: Trainer) -> None:
        for act in acts:
            act(trainer)

    return act_all


def read(run: Run) -> list[dict]:
    return [json.loads(line) for line in (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.catalogue(49, 51)
@pytest.mark.parametrize(
    "fault, cause",
    [(spoil_next_loss, "not finite: gradient of"), (flip_a_bit, "ranks 0, 1 do not hold the same bits")],
    ids=["nan", "bit"],
)
def test_what_the_machine_did_once_is_gone_after_going_back_to_the_bits_of_a_calm_run(home, fault, cause):
    calm, run = run_of(home, "calm", COPIES), run_of(home, "rewinds", COPIES, on_anomaly="rewind", digest_every_steps=1)
    done: list[int] = []

    def once(trainer: Trainer) -> None:
        if trainer.steps_done == 7 and trainer.ranks.rank == 1 and not done:
            done.append(7)
            fault(trainer)

    train_ranks(calm)
    outcomes = train_ranks(run, before_step=once)
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [STEPS] * 2
    (rewind,) = events(run, "rewind")
    assert rewind["to"] == 6 and cause in rewind["cause"]
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.catalogue(49)
def test_a_step_that_going_back_does_not_mend_is_skipped(home):
    run = run_of(home, "mended", on_anomaly="rewind")

    def always_at_7(trainer: Trainer) -> None:
        if trainer.steps_done == 7:
            spoil_next_loss(trainer)

    outcomes = train_ranks(run, before_step=always_at_7)
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [STEPS] * 2
    assert [(one["step"], one["to"]) for one in events(run, "rewind")] == [(7, 6)] * 2
    assert [one["step"] for one in events(run, "skip")] == [8]
    assert [row[0] for row in rows(run, "step")] == list(range(1, STEPS + 1))


@pytest.mark.catalogue(51)
def test_a_flipped_bit_ends_a_run_that_is_to_stop_before_it_is_saved(home):
    run = run_of(home, "stops", COPIES)
    outcomes = train_ranks(run, before_step=at_step(7, flip_a_bit, rank=1))
    assert {outcome["error"] for outcome in outcomes} == {"CorruptStateError"}
    assert outcomes[0]["text"].startswith("after step 9: ranks 0, 1 do not hold the same bits in ")
    assert [folder.name for folder in sorted((home / "stops" / "checkpoints").glob("step-*"))] == [
        "step-00000003",
        "step-00000006",
    ]


@pytest.mark.catalogue(51)
def test_a_stop_does_not_save_what_copies_do_not_agree_on(home):
    """A storm of the soak has found this: a flipped bit, and SIGTERM before the next comparison."""
    calm, run = run_of(home, "calm", COPIES), run_of(home, "stopped", COPIES, on_anomaly="rewind")
    train_ranks(calm)
    outcomes = train_ranks(run, before_step=both(at_step(7, flip_a_bit, rank=1), at_step(8, Trainer.request_stop)))
    assert [outcome.get("stopped", outcome) for outcome in outcomes] == [True] * 2
    assert [(one["step"], one["to"]) for one in events(run, "rewind")] == [(8, 6)]
    assert [one["step"] for one in events(run, "stop")] == [6]
    train_ranks(run)
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.catalogue(51)
@pytest.mark.parametrize(
    "layout, blamed",
    [(Layout(dp=4, zero_stage=3, dp_shard=2), (1, 3)), (Layout(tp=2, dp=2, zero_stage=1), (2, 3))],
    ids=["copies of cut state", "copies along tp"],
)
def test_copies_are_found_in_every_layout_and_cut_state_is_not_taken_for_copies(home, layout, blamed):
    run = replace(run_of(home, "copies", layout, digest_every_steps=1), checkpoint=Checkpoint(every_steps=None, export=False))
    outcomes = train_ranks(run, before_step=at_step(2, flip_in_the_last_part, rank=3))
    assert outcomes[0]["error"] == "CorruptStateError"
    assert f"after step 3: ranks {blamed[0]}, {blamed[1]} do not hold" in outcomes[0]["text"]


def flip_in_the_last_part(trainer: Trainer) -> None:
    """Of the first moment of the last norm."""
    moment = trainer.optimizer.state[dict(trainer.share.named())["norm.weight"]]["exp_avg"]
    local(moment).view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def test_nothing_but_nan_for_too_long_ends_a_run_that_skips(home):
    run = run_of(home, "hopeless", Layout(micro_batch_size=2), on_anomaly="skip")
    with pytest.raises(AnomalousStepError, match=f"step 11.*so were the {MOST_IN_A_ROW} steps before"):
        train_here(run, before_step=at_step(2, spoil_every_loss))


def test_choices_of_experts_in_a_step_that_was_passed_over_do_not_count_in_the_next():
    model = replace(FAMILIES["mixtral"], num_hidden_layers=2)
    run = Run(model, device="cpu", batch=Batch(8, 3), faults=Faults(on_anomaly="skip"), log=Log(memory_steps=0))
    loader = RandomDocuments(sequence_length=8, vocab_size=model.vocab_size, seed=1)
    trainer = Trainer(run, Ranks(0, 1, torch.device("cpu")), loader)
    spoil_next_loss(trainer)
    assert trainer.train_step().gradients.anomaly
    balance = trainer.train_step().gradients.expert_balance
    assert balance is not None and balance.load.sum(1).tolist() == [3 * 8 * model.num_experts_per_tok] * 2


def test_an_update_forgives_the_steps_that_were_passed_over_before_it():
    norms = Norms(Faults(on_anomaly="skip"))
    for step in range(3 * MOST_IN_A_ROW):
        norms.pass_over(step, "loss nan")
        if (step + 1) % MOST_IN_A_ROW == 0:
            norms.accept(1.0)
    with pytest.raises(AnomalousStepError):
        for step in range(MOST_IN_A_ROW + 1):
            norms.pass_over(step, "loss nan")


@pytest.mark.catalogue(53)
def test_a_spike_is_measured_by_the_median_of_the_norms_before_it():
    norms = Norms(Faults(spike_factor=10.0))
    for number in range(FEWEST):
        assert norms.judge(2.0, 1e9) == ""
        norms.accept(1.0 + 0.01 * number)
    assert norms.judge(2.0, 1e9) != "" and norms.judge(2.0, 9.0) == ""
    norms.accept(9.0)  # twice, by which a mean would be far above what is usual
    norms.accept(9.0)
    assert norms.judge(2.0, 108.5) == "norm of the gradient 108.5, 100 times the usual 1.085"
    resumed = Norms(Faults(spike_factor=10.0))
    resumed.load_state(json.loads(json.dumps(norms.state())))
    assert resumed.judge(2.0, 108.5) == norms.judge(2.0, 108.5)
    assert Norms(Faults()).judge(2.0, 1e30) == ""


@pytest.mark.catalogue(53)
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_spike_on_one_rank_is_told_and_decided_alike_on_all(home, policy):
    """`skip` leaves the step out on both ranks; `rewind` does it again, to the bits of a run without it."""
    long = {"steps": FEWEST + 4, "batch": Batch(11, 8), "optimizer": Optimizer(learning_rate=5e-3)}
    calm = replace(run_of(home, "calm", COPIES), **long)
    run = replace(run_of(home, policy, COPIES, on_anomaly=policy, spike_factor=20.0, digest_every_steps=1), **long)
    done: list[int] = []

    def once(trainer: Trainer) -> None:
        if trainer.steps_done == FEWEST + 1 and trainer.ranks.rank == 1 and not done:
            done.append(trainer.steps_done)
            spoil_next_loss(trainer, 1e4)

    outcomes = train_ranks(run, before_step=once)
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [FEWEST + 4] * 2
    (event,) = events(run, policy)
    assert event["step"] == (FEWEST + 2 if policy == "skip" else FEWEST + 1) and "times the usual" in event["cause"]
    assert "times the usual" in (home / policy / "log.txt").read_text()
    train_ranks(calm)
    assert same(state(run), state(calm)) == (policy == "rewind")  # and copies were compared after every step


@pytest.mark.catalogue(53)
def test_a_spike_in_the_first_step_after_a_stop_is_measured_by_the_norms_before_it(home):
    faults = Faults(on_anomaly="skip", spike_factor=20.0)
    run = small_run(home, faults=faults, steps=FEWEST + 4, batch=Batch(11, 4), optimizer=Optimizer(learning_rate=5e-3))
    train_here(run, before_step=stop_at(FEWEST + 2))
    train_here(run, before_step=at_step(FEWEST + 2, lambda trainer: spoil_next_loss(trainer, 1e4)))
    assert [event["step"] for event in events(run, "skip")] == [FEWEST + 3]


@pytest.mark.catalogue(51)
def test_of_three_copies_the_two_that_agree_name_the_third(home):
    run = run_of(home, "three", Layout(dp=3, zero_stage=0, micro_batch_size=2), digest_every_steps=1)
    run = replace(run, batch=Batch(11, 6))
    outcomes = train_ranks(run, before_step=at_step(2, flip_a_bit, rank=1))
    assert {outcome.get("error") for outcome in outcomes} == {"CorruptStateError"}
    told = {outcome["text"].partition(": memory")[0] for outcome in outcomes}
    assert len(told) == 1 and told.pop().startswith("after step 3: rank 1 does not hold the bits of its copies in ")


@pytest.mark.catalogue(51)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 4096, 40_001])
def test_every_flipped_bit_changes_the_digest(dtype, count):
    generator = torch.Generator().manual_seed(count)
    tensor = torch.randn(count, generator=generator).to(dtype)
    before, data = digest(tensor), tensor.view(torch.uint8)
    assert digest(tensor.clone()) == before
    for at in torch.randint(len(data), (60,), generator=generator).tolist():
        bit = 1 << at % 8
        data[at] ^= bit
        assert digest(tensor) != before
        data[at] ^= bit
    assert digest(tensor) == before


def test_numbers_that_change_places_change_the_digest():
    assert digest(torch.tensor([1.0, 2.0]).double()) != digest(torch.tensor([2.0, 1.0]).double())


def test_the_majority_is_right_and_of_two_both_are_named():
    found = judge([[(5, 1), (6, 1)], [(5, 1), (6, 1)], [(5, 2), (6, 1)]], {5: "norm.weight", 6: "embed"})
    assert (found.blamed, found.differing, found.num_compared) == ((2,), {"norm.weight": (2,)}, 2)
    assert found.text(3) == "after step 3: rank 2 does not hold the bits of its copies in norm.weight"
    assert judge([[(5, 1)], [(5, 2)], [(9, 4)]], {}).blamed == (0, 1)
    assert judge([[(5, 1)], [(6, 2)]], {}).num_compared == 0


def without_targets(trainer: Trainer) -> None:
    """Let all that is read from now on have no valid target."""
    read = trainer.loader.read

    def masked(numbers):
        sequences = read(numbers)
        sequences.targets[:] = -100
        return sequences

    trainer.loader.read = masked  # type: ignore[method-assign]


@pytest.mark.catalogue(50)
def test_a_step_without_a_single_valid_target_ends_the_run_and_says_so(home):
    outcomes = train_ranks(small_run(home, layout=ZERO_2), before_step=at_step(2, without_targets))
    assert {outcome.get("error") for outcome in outcomes} == {"AnomalousStepError"}
    assert outcomes[0]["text"].startswith("step 3, sequences 8 to 11: no token is a valid target")


def test_nothing_but_steps_without_a_target_ends_a_run_that_skips_and_sends_to_the_data(home):
    run = small_run(home, name="aimless", steps=12, faults=Faults(on_anomaly="skip"))
    with pytest.raises(AnomalousStepError, match=r"step 11.* passed over\. Look at the data with `ultrascale data inspect`\.$"):
        train_here(run, before_step=at_step(2, without_targets))


@pytest.mark.catalogue(50)
def test_a_step_without_a_single_valid_target_updates_nothing_where_such_steps_are_skipped(home):
    log = replace(small_run(home).log, gradient_noise_scale=True)
    run = small_run(home, layout=ZERO_2, log=log, steps=5, faults=Faults(on_anomaly="skip"))
    stopped = small_run(home, name="stopped", layout=ZERO_2, log=log, steps=5)
    train_ranks(stopped, before_step=stop_at(2))
    outcomes = train_ranks(run, before_step=at_step(2, without_targets))
    assert [outcome.get("steps_done") for outcome in outcomes] == [5] * 2
    assert same(state(run), state(stopped))
    lines = (home / "small" / "metrics.jsonl").read_text().splitlines()
    assert ["train/loss" in json.loads(line) for line in lines] == [True] * 2 + [False] * 3
