"""recompute = "auto" in a run: chosen once, written down, and found again by whoever goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from train.small_runs import MODEL, same, small_run, state, stop_at, train_here, train_ranks

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.config.resolve import resolve
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.search.recompute_choice import recompute_options
from ultrascale.plan.workload import Workload
from ultrascale.work.work import Shape


def budget() -> int:
    """What keeps one of two blocks as it is, and the other as small as can be."""
    workload = Workload(MODEL, parse_cluster("1xcpu"), 11, 8, documents=True)
    ways = recompute_options(workload, 0, Shape(2, 11, documents=True))
    return ways[0].kept_bytes + ways[-1].kept_bytes


def test_a_run_that_goes_on_computes_again_what_it_did_before_and_ends_with_the_same_bits(
    home: Path, no_recomputation_is_chosen
) -> None:
    auto = Layout(micro_batch_size=2, recompute="auto", recompute_budget=budget())
    whole, parts = small_run(home, name="whole"), small_run(home, name="parts", layout=auto)
    train_here(whole)
    train_here(parts, before_step=stop_at(3))
    kept = json.loads((home / "parts" / "recompute.json").read_text())
    chosen = resolve(str(home / "parts" / "run.toml"), []).run.layout
    assert chosen.recompute == "blocks" and list(chosen.recompute_blocks) == kept["recompute_blocks"] != ["none x 2"]
    no_recomputation_is_chosen()
    train_here(parts)
    assert same(state(whole), state(parts))


def test_all_ranks_go_by_the_first_one_s_choice_and_another_budget_is_chosen_for_anew(home: Path) -> None:
    layout = Layout(dp=2, zero_stage=3, micro_batch_size=2, recompute="auto", recompute_budget=budget())
    run = small_run(home, layout=layout)
    assert [one["steps_done"] for one in train_ranks(run, before_step=stop_at(2))] == [2, 2]
    before = (home / "small" / "recompute.json").read_text()
    train_ranks(replace(run, layout=replace(layout, recompute_budget=10**9)))
    after = json.loads((home / "small" / "recompute.json").read_text())
    assert after["recompute_blocks"] == ["none x 2"] != json.loads(before)["recompute_blocks"]


def test_a_budget_that_nothing_keeps_to_is_refused_before_the_first_step(home: Path) -> None:
    run = small_run(home, layout=Layout(micro_batch_size=2, recompute="auto", recompute_budget=100))
    with pytest.raises(SpecError, match=r"recompute_budget: is 100 B, but a rank keeps"):
        train_here(run)
