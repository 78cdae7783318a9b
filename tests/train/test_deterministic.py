"""deterministic = true: what torch is told while a run is on, and two runs with the same bits."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.small_runs import same, small_run, state, train_here

from ultrascale.config.resolve import resolve
from ultrascale.description.attention_cores import core_requirements
from ultrascale.description.problems import SpecError
from ultrascale.kernels.attention.attention_contest import excluded
from ultrascale.train.start import deterministic as module
from ultrascale.train.start.deterministic import WORKSPACE_VARIABLE, deterministic


def test_two_runs_have_the_same_bits_those_of_a_run_without_it_and_a_line_says_so(home: Path) -> None:
    runs = [small_run(home, name=name, deterministic=name != "plain", steps=4) for name in ("one", "two", "plain")]
    told: list[bool] = []
    for run in runs:
        train_here(run, before_step=lambda trainer: told.append(torch.are_deterministic_algorithms_enabled()))
    assert told == [True] * 8 + [False] * 4
    one, two, plain = map(state, runs)
    assert same(one, two) and same(one, plain)
    assert "deterministic: torch's deterministic algorithms" in (home / "one" / "log.txt").read_text()
    assert "deterministic" not in (home / "plain" / "log.txt").read_text()


def test_torch_is_as_before_afterwards_and_cublas_gets_a_workspace_with_which_it_repeats(home, monkeypatch) -> None:
    run = small_run(home, deterministic=True)
    for given, taken in ((None, ":4096:8"), (":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")):
        monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
        if given is not None:
            monkeypatch.setenv(WORKSPACE_VARIABLE, given)
        filled = module.of_torch.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(KeyError), deterministic(run):
            assert torch.are_deterministic_algorithms_enabled() and os.environ[WORKSPACE_VARIABLE] == taken
            raise KeyError
        assert not torch.are_deterministic_algorithms_enabled()
        assert module.of_torch.fill_uninitialized_memory == filled  # pyright: ignore[reportAttributeAccessIssue]


def test_compiled_blocks_are_not_chosen_by_timing() -> None:
    from torch._inductor import config

    if hasattr(config, "deterministic"):
        # The configuration's own patch: pytest's would delete the entry afterwards, and every later compilation would miss it.
        with config.patch(deterministic=False):
            module._steady_compiler()
            assert config.deterministic


def test_a_core_that_is_not_deterministic_takes_no_part_and_is_refused_by_name() -> None:
    settings = {"model.preset": "llama-3.2-1b", "layout.precision": "bf16", "data.document_mask": False}
    run = resolve(None, settings).run
    wanted = core_requirements(run, "cuda")
    assert excluded("cudnn", wanted, compiled=False) == ""
    steady = core_requirements(replace(run, deterministic=True), "cuda")
    assert excluded("cudnn", steady, compiled=False) == "is not deterministic in its backward pass"
    assert excluded("sdpa", steady, compiled=False) == ""
    with pytest.raises(SpecError, match=r'layout.attention.*: "cudnn" is not deterministic'):
        resolve(None, settings | {"deterministic": True, "layout.attention": "cudnn"})
