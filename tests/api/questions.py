"""Questions asked of the API and of the command line, which must answer the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import ultrascale as us
from ultrascale.cli.main import main

RUN = "runs/tiny-llama-cpu.toml"


class Question(NamedTuple):
    """One question, as a call and as a command line."""

    name: str
    call: Callable[[], Any]
    words: list[str]


PLANS = [
    Question("run", lambda: us.plan(RUN), ["plan", RUN]),
    Question("changed run", lambda: us.plan(RUN, zero_stage=3), ["plan", RUN, "--zero-stage", "3"]),
    Question("GPUs", lambda: us.plan("runs/llama-3-8b.toml"), ["plan", "runs/llama-3-8b.toml"]),
    Question(
        "search", lambda: us.plan("tiny-llama", "8xh100", tp=[1, 2], pp=1, top=3, explain=True),
        ["plan", "--model", "tiny-llama", "--gpus", "8xh100", "--tp", "1,2", "--pp", "1", "--top", "3", "--explain"],
    ),
    Question(
        "search as a search", lambda: us.search("tiny-llama", "8xh100", tokens_per_batch="1M", pp=1, stack="megatron"),
        ["plan", "--model", "tiny-llama", "--gpus", "8xh100", "--tokens-per-batch", "1M", "--pp", "1", "--stack", "megatron"],
    ),
    Question(
        "experts", lambda: us.plan("mixtral-8x7b", "64xh100", pp=1, ep=8, expert_imbalance=1.2),
        ["plan", "--model", "mixtral-8x7b", "--gpus", "64xh100", "--pp", "1", "--ep", "8", "--expert-imbalance", "1.2"],
    ),
    Question(
        "settings", lambda: us.plan("tiny-llama", "8xh100", tp=1, pp=1, layout={"attention": "sdpa"}),
        ["plan", "--model", "tiny-llama", "--gpus", "8xh100", "--tp", "1", "--pp", "1", "--layout.attention", "sdpa"],
    ),
    Question("CPU", lambda: us.plan("tiny-llama", "2xcpu"), ["plan", "--model", "tiny-llama", "--gpus", "2xcpu"]),
    Question("nothing fits", lambda: us.plan("llama-3-70b", "1xh100"), ["plan", "--model", "llama-3-70b", "--gpus", "1xh100"]),
]  # fmt: skip
SCHEDULES = [
    Question("schedule", lambda: us.schedule("1f1b", pp=2, micro_batches=3, cost={"forward": 2}),
             ["show", "schedule", "1f1b", "--pp", "2", "--micro-batches", "3", "--cost.forward", "2"]),
    Question("schedules", lambda: us.schedule(pp=8), ["show", "schedules", "--pp", "8"]),
]  # fmt: skip
TRACES = [
    Question("trace", lambda: us.trace(RUN, world=4, rank=3), ["trace", RUN, "--world", "4", "--rank", "3"]),
    Question(
        "stages", lambda: us.trace(RUN, layout={"pp": 2}, all_stages=True), ["trace", RUN, "--layout.pp", "2", "--all-stages"]
    ),
]
CHECKS = [
    Question("check", lambda: us.check(RUN, processes=2, own_layout=True, steps=1),
             ["check", RUN, "--processes", "2", "--own-layout", "--steps", "1"]),
]  # fmt: skip
OTHERS = [
    ["plan", "far", "--parameters", "72T", "--kilometres", "4800", "--line-gbits", "400", "--step-seconds", "60"],
    ["show", RUN], ["show", "models"], ["show", "clusters"], ["show", "stacks"], ["show", "stacks", "megatron"],
    ["show", "keys"], ["doctor"],
]  # fmt: skip
"""Verbs that print JSON and are not functions of the API."""


def printed(words: list[str], capsys) -> Any:
    """What `--json` prints of it."""
    capsys.readouterr()
    assert main([*words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def without_clock(document: Any) -> Any:
    """`document` without how long a search took here."""
    if isinstance(document, dict) and "search" in document:
        return {**document, "search": {**document["search"], "seconds": 0}}
    return document
