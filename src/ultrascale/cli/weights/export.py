"""`ultrascale export`: a checkpoint as a Hugging Face folder, with a model card that describes the training run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import print_json, waiting
from ultrascale.cli.terminal.stores import CONFIG, fetched, store_of, uploaded
from ultrascale.cli.weights.opening import expect_contents, folder_problems, open_trained_and_print
from ultrascale.config.resolve import resolve
from ultrascale.description.problems import SpecError, mistake
from ultrascale.description.progress import tokens_after
from ultrascale.description.units import format_count
from ultrascale.models.files.tokenizer_files import find_tokenizer
from ultrascale.storage import MissingError, url_of
from ultrascale.storage.hub import HubStore
from ultrascale.train.folder.run_folder import RunFolder


def export(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    precision: Literal["as-is", "fp32", "bf16"] = "as-is",
    max_shard_gb: float = 5.0,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
    json: bool = False,
) -> int:
    """Write a checkpoint as a folder that transformers, vLLM and llama.cpp read: safetensors, config.json, tokenizer.

    Example: ultrascale export out/demo exported --precision bf16

    Args:
        checkpoint: Run folder (its newest complete checkpoint), checkpoint, or another Hugging Face folder; also s3://...
        out: Folder to create, atomically; in a store config.json appears last. hf://USER/NAME: pushed.
        precision: Dtype of the exported weights; as-is: that of the folder the run was imported from, else of the checkpoint.
        max_shard_gb: Largest size of a weight file in GB (10^9 bytes).
        tokenizer: tokenizer.json to include, if the one of the run's data is elsewhere.
        overwrite: Replace OUT if it is an earlier export, in a folder one of this model; nothing else is ever replaced.
        push_to_hub: Upload OUT to the Hugging Face Hub as model USER/NAME, with a model card. A new model is private.
        public: Make a new model on the Hub public.
        json: Print one JSON object.
    """
    is_local = store_of(checkpoint) is None
    if is_local and (wrong := folder_problems(checkpoint)):
        raise SpecError(wrong)
    if (url := url_of(out) or "").startswith("hf://"):
        if push_to_hub is not None:
            raise mistake("--push-to-hub", f"is given beside {url}, which is pushed to as well", "Keep one of the two.")
        push_to_hub = url.removeprefix("hf://")
    elif store_of(out, to_write=True) is None:
        from ultrascale.models.files.folders import expect_replaceable
        from ultrascale.models.files.weight_files import is_exported

        expect_replaceable(out, is_ours=is_exported, overwrite=overwrite, source=checkpoint if is_local else None)
    if not 0 < max_shard_gb < float("inf"):
        raise mistake("max_shard_gb", f"must be a number above 0, is {max_shard_gb}", "5 is usual.")
    if push_to_hub is not None:
        from ultrascale.models.hub import expect_pushable

        expect_pushable(push_to_hub, url if url.startswith("hf://") else "--push-to-hub")
    elif public:
        raise mistake("--public", "is about --push-to-hub, which is not given", "Give both, or neither.")
    if tokenizer is not None:
        find_tokenizer(tokenizer)
    if is_local:
        expect_contents(checkpoint)
    address = None
    with waiting("exporting"):
        from ultrascale.description.architecture.weights import num_parameters
        from ultrascale.models.files.huggingface import expect_same_model, export_folder
        from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE

        with fetched(checkpoint) as source_folder, uploaded(out, overwrite=overwrite) as target:
            trained = open_trained_and_print(source_folder)
            expect_same_model(str(url_of(out) or out), _held_config(out), trained.model)
            dtype = trained.dtype if precision == "as-is" else TORCH_DTYPE[precision]
            folder = export_folder(
                trained.weights,
                trained.model,
                target,
                tokenizer=tokenizer or trained.tokenizer,
                dtype=dtype,
                max_shard_bytes=int(max_shard_gb * 10**9),
                overwrite=overwrite,
                source=source_folder,
            )
            if push_to_hub is not None:
                from ultrascale.models.hub import model_card, push

                facts = training_facts(source_folder, trained.steps_done)
                address = push(folder, push_to_hub, card=model_card(trained.model, push_to_hub, facts), public=public)
    to = store_of(out)
    folder = folder if to is None else to.url
    written = str(dtype or next(iter(trained.weights.values())).dtype).removeprefix("torch.")
    parameters, has_tokenizer = num_parameters(trained.model), (tokenizer or trained.tokenizer) is not None
    if json:
        print_json({
            "source": str(trained.source), "folder": str(folder), "num_parameters": parameters, "dtype": written,
            "tokenizer": has_tokenizer, "pushed_to": address,
        }, "export")  # fmt: skip
    else:
        print(f"{trained.source} -> {folder}: {parameters:,} parameters, {trained.model.model_type}, {written}")
        if precision == "as-is" and trained.dtype is not None:
            print(f"{written} is what the run was imported from; --precision fp32 writes what it was trained in")
        if address is not None:
            print(f"pushed to {address}: say in its card what it was trained on, and under which licence it may be used")
        if not has_tokenizer:
            print("no tokenizer went along: none was found with the run's data; --tokenizer names one")
    return 0


def _held_config(out: Path) -> bytes:
    """`config.json` of an earlier export; nothing if there is none, or on the Hub, where a push keeps what was there."""
    store = store_of(out)
    with suppress(OSError, MissingError):
        return (out / CONFIG).read_bytes() if store is None else b"" if isinstance(store, HubStore) else store.read(CONFIG)
    return b""


def command(arguments: list[str]) -> int:
    """Run the verb; returns its exit code."""
    return parse(export, "export", arguments)


def training_facts(place: Path, steps_done: int | None) -> dict[str, str]:
    """Facts about the run whose folder is `place` or above it, after this many steps: text by name. Empty if there is no such
    run."""
    folder = next(
        (candidate for candidate in (place, place.parent, place.parent.parent) if (candidate / "run.toml").is_file()), None
    )
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
