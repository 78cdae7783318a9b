"""`ultrascale export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ultrascale.api.stamp import stamped
from ultrascale.cli.opening import expect_folder, open_and_tell
from ultrascale.cli.parse import parse


def export(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    precision: Literal["as-is", "fp32", "bf16"] = "as-is",
    max_shard_gb: float = 5.0,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Write a checkpoint as a folder that transformers, vLLM and llama.cpp read: safetensors, config.json, tokenizer.

    Example: ultrascale export out/demo exported --precision bf16

    Args:
        checkpoint: A run folder (its newest whole checkpoint), one checkpoint, or another Hugging Face folder.
        out: The folder to make. It appears whole or not at all.
        precision: Dtype of the weights written; as-is: that of the folder the run was imported from, else of the checkpoint.
        max_shard_gb: Weights are split into files of at most this many GB (10^9 bytes).
        tokenizer: A tokenizer.json to go along, if the one of the run's data is elsewhere.
        overwrite: Replace OUT if it is an earlier export; nothing else is ever replaced.
        json: Print one JSON object.
    """
    expect_folder(checkpoint)
    from ultrascale.models.huggingface import export_folder
    from ultrascale.parallel.precision import TORCH_DTYPE
    from ultrascale.spec.problems import Problem, SpecError
    from ultrascale.spec.weights import num_parameters

    if not 0 < max_shard_gb < float("inf"):
        raise SpecError([Problem("max_shard_gb", f"must be a number above 0, is {max_shard_gb}", "5 is usual.")])
    trained = open_and_tell(checkpoint)
    dtype = trained.dtype if precision == "as-is" else TORCH_DTYPE[precision]
    folder = export_folder(
        trained.weights,
        trained.model,
        out,
        tokenizer=tokenizer or trained.tokenizer,
        dtype=dtype,
        max_shard_bytes=int(max_shard_gb * 10**9),
        overwrite=overwrite,
        source=checkpoint,
    )
    written = str(dtype or next(iter(trained.weights.values())).dtype).removeprefix("torch.")
    parameters, has_tokenizer = num_parameters(trained.model), (tokenizer or trained.tokenizer) is not None
    if json:
        print(jsonlib.dumps(stamped("export", {
            "source": str(trained.source), "folder": str(folder), "num_parameters": parameters, "dtype": written,
            "tokenizer": has_tokenizer,
        })))  # fmt: skip
    else:
        print(f"{trained.source} -> {folder}: {parameters:,} parameters, {trained.model.model_type}, {written}")
        if precision == "as-is" and trained.dtype is not None:
            print(f"{written} is what the run was imported from; --precision fp32 writes what it was trained in")
        if not has_tokenizer:
            print("no tokenizer went along: none was found with the run's data; --tokenizer names one")
    return 0


def command(arguments: list[str]) -> int:
    """Run the verb; returns its exit code."""
    return parse(export, "export", arguments)
