"""Defaults of training for keys that its file leaves out: warm-up, and evaluation on text that `data prepare` held out.

Only `ultrascale train` asks for this. A key that is written, whatever its value, is left alone; in the run's folder the choice
stands in run.toml like any other, so a run that goes on keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ultrascale.config.resolve import Resolved
from ultrascale.description.run import Run, Source

WARMUP_SHARE = 20
"""One step in so many warms up, at most `MOST_WARMUP`: Adam's second moments are not known before."""
MOST_WARMUP = 2000
EVALUATIONS = 10
"""In a whole run."""


def usual(resolved: Resolved) -> tuple[Run, list[str]]:
    """The run with what it leaves open, and a line for each choice that says how to choose otherwise."""
    run, lines = resolved.run, []
    is_open = {key for key, origin in resolved.provenance.items() if origin == "default"}
    steps = min(run.steps // WARMUP_SHARE, MOST_WARMUP)
    if steps and {"optimizer.warmup_steps", "optimizer.decay_steps"} <= is_open:
        run = replace(run, optimizer=replace(run.optimizer, warmup_steps=steps))
        lines.append(f"warm-up: {steps} of {run.steps} steps (optimizer.warmup_steps = 0 for none)")
    made = [path for source in run.data.sources if (path := Path(source.path) / "validation").is_dir()]
    if made and {"data.validation", "evaluation.every_steps"} <= is_open:
        every = max(1, run.steps // EVALUATIONS)
        run = replace(
            run,
            data=replace(run.data, validation=tuple(Source(str(path)) for path in made)),
            evaluation=replace(run.evaluation, every_steps=every),
        )
        told = ", ".join(map(str, made))
        lines.append(f'validation: {told}, every {every} steps (evaluation.every_steps = "none" for never)')
    return run, lines
