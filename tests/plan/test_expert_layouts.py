"""40 published layouts of experts: how close their predictions are, whether they are called fit, and what a free pick gains.

The bar is 36 of 40 within 15 percent, all called fit, and no gain above 20 percent without what the expert could not do. What
misses it is listed here by name, and told in docs/validation.md: a row leaves a list when a law is mended, none comes in.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from ultrascale.validation.rows import read_rows

FILE = Path(__file__).parents[2] / "benchmarks" / "plan" / "expert_layouts.py"
FAR = {"megatron-bridge-040", "megatron-bridge-001", "ibm-fms-fsdp-007", "automodel-kimi-k2"}
"""More than 15 percent off."""
CALLED_TOO_LARGE = {"megatron-bridge-012", "torchtitan-b200-006", "llama3-405b-16k"}
"""Ran, and are predicted to leave less free than must stay free."""
UNEXPLAINED = {"megatron-bridge-020", "automodel-gpt-oss-120b"}
"""Free picks that gain more than 20 percent, with nothing known that the expert could not do."""


@cache
def experts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_layouts", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["expert_layouts"] = module
    spec.loader.exec_module(module)
    return module


@cache
def judged() -> list:
    return experts().judge(read_rows(experts().LAYOUTS))


def test_there_are_forty_layouts_each_with_its_source_and_of_many_kinds() -> None:
    rows = read_rows(experts().LAYOUTS)
    assert len(rows) == len({row.identity for row in rows}) == 40
    assert all(row.config.source and row.measured.reported for row in rows)
    assert len({row.config.source_key for row in rows}) >= 15
    assert len({one.expert.workload.cluster.accelerator.name for one in judged()}) >= 8
    assert len({one.expert.workload.stack.name for one in judged()}) >= 10


def test_predictions_of_all_but_those_listed_are_within_15_percent() -> None:
    assert {one.row.identity for one in judged() if abs(one.error) > experts().CLOSE} <= FAR


def test_all_but_those_listed_are_called_fit() -> None:
    assert {one.row.identity for one in judged() if not one.found.fits} <= CALLED_TOO_LARGE


@pytest.mark.nightly
def test_no_free_pick_gains_more_than_20_percent_without_saying_what_the_expert_could_not_do() -> None:
    gains = {one.row.identity: experts().pick(one).gain for one in judged()}
    large = {name for name, gain in gains.items() if gain > experts().EXPLAINED}
    assert {name for name in large if not experts().COULD_NOT[name]} <= UNEXPLAINED


@pytest.mark.parametrize("name", ["automodel-qwen3-30b", "deepseek-v3-001", "automodel-kimi-k2"])
def test_mixtures_of_experts_are_not_cut_by_tp_beyond_2(name: str) -> None:
    """Their products are small: DeepSeek and NVIDIA cut them by 1 or 2, and a search once took 8, 4 and 4."""
    best = experts().pick(next(one for one in judged() if one.row.identity == name)).best
    assert best is not None and best.layout.tp <= 2
