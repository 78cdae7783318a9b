"""A run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ultrascale.checkpoint import CheckpointError, load_full, newest_valid
from ultrascale.models.huggingface import export_folder
from ultrascale.spec.run import Run

PREFIX = "model."


def export_checkpoint(root: Path, target: Path, *, run: Run) -> Path:
    """Write the weights of the newest whole checkpoint under `root` to `target`, replacing it. Runs on one rank, on the CPU.

    Raises CheckpointError if there is none.
    """
    folder = newest_valid(root)
    if folder is None:
        raise CheckpointError(f"{root} holds no whole checkpoint to export")
    tensors, _ = load_full(folder)
    return export_folder(weights_in(tensors), run.model, target, tokenizer=tokenizer_of(run), overwrite=True)


def weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights among a checkpoint's tensors, under the names of `spec.weights`."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def tokenizer_of(run: Run) -> Path | None:
    """The tokenizer.json that belongs to a run's data, if there is one."""
    if run.data.tokenizer is not None:
        return Path(run.data.tokenizer)
    beside = [Path(source.path) / "tokenizer.json" for source in run.data.sources]
    return next((path for path in beside if path.exists()), None)
