from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.trainable import expect_trainable, untrainable_layout, untrainable_model
from ultrascale.description.architecture.families import TRAINED
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.schedules import SCHEDULES


@pytest.mark.parametrize("layout, field", [
    ({"precision": "fp8", "tp": 2, "tp_overlap": True}, "tp_overlap"), ({"precision": "mxfp8"}, "precision"),
])  # fmt: skip
def test_layouts_that_are_only_planned_are_refused_by_name(layout, field):
    found = untrainable_layout(Layout(**layout))
    assert [problem.key for problem in found] == [f"layout.{field}"]
    assert all("ultrascale plan" in p.remedy for p in found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_trained(name):
    assert untrainable_layout(Layout(pp=2, schedule=name, virtual_stages=SCHEDULES[name].virtual_stages or 2)) == []


def test_data_parallel_layouts_are_trained():
    for zero_stage in (0, 1, 2, 3):
        assert untrainable_layout(Layout(dp=8, zero_stage=zero_stage, precision="bf16", reduce_dtype="bf16")) == []


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_trained_families_are_trained_and_no_others(name):
    model = PRESETS[name]
    assert (untrainable_model(model) == []) == (model.model_type in TRAINED)


@pytest.mark.parametrize("kind", ["grok", "nemotron"])
def test_families_that_are_only_planned_are_refused_by_name(kind):
    with pytest.raises(SpecError) as caught:
        expect_trainable(replace(PRESETS["tiny-llama"], model_type=kind))
    assert [problem.key for problem in caught.value.problems] == ["model.model_type"]


@pytest.mark.parametrize(
    "words",
    [["--layout.precision", "fp8", "--layout.tp", "2", "--layout.tp_overlap", "true"], ["--model.preset", "tiny-nemotron"]],
)
def test_a_run_that_is_only_planned_resolves_but_no_verb_starts_it(words, tmp_path):
    from ultrascale.cli import check, train

    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\n[data]\nsources = ["x"]\n', encoding="utf-8"
    )
    assert resolve(tmp_path / "run.toml", words).run.layout.dp == 1
    for verb in (train, check):
        with pytest.raises(SpecError, match="`ultrascale plan` handles it"):
            verb.command([str(tmp_path / "run.toml"), *words])


def test_what_is_only_planned_is_told_together_with_the_corpus_that_is_missing():
    with pytest.raises(SpecError) as caught:
        resolve(
            None,
            {"model.preset": "tiny-nemotron", "batch.sequence_length": 64, "layout.precision": "mxfp8"},
            require_data=True,
        )
    assert [p.key for p in caught.value.problems] == ["model.model_type", "layout.precision", "data.sources"]


def test_no_part_of_the_trainer_builds_a_model_that_is_only_planned(tmp_path):
    import torch

    from ultrascale.models.decoder import Decoder
    from ultrascale.models.files.huggingface import export_folder
    from ultrascale.parallel.apply import build_share
    from ultrascale.parallel.mesh import Ranks

    with pytest.raises(SpecError, match=r"model\.model_type"):
        Decoder(PRESETS["tiny-nemotron"])
    with pytest.raises(SpecError, match=r"layout\.precision"):
        build_share(PRESETS["tiny-llama"], Layout(precision="mxfp8"), Ranks(0, 1, torch.device("cpu")), seed=0)
    with pytest.raises(SpecError, match=r"model\.model_type"):
        export_folder({}, PRESETS["tiny-nemotron"], tmp_path / "out")
