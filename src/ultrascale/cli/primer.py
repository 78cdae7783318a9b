"""`ultrascale primer`: small kernels on this machine's GPU, achieved against peak, and what the numbers mean."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import tyro

from ultrascale.cli.parse import parse

if TYPE_CHECKING:
    from ultrascale.primer.exercise import Exercise, Outcome
    from ultrascale.primer.lessons import Place

Lesson = Literal["access", "tiles", "coarsening", "divergence", "softmax", "attention"]


def primer(lessons: tyro.conf.Positional[tuple[Lesson, ...]] = (), json: bool = False) -> tuple[tuple[Lesson, ...], bool]:
    """Run small kernels on this machine's GPU and say what of its peak they reach, and what that means.

    Without a GPU they run on the CPU in Triton's interpreter: results are checked, speed is not told. For example:

        ultrascale primer

        ultrascale primer softmax attention

    Args:
        lessons: Which; all if left out.
        json: Print one JSON object.
    """
    return lessons, json


def command(arguments: list[str]) -> int:
    """Run the verb: 0 when every result was right, 1 when one was not, 2 when triton is missing or a lesson unknown."""
    only, as_json = parse(primer, "primer", arguments)
    from ultrascale.primer.interpreter import choose_device

    device = choose_device()
    from ultrascale.primer.lessons import lessons, outcomes, place  # behind it, as they import triton

    where = place(device)
    if not as_json:
        print(_head(where))
    told, right = [], True
    for number, exercise in enumerate(lessons(device, only), 1):
        found = outcomes(exercise, where)
        right = right and all(one.is_right for one in found)
        told.append({"lesson": exercise.name, "title": exercise.title, "variants": [asdict(one) for one in found]})
        if not as_json:
            _print(number, exercise, found)
    if as_json:
        facts = asdict(where) | {"device": str(where.device)}
        print(jsonlib.dumps({"place": facts, "lessons": told, "all_right": right}))
    return 0 if right else 1


def _head(where: Place) -> str:
    if where.peak_bytes is None or where.peak_flops is None:
        return f"{where.name}: no GPU here. Triton's interpreter checks every result; speed is told only on a GPU."
    lines = [f"{where.name}: {where.peak_bytes / 1e12:.2f} TB/s, {where.peak_flops / 1e12:.0f} TFLOP/s bf16 ({where.origin})"]
    if where.copy_bytes and where.product_flops:
        lines.append(f"torch's copy reaches {where.copy_bytes / 1e12:.2f} TB/s, its product {where.product_flops / 1e12:.0f}")
    return "\n".join(lines)


def _print(number: int, exercise: Exercise, found: list[Outcome]) -> None:
    print(f"\n{number}. {exercise.title}")
    width = max(len(one.name) for one in found)
    for one in found:
        print(f"   {one.name:<{width}}  {_speed(one)}  {_result(one)}{f'  {one.note}' if one.note else ''}".rstrip())
    print("\n".join(f"   {line}" for line in exercise.meaning.splitlines()))


def _speed(one: Outcome) -> str:
    if one.seconds is None or one.rate is None:
        return ""
    rate = f"{one.rate / 1e12:8.3f} T{one.unit}"
    return f"{one.seconds * 1e6:10.1f} us {rate}" + ("" if one.share is None else f" {one.share:6.1%} of peak")


def _result(one: Outcome) -> str:
    return "right" if one.is_right else f"WRONG: off by {one.error:.1e}"
