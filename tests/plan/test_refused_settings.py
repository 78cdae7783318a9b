"""What is asked for and cannot be is refused for its own reason, with the nearest that would do."""

from __future__ import annotations

from typing import Any

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS, stack_called
from ultrascale.cli.main import main
from ultrascale.description.problems import SpecError
from ultrascale.plan.search.search import search
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.workload import Workload

SEARCH = ["plan", "--gpus", "64xh100", "--seq-len", "8192", "--top", "1"]


def workload(stack: str = "ultrascale", *, model: str = "llama-3-8b", gpus: str = "64xh100", length: int = 8192) -> Workload:
    return Workload(preset(model), parse_cluster(gpus), length, 512, STACKS[stack])


@pytest.mark.parametrize(
    ("stack", "constraints", "rule", "remedy"),
    [
        ("ultrascale", {"dp_shard": (5,)}, "dp_shard = 5 does not divide 64 GPUs", "4 or 8"),
        ("ultrascale", {"dp_shard": (128,)}, "dp_shard = 128 does not divide 64 GPUs", "Nearest: 64."),
        ("ultrascale", {"dp_shard": (8,), "zero_stage": (0,)}, "ZeRO 0 cuts nothing", "--zero-stage 1, 2 or 3"),
        ("ultrascale", {"dp_shard": (64,), "tp": (2,)}, "does not divide dp = 1 or 2 or 4 or 8 or 16 or 32", "Nearest: 32."),
        ("megatron", {"zero_stage": (3,)}, "megatron has ZeRO 0, 1, not 3", "0, 1"),
        ("megatron", {"recompute": ("every-k",)}, "megatron has recompute none, selective, full, not every-k", "none"),
        ("deepspeed", {"zero_stage": (3,), "pp": (2,)}, "with a pipeline deepspeed has ZeRO 0, 1, not 3", "0, 1"),
        ("ultrascale", {"schedule": ("own.csv",)}, "own.csv is made for one number of ranks and micro-batches", "run.toml"),
        ("deepspeed", {"schedule": ("zb-v",)}, "deepspeed has 1f1b, not zb-v", "1f1b"),
        ("deepspeed", {"dp": (64,), "dp_shard": (8,), "zero_stage": (1,)}, "hybrid sharding with ZeRO 3 only", "Leave it out"),
        ("deepspeed", {"cp": (2,), "tp": (2,)}, "without tp and pp only", "Drop the others"),
        ("nanotron", {"dp": (32,), "dp_shard": (8,)}, "nanotron has no hybrid sharding", "Leave it out"),
        ("llm-foundry", {"pp": (2,)}, "llm-foundry has no pipeline", "Use 1"),
        (
            "megatron-deepspeed",
            {"sequence_parallel": (True,)},
            "megatron-deepspeed has no sequence parallelism",
            "Leave it out",
        ),
        ("ultrascale", {"tp": (8,), "pp": (64,)}, "tp 8 x pp 64 = 512 GPUs are more than 64", "Change one"),
        ("ultrascale", {"tp": (2,), "pp": (1,), "cp": (1,), "dp": (4,)}, "tp 2 x dp 4 = 8 GPUs leave 56 of 64", "leave"),
        ("ultrascale", {"tp": (4, 3)}, "tp = 3 does not divide 64 GPUs", "2 or 4"),
        ("ultrascale", {"ep": (8,)}, "cuts experts, but the model has none", "use tp"),
        ("ultrascale", {"micro_batch_size": (5000,)}, "5000 is more than the batch of 512 sequences", "512 or less"),
        ("ultrascale", {"micro_batch_size": (3,)}, "no dp x 3 divides the batch of 512 sequences", "2 or 4"),
        ("ultrascale", {"schedule": ("1f1b",), "pp": (1,)}, "1f1b is read only if pp > 1", "search pp > 1"),
        (
            "ultrascale",
            {"virtual_stages": (16,), "pp": (4,)},
            "pp 4 x 16 = 64 stages are more than 32 layers, embedding and head",
            "8 or less",
        ),
        ("ultrascale", {"virtual_stages": (3,), "schedule": ("1f1b",)}, "3 stages a rank are not what 1f1b", "interleaved"),
    ],
)
def test_a_setting_that_cannot_be_is_told_for_its_own_reason(
    stack: str, constraints: dict[str, Any], rule: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as error:
        search(workload(stack), constraints=constraints)
    (problem,) = error.value.problems
    assert rule in problem.rule and remedy in problem.remedy
    assert problem.key.removeprefix("layout.") in constraints


def test_every_setting_that_cannot_be_is_told_at_once() -> None:
    with pytest.raises(SpecError) as error:
        search(workload("megatron"), constraints={"zero_stage": (3,), "recompute": ("every-k",), "tp": (3,)})
    assert {problem.key for problem in error.value.problems} == {"layout.zero_stage", "layout.recompute", "layout.tp"}


def test_stages_that_are_asked_for_need_not_cut_the_layers_evenly() -> None:
    table = legal_layouts(workload(), constraints={"pp": (4,), "virtual_stages": (3,)}).table
    assert len(table) and set(table.virtual_stages) == {3} and set(table.pp) == {4}


def test_a_schedule_that_is_asked_for_leaves_no_layout_without_a_pipeline() -> None:
    assert min(legal_layouts(workload(), constraints={"schedule": ("zb-v",)}).table.pp) == 2
    assert min(legal_layouts(workload(), constraints={"schedule": ("zb-v",), "pp": (1, 2)}).table.pp) == 1


def test_context_parallelism_of_deepspeed_stands_alone_and_its_hybrid_sharding_at_stage_three() -> None:
    table = legal_layouts(workload("deepspeed", length=32768)).table
    assert set(table.tp[table.cp > 1]) == set(table.pp[table.cp > 1]) == {1}
    part = (table.zero_stage > 0) & (table.dp_shard < table.dp)
    assert part.any() and set(table.zero_stage[part]) == {3}


def test_a_trainer_that_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match="Did you mean deepspeed"):
        stack_called("deepsped")


def test_experts_are_asked_for_by_their_own_flag(capsys) -> None:
    assert main([*SEARCH, "--model", "mixtral-8x7b", "--ep", "8", "--json"]) == 0
    assert '"ep": 8' in capsys.readouterr().out
    assert main([*SEARCH, "--model", "llama-3-8b", "--ep", "8"]) == 2
    assert "the model has none" in capsys.readouterr().err
    assert main([*SEARCH, "--model", "llama-3-8b", "--dp-shard", "0"]) == 2
    assert "must be from 1" in capsys.readouterr().err


def test_a_schedule_that_a_batch_does_not_fill_is_refused_with_the_batch_that_does(capsys):
    command = ["plan", "--model", "llama-3-8b", "--gpus", "64xh100", "--pp", "8", "--dp", "8", "--schedule", "zb-v", "--brief"]
    assert main([*command, "--tokens-per-batch", "1M"]) == 2
    assert "16 micro-batches or more for each rank of dp" in capsys.readouterr().err
    assert main([*command, "--tokens-per-batch", "1048576"]) == 0 and "zb-v x2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stack", "modules", "told"),
    [
        ("deepspeed", "norm+mlp", "deepspeed does not recompute mlp, norm by name"),
        ("megatron", "norm+mlp_act", "megatron does not recompute mlp_act by name"),
        ("ultrascale", "norm+mlp_act,full", "Give it alone, to such a --stack (ultrascale, megatron), or choose"),
    ],
)
def test_modules_that_a_trainer_does_not_recompute_are_refused_where_they_are_asked_for(stack, modules, told, capsys):
    """They were planned, and refused by --print-flags, which advised the --stack that was given."""
    command = ["plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--brief", "--stack", stack, "--recompute", modules]
    assert main(command) == 2 and told in " ".join(capsys.readouterr().err.split())
    assert main([*command[:-1], "norm+mlp"]) == (2 if stack == "deepspeed" else 0)
