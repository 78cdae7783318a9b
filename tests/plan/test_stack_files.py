"""The files of trainers: every value with its source, shared numbers equal, names that programs are known by."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

import pytest

import ultrascale as us
from ultrascale.catalogue.stacks.stack import OPTIMIZERS, Stack
from ultrascale.catalogue.stacks.stack_files import (
    STACKS,
    changed_settings,
    changed_stack,
    expect_known_keys,
    program_of,
    setting_types,
    settings_of,
    stack_file,
    stack_names,
    with_settings,
)
from ultrascale.cli.main import main
from ultrascale.description.layout import CpMethod, Precision
from ultrascale.description.problems import SpecError
from ultrascale.description.recomputed import MODULES
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.flags.trainers import WRITERS

SEARCH = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "32xh100", "--seq-len", "4096", "--sequences-per-batch", "256"]


@pytest.mark.parametrize("name", stack_names())
def test_every_value_that_is_not_the_usual_one_says_where_it_was_read(name: str) -> None:
    file, plain = stack_file(name), settings_of(Stack(name))
    told = {key for key, value in settings_of(file.stack).items() if value != plain[key]}
    assert told <= {*file.sources} and all(len(text) > 4 for text in file.sources.values())
    assert file.title and file.release and file.stack.name == name
    assert set(file.can.schedules) <= {*SCHEDULES} and file.writes in {"", *WRITERS}
    assert set(file.can.precisions) <= {*get_args(Precision)} and set(file.can.cp_methods) <= {*get_args(CpMethod)}
    assert set(file.can.modules) <= {*MODULES} and set(file.can.optimizers) <= {*OPTIMIZERS}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('extend = "torchtitan"', "extend"), ("[can]\ntensr = true", "tensr"), ("[usual]\nzero = 1", "zero"),
        ("[settings]\nreduce_bytes = { is = 2 }", "from"),
        ('[settings]\nreduce_bytes = { is = 2, from = "its README", as = "others" }', "as"),
    ],
)  # fmt: skip
def test_a_key_that_nothing_reads_and_a_setting_without_a_source_are_refused(text, key) -> None:
    with pytest.raises(SpecError) as caught:
        expect_known_keys("later.toml", tomllib.loads(f'title = "Later"\nrelease = "of 2027"\n{text}'))
    assert [problem.key.rpartition(".")[2] for problem in caught.value.problems] == [key]
    assert "later.toml" in caught.value.problems[0].key


def test_a_number_that_several_stacks_share_is_one_number() -> None:
    values: dict[str, set[float]] = {}
    for name in stack_names():
        for key, shared in stack_file(name).shared.items():
            values.setdefault(shared, set()).add(settings_of(stack_file(name).stack)[key])
    assert len(values) >= 4 and all(len(found) == 1 for found in values.values()), values


@pytest.mark.parametrize(
    ("framework", "stack", "exact"),
    [
        ("NeMo / Megatron-Core (recipe release v25.04.02)", "nemo", True), ("Megatron-LM", "megatron", True),
        ("Megatron-DeepSpeed", "megatron-deepspeed", True), ("DeepSpeed ZeRO-3", "deepspeed", True),
        ("Megatron-style 3D trainer (vTrain testbed)", "vtrain", True), ("NeMo AutoModel", "automodel", True),
        ("llm-foundry/Composer FSDP1", "llm-foundry", True), ("fms-fsdp (PyTorch FSDP1)", "fms-fsdp", True),
        ("HF transformers Trainer", "transformers", True), ("KempnerForge", "torchtitan", False),
        ("InternEvo", "megatron", False), ("PaxML (JAX/XLA)", "maxtext", False),
    ],
)  # fmt: skip
def test_programs_are_known_by_their_names(framework: str, stack: str, exact: bool) -> None:
    assert program_of(framework) == (stack, exact)


def test_a_program_that_nobody_knows_is_none() -> None:
    assert program_of("our own") is None


@pytest.mark.parametrize("key", setting_types())
def test_every_setting_can_be_changed_and_says_what_it_takes(key: str) -> None:
    own = settings_of(STACKS["megatron"])[key]
    assert settings_of(with_settings(STACKS["megatron"], {key: str(own)}))[key] == own
    with pytest.raises(SpecError, match="must be"):
        with_settings(STACKS["megatron"], {key: "a few"})


def test_what_was_changed_is_told_again() -> None:
    assert changed_settings(changed_stack("nemo", {"dispatcher": "deepep", "gradient_bytes": "2"})) == {"dispatcher": "deepep"}
    assert changed_settings(STACKS["nemo"]) == {}


def test_a_setting_changes_the_plan_and_the_flags_it_prints(capsys) -> None:
    seconds = {}
    for words in ([], ["--stack.dispatcher", "deepep"]):
        assert main([*SEARCH, "--stack", "megatron", "--ep", "8", *words, "--print-flags"]) == 0
        printed = capsys.readouterr().out
        assert ("--moe-flex-dispatcher-backend deepep" in printed) is bool(words)
        seconds[bool(words)] = printed
    assert seconds[True] != seconds[False]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stack", "megatron", "--stack.dispacher", "deepep"], "Did you mean dispatcher?"),
        (["--stack", "megatron", "--stack.dispatcher", "pigeons"], "must be one of alltoall, deepep, hybridep, is 'pigeons'"),
        (["--stack", "megatron", "--stack.gradient-bytes", "-2"], "must be a number from 0 to 1e12"),
        (["--stack.cuda-graphs"], "is a setting of other trainers' stacks"),
        (["--stack", "megatrn"], "Did you mean megatron"),
    ],
)
def test_settings_that_are_none_are_refused_in_a_sentence(words: list[str], told: str, capsys) -> None:
    assert main([*SEARCH, *words]) == 2
    assert told in capsys.readouterr().err


def test_stacks_are_shown_with_their_sources(capsys) -> None:
    assert main(["show", "stacks"]) == 0 and "nanotron-2024" in capsys.readouterr().out
    assert main(["show", "stacks", "megatron", "--json"]) == 0 and "param_and_grad_buffer.py" in capsys.readouterr().out
    assert main(["show", "stacks", "megatron"]) == 0 and "stack.dispatcher" in capsys.readouterr().out


def test_no_gradient_is_sent_wider_than_deepspeed_keeps_it() -> None:
    deepspeed = STACKS["deepspeed"]
    assert deepspeed.reduce_bytes == deepspeed.gradient_bytes == 2


def test_a_plan_takes_what_a_trainer_does_in_one_precision_alone(tmp_path):
    """BLOOM's optimizer is that of bf16; in fp16 it was DeepSpeed's."""
    settings: dict[str, Any] = {
        "zero_stage": 1,
        "dp": 8,
        "recompute": "full",
        "micro_batch_size": 1,
        "stack": "megatron-deepspeed",
    }
    found = {
        precision: us.plan("llama-2-7b", "8xa100", precision=precision, **settings).chosen.stack.gradient_bytes
        for precision in ("bf16", "fp16")
    }
    assert found == {"bf16": 4, "fp16": 2}
    file = tmp_path / "run.toml"
    file.write_text(us.plan("llama-2-7b", "8xa100", precision="fp16", **settings).to_toml())
    assert us.plan(str(file), stack="megatron-deepspeed").chosen.stack.gradient_bytes == 2
    settings |= {"stack.gradient_bytes": 4}
    stated = us.plan("llama-2-7b", "8xa100", precision="fp16", **settings)
    assert stated.chosen.stack.gradient_bytes == 4
