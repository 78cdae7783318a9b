"""Output of the primer: each lesson's variants, checked and, on a GPU, compared with the peak, and what the numbers mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ultrascale.primer.interpreter import choose_device

if TYPE_CHECKING:
    from ultrascale.primer.exercise import Exercise, Outcome
    from ultrascale.primer.lessons import Place


def tell(only: Sequence[str] = (), *, as_json: bool = False, stamp: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> int:
    """Run and print these lessons, all if none is named: 0 when every result was right, 1 when one was not.

    `stamp`: what the JSON becomes before it is printed. Raises SpecError without triton.
    """
    device = choose_device()
    from ultrascale.primer.lessons import lessons, outcomes, place  # behind it, as they import triton

    where = place(device)
    if not as_json:
        print(_head(where), flush=True)
    told, right = [], True
    for number, exercise in enumerate(lessons(device, tuple(only)), 1):
        found = outcomes(exercise, where)
        right = right and all(one.is_right for one in found)
        told.append({"lesson": exercise.name, "title": exercise.title, "variants": [asdict(one) for one in found]})
        if not as_json:
            _print(number, exercise, found)
    if as_json:
        facts = asdict(where) | {"device": str(where.device)}
        print(json.dumps(stamp({"place": facts, "lessons": told, "all_right": right})))
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
    print("\n".join(f"   {line}" for line in exercise.meaning.splitlines()), flush=True)


def _speed(one: Outcome) -> str:
    if one.seconds is None or one.rate is None:
        return ""
    rate = f"{one.rate / 1e12:8.3f} T{one.unit}"
    return f"{one.seconds * 1e6:10.1f} us {rate}" + ("" if one.share is None else f" {one.share:6.1%} of peak")


def _result(one: Outcome) -> str:
    return "right" if one.is_right else f"WRONG: off by {one.error:.1e}"
