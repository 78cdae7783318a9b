"""The kernel that a plan prices is the one that the trainer's contest would take."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack import KERNEL_OF_CORE, with_attention
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.attention_cores import CANDIDATE_CORES, core_requirements
from ultrascale.description.layout import AttentionCore, Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.kernels.attention.attention_contest import excluded
from ultrascale.kernels.choice.contest import decide
from ultrascale.plan.laws.compute import Kernel, attention_seconds
from ultrascale.plan.report import workload_of
from ultrascale.plan.time.attention_choice import attention_kernel, wanted_of
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Shape
from ultrascale.work.work import block_work

KERNELS: dict[AttentionCore, Kernel] = {"sdpa": "flash-2", "varlen": "flash-2", **KERNEL_OF_CORE}
"""Of torch's flash attention where it does not take cuDNN's by itself."""
OF_TORCH: tuple[AttentionCore, ...] = ("sdpa", "varlen", "cudnn", "flex")


def scores_of(workload, shape):
    return next(op.scores for op in block_work(workload.model, 0, shape) if op.scores is not None)


@settings(max_examples=60, deadline=None)
@given(
    gpus=st.sampled_from(["8xa100", "8xh100", "8xb200"]),
    name=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "llama-3.2-1b"]),
    precision=st.sampled_from(["bf16", "fp16", "fp8"]), documents=st.booleans(), cp=st.sampled_from([1, 2]),
    length=st.sampled_from([1024, 8192]),
)  # fmt: skip
def test_a_contest_whose_times_are_the_plan_s_has_the_same_winner(gpus, name, precision, documents, cp, length):
    model, cluster = preset(name), parse_cluster(gpus)
    layout = Layout(cp=cp, precision=precision, micro_batch_size=1)
    run = Run(model=model, layout=layout, batch=Batch(length, 8), data=Data(document_mask=documents))
    workload = workload_of(run, cluster, STACKS["ultrascale"])
    shape = Shape(1, length, precision, documents, "cuda", cp=cp)
    wanted = core_requirements(run, "cuda")
    assert wanted_of(workload, shape) == wanted
    scores = scores_of(workload, shape)
    dtype = "bf16" if precision == "fp8" else precision

    def seconds(core: AttentionCore) -> float:
        return sum(
            attention_seconds(
                cluster.accelerator, **scores._asdict(), dtype=dtype, backward=way, kernel=KERNELS[core]
            )
            for way in (False, True)
        )  # fmt: skip

    outcomes = {
        core: excluded(core, wanted, compiled=False) or seconds(core)
        for core in CANDIDATE_CORES if core in OF_TORCH
    }  # fmt: skip
    if all(isinstance(one, str) for one in outcomes.values()):
        return
    chosen = decide("attention", [outcomes]).chosen
    winner = next(kernel for core, kernel in KERNELS.items() if core == chosen)
    assert winner == attention_kernel(workload, shape, scores)


@pytest.mark.parametrize(
    ("gpus", "documents", "cp", "expected"),
    [
        ("8xh100", False, 1, "cudnn"),
        ("8xb200", False, 1, "cudnn"),
        ("8xh100", True, 1, "flash-2"),
        ("8xh100", False, 2, "flash-2"),
        ("8xa100", False, 1, "flash-2"),
    ],
)
def test_hopper_takes_cudnn_where_nothing_is_masked(gpus, documents, cp, expected):
    workload = Workload(preset("llama-3.1-8b"), parse_cluster(gpus), 8192, 8, documents=documents)
    shape = Shape(1, 8192, "bf16", documents, "cuda", cp=cp)
    assert attention_kernel(workload, shape, scores_of(workload, shape)) == expected


def test_a_core_that_is_named_is_priced_as_it_is():
    workload = Workload(preset("llama-3.1-8b"), parse_cluster("8xh100"), 8192, 8)
    layout = Layout(dp=8, zero_stage=3, precision="bf16")
    cores: tuple[AttentionCore, ...] = ("auto", "sdpa", "varlen", "cudnn", "flex", "flash-2", "flash-3")
    step = {core: predict(replace(workload, stack=with_attention(workload.stack, core)), layout).step_seconds for core in cores}
    assert step["flash-3"] < step["cudnn"] == step["auto"] < step["flash-2"] < step["flex"]
    assert step["sdpa"] == step["varlen"] == step["cudnn"], "torch takes cuDNN's on Hopper where nothing is masked"


@pytest.mark.parametrize(("gpus", "is_faster"), [("8xh100", True), ("8xb200", True), ("8xa100", False)])
def test_torchtitan_of_2026_asks_for_cudnn_first(gpus: str, is_faster: bool):
    """Its models/common/attention.py; on B200 that had raised 10,902 tokens/s to 12,211 (pull request 1196, 2025)."""
    workload = Workload(preset("llama-3-8b"), parse_cluster(gpus), 8192, 8)
    layout = Layout(dp=8, zero_stage=3, precision="bf16", recompute="selective")
    old, new = (
        predict(replace(workload, stack=STACKS[name]), layout).step_seconds for name in ("torchtitan", "torchtitan-2026")
    )
    assert (new < 0.95 * old) == is_faster


def test_torchtitan_of_2026_gives_windows_and_sinks_to_flex_attention():
    workload = Workload(preset("gpt-oss-20b"), parse_cluster("8xb200"), 8192, 8, stack=STACKS["torchtitan-2026"])
    shape = Shape(1, 8192, "bf16", device="cuda")
    assert attention_kernel(workload, shape, scores_of(workload, shape)) == "flash-2"


def test_deterministic_runs_do_without_cudnn():
    stack = with_attention(STACKS["ultrascale"], "auto", deterministic=True)
    assert stack.attention_kernel == "flash-2"
