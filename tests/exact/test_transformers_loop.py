"""`check --against transformers`: a plain loop of another program, which sees what the proof's own reference shares."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import cos, pi
from typing import Any

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.cases import cases
from ultrascale.check.compare import Verdict
from ultrascale.check.matrix import FAMILIES
from ultrascale.check.prove import prove_all
from ultrascale.cli.main import main
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run

pytest.importorskip("transformers")
from ultrascale.check.oracle.transformers_loop import comparable, learning_rates, tolerance_of

STEPS = 3
FEW: dict[str, dict[str, Any]] = {"tiny-mistral": {"cp": 2}, "tiny-deepseek-v3": {"dp": 2, "ep": 2}}
"""With windows, and with experts and latent attention."""


def proven(layouts: dict[str, dict[str, Any]], *, against: Any = "transformers") -> dict[str, Verdict]:
    """By preset."""
    found = {}
    for preset, layout in layouts.items():
        run, _ = comparable(Run(PRESETS[preset], layout=Layout(**layout), device="cpu"), STEPS)
        last = list(cases(run, own_layout=True))[-1]
        tolerance = tolerance_of(run) if against else None
        (found[preset],) = prove_all([last], steps=STEPS, go_on=True, against=against, tolerance=tolerance)
    return found


def expect_equal(verdicts: dict[str, Verdict]) -> None:
    assert {name: verdict.failure or verdict.beyond for name, verdict in verdicts.items() if not verdict.holds} == {}
    assert all(verdict.worst.keys() == {"loss", "gradient norm", "weight"} for verdict in verdicts.values())


def test_a_dense_family_and_one_with_experts_train_as_in_a_plain_loop_of_transformers():
    expect_equal(proven(FEW))


@pytest.mark.nightly
def test_every_family_trains_as_in_a_plain_loop_of_transformers():
    expect_equal(proven({preset: {"dp": 2, "zero_stage": 3} for preset in FAMILIES}))


def test_a_run_is_compared_without_what_transformers_has_not_and_that_is_said():
    model = replace(PRESETS["tiny-deepseek-v3"], dropout=0.1)
    given = Optimizer(name="muon", warmup_steps=100)
    run, notes = comparable(Run(model, steps=1000, layout=Layout(dp=2), optimizer=given), STEPS)
    assert (run.model.dropout, run.model.router_bias_update_rate, run.model.num_nextn_predict_layers) == (0.0, 0.0, 0)
    assert (run.steps, run.optimizer.name, run.optimizer.warmup_steps) == (3, "adamw", 1)
    assert "model.dropout" in notes[0] and "model.router_bias_update_rate" in notes[0] and "no muon" in notes[1]


def test_rates_of_all_steps_are_a_warm_up_and_each_schedule_down_to_its_floor():
    optimizer = Optimizer(learning_rate=1.0, warmup_steps=2, min_learning_rate_ratio=0.1)
    half = 0.1 + 0.9 * (1 + cos(pi / 2)) / 2
    assert learning_rates(optimizer, 4) == pytest.approx([0.5, 1.0, half, 0.1])
    assert learning_rates(replace(optimizer, schedule="constant"), 4) == [0.5, 1.0, 1.0, 1.0]
    assert learning_rates(replace(optimizer, schedule="wsd", decay_steps=2), 5) == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])
    assert learning_rates(replace(optimizer, schedule="linear"), 6) == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1])


RUN = 'device = "cpu"\n[model]\npreset = "tiny-llama"\n[layout]\ndp = 2\n'


def test_without_the_package_or_its_family_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    from transformers.models.auto import modeling_auto

    (tmp_path / "run.toml").write_text(RUN)
    words = ["check", str(tmp_path / "run.toml"), "--own-layout", "--against", "transformers"]
    monkeypatch.delitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "llama")
    assert main(words) == 2
    assert "has no family llama" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(words) == 2
    assert "needs transformers, which is not installed" in capsys.readouterr().err
    assert main([*words, "--plant", "all"]) == 2
    assert "without planted faults" in capsys.readouterr().err


def test_the_verdict_against_transformers_says_what_it_compared_and_what_it_does_not_see(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(RUN)
    assert main(["check", str(tmp_path / "run.toml"), "--own-layout", "--against", "transformers"]) == 0
    told = capsys.readouterr().out
    assert "2 of 2 cases compute what a plain loop of transformers computes." in told and "Not seen: the initial values" in told
