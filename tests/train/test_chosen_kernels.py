"""Kernels chosen by their speed in a run: said, kept, taken again by whoever goes on, and alike on every rank."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train.small_runs import same, small_run, state, stop_at, train_here, train_ranks

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.config.resolve import resolve
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.kernels.attention.flash_packages import MODULES
from ultrascale.kernels.choice import implementation
from ultrascale.kernels.choice.contest import ContestResult
from ultrascale.kernels.choice.fused_contest import _CASES, _Draw, fused_shape, kernels_of
from ultrascale.kernels.choice.implementation import choose
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.start import chosen_kernels
from ultrascale.work.fp8_slots import products_line

FASTEST = Layout(micro_batch_size=2, attention="fastest")


def log(home: Path, name: str) -> list[str]:
    return [line for line in (home / name / "log.txt").read_text().splitlines() if line.startswith("attention:")]


def test_a_run_that_goes_on_takes_the_core_it_had_and_ends_with_the_same_bits(home: Path, kernel_seconds) -> None:
    kernel_seconds({"sdpa": 2e-3, "varlen": 1e-3}.__getitem__)
    whole, parts = (small_run(home, name=name, layout=FASTEST) for name in ("whole", "parts"))
    train_here(whole)
    train_here(parts, before_step=stop_at(3))
    assert resolve(str(home / "parts" / "run.toml"), []).run.layout.attention == "varlen"
    kernel_seconds({"sdpa": 1e-3, "varlen": 2e-3}.__getitem__)  # another day, another winner
    train_here(parts)
    told = "attention: varlen 1 ms; sdpa 2 ms; not cudnn, flash-2, flash-3, flash-4: is for CUDA; "
    assert [line[: len(told)] for line in log(home, "parts")] == [told, told]
    assert log(home, "parts")[1].endswith("as before")
    assert same(state(whole), state(parts))


def test_the_file_that_was_written_goes_on_with_the_same_core_though_it_is_asked_for_by_name(
    home: Path, kernel_seconds
) -> None:
    kernel_seconds({"sdpa": 2e-3, "varlen": 1e-3}.__getitem__)
    train_here(small_run(home, name="parts", layout=FASTEST), before_step=stop_at(3))
    written = resolve(str(home / "parts" / "run.toml"), []).run
    train_here(written)
    assert log(home, "parts")[1] == "attention: varlen, as layout.attention says"


def test_on_the_cpu_nothing_is_timed_unless_asked_for_and_the_line_says_so(home: Path, kernel_seconds) -> None:
    kernel_seconds({}.__getitem__)
    run = small_run(home, name="plain")
    train_here(replace(run, steps=1))
    assert log(home, "plain") == [
        'attention: sdpa, PyTorch\'s flash attention for CPUs, masked; layout.attention = "fastest" times it against others'
    ]
    kernels = "kernels: torch, PyTorch's own operations, the only choice on a CPU"
    assert kernels in (home / "plain" / "log.txt").read_text().splitlines()
    assert not (home / "plain" / "chosen_kernels.json").exists()


@pytest.mark.parametrize(("precision", "count"), [("fp8", 1), ("bf16", 0)])
def test_a_run_in_fp8_says_where_nothing_multiplies_fp8(home: Path, precision: Any, count: int) -> None:
    run = small_run(home, name="narrow", layout=Layout(micro_batch_size=2, precision=precision))
    train_here(replace(run, steps=1))
    told = (home / "narrow" / "log.txt").read_text()
    assert told.count("fp8: emulated, since this device has no products of it") == count
    assert told.count("fp8: q_proj, ") == count


def test_what_an_fp8_run_multiplies_in_8_bits_and_what_stays_in_bf16_is_named_weight_by_weight() -> None:
    model = preset("tiny-deepseek-v3")
    narrow, _, wide = products_line(model, Layout(precision="fp8", fp8_keep_blocks=1)).partition("; in bf16 stay ")
    products, _, blocks = narrow.partition(" of ")
    assert products == "q_b_proj, kv_b_proj, o_proj, gate_proj, up_proj, down_proj"
    assert blocks == f"{model.num_hidden_layers - 2} of {model.num_hidden_layers} blocks, row scaling"
    assert wide.endswith(", attention, loss; blocks at either end: 1")
    assert {"embed_tokens", "router", "q_a_proj", "kv_a_proj_with_mqa", "lm_head"} <= set(wide.split(", "))


def test_ranks_that_measure_otherwise_decide_alike(home: Path, kernel_seconds) -> None:
    def seconds_of(name: str) -> float:
        import torch.distributed as dist

        return {"sdpa": 1e-3 if dist.get_rank() == 0 else 5e-3, "varlen": 2e-3}[name]  # alone, rank 0 would take sdpa

    kernel_seconds(seconds_of)
    run = small_run(home, layout=replace(FASTEST, dp=2))
    results = train_ranks(replace(run, steps=2))
    assert [one["steps_done"] for one in results] == [2, 2]
    assert log(home, "small")[0].startswith("attention: varlen 2 ms; sdpa 5 ms")


def test_a_question_that_changed_is_asked_anew(home: Path, kernel_seconds) -> None:
    kernel_seconds({"sdpa": 2e-3, "varlen": 1e-3}.__getitem__)
    run = small_run(home, name="parts", layout=FASTEST)
    train_here(run, before_step=stop_at(2))
    kernel_seconds({"sdpa": 1e-3, "varlen": 2e-3}.__getitem__)
    train_here(replace(run, layout=replace(FASTEST, micro_batch_size=1)))
    assert json.loads((home / "parts" / "chosen_kernels.json").read_text())["verdicts"]["attention"]["chosen"] == "sdpa"


def test_a_core_that_the_device_has_not_is_refused_at_the_start(home: Path) -> None:
    run = small_run(home, layout=replace(FASTEST, attention="cudnn"))
    with pytest.raises(SpecError, match=r'layout.attention: "cudnn" is for CUDA'):
        train_here(run)


def test_a_run_whose_package_is_gone_is_told_what_to_do_and_does_not_go_on_with_another(monkeypatch) -> None:
    kept = ContestResult("attention", "flash-2", "", {"flash-2": 1e-3, "sdpa": 2e-3})
    monkeypatch.setitem(sys.modules, MODULES["flash-2"], None)
    run = resolve(None, {"model.preset": "llama-3.2-1b", "layout.precision": "bf16"}).run
    on_cuda = Ranks(0, 1, torch.device("cuda"))
    with pytest.raises(SpecError, match=r"began with flash-2, but rank 0: flash_attn.* is not installed"):
        chosen_kernels._attention(run, on_cuda, kept)
    monkeypatch.setitem(sys.modules, MODULES["flash-2"], SimpleNamespace(_flash_attn_varlen_forward=None))
    assert chosen_kernels._attention(run, on_cuda, kept) is kept
    named = replace(run, layout=replace(run.layout, attention="flash-2"))
    assert chosen_kernels._attention(named, on_cuda, None).line() == "attention: flash-2, as layout.attention says"


def test_on_cuda_each_kernel_that_the_model_calls_is_chosen_by_itself_and_kept_ones_are_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(
        chosen_kernels, "fused_contest", lambda kernel, **rest: {"torch": 2e-3, "triton": 1e-3 if kernel == "norm" else 3e-3}
    )
    run = resolve(None, {"model.preset": "llama-3.2-1b", "layout.precision": "bf16"}).run
    on_cuda = Ranks(0, 1, torch.device("cuda"))
    kept = {"swiglu": ContestResult("swiglu", "triton", "", {"triton": 1.0})}
    found = chosen_kernels._fused(run, on_cuda, kept)
    assert {name: one.chosen for name, one in found.items()} == {
        "norm": "triton", "norm_of_sum": "torch", "rotary": "torch", "swiglu": "triton", "loss": "torch"
    }  # fmt: skip
    assert found["norm"].line() == "norm: triton 1 ms; torch 2 ms"
    cut = replace(run, layout=replace(run.layout, tp=2))
    assert "loss" not in chosen_kernels._fused(cut, on_cuda, kept)
    compiled = chosen_kernels._fused(replace(run, compile=True), on_cuda, kept)
    assert [one.line() for one in compiled.values()] == ["kernels: torch, the compiler fuses them"]
    experts = resolve(None, {"model.preset": "mixtral-8x7b", "layout.precision": "bf16", "compile": "true"}).run
    assert list(chosen_kernels._fused(experts, on_cuda, {})) == ["swiglu", "experts"]  # they stand outside of graphs
    narrow = replace(run, compile=True, optimizer=replace(run.optimizer, name="adamw-8bit"))
    assert list(chosen_kernels._fused(narrow, on_cuda, {})) == ["adamw-8bit"]  # so does the update


def test_norms_are_timed_as_the_model_calls_them() -> None:
    assert "norm_of_sum" not in kernels_of(preset("olmo-2-1b"), Layout())  # no norm reads a sum of two halves
    for name, weight in (("gemma-3-1b", torch.float32), ("llama-3.2-1b", torch.bfloat16)):
        model = preset(name)
        shape = fused_shape(model, Layout(), 16, torch.bfloat16)
        for kernel in ("norm", "norm_of_sum"):
            assert kernel in kernels_of(model, Layout())
            *streams, scale = _CASES[kernel](model, shape, _Draw(shape, torch.device("cpu")))[1]
            assert scale.dtype == weight and {one.dtype for one in streams} == {torch.bfloat16}


def test_forms_are_set_kernel_by_kernel_and_one_name_goes_for_those_that_have_it(monkeypatch) -> None:
    cuda = torch.device("cuda")
    for kernel in list(implementation._CHOSEN):
        monkeypatch.setitem(implementation._CHOSEN, kernel, "torch")  # and as before afterwards
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(__spec__=ModuleSpec("liger_kernel", None)))
    choose({"norm": "liger", "loss": "compiled"}, cuda)
    assert implementation._CHOSEN == {
        "norm": "liger",
        "norm_of_sum": "torch",
        "rotary": "torch",
        "swiglu": "torch",
        "loss": "compiled",
        "experts": "torch",
        "adamw-bf16": "torch",
        "adamw-8bit": "torch",
    }
    choose("liger", cuda)
    assert implementation._CHOSEN == {
        "norm": "liger",
        "norm_of_sum": "liger",
        "rotary": "torch",
        "swiglu": "torch",
        "loss": "torch",
        "experts": "torch",
        "adamw-bf16": "torch",
        "adamw-8bit": "torch",
    }
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(SpecError, match=r"kernels: liger_kernel is not installed\. pip install liger-kernel"):
        choose("liger", cuda)


def test_shapes_are_those_of_one_rank() -> None:
    run = resolve(None, {"model.preset": "llama-3.2-1b", "layout.tp": 2, "layout.cp": 4, "layout.precision": "bf16"}).run
    shape = chosen_kernels.attention_shape(run)
    assert (shape.length, shape.heads, shape.key_heads, shape.dtype) == (256, 16, 4, torch.bfloat16)
    swapped = replace(run, layout=replace(run.layout, cp_method="all-to-all"))
    shape = chosen_kernels.attention_shape(swapped)
    assert (shape.length, shape.heads, shape.key_heads) == (1024, 4, 1)
    latent = resolve(None, {"model.preset": "deepseek-v2-lite", "batch.sequence_length": 64}).run
    shape = chosen_kernels.attention_shape(latent)
    assert (shape.heads, shape.key_heads, shape.head_dim, shape.value_dim) == (16, 16, 192, 128)
