"""Training defaults for keys that the run's file omits: warm-up, and evaluation on text held out by `data prepare`.

`ultrascale train` applies them and `ultrascale show` shows them. A key that is set keeps its value. A resumed run keeps the
warm-up and evaluations that it started with (from the run.toml of its folder), however many steps it has now. Held-out text is
read from the folders of the run's current sources, which may have been moved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ultrascale.config.resolve import Resolved, run_from_toml
from ultrascale.config.rules.early import STORE_URL, validation_folders
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run, Source
from ultrascale.description.units import count_of

ORIGIN = "train's default"
"""Source of a value chosen here."""
FROM_RUN_START = "as the run began"
"""Source of a value that the run has kept, whoever chose it."""
WARMUP_SHARE = 20
"""One step in this many is a warm-up step, at most `MOST_WARMUP`: Adam's second moments are not reliable before."""
MOST_WARMUP = 2000
EVALUATIONS = 10
"""Number of evaluations in a run."""

IN_STORE = "text held out beside a source in a store is not looked for (data.validation and evaluation.every_steps name it)"


def train_defaults(resolved: Resolved, island_folder: Path | None = None) -> tuple[Resolved, list[str]]:
    """The run with defaults for omitted keys, and one line per default that says how to override it.

    `island_folder`: folder of an island, which is searched for the run.toml from the start before the run's own folder.
    """
    run, lines, origins = resolved.run, [], {}
    folder = Path(run.folder) / run.name
    before = _run_at_start(folder if island_folder is None else island_folder) or _run_at_start(folder)
    is_open = {key for key, origin in resolved.provenance.items() if origin == "default"}
    steps, origin = min(run.steps // WARMUP_SHARE, MOST_WARMUP), ORIGIN
    if before is not None and before.optimizer.warmup_steps < run.steps:
        steps, origin = before.optimizer.warmup_steps, FROM_RUN_START
    if steps and {"optimizer.warmup_steps", "optimizer.decay_steps"} <= is_open:
        run = replace(run, optimizer=replace(run.optimizer, warmup_steps=steps))
        origins["optimizer.warmup_steps"] = origin
        lines.append(f"warm-up: {steps} of {run.steps} steps (optimizer.warmup_steps = 0 for none)")
    every, sources = _evaluation(run, before)
    asked = {"evaluation.every_steps"} - is_open
    if asked:
        every, sources = run.evaluation.every_steps, sources or _held_out(run)
    if every and sources and "data.validation" in is_open:
        run = replace(
            run, data=replace(run.data, validation=sources), evaluation=replace(run.evaluation, every_steps=every)
        )  # fmt: skip
        is_kept = before is not None and sources == before.data.validation
        origins |= {
            "data.validation": FROM_RUN_START if is_kept else ORIGIN,
            **({} if asked else {"evaluation.every_steps": FROM_RUN_START if before else ORIGIN}),
        }
        paths = ", ".join(source.path for source in sources)
        lines.append(f'validation: {paths}, every {count_of(every, "step")} (evaluation.every_steps = "none" for never)')
    elif before is None and "data.validation" in is_open and any(STORE_URL.match(source.path) for source in run.data.sources):
        lines.append(f"validation: none; {IN_STORE}")
    return replace(resolved, run=run, provenance=resolved.provenance | origins), lines


def _evaluation(run: Run, before: Run | None) -> tuple[int | None, tuple[Source, ...]]:
    """Steps between two evaluations, and validation sources: text held out beside the run's sources, wherever they are now, or
    other sources that were named when the run began."""
    prepared = _held_out(run)
    if before is None:
        return max(1, run.steps // EVALUATIONS), prepared
    earlier = before.data.validation
    is_made = {Path(source.path) for source in earlier} <= {*validation_folders(before)}
    return before.evaluation.every_steps, prepared if earlier and is_made else earlier


def _held_out(run: Run) -> tuple[Source, ...]:
    return tuple(Source(str(path)) for path in validation_folders(run) if path.is_dir())


def _run_at_start(folder: Path) -> Run | None:
    """The run as saved in a folder; None if it has not begun."""
    if not (folder / "checkpoints").is_dir():
        return None
    try:
        return run_from_toml((folder / "run.toml").read_text())
    except (OSError, ValueError, SpecError):
        return None
