"""What a plan says beside parameters, gradients and optimizer state is what their bytes are."""

from __future__ import annotations

import re

import pytest

import ultrascale as us
from ultrascale.cli.main import main
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.plan.memory.ledger import CATEGORIES
from ultrascale.plan.view.plan_view import PARTS
from ultrascale.plan.view.state_words import state_words

SMALL = {"model": "llama-3.2-1b", "gpus": "8xh100", "seq_len": 1024, "recompute": "none"}
WIDTHS = {"fp32 master weights": 4, "bf16 master weights": 2, "fp32": 4, "bf16": 2, "fp32, and bf16 of autograd": 6}
MOMENTS = {"two moments, fp32": 8, "two moments, bf16": 4, "two moments, 8 bits": 2}


def words_of(plan):
    return state_words(plan.chosen.run.model, plan.chosen.run.layout, plan.chosen.stack)


@pytest.mark.parametrize("asked", [
    {"dp": 8, "zero_stage": 0},
    {"dp": 8, "zero_stage": 1},
    {"dp": 8, "zero_stage": 3, "dp_shard": 4},
    {"dp": 4, "cp": 2, "zero_stage": 3},
    {"cp": 8, "zero_stage": 3},
    {"tp": 8},
    {"dp": 8, "zero_stage": 2, "precision": "fp32"},
    {"dp": 8, "zero_stage": 2, "optimizer": "adamw-bf16"},
    {"dp": 8, "zero_stage": 2, "optimizer": "adamw-8bit"},
    {"dp": 8, "zero_stage": 2, "precision": "fp8"},
    {"dp": 4, "tp": 2, "zero_stage": 1, "stack": "megatron"},
    {"dp": 8, "zero_stage": 0, "stack": "megatron"},
    {"dp": 8, "zero_stage": 1, "stack": "nanotron"},
    {"dp": 8, "zero_stage": 2, "stack": "deepspeed"},
    {"dp": 8, "zero_stage": 3, "stack": "deepspeed"},
    {"dp": 8, "zero_stage": 3, "stack": "automodel"},
], ids=str)  # fmt: skip
def test_dtypes_and_ranks_beside_the_state_give_its_bytes(asked):
    plan = us.plan(**SMALL, **asked)
    words, left = words_of(plan), plan.chosen.memory.between_steps.by_category
    elements = num_parameters(plan.chosen.run.model) / plan.layout.tp
    for category, widths in (("parameters", WIDTHS), ("optimizer", MOMENTS)):
        text = words[category]
        shards = int(found[1]) if (found := re.search(r"sharded over (\d+) ranks", text)) else 1
        known = re.sub(r",? ?(sharded over \d+ ranks|replicated)$", "", text)
        masters = 4 if known.startswith("fp32 master weights, two") else 0
        width = widths[known.removeprefix("fp32 master weights, ") if masters else known] + masters
        assert left[category] == pytest.approx(elements * width / shards, rel=0.03), (category, text)


def test_gradients_of_a_trainer_that_allocates_them_once_have_their_dtypes():
    plan = us.plan(**SMALL, dp=8, zero_stage=1, stack="nanotron")
    assert words_of(plan)["gradients"] == "fp32, and bf16 of autograd, replicated"
    assert plan.chosen.memory.between_steps.by_category["gradients"] == 6 * num_parameters(plan.chosen.run.model)
    sharded = us.plan(**SMALL, dp=8, zero_stage=2, stack="deepspeed")
    assert words_of(sharded)["gradients"].endswith("sharded over 8 ranks")


def test_experts_that_fewer_ranks_shard_are_named():
    words = words_of(us.plan("mixtral-8x7b", "64xh100", seq_len=4096, dp=64, ep=8, zero_stage=3, dp_shard=32))
    assert words["parameters"] == "fp32 master weights, sharded over 32 ranks, experts over 8"


def test_what_is_gathered_is_in_the_dtype_of_its_bytes():
    alone = us.plan("llama-3.2-1b", "1xh100", seq_len=1024)
    assert words_of(alone)["gathered"] == "bf16 copy, while in use" and words_of(alone)["parameters"] == "fp32 master weights"
    fp8 = us.plan(**SMALL, dp=8, zero_stage=2, precision="fp8")
    assert words_of(fp8)["gathered"] == "bf16 copy, unsharded while in use"
    narrow = us.plan(**SMALL, dp=8, zero_stage=2, precision="fp8", layout={"fp8_all_gather": True})
    assert words_of(narrow)["gathered"] == "bf16 and fp8 copy, unsharded while in use"


def test_the_table_of_a_plan_has_these_words(capsys):
    command = ["plan", "--model", "llama-3.2-1b", "--gpus", "8xh100", "--seq-len", "1024", "--dp", "4", "--cp", "2"]
    assert main([*command, "--zero-stage", "1", "--recompute", "none"]) == 0
    out = capsys.readouterr().out
    assert "two moments, fp32, sharded over 8 ranks" in out and "fp32 master weights, sharded over 8 ranks" in out


def test_many_equal_stages_are_said_once(capsys):
    command = [
        "plan",
        "--model",
        "llama-3-8b",
        "--gpus",
        "16xh100",
        "--stack",
        "megatron",
        "--pp",
        "2",
        "--schedule",
        "interleaved",
    ]
    assert main([*command, "--layout.virtual-stages", "16"]) == 0
    assert "blocks of each stage: 1 in each of 32" in capsys.readouterr().out


def test_categories_have_the_names_of_a_trace_and_of_a_run_s_log():
    assert {name: label for name, (label, *_) in PARTS.items()} == {name: name for name in CATEGORIES}


def test_what_is_not_a_batch_is_not_called_one(capsys):
    """Megatron keeps an unread gradient for every distinct shape of a linear layer: 435 MiB of GPT-3, said to be the batch."""
    command = ["plan", "--model", "gpt-3-1.3b", "--gpus", "8xh100", "--dp", "8", "--stack", "megatron", "--zero-stage", "1"]
    assert main([*command, "--recompute", "none"]) == 0
    assert "gradients that nobody reads" in capsys.readouterr().out


def test_checkpointed_inputs_count_as_residual_stream_at_the_peak_too(capsys):
    command = ["plan", "--model", "llama-3.2-1b", "--gpus", "8xh100", "--dp", "8", "--zero-stage", "3", "--seq-len", "16k"]
    assert main([*command, "--micro-batch-size", "4", "--recompute", "full"]) == 0
    out = capsys.readouterr().out
    assert "element-wise, residual" in out and "residual stream 256 MiB" in out
