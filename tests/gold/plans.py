"""500 drawn plans and a few searches as they were recorded, so that a change of any number is seen, and explained.

python tests/gold/plans.py             prints what differs from the record, the furthest first
python tests/gold/plans.py --write     records anew; say in the commit why the numbers moved
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.config.resolve import resolve
from ultrascale.description.problems import SpecError
from ultrascale.plan.report import has_rates, workload_of
from ultrascale.plan.search.replayed import with_replay
from ultrascale.plan.search.search import distinct, search
from ultrascale.plan.time.price import Prediction, predict
from ultrascale.plan.view.search_view import layout_words

RECORD = Path(__file__).with_name("plans.json")
COUNT = 500
DIGITS = 6
"""Of a recorded number; a test compares to one part in a hundred thousand, which rounding between machines does not reach."""
LISTED = 5
MODELS = (
    "gpt2-xl", "llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen2.5-7b", "qwen3-0.6b", "smollm3-3b",
    "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b",
    "gemma-2-9b",
)  # fmt: skip
GPUS = ("h100", "h200", "a100-80gb", "b200", "h800", "l40s", "mi300x")
SCHEDULES = {"1f1b": (1,), "afab": (1,), "interleaved": (2, 4), "breadth-first": (2,), "zb-h1": (1,), "zb-v": (2,),
             "dualpipe-v": (2,), "dualpipe": (1,)}  # fmt: skip
SEARCHES = (
    ("llama-3-8b", "64xh100", 8192, 512, "ultrascale"), ("llama-3-70b", "256xh100", 4096, 1024, "megatron"),
    ("mixtral-8x7b", "128xh100", 4096, 512, "ultrascale"), ("llama-3.2-1b", "8xa100-80gb", 4096, 256, "torchtitan"),
    ("deepseek-v2-lite", "32xh200", 4096, 256, "ultrascale"), ("qwen3-30b-a3b", "8xh100", 4096, 512, "ultrascale"),
    ("llama-3-8b", "16xh100", 4096, 512, "nanotron"), ("gpt2-xl", "8xh100", 1024, 512, "deepspeed"),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A model, devices, a trainer and a layout, in the words of the command line."""

    gpus: str
    stack: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.gpus, self.stack, *(word.removeprefix("--") for word in self.words)])

    def answer(self) -> Prediction:
        """Raises SpecError if it is not legal."""
        run, cluster = resolve(None, [*self.words]).run, parse_cluster(self.gpus)
        if not has_rates(cluster.accelerator, run.layout.precision) or cluster.num_accelerators != run.layout.world_size:
            raise SpecError([])
        return with_replay(predict(workload_of(run, cluster, STACKS[self.stack]), run.layout))


def drawn(count: int = COUNT, seed: int = 0) -> list[Asked]:
    """Legal questions, the same in every process."""
    draw = random.Random(seed)
    found: list[Asked] = []
    while len(found) < count:
        one = _one(draw)
        try:
            one.answer()
        except SpecError:
            continue
        found.append(one)
    return found


def _one(draw: random.Random) -> Asked:
    tp, cp, pp = draw.choice([1, 1, 2, 4, 8]), draw.choice([1, 1, 1, 2]), draw.choice([1, 1, 2, 4, 8])
    dp, size, schedule = draw.choice([1, 2, 4, 8, 32]), draw.choice([1, 1, 2, 4]), draw.choice([*SCHEDULES])
    count = pp * draw.choice([1, 2, 4, 8])
    layout: dict[str, Any] = {
        "dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": draw.choice([1, 1, 2, 4, 8]), "micro_batch_size": size,
        "zero_stage": draw.choice([0, 1, 2, 3]) if dp * cp > 1 else 0, "precision": draw.choice(["bf16", "bf16", "fp8"]),
        "recompute": draw.choice(["none", "selective", "full", "every-k"]),
    }  # fmt: skip
    if pp > 1:
        layout |= {"schedule": schedule, "virtual_stages": draw.choice(SCHEDULES[schedule])}
    batch = {"sequence_length": draw.choice([1024, 4096, 8192]), "sequences_per_batch": dp * size * count}
    words = [f"--model.preset={draw.choice(MODELS)}"]
    words += [f"--layout.{key}={value}" for key, value in layout.items()] + [f"--batch.{key}={n}" for key, n in batch.items()]
    stack = draw.choice(["ultrascale", "ultrascale", "ultrascale", *STACKS])
    return Asked(f"{dp * tp * cp * pp}x{draw.choice(GPUS)}", stack, tuple(words))


def facts(found: Prediction) -> dict[str, Any]:
    """Numbers of one plan: seconds and bytes."""
    memory = found.memory
    numbers = {
        "step": found.step_seconds, "allocated": float(memory.allocated), "reserved": float(memory.reserved),
        "outside": float(memory.outside), "bubble": found.waterfall["bubble"], "compute": found.waterfall["compute"],
        "data_parallel": found.waterfall["data_parallel"],
    }  # fmt: skip
    return {name: float(f"{number:.{DIGITS}g}") for name, number in numbers.items()} | {"fits": bool(memory.fits)}


def ranking(name: str, gpus: str, length: int, sequences: int, stack: str) -> dict[str, float]:
    """Seconds of the first layouts of a search, by layout."""
    words = [f"--model.preset={name}", f"--batch.sequence_length={length}", f"--batch.sequences_per_batch={sequences}"]
    run = resolve(None, [*words, "--layout.precision=bf16"]).run
    result = search(workload_of(run, parse_cluster(gpus), STACKS[stack]), base=run.layout)
    listed = distinct(result.ranked)[:LISTED]
    return {layout_words(one.layout, one.num_micro_batches): float(f"{one.step_seconds:.{DIGITS}g}") for one in listed}


def recorded() -> dict[str, Any]:
    """The record: plans and searches by question."""
    return json.loads(RECORD.read_text())


def answers(plans: list[Asked]) -> dict[str, Any]:
    """What is said today."""
    return {str(one): facts(one.answer()) for one in plans}


def searches() -> dict[str, dict[str, float]]:
    """The same of the searches."""
    return {" ".join(map(str, one)): ranking(*one) for one in SEARCHES}


def differences(then: dict[str, Any], now: dict[str, Any], tolerance: float = 1e-5) -> list[tuple[float, str]]:
    """How far numbers moved, relative to the record, the furthest first; a plan that fits no more, or does now, is 1."""
    found = []
    for asked, old in then.items():
        for name, value in old.items():
            new = now[asked].get(name)
            if new is None or isinstance(value, bool):
                moved = float(new is not value)
            else:
                moved = abs(new - value) / max(abs(value), 1e-9)
            if moved > tolerance:
                found.append((moved, f"{name} {value} -> {new}: {asked}"))
    return sorted(found, reverse=True)


def main() -> int:
    if "--write" in sys.argv:
        plans, found = answers(drawn()), searches()
        lines = [f"  {json.dumps(asked)}: {json.dumps(numbers)}" for asked, numbers in plans.items()]
        told = [f"  {json.dumps(asked)}: {json.dumps(numbers)}" for asked, numbers in found.items()]
        RECORD.write_text('{"plans": {\n' + ",\n".join(lines) + '\n},\n"searches": {\n' + ",\n".join(told) + "\n}}\n")
        return 0
    then = recorded()
    for moved, words in [
        *differences(then["plans"], answers([asked_again(text) for text in then["plans"]])),
        *differences(then["searches"], searches()),
    ]:
        print(f"{moved:9.2%}  {words}")
    return 0


def asked_again(text: str) -> Asked:
    """The question of a key of the record."""
    gpus, stack, *words = text.split(" ")
    return Asked(gpus, stack, tuple(f"--{word}" for word in words))


if __name__ == "__main__":
    sys.exit(main())
