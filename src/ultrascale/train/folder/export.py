"""A run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ultrascale.checkpoint import CheckpointError, load_full, newest_valid
from ultrascale.description.run import Run
from ultrascale.models.files.huggingface import export_folder
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILE, TOKENIZER_FILES, copy_tokenizer, find_tokenizer
from ultrascale.storage import MissingError, open_store, url_of
from ultrascale.train.folder.run_folder import RunFolder

NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtypes of imported folders that training widens."""
PREFIX = "model."
"""Prefix of the names of model tensors; the others belong to the optimizer."""


def export_checkpoint(root: Path, target: Path, *, run: Run) -> Path:
    """Write the weights of the newest whole checkpoint under `root` to `target`, replacing it. Runs on one rank, on the CPU.

    Raises CheckpointError if there is none.
    """
    folder = newest_valid(root)
    if folder is None:
        raise CheckpointError(f"{root} holds no whole checkpoint to export")
    tensors, facts = load_full(folder)
    weights, dtype = weights_in(tensors), dtype_of(facts)
    return export_folder(weights, run.model, target, tokenizer=tokenizer_of(run), dtype=dtype, overwrite=True)


def dtype_of(facts: Mapping[str, Any]) -> torch.dtype | None:
    """Default dtype of an export: that of the imported folder; None: the checkpoint's."""
    return next((dtype for dtype, name in NARROW.items() if name == facts.get("imported_dtype")), None)


def weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights among a checkpoint's tensors and the biases that balance experts, named as in
    `description.architecture.weights`."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def tokenizer_of(run: Run) -> Path | None:
    """The tokenizer.json of a run's data, if there is one; else the copy in the run's folder."""
    if run.data.tokenizer is not None and Path(run.data.tokenizer).exists():
        return find_tokenizer(run.data.tokenizer)
    places = [*(Path(source.path) for source in run.data.sources), RunFolder.of(run).path]
    return next((place / TOKENIZER_FILE for place in places if (place / TOKENIZER_FILE).exists()), None)


def keep_tokenizer(run: Run) -> None:
    """Copy the run's tokenizer, if there is one, into its folder, so that the folder suffices for generation.

    Raises SpecError if the file is not a tokenizer.
    """
    folder, tokenizer = RunFolder.of(run).path, tokenizer_of(run)
    if tokenizer is None and run.data.sources and url_of(run.data.sources[0].path) is not None:
        store = open_store(run.data.sources[0].path)
        for name in TOKENIZER_FILES:
            with suppress(MissingError):
                RunFolder.of(run).write_text(name, store.read(name).decode())
        tokenizer = tokenizer_of(run)
    if tokenizer is not None and tokenizer.resolve() != (folder / TOKENIZER_FILE).resolve():
        copy_tokenizer(tokenizer, folder, max_length=run.model.max_position_embeddings)
