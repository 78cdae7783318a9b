"""Trained weights from a checkpoint or a Hugging Face folder, and a first checkpoint from imported weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from ultrascale.checkpoint import load_full, save, search
from ultrascale.checkpoint.disk.folders import candidates
from ultrascale.checkpoint.listing import only_damaged
from ultrascale.checkpoint.manifest import MANIFEST_NAME
from ultrascale.config.resolve import run_from_toml, to_toml
from ultrascale.config.rules.trainable import expect_trainable_run
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import score_biases
from ultrascale.description.architecture.weights import weights as weights_of
from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.description.run import Run
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import import_folder
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILE
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE
from ultrascale.train.corpora import build_loader, expect_tokenizer_of, with_absolute_paths
from ultrascale.train.folder.export import NARROW, PREFIX, dtype_of, tokenizer_of, weights_in
from ultrascale.train.folder.facts import expect_facts
from ultrascale.train.folder.resume import decisive_parts
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.optimizers.optimizer import moments_of, saved_dtype

_OF_TRAINING = (
    "dropout", "mtp_loss_coef", "router_aux_loss_coef", "router_aux_loss_scope", "router_bias_update_rate",
    "router_z_loss_coef",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A model with its weights."""

    model: Model
    weights: dict[str, torch.Tensor]
    """Unsharded tensors on the CPU, named as in `description.architecture.weights`; includes the biases that balance
    experts."""
    tokenizer: Path | None
    """The model's `tokenizer.json`."""
    source: Path
    """The folder that was read: a checkpoint or a Hugging Face folder."""
    steps_done: int | None = None
    """Steps done at the checkpoint; None for a Hugging Face folder."""
    run: Run | None = None
    """The run of a checkpoint."""
    dtype: torch.dtype | None = None
    """Dtype of the Hugging Face folder that a checkpoint's run started from, if narrower than the checkpoint's."""

    def decoder(self, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
        """The model with these weights, for inference."""
        with torch.device("meta"):
            decoder = Decoder(self.model)
        wide = {bias.name for bias in score_biases(self.model)}  # they moved by thousandths, which bf16 would round away
        weights = {name: value.to(device, value.dtype if name in wide else dtype) for name, value in self.weights.items()}
        decoder.load_state_dict(weights, assign=True)
        return decoder.requires_grad_(False).eval()


def open_trained(path: str | Path) -> Trained:
    """Read a checkpoint, the newest whole one of a run folder, or a Hugging Face folder.

    Raises SpecError if `path` is none of these, and CheckpointError if a checkpoint is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise mistake(str(path), "is no folder", "Give a checkpoint, a run folder, or a Hugging Face folder.")
    if (path / "config.json").exists():
        model, weights = import_folder(path)
        tokenizer = path / TOKENIZER_FILE
        return Trained(model, weights, tokenizer if tokenizer.exists() else None, path)
    return _open_checkpoint(_find_checkpoint(path))


def import_as_first_checkpoint(folder: str | Path, run: Run) -> Path:
    """Write the weights of a Hugging Face folder as the checkpoint of `run` before its first step; `train` resumes from it.

    Returns the checkpoint. Raises SpecError if the run's model or the tokenizer of its data differs, or the run has
    checkpoints already, and DataError if its data cannot be read.
    """
    expect_trainable_run(run)
    model, weights = import_folder(folder)
    run = with_absolute_paths(run)
    root = RunFolder.of(run).checkpoints
    problems = _model_differences(run.model, model, folder)
    if candidates(root):
        problems.append(Problem(str(root), "has checkpoints already", "Give the run another name, or remove them."))
    if problems:
        raise SpecError(problems)
    training = build_loader(run, run.data.sources)
    expect_tokenizer_of(Path(folder), training)
    dtype = TORCH_DTYPE[run.layout.master_dtype]
    tensors = {f"{PREFIX}{name}": weight.to(dtype) for name, weight in weights.items()}
    zeros = {
        f"optimizer.{moment}.{weight.name}": torch.zeros(weight.shape, dtype=saved_dtype(weight, run.optimizer, dtype))
        for weight in weights_of(model)
        for moment in moments_of(weight, run.optimizer)
    }
    facts = {
        "steps_done": 0,
        "run": to_toml(run),
        "decides": decisive_parts(run),
        "data": training.fingerprint(),
        "noise_scale": None,
        "optimizer": run.optimizer.name,
        "imported_dtype": _narrow_dtype(model, weights),
    }
    return save(root, 0, tensors | zeros, facts)


def _narrow_dtype(model: Model, weights: dict[str, torch.Tensor]) -> str | None:
    wide = {bias.name for bias in score_biases(model)}  # in fp32 whatever the rest is
    dtypes = {weight.dtype for name, weight in weights.items() if name not in wide}
    return NARROW.get(next(iter(dtypes))) if len(dtypes) == 1 else None


def _find_checkpoint(path: Path) -> Path:
    if (path / MANIFEST_NAME).exists() or path in [candidate.path for candidate in candidates(path.parent)]:
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = search(root)
    if newest.folder is not None:
        return newest.folder
    if newest.rejected:
        raise only_damaged(root, [f"{rejected.folder.name}: {rejected.reason}" for rejected in newest.rejected])
    rule = "holds neither config.json with weights nor a checkpoint"
    raise mistake(str(path), rule, "Give a checkpoint, a run folder, or a Hugging Face folder.")


def _open_checkpoint(folder: Path) -> Trained:
    tensors, facts = load_full(folder)
    expect_facts(facts, folder)
    run = run_from_toml(facts["run"], where=f"{folder}, metadata")
    tokenizer_file = folder.resolve().parent.parent / TOKENIZER_FILE  # in the run's folder, even if that was moved
    tokenizer = tokenizer_file if tokenizer_file.exists() else tokenizer_of(run)
    return Trained(run.model, weights_in(tensors), tokenizer, folder, facts["steps_done"], run, dtype_of(facts))


def _model_differences(expected: Model, actual: Model, folder: str | Path) -> list[Problem]:
    """Fields that differ and change what the model computes. Settings of training belong to the run and are not compared."""
    passed_over = {"name", "model_type", "initializer_range", *_OF_TRAINING}
    remedy = f'Set model.path = "{folder}" in the run; of the other fields only {", ".join(_OF_TRAINING)} may be set beside it.'
    expected, actual = _computed(expected), _computed(actual)
    return [
        Problem(f"model.{f.name}", f"is {getattr(expected, f.name)!r}, in {folder} {getattr(actual, f.name)!r}", remedy)
        for f in fields(Model)
        if f.name not in passed_over and getattr(expected, f.name) != getattr(actual, f.name)
    ]


def _computed(model: Model) -> Model:
    """`model` without values that do not affect its output, which an export need not keep."""
    scaling, scalar, interval = model.rope_scaling, model.query_pre_attn_scalar, model.full_attention_interval
    if scaling is not None and scaling.rope_type == "linear":
        scaling = replace(scaling, original_max_position_embeddings=model.max_position_embeddings)
    return replace(
        model, rope_scaling=scaling, query_pre_attn_scalar=None if scalar == model.head_dim else scalar,
        full_attention_interval=None if interval is not None and interval > model.num_hidden_layers else interval,
    )  # fmt: skip
