"""Facts of a training run for its model card."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ultrascale.config.resolve import resolve
from ultrascale.description.problems import SpecError
from ultrascale.description.progress import tokens_after
from ultrascale.description.units import format_count
from ultrascale.train.folder.run_folder import RunFolder


def training_facts(place: Path, steps_done: int | None) -> dict[str, str]:
    """Facts of the run whose folder is `place` or above it, after so many steps: text by name. Empty without such a run."""
    folder = next((one for one in (place, place.parent, place.parent.parent) if (one / "run.toml").is_file()), None)
    if folder is None or steps_done is None:
        return {}
    with suppress(SpecError):
        run = resolve(folder / "run.toml").run
        rows = [row for row in RunFolder(folder).metric_rows() if row["step"] <= steps_done]
        losses = {key: value for row in rows for key, value in row.items() if key == "train/loss" or key.startswith("val/loss")}
        return {
            "steps": f"{steps_done:,}",
            "tokens": format_count(tokens_after(run.batch, steps_done)),
            "sequence length": f"{run.batch.sequence_length:,}",
            "precision": run.layout.precision,
            "optimizer": f"{run.optimizer.name}, learning rate {run.optimizer.learning_rate:g} ({run.optimizer.schedule})",
            **{key: f"{value:.4f}" for key, value in losses.items()},
        }
    return {}
