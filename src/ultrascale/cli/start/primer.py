"""`ultrascale primer`: small kernels on this machine's GPU, achieved against peak, with an explanation of the numbers."""

from __future__ import annotations

from functools import partial
from typing import Literal

import tyro

from ultrascale.api.stamp import stamped
from ultrascale.cli.terminal.parse import parse

Lesson = Literal["access", "tiles", "coarsening", "divergence", "softmax", "attention"]


def primer(lessons: tyro.conf.Positional[tuple[Lesson, ...]] = (), json: bool = False) -> int:
    """Run small kernels on this machine's GPU; report and explain the fraction of its peak that they reach.

    Without a GPU they run on the CPU in Triton's interpreter: results are checked, speed is not reported. For example:

        ultrascale primer

        ultrascale primer softmax attention

    Args:
        lessons: Lessons to run. Default: all.
        json: Print one JSON object.
    """
    from ultrascale.primer.run_lessons import run_lessons

    return run_lessons(lessons, as_json=json, stamp=partial(stamped, "primer"))


command = partial(parse, primer, "primer")
"""Run the verb; returns 0 if every result is right, 1 if one is wrong, 2 if triton is missing or a lesson is unknown."""
