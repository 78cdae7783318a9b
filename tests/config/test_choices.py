"""Choices of a run that is built in Python are checked as those of a file are, with the same words."""

from dataclasses import replace

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.config.choices import choice_problems
from ultrascale.config.resolve import resolve
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Optimizer, Run
from ultrascale.description.sections.trackers import Log
from ultrascale.models.decoder import Decoder
from ultrascale.plan.report import plan_run
from ultrascale.trace.rank import trace_rank
from ultrascale.train.loop import train

TINY = preset("tiny-llama")
UNKNOWN = {
    "optimizer.name": ("adam", Run(TINY, optimizer=Optimizer(name="adam"))),  # pyright: ignore[reportArgumentType]
    "model.hidden_act": ("gelu", Run(replace(TINY, hidden_act="gelu"))),
    "layout.precision": ("fp4", Run(TINY, layout=Layout(precision="fp4"))),  # pyright: ignore[reportArgumentType]
    "optimizer.schedule": ("cosin", Run(TINY, optimizer=Optimizer(schedule="cosin"))),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_choice_of_a_run_in_python_is_refused_in_the_words_of_a_file(key):
    value, run = UNKNOWN[key]
    with pytest.raises(SpecError) as of_file:
        resolve(None, {"model.preset": "tiny-llama", key: value})
    (expected,) = (problem for problem in of_file.value.problems if problem.key == key)
    assert "is " + repr(value) in expected.rule and "Did you mean" in expected.remedy
    for starts in (train, lambda run: trace_rank(run, 0), lambda run: plan_run(run, parse_cluster("8xh100"))):
        with pytest.raises(SpecError) as caught:
            starts(run)
        assert [(p.key, p.rule, p.remedy) for p in caught.value.problems] == [(key, expected.rule, expected.remedy)]


def test_a_model_of_an_unknown_activation_is_not_built():
    with pytest.raises(SpecError, match=r"model\.hidden_act: must be one of .*gelu_pytorch_tanh"):
        Decoder(replace(TINY, hidden_act="gelu"))


def test_items_of_a_list_are_checked_and_a_missing_choice_is_none():
    assert [*choice_problems(Run(TINY))] == []
    log = Log(sinks=("wandb", "tensorbord"))  # pyright: ignore[reportArgumentType]
    assert [(p.key, p.remedy) for p in choice_problems(Run(TINY, log=log))] == [("log.sinks", "Did you mean 'tensorboard'?")]


def test_true_is_not_a_stage_of_zero():
    layout = Layout(zero_stage=True)  # pyright: ignore[reportArgumentType]
    assert [p.key for p in choice_problems(layout, "layout.")] == ["layout.zero_stage"]
