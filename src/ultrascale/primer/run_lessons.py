"""Output of the primer: each lesson's variants, checked and, on a GPU, compared with the peak, with an explanation of the
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ultrascale.primer.interpreter import choose_device

if TYPE_CHECKING:
    from ultrascale.primer.exercise import Exercise, VariantOutcome
    from ultrascale.primer.lessons import Place


def run_lessons(
    only: Sequence[str] = (), *, as_json: bool = False, stamp: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> int:
    """Run and print these lessons, by default all; returns 0 if every result is right, 1 if one is wrong.

    `stamp`: transforms the JSON before it is printed. Raises SpecError without triton.
    """
    device = choose_device()
    from ultrascale.primer.lessons import lessons, outcomes, place  # after that, since they import triton

    where = place(device)
    if not as_json:
        print(_head(where), flush=True)
    reports, right = [], True
    for number, exercise in enumerate(lessons(device, tuple(only)), 1):
        rows = outcomes(exercise, where)
        right = right and all(row.is_right for row in rows)
        reports.append({"lesson": exercise.name, "title": exercise.title, "variants": [asdict(row) for row in rows]})
        if not as_json:
            _print(number, exercise, rows)
    if as_json:
        facts = asdict(where) | {"device": str(where.device)}
        print(json.dumps(stamp({"place": facts, "lessons": reports, "all_right": right})))
    return 0 if right else 1


def _head(where: Place) -> str:
    if where.peak_bytes is None or where.peak_flops is None:
        return f"{where.name}: no GPU here. Triton's interpreter checks every result; speed is measured only on a GPU."
    lines = [f"{where.name}: {where.peak_bytes / 1e12:.2f} TB/s, {where.peak_flops / 1e12:.0f} TFLOP/s bf16 ({where.origin})"]
    if where.copy_bytes and where.product_flops:
        lines.append(f"torch's copy reaches {where.copy_bytes / 1e12:.2f} TB/s, its product {where.product_flops / 1e12:.0f}")
    return "\n".join(lines)


def _print(number: int, exercise: Exercise, rows: list[VariantOutcome]) -> None:
    print(f"\n{number}. {exercise.title}")
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"   {row.name:<{width}}  {_speed(row)}  {_result(row)}{f'  {row.note}' if row.note else ''}".rstrip())
    print("\n".join(f"   {line}" for line in exercise.meaning.splitlines()), flush=True)


def _speed(row: VariantOutcome) -> str:
    if row.seconds is None or row.rate is None:
        return ""
    rate = f"{row.rate / 1e12:8.3f} T{row.unit}"
    return f"{row.seconds * 1e6:10.1f} us {rate}" + ("" if row.share is None else f" {row.share:6.1%} of peak")


def _result(row: VariantOutcome) -> str:
    return "right" if row.is_right else f"WRONG: off by {row.error:.1e}"
