"""Muon and narrow moments: N ranks do what one does, on every axis, and go on to the same bits on any layout."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any, cast, get_args, get_type_hints

import pytest
import torch
from ranks import run_ranks
from train.small_runs import MODEL, largest_error, same, small_run, state, stop_at, train_here, train_in_turn, train_ranks
from train.test_resume_layouts import EXPERTS

from ultrascale.api.planning.plan_request import PlanOptions
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack import OPTIMIZERS
from ultrascale.check.prove import Case, prove_all
from ultrascale.check.small import provable, shrink_model
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.description.architecture.weights import is_hidden_matrix, weights
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Optimizer, Run
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import local
from ultrascale.plan.memory.sharding import moment_bytes
from ultrascale.plan.view.state_words import MOMENTS
from ultrascale.train.optimizers.compact_adamw import CompactAdamW
from ultrascale.train.optimizers.optimizer import build_optimizer

LLAMA, MIXTRAL = PRESETS["tiny-llama"], PRESETS["tiny-mixtral"]
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero 1 of 2": (LLAMA, {"dp": 2, "zero_stage": 1}),
    "zero 3 of 3, uneven": (LLAMA, {"dp": 3, "zero_stage": 3}),
    "tp": (LLAMA, {"tp": 2}),
    "tp, zero 2, hybrid": (LLAMA, {"tp": 2, "dp": 4, "dp_shard": 2, "zero_stage": 2}),
    "pp zb-v": (LLAMA, {"pp": 2, "schedule": "zb-v", "virtual_stages": 2}),
    "ep, expert_tp, zero 1": (MIXTRAL, {"dp": 4, "ep": 2, "expert_tp": 2, "zero_stage": 1}),
    "ep, zero 3": (MIXTRAL, {"dp": 4, "ep": 2, "zero_stage": 3}),
    "rows of experts": (MIXTRAL, {"dp": 3, "zero_stage": 3}),
    "rows of experts, expert_tp": (MIXTRAL, {"dp": 3, "tp": 2, "expert_tp": 2, "zero_stage": 1}),
}


def cases(name: str, layouts=LAYOUTS) -> list[Case]:
    settings = Optimizer(name=cast(Any, name), learning_rate=1e-2, clip_grad_norm=0.5, warmup_steps=1)
    found = []
    for case, (preset, words) in layouts.items():
        layout = Layout(**words)
        run = provable(Run(shrink_model(preset, layout), steps=10, layout=layout, optimizer=settings))
        found.append(Case(case, replace(run, batch=Batch(24, 2 * layout.dp))))
    return found


PROVEN: dict[str, tuple[str, ...]] = {
    "muon": tuple(LAYOUTS),
    "adamw": ("rows of experts",),  # the other layouts are those of tests/exact
    "adamw-bf16": ("zero 3 of 3, uneven", "pp zb-v", "rows of experts"),
    "adamw-8bit": ("zero 3 of 3, uneven", "tp", "ep, expert_tp, zero 1", "rows of experts", "rows of experts, expert_tp"),
}


def test_every_optimizer_of_a_run_is_proven_planned_and_listed_in_the_help_of_plan():
    names = get_args(get_type_hints(Optimizer)["name"])
    assert {*names} == {*PROVEN} == {*OPTIMIZERS} == {*MOMENTS}
    listed = re.search(r"Optimizer: ([\w, -]+)\.", inspect.getsource(PlanOptions))
    assert listed and listed[1].split(", ") == [*names]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_has_the_planned_bytes(name):
    """But for counts of updates, one number a parameter."""
    share = share_of(MODEL)
    optimizer = build_optimizer(share, Optimizer(name=name))
    for shard in share.local_parameters:
        held = sum(moment.nbytes for moment in optimizer.state[shard.parameter].values() if moment.dim())
        planned = moment_bytes(shard.weight, shard.parameter.numel(), name, shard.parameter.element_size())
        assert held == planned, f"{shard.name}: OPTIMIZERS[{name!r}], or plan.memory.sharding.moment_bytes"


@pytest.mark.parametrize("name", PROVEN)
def test_n_ranks_update_as_one_process_on_every_axis(name):
    """In float64. Moments kept narrow are rounded by position: the same bits, so no tolerance of their own is needed."""
    for verdict in prove_all(cases(name, {case: LAYOUTS[case] for case in PROVEN[name]}), steps=2):
        assert verdict.holds, verdict


def share_of(model, layout=None, seed=0):
    return build_share(model, layout or Layout(), Ranks(0, 1, torch.device("cpu")), seed=seed)


def test_muon_is_torchs_on_one_process():
    share = share_of(MODEL)
    settings = Optimizer(name="muon", learning_rate=0.02, weight_decay=0.1)
    ours = build_optimizer(share, settings)
    twins = {
        one.name: torch.nn.Parameter(one.parameter.detach().clone())
        for one in share.local_parameters
        if is_hidden_matrix(one.weight)
    }
    theirs = torch.optim.Muon(twins.values(), lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    random = torch.Generator().manual_seed(0)
    before = {one.name: one.parameter.detach().clone() for one in share.local_parameters}
    for _ in range(3):
        for one in share.local_parameters:
            one.parameter.grad = torch.randn(one.parameter.shape, generator=random)
            if one.name in twins:
                twins[one.name].grad = one.parameter.grad.clone()
        ours.step()
        theirs.step()
    for one in share.local_parameters:
        if one.name in twins:
            apart, moved = (one.parameter - twins[one.name]).norm(), (one.parameter - before[one.name]).norm()
            assert apart < 0.05 * moved, one.name  # products in bf16, of inputs that differ by a factor
    assert len(twins) == 7 * MODEL.num_hidden_layers


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt2", "tiny-deepseek-v3", "tiny-gpt-oss"])
def test_muon_moves_matrices_of_blocks_and_nothing_else(preset):
    model = PRESETS[preset]
    hidden = {weight.name for weight in weights(model) if is_hidden_matrix(weight)}
    for weight in weights(model):
        inside = weight.name.startswith("layers.") and weight.name.endswith(".weight")
        is_named = inside and not any(word in weight.name for word in ("norm", "router"))
        assert (weight.name in hidden) == is_named, weight.name


@pytest.mark.parametrize("name", ["muon", "adamw-bf16", "adamw-8bit"])
def test_a_stopped_run_goes_on_to_the_same_bits_and_on_another_layout_to_the_same_within_rounding(home, name):
    settings = Optimizer(name=name, learning_rate=5e-3, warmup_steps=1)
    layout = Layout(dp=2, zero_stage=2, micro_batch_size=1)
    whole, run = (small_run(home, name=n, layout=layout, optimizer=settings, steps=5) for n in ("whole", "stopped"))
    outcomes = train_in_turn([(whole, None), (run, stop_at(3)), (run, None)])
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [5, 3, 5]
    assert same(state(run), state(whole))
    moved = small_run(home, name="moved", layout=layout, optimizer=settings, steps=5)
    train_ranks(moved, before_step=stop_at(3))
    for other, done in ((Layout(tp=2), 4), (Layout(), 5)):
        assert train_ranks(replace(moved, layout=other), before_step=stop_at(done))[0].get("steps_done") == done, other
    # A gradient that differs in its last bit may round a moment the other way: one step of 8 bits, 1 of 256.
    limits = {"muon": 3e-3, "adamw-bf16": 1e-4, "adamw-8bit": 1e-3}
    weights_ = [{n: v for n, v in state(r).items() if n.startswith("model.")} for r in (moved, whole)]
    assert largest_error(*weights_) < limits[name]


def test_a_run_goes_from_wide_moments_to_8_bits_and_back_but_not_to_muon(home):
    run = small_run(home, optimizer=Optimizer(name="adamw", warmup_steps=1), steps=2)
    train_here(run)
    for steps, name in ((4, "adamw-8bit"), (6, "adamw")):
        done = train_here(replace(run, steps=steps, optimizer=replace(run.optimizer, name=name)))
        assert done.steps_done == steps
    for other in ("muon", "adamw-bf16"):
        with pytest.raises(SpecError) as caught:
            train_here(replace(run, steps=8, optimizer=replace(run.optimizer, name=other)))
        assert [problem.key for problem in caught.value.problems] == ["optimizer.name"]


def bytes_of_state(rank: int, model, layout: Layout, name: Any) -> int:
    share = build_share(model, layout, Ranks(rank, layout.world_size, torch.device("cpu")), seed=0)
    optimizer = build_optimizer(share, Optimizer(name=name))
    state = [local(value) for one in optimizer.state.values() for key, value in one.items() if key != "step"]
    return sum(value.numel() * value.itemsize for value in state)


def test_moments_are_narrow_between_steps():
    wide, bf16, eight = (bytes_of_state(0, LLAMA, Layout(), name) for name in ("adamw", "adamw-bf16", "adamw-8bit"))
    vectors = sum(8 * weight.numel for weight in weights(LLAMA) if len(weight.shape) == 1)
    assert bf16 == vectors + (wide - vectors) // 2
    assert eight - vectors == pytest.approx((wide - vectors) / 4, rel=0.05)


def gradient_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(hash(name) % 1000)
    return torch.randn(parameter.shape, generator=random) * 1e-3


def codes_after_updates(rank: int, layout: Layout) -> dict[str, torch.Tensor]:
    """Codes of rows that this rank holds, of weights whole along tp."""
    share = build_share(MODEL, layout, Ranks(rank, layout.world_size, torch.device("cpu")), seed=0)
    optimizer = build_optimizer(share, Optimizer(name="adamw-8bit"), seed=5)
    assert isinstance(optimizer, CompactAdamW)
    from torch.distributed.tensor import DTensor, distribute_tensor

    for _ in range(3):
        for one in share.local_parameters:
            whole = gradient_of(one.name, torch.empty(one.parameter.shape))
            p = one.parameter
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
        optimizer.step()
    return {one.name: optimizer.state[one.parameter]["exp_avg"] for one in share.local_parameters if len(one.weight.shape) > 1}


def test_codes_are_the_same_bits_on_two_ranks_as_on_one():
    (whole,) = run_ranks(1, codes_after_updates, Layout())
    halves = run_ranks(2, codes_after_updates, Layout(dp=2, zero_stage=3))
    for name, codes in whole.items():
        assert torch.equal(torch.cat([half[name] for half in halves]), codes), name


def test_experts_are_given_to_their_own_ranks_only():
    assert {len(w.shape) for w in weights(EXPERTS) if is_hidden_matrix(w) and w.is_expert} == {3}


def test_the_host_updates_by_adamw_alone_and_settings_nobody_reads_are_told():
    words = {"model.preset": "tiny-llama", "batch.sequence_length": 64, "layout.offload_optimizer": True}
    with pytest.raises(SpecError) as caught:
        resolve(None, words | {"optimizer.name": "muon"})
    assert [problem.key for problem in caught.value.problems] == ["optimizer.name"]
    assert any("momentum has no effect" in note for note in run_notes(Run(MODEL, optimizer=Optimizer(momentum=0.5))))
