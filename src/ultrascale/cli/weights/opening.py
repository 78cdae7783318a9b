"""Opening of trained weights for `generate`, `evaluate` and `export`, with a warning about newer damaged checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.checkpoint.listing import expect_readable
from ultrascale.config.rules.early import has_checkpoints
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.huggingface import from_hf
from ultrascale.description.problems import Problem, mistake
from ultrascale.models.files.weight_files import weight_files

if TYPE_CHECKING:
    from ultrascale.train.start.trained import Trained


def folder_problems(path: Path) -> list[Problem]:
    """A problem if the folder at `path` is missing or empty, before torch is imported, which takes seconds."""
    if path.is_dir() and ((path / "config.json").exists() or has_checkpoints(path)):
        return []
    rule = "holds neither config.json with weights nor a checkpoint" if path.is_dir() else "is no folder"
    return [Problem(str(path), rule, "Give a checkpoint, a run folder, or a Hugging Face folder.")]


def expect_contents(path: Path) -> None:
    """Raises SpecError or CheckpointError, before torch is imported, if config.json, file names, manifests and sizes show that
    the folder cannot be read."""
    if (path / "config.json").exists():
        expect_trainable(from_hf(path))
        weight_files(path)
    else:
        expect_readable(path)


def expect_device(device: str) -> str:
    """ "cpu" or "cuda", which "auto" stands for if there is one. Raises SpecError if there is none."""
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise mistake("--device", "is cuda, but torch finds no CUDA device", "--device cpu; `ultrascale doctor` says more.")
    return device if device != "auto" else "cuda" if has_cuda else "cpu"


def open_trained_and_print(path: Path) -> Trained:
    """`open_trained`, with a line on stderr for every newer damaged checkpoint of the run that names the step used instead."""
    from ultrascale.checkpoint import damaged_after
    from ultrascale.train.start.trained import open_trained

    trained = open_trained(path)
    named = trained.steps_done is None or trained.source == path
    for damaged in () if named else damaged_after(trained.source):
        reason = damaged.reason.replace("\n", "; ")
        line = f"ultrascale: {damaged.folder.name} is damaged, using {trained.source.name} instead: {reason}"
        print(line, file=sys.stderr)
    return trained
