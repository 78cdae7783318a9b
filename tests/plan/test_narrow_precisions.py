"""MXFP8 and NVFP4: planned for trainers that have them, on devices that have them."""

from __future__ import annotations

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.machines import ACCELERATORS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.trainable import untrainable_layout
from ultrascale.description.layout import NARROW, Layout, Precision
from ultrascale.description.problems import SpecError
from ultrascale.plan.flags.trainers import trainer_flags
from ultrascale.plan.laws.compute import matmul_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.report import workload_of
from ultrascale.plan.time.price import Prediction, predict


def predicted(precision: str, *, gpus: str = "64xgb200", stack: str = "megatron", **layout: object) -> Prediction:
    words = ["--model.preset=llama-3-70b", "--batch.sequence_length=4096", "--batch.sequences_per_batch=256", "--layout.dp=64"]
    words += [f"--layout.{key}={value}" for key, value in {"precision": precision, "zero_stage": 1, **layout}.items()]
    run = resolve(None, words).run
    return predict(workload_of(run, parse_cluster(gpus), STACKS[stack]), run.layout)


def activations(precision: str) -> float:
    return float(predicted(precision).memory.categories["activations"])


def test_a_factor_takes_its_bits_and_its_share_of_scales():
    assert (NARROW["fp8"], NARROW["mxfp8"], NARROW["nvfp4"]) == (1, 33 / 32, 9 / 16)


def test_saved_inputs_of_products_shrink_with_their_format_and_nothing_else_does():
    fp8, mx, nv = map(activations, ("fp8", "mxfp8", "nvfp4"))
    assert nv < fp8 < mx
    assert (mx - fp8) / (fp8 - nv) == pytest.approx((1 / 32) / (7 / 16), rel=1e-3)


def test_gathered_weights_shrink_to_their_format():
    wide = predicted("bf16", stack="torchtitan", zero_stage=3).memory.categories["gathered"]
    names: tuple[Precision, ...] = ("nvfp4", "fp8", "mxfp8")
    plans = [predicted(name, stack="torchtitan", zero_stage=3, fp8_all_gather="true") for name in names]
    saved = [float(wide) - float(plan.memory.categories["gathered"]) for plan in plans]  # of blocks; what is outside stays wide
    assert saved[0] / saved[1] == pytest.approx(2 - 9 / 16, rel=1e-3) and saved[2] / saved[1] == pytest.approx(
        31 / 32, rel=1e-3
    )
    assert LayoutTable.of([Layout(precision=name) for name in names]).narrow_bytes.tolist() == [9 / 16, 1, 33 / 32]


def test_products_in_nvfp4_take_what_was_measured_of_fp8s_and_mxfp8_takes_fp8s():
    for name, share in (("b200", 0.6), ("b300", 0.5), ("gb200", 0.6), ("gb300", 0.49)):  # Ultra's peak is three times fp8's
        device, dtypes = ACCELERATORS[name], ("fp8", "mxfp8", "nvfp4")
        fp8, mx, nv = (matmul_seconds(device, 32768, 8192, 8192, dtype=dtype, casts=False) for dtype in dtypes)
        assert mx == fp8 and nv / fp8 == pytest.approx(share, rel=0.03), name
        assert nv > 2 * 32768 * 8192 * 8192 / ACCELERATORS[name].peak_flops["nvfp4"].value
    steps = [predicted(name).step_seconds for name in ("nvfp4", "mxfp8", "bf16")]
    assert steps == sorted(steps)


def test_devices_without_the_peak_are_refused_with_those_that_have_it(capsys):
    words = ["plan", "--model", "llama-3-8b", "--seq-len", "4096", "--stack", "megatron", "--precision", "nvfp4"]
    assert main([*words, "--gpus", "64xh100"]) == 2
    assert "or a device that has it: b200, b300, gb200, gb300." in capsys.readouterr().err
    with pytest.raises(SpecError, match="has no mxfp8"):
        predicted("mxfp8", gpus="64xa100-80")


def test_our_trainer_names_fp8_as_the_nearest_and_other_trainers_what_they_have(capsys):
    for name in ("mxfp8", "nvfp4"):
        (problem,) = untrainable_layout(Layout(precision=name))
        assert problem.key == "layout.precision" and "fp8 is the nearest" in problem.rule
        with pytest.raises(SpecError, match="does not make"):
            predicted(name, stack="ultrascale")
    words = ["plan", "--model", "llama-3-8b", "--seq-len", "4096", "--stack", "torchtitan", "--gpus", "64xgb200"]
    assert main([*words, "--precision", "nvfp4"]) == 2
    assert "torchtitan trains in fp32, bf16, mxfp8, fp8, the plan wants nvfp4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stack", "precision", "words"),
    [
        ("megatron", "mxfp8", ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8")),
        ("megatron", "nvfp4", ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4")),
        ("torchtitan", "mxfp8", ('converters = ["quantize.linear.mx"]', 'recipe_name = "mxfp8_cublas"')),
    ],
)
def test_flags_for_other_trainers_name_the_recipe(stack: str, precision: str, words: tuple[str, ...]):
    stage = 1 if stack == "megatron" else 2
    found = predicted(precision, stack=stack, zero_stage=stage)
    flags = trainer_flags(found.workload, found.layout)
    assert all(word in flags for word in words)
