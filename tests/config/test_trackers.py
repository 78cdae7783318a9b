"""Tables of trackers in a run's file."""

import pytest

from ultrascale.config.resolve import resolve, to_toml
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.description.problems import SpecError

TINY = '[model]\npreset = "tiny-llama"\n'


def run_of(tmp_path, text, words=()):
    (tmp_path / "run.toml").write_text(TINY + text)
    return resolve(tmp_path / "run.toml", list(words))


@pytest.mark.parametrize(
    "text, sinks",
    [
        ("[log.wandb]\n", ("wandb",)),
        ('[log.tensorboard]\ngroup = "a"\n[log.wandb]\n', ("wandb", "tensorboard")),
        ('[log]\nsinks = ["mlflow"]\n[log.wandb]\noffline = true\n', ("mlflow",)),
        ("[log]\nsinks = []\n[log.wandb]\n", ()),
        ("", ()),
    ],
)
def test_a_table_turns_its_tracker_on_and_sinks_have_the_last_word(tmp_path, text, sinks):
    run = run_of(tmp_path, text).run
    assert run.log.sinks == sinks
    (tmp_path / "again.toml").write_text(to_toml(run))
    assert resolve(tmp_path / "again.toml").run == run


def test_a_flag_turns_it_on_too_and_it_is_said_where_that_came_from(tmp_path):
    resolved = run_of(tmp_path, "", ["--log.trackio.project", "lab", "--log.trackio.tags", "a,b"])
    assert resolved.run.log.sinks == ("trackio",) and resolved.run.log.trackio.tags == ("a", "b")
    assert resolved.provenance["log.sinks"] == "derived from [log.trackio]"


def test_a_table_that_nothing_reads_is_noted(tmp_path):
    run = run_of(tmp_path, "[log]\nsinks = []\n[log.wandb]\noffline = true\n").run
    assert "log.wandb has no effect: log.sinks does not name wandb." in run_notes(run)


@pytest.mark.parametrize(
    "text, told",
    [
        ('[log.mlflow]\nurl = "https://me:secret@host"\n', "log.mlflow.url"),
        ('[log.wandb]\nid = "a/b"\n', "log.wandb.id"),
        ('[log.wandb]\nproject = ""\n', "log.wandb.project"),
        ('[log.trackio]\nentity = "me"\n', "log.trackio.entity"),
        ('[log.wandb]\nprojct = "a"\n', "Did you mean log.wandb.project?"),
        ('[log.neptune]\nproject = "a"\n', "log.neptune"),
    ],
)
def test_a_mistake_is_told_by_its_key_and_no_password_is_kept(tmp_path, text, told):
    with pytest.raises(SpecError) as caught:
        run_of(tmp_path, text)
    assert told in str(caught.value)
