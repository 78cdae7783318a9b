"""Every way to cut a small model over one to eight ranks, and what the rules say of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.rules.run_rules import run_problems
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem
from ultrascale.description.run import Batch, Checkpoint, Data, Run, Source
from ultrascale.description.schedules import SCHEDULES

MOST_RANKS = 8
DENSE = replace(PRESETS["tiny-llama"], num_hidden_layers=6, hidden_size=32, intermediate_size=64, vocab_size=59, head_dim=8,
                num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
SPARSE = replace(PRESETS["tiny-mixtral"], num_hidden_layers=4, hidden_size=32, intermediate_size=64, moe_intermediate_size=64,
                 vocab_size=59, head_dim=8, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
LENGTH = 23
"""Tokens of a sequence: no number of ranks divides it."""
METHODS = [("ring", 1), ("all-gather", 1), ("all-to-all", 1), *(("ring+all-to-all", heads) for heads in (1, 2, 4))]


def every_layout(model: Model) -> Iterator[Layout]:
    """Every combination of axes, ZeRO stages and groups, schedules and stages, context methods and experts' axes of at most
    eight ranks, whether it makes sense or not."""
    for dp, tp, cp, pp in product(range(1, MOST_RANKS + 1), repeat=4):
        if dp * tp * cp * pp <= MOST_RANKS:
            for options in product(_data(dp), _pipeline(pp), _context(cp), _experts(model)):
                yield Layout(dp=dp, tp=tp, cp=cp, pp=pp, precision="fp64", **_joined(options))


def run_of(model: Model, layout: Layout) -> Run:
    """A run of two micro-batches a step, or as many as a pipeline of this length wants at least."""
    count = max(2, layout.pp * (2 if layout.schedule.startswith("dualpipe") else 1))
    batch = Batch(sequence_length=LENGTH, sequences_per_batch=layout.dp * count)
    return Run(model, layout=layout, batch=batch, data=Data(sources=(Source("any"),)), checkpoint=Checkpoint(export=False))


def reasons(run: Run) -> list[Problem]:
    """Why `ultrascale train` refuses the run; empty if it does not."""
    return run.layout.problems() or run_problems(run, require_data=True)


def accepted(model: Model) -> list[Run]:
    """Every layout that is trained."""
    return [run for layout in every_layout(model) if not reasons(run := run_of(model, layout))]


def _data(dp: int) -> list[dict[str, Any]]:
    shards = [None, *(n for n in range(1, dp) if dp > 1)]
    return [{"zero_stage": stage, "dp_shard": shard} for stage in range(4) for shard in (shards if stage else [None])]


def _pipeline(pp: int) -> list[dict[str, Any]]:
    if pp == 1:
        return [{}]
    return [{"schedule": schedule, "virtual_stages": stages} for schedule in SCHEDULES for stages in (1, 2, 3)]


def _context(cp: int) -> list[dict[str, Any]]:
    return [{}] if cp == 1 else [{"cp_method": method, "cp_heads": heads} for method, heads in METHODS]


def _experts(model: Model) -> list[dict[str, Any]]:
    sizes = [(1, 1), (2, 1)]
    if model.num_experts:
        sizes = [(ep, cut) for ep in (1, 2, 3, 4, 8) for cut in (1, 2, 4) if ep * cut <= MOST_RANKS]
    return [{"ep": ep, "expert_tp": cut} for ep, cut in sizes]


def _joined(options: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {key: value for part in options for key, value in part.items()}
