"""`ultrascale primer`: small kernels on this machine's GPU, achieved against peak, and what the numbers mean."""

from __future__ import annotations

from functools import partial
from typing import Literal

import tyro

from ultrascale.api.schemas.stamp import stamped
from ultrascale.cli.terminal.parse import parse

Lesson = Literal["access", "tiles", "coarsening", "divergence", "softmax", "attention"]


def primer(lessons: tyro.conf.Positional[tuple[Lesson, ...]] = (), json: bool = False) -> int:
    """Run small kernels on this machine's GPU and say what of its peak they reach, and what that means.

    Without a GPU they run on the CPU in Triton's interpreter: results are checked, speed is not told. For example:

        ultrascale primer

        ultrascale primer softmax attention

    Args:
        lessons: Which; all if left out.
        json: Print one JSON object.
    """
    from ultrascale.primer.run_lessons import run_lessons

    return run_lessons(lessons, as_json=json, stamp=partial(stamped, "primer"))


def command(arguments: list[str]) -> int:
    """Run the verb: 0 when every result was right, 1 when one was not, 2 when triton is missing or a lesson unknown."""
    return parse(primer, "primer", arguments)
