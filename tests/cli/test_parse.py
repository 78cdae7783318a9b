"""Settings of a run among the words of a verb."""

from __future__ import annotations

import pytest

from ultrascale.api.keywords import unknown_flag
from ultrascale.cli.main import main
from ultrascale.cli.terminal.parse import split_settings
from ultrascale.description.problems import did_you_mean


@pytest.mark.parametrize(
    "words, settings",
    [
        (["--layout.tp", "2", "run.toml", "--rank", "1"], ["--layout.tp", "2"]),
        (["run.toml", "--layout.tp=2", "--rank", "1"], ["--layout.tp=2"]),
        (["--compile", "run.toml", "--rank", "1"], ["--compile"]),
        (["--compile", "false", "run.toml", "--rank", "1"], ["--compile", "false"]),
        (["--layout.sequence-parallel", "--cluster", "8xh100", "run.toml", "--rank", "1"],
         ["--layout.sequence-parallel", "--cluster", "8xh100"]),
        (["--compile", "fasle", "--cluster", "8xh100", "run.toml", "--rank", "1"],
         ["--compile", "fasle", "--cluster", "8xh100"]),
        (["--layout.unknown", "3", "run.toml", "--rank", "1"], ["--layout.unknown", "3"]),
        (["--model.preset", "tiny-llama", "run.toml", "--rank", "1"], ["--model.preset", "tiny-llama"]),
        (["run.toml", "--rank", "1", "--steps", "3"], []),
    ],
)  # fmt: skip
def test_settings_are_told_from_the_words_of_the_verb_wherever_they_stand(words: list[str], settings: list[str]) -> None:
    found, others = split_settings(words, verb_flags=("rank", "steps"))
    assert found == settings
    assert others == ["run.toml", "--rank", "1", *(["--steps", "3"] if "--steps" in words else [])]


@pytest.mark.parametrize("word", ["gpipe", "interleaved", "run", "out", "node"])
@pytest.mark.parametrize("after", [[], ["--rank", "1"]])
def test_a_setting_that_is_on_or_off_leaves_the_verb_its_word(word: str, after: list[str]) -> None:
    words = ["--layout.sequence-parallel", word, *after]
    assert split_settings(words, verb_flags=("rank",)) == (words[:1], words[1:])


@pytest.mark.parametrize("verb", ["plan", "check", "trace", "train", "show"])
def test_a_setting_may_stand_before_the_file(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--layout.tp", "3", "runs/tiny-llama-cpu.toml"]) == 2
    assert "must divide model.num_attention_heads = 4, is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "plan",
        "plan far",
        "show",
        "show schedule",
        "check",
        "trace",
        "train",
        "measure step",
        "measure speed",
        "measure network",
        "sweep",
        "validate",
    ],
)
def test_help_has_its_examples_in_lines_below_each_other_and_no_value_none(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    told = capsys.readouterr().out
    assert "\n    ultrascale " in told
    assert "\n\n\n" not in told and "{None" not in told


def test_a_refused_flag_is_never_proposed_in_its_own_place():
    for flag in ("--folder", "--name"):
        assert f"mean {flag}" not in unknown_flag(flag, [], "import", settings=True).remedy


def test_only_a_flag_of_the_launch_is_taken_for_one_of_the_launch():
    assert unknown_flag("--size", [], "show", settings=True).remedy == "See `ultrascale show --help`."
    assert "mean --launch.kubernetes.size?" in unknown_flag("--launch.kubernets.size", [], "show", settings=True).remedy


def test_several_names_that_may_be_meant_are_a_list():
    known = ["every_step", "every_steps", "every_stop"]
    assert did_you_mean("every_step", known, "", most=3) == "Did you mean every_step, every_steps or every_stop?"
    assert did_you_mean("every_step", known, "", most=2) == "Did you mean every_step or every_steps?"


@pytest.mark.parametrize("flag", ["--gpus", "--nproc_per_node", "--num-processes"])
def test_other_programs_flags_for_processes_are_known(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "runs/tiny-llama-cpu.toml", flag, "8"]) == 2
    assert "Did you mean --processes?" in capsys.readouterr().err
