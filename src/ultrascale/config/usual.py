"""Defaults of training for keys that its file leaves out: warm-up, and evaluation on text that `data prepare` held out.

`ultrascale train` takes them and `ultrascale show` shows them. A key that is written, whatever its value, is left alone. A run
that goes on keeps what it began with, which stands in the run.toml of its folder, however many steps it has now.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ultrascale.config.resolve import Resolved, run_from_toml
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run, Source

ORIGIN = "train's default"
"""Source of a value that is chosen here."""
KEPT = "train's default, as the run began"
WARMUP_SHARE = 20
"""One step in so many warms up, at most `MOST_WARMUP`: Adam's second moments are not known before."""
MOST_WARMUP = 2000
EVALUATIONS = 10
"""In a whole run."""


def usual(resolved: Resolved) -> tuple[Resolved, list[str]]:
    """The run with what it leaves open, and a line for each choice that says how to choose otherwise."""
    run, before, lines, origins = resolved.run, _begun(resolved.run), [], {}
    origin = ORIGIN if before is None else KEPT
    is_open = {key for key, told in resolved.provenance.items() if told == "default"}
    steps = min(run.steps // WARMUP_SHARE, MOST_WARMUP) if before is None else before.optimizer.warmup_steps
    if steps and {"optimizer.warmup_steps", "optimizer.decay_steps"} <= is_open:
        run = replace(run, optimizer=replace(run.optimizer, warmup_steps=steps))
        origins["optimizer.warmup_steps"] = origin
        lines.append(f"warm-up: {steps} of {run.steps} steps (optimizer.warmup_steps = 0 for none)")
    every, sources = _evaluation(run) if before is None else (before.evaluation.every_steps, before.data.validation)
    if every and sources and {"data.validation", "evaluation.every_steps"} <= is_open:
        run = replace(
            run, data=replace(run.data, validation=sources), evaluation=replace(run.evaluation, every_steps=every)
        )  # fmt: skip
        origins |= {"data.validation": origin, "evaluation.every_steps": origin}
        told = ", ".join(source.path for source in sources)
        lines.append(f'validation: {told}, every {every} steps (evaluation.every_steps = "none" for never)')
    return replace(resolved, run=run, provenance=resolved.provenance | origins), lines


def _evaluation(run: Run) -> tuple[int, tuple[Source, ...]]:
    """Steps between two evaluations, and the held-out text that was made beside the run's sources."""
    made = [path for source in run.data.sources if (path := Path(source.path) / "validation").is_dir()]
    return max(1, run.steps // EVALUATIONS), tuple(Source(str(path)) for path in made)


def _begun(run: Run) -> Run | None:
    """The run as it stands in its folder; None where it has not begun."""
    folder = Path(run.folder) / run.name
    if not (folder / "checkpoints").is_dir():
        return None
    try:
        return run_from_toml((folder / "run.toml").read_text())
    except (OSError, ValueError, SpecError):
        return None
