"""Checkpoints of a run: their contents, and resuming from one.

Tensors have global names (`model.layers.0.mlp.up_proj.weight`, `optimizer.exp_avg.layers.0.mlp.up_proj.weight`), so any layout
can read what any other wrote. JSON metadata holds steps done, the resolved run, and facts on the data. Nothing else decides the
next step: its sequences follow from the step alone, and training draws no random numbers.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ultrascale.checkpoint import CheckpointError, CheckpointSearch, Slice, load, shards_read
from ultrascale.checkpoint.disk.folders import step_folder
from ultrascale.checkpoint.manifest import Manifest
from ultrascale.config.resolve import run_from_toml, to_toml
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Run
from ultrascale.kernels.optimizers.narrow_moments import rows_of
from ultrascale.models.initialise import shard_boxes
from ultrascale.parallel.share import LocalParameter, local
from ultrascale.train.folder.differences import differences, with_defaults
from ultrascale.train.folder.export import PREFIX
from ultrascale.train.folder.facts import expect_facts, read_facts
from ultrascale.train.optimizers.compact_adamw import CompactAdamW
from ultrascale.train.optimizers.optimizer import moment_of, moments_of, set_steps_done
from ultrascale.train.trainer import Trainer
from ultrascale.work.fp8_slots import num_block_slots

AMAXES = "fp8.amax_history."
"""Prefix of the names of the amax history of fp8 delayed scaling."""


def tensors_of(trainer: Trainer) -> dict[str, list[Slice]]:
    """Weights, their moments and the biases that balance experts, by global name, as this rank's local slices.

    A rank may hold both the first and the last stage of a pipeline, and each has a copy of a tied embedding.
    """
    tensors: dict[str, list[Slice]] = defaultdict(list)
    for shard in trainer.share.local_parameters:
        tensors[f"{PREFIX}{shard.name}"] += _slices(shard, local(shard.parameter.detach()))
        for moment in moments_of(shard.weight, trainer.run.optimizer):
            tensors[f"optimizer.{moment}.{shard.name}"] += _slices(shard, moment_of(trainer.optimizer, shard, moment))
    for stage in trainer.share.stages.values():
        for name, bias in stage.named_buffers():
            tensors[f"{PREFIX}{name}"].append(Slice(bias, tuple(bias.shape), (0,) * bias.dim()))
    history = trainer.share.amax_history
    for name, table in () if history is None else history.tables():
        tensors[f"{AMAXES}{name}"].append(Slice(table, tuple(table.shape), (0, 0)))
    for kind, shard, tensor in () if trainer.outer is None else trainer.outer.tensors():
        tensors[f"{kind}.{shard.name}"] += _slices(shard, tensor)
    return dict(tensors)


def _unread_tables(model: Model, saved_history: dict[str, Any] | None) -> dict[str, list[Slice]]:
    """Placeholders for an amax history in the checkpoint that this run does not use: every stored tensor must be loaded."""
    first, last = saved_history["layers"] if saved_history is not None else (0, -1)
    shapes = {
        layer: (num_block_slots(model, layer), saved_history["length"])
        for layer in range(first, last + 1)
        if saved_history is not None
    }
    return {f"{AMAXES}layers.{layer}": [Slice(torch.empty(shape), shape, (0, 0))] for layer, shape in shapes.items()}


def _take_back(trainer: Trainer, tensors: dict[str, list[Slice]]) -> None:
    """Store values that were loaded into copies back into the trainer."""
    if isinstance(trainer.optimizer, CompactAdamW):
        waiting = {name: iter(slices) for name, slices in tensors.items()}
        for shard in trainer.share.local_parameters:
            for moment in moments_of(shard.weight, trainer.run.optimizer):
                boxes = islice(
                    waiting[f"optimizer.{moment}.{shard.name}"], len(shard_boxes(shard.parameter, shard.weight_shard))
                )
                trainer.optimizer.store(shard).load_values(moment, torch.cat([rows_of(box.tensor) for box in boxes]))


def _slices(shard: LocalParameter, tensor: Tensor) -> list[Slice]:
    """Slices of a weight or a moment that this rank holds."""
    return [
        Slice(box, shard.weight.shape, offsets) for offsets, box in shard_boxes(shard.parameter, shard.weight_shard, tensor)
    ]


def facts_of(trainer: Trainer) -> dict[str, Any]:
    """The JSON metadata of a checkpoint."""
    noise = trainer.noise_scale
    return {
        "steps_done": trainer.steps_done,
        "saved_at": time.time(),  # the file's modification time changes when a checkpoint is copied
        "run": to_toml(trainer.run),
        "decides": decisive_parts(trainer.run),
        "data": trainer.loader.fingerprint(),
        "noise_scale": noise.state() if noise is not None else None,
        "optimizer": trainer.run.optimizer.name,
        "skipped_steps": trainer.skipped_steps,
        "imported_dtype": trainer.imported_dtype,
        "norms": trainer.norms.state(),
        "loss_scale": None if trainer.loss_scale is None else trainer.loss_scale.state(),
        "fp8_amax_history": None if trainer.share.amax_history is None else trainer.share.amax_history.state(),
        "islands": None if trainer.outer is None else trainer.outer.facts(),
    }


def restore(trainer: Trainer, checkpoint: Path, *, allow_changes: bool = False, verified: bool = False) -> None:
    """Set `trainer` to the state in `checkpoint`, whatever layout wrote it. `verified`: True if every byte was just read.

    Raises SpecError if the run or its data are not those of the checkpoint (with `allow_changes`: if its batch or its weights
    are not), and CheckpointError if the files are damaged; nothing is changed then.
    """
    facts = read_facts(checkpoint)
    _expect_same_run(trainer, facts, checkpoint, allow_changes=allow_changes)
    outer, outer_facts = trainer.outer, facts.get("islands")
    if outer is not None:
        outer.expect(outer_facts)
    tensors, amax_updates = _targets(trainer, facts)
    # If the run or the checkpoint has islands, only one of the two may have outer tensors.
    load(checkpoint, tensors, strict=outer is None and outer_facts is None, verified=verified)
    _take_back(trainer, tensors)
    _take_facts(trainer, facts)
    if trainer.share.amax_history is not None:
        trainer.share.amax_history.begin(amax_updates)


def shards_for(trainer: Trainer, manifest: Manifest) -> set[str]:
    """The files of a checkpoint that `restore` reads on this rank. Raises CheckpointError if the checkpoint is not from a
    run."""
    return shards_read(manifest, _targets(trainer, expect_facts(manifest.metadata, step_folder(Path(), manifest.step)))[0])


def _targets(trainer: Trainer, facts: dict[str, Any]) -> tuple[dict[str, list[Slice]], int]:
    """The tensors to load for a checkpoint with these facts, and the number of updates in its delayed-scaling history."""
    tensors, history = tensors_of(trainer), trainer.share.amax_history
    saved_history = facts.get("fp8_amax_history")
    amax_updates = 0 if history is None else history.updates_in(saved_history)
    if amax_updates == 0:
        tensors = {name: slices for name, slices in tensors.items() if not name.startswith(AMAXES)}
        tensors |= _unread_tables(trainer.run.model, saved_history)
    return tensors, amax_updates


def _take_facts(trainer: Trainer, facts: dict[str, Any]) -> None:
    """Restore the state in a checkpoint's JSON metadata, once its tensors are loaded."""
    trainer.share.expect_other_weights()
    trainer.steps_done = facts["steps_done"]
    trainer.skipped_steps = facts.get("skipped_steps") or 0
    trainer.imported_dtype = facts.get("imported_dtype")
    trainer.norms.load_state(facts.get("norms") or [])
    set_steps_done(trainer.optimizer, trainer.steps_done - trainer.skipped_steps)
    if trainer.loss_scale is not None and facts.get("loss_scale") is not None:
        trainer.loss_scale.load_state(facts["loss_scale"])
    if trainer.noise_scale is not None and facts.get("noise_scale") is not None:
        trainer.noise_scale.load_state(facts["noise_scale"])
    if trainer.outer is not None:
        trainer.outer.restored(facts.get("islands"))


def begin_islands(trainer: Trainer) -> str:
    """Bring this island into the same round as the others, and do any outer step that is due since it stopped. Returns a
    description. Collective over all islands, where there are several."""
    outer = trainer.outer
    if outer is None:
        return ""

    whole: dict[str, list[Slice]] = {}

    def tensors() -> dict[str, list[Slice]]:
        whole.clear()
        whole.update(tensors_of(trainer))
        return whole

    def take(facts: dict[str, Any]) -> None:
        _take_back(trainer, whole)
        whole.clear()
        _take_facts(trainer, facts)

    message = outer.begin(trainer.steps_done, tensors, lambda: facts_of(trainer), take)
    if outer.stops or not outer.settle(trainer.steps_done):
        trainer.request_stop()
    return message


def restore_newest(
    trainer: Trainer, root: Path, *, allow_changes: bool, search: Callable[..., CheckpointSearch]
) -> CheckpointSearch:
    """Restore the newest intact checkpoint under `root`, if there is one. Returns which one, and why newer ones were rejected.

    `search` finds it, as `checkpoint.search` does.

    Raises as `restore` does, and CheckpointError if there are checkpoints but all are damaged.
    """
    newest = search(root, process_group=trainer.ranks.host_group)
    if newest.folder is None and newest.rejected:
        damage = "\n  ".join(f"{rejected.folder.name}: {rejected.reason}" for rejected in newest.rejected)
        remedy = "Bring one back from elsewhere, or remove them all to start the run over"
        raise CheckpointError(f"{root}: no checkpoint is whole. {remedy}.\n  {damage}")
    if newest.folder is not None:
        restore(trainer, newest.folder, allow_changes=allow_changes, verified=True)
    return newest


def decisive_parts(run: Run) -> dict[str, Any]:
    """Settings that must not change when a run resumes, as plain data. A fingerprint replaces the paths of data."""
    model = asdict(run.model)
    model.pop("name")
    data = {"weights": [source.weight for source in run.data.sources], "document_mask": run.data.document_mask}
    parts = {"model": model, "batch": asdict(run.batch), "data": data, "seed": run.seed}
    return json.loads(json.dumps(parts))  # tuples become lists, as JSON reads them


def changes_since(checkpoint: Path, run: Run) -> list[str]:
    """Settings of `run` that differ from the run that wrote `checkpoint`, as `optimizer.learning_rate: 0.003 (was 0.001)`."""
    texts = read_facts(checkpoint)["run"], to_toml(run), to_toml(with_defaults(run))
    before, now, defaults = (tomllib.loads(text) for text in texts)
    where = ("name", "folder")
    changes = [change for change in differences(before, now, defaults) if change[0] not in where]
    return [f"{key}: {_toml_text(new)} (was {_toml_text(old)})" for key, old, new in changes]


def _toml_text(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def _expect_same_run(trainer: Trainer, facts: dict[str, Any], checkpoint: Path, *, allow_changes: bool) -> None:
    remedy = "Set it back, start another run with --name, or go on all the same with --allow-changes."
    run = trainer.run
    fits = _weights_fit(facts["run"], run.model)
    problems = [
        Problem(key, f"is {now!r}, but {checkpoint.name} was trained with {before!r}", lasting or remedy)
        for key, before, now in differences(facts["decides"], decisive_parts(run), decisive_parts(with_defaults(run)))
        if (lasting := _lasting(key, before, fits=fits)) or not allow_changes
    ]
    problems += _optimizer_problem(facts.get("optimizer") or "adamw", run.optimizer.name)
    now = trainer.loader.fingerprint()
    if not allow_changes and facts["data"] not in (now, now.partition("+")[0]):  # an older release took fewer samples
        rule = f"the prepared data is not what {checkpoint.name} was trained on (its fingerprint differs)"
        problems.append(Problem("data.sources", rule, remedy))
    if problems:
        raise SpecError(problems)


def _weights_fit(saved: str, model: Model) -> bool:
    """True if the run in `saved` (TOML) has the weights of `model`, with their shapes, or cannot be read by this release."""
    try:
        before = run_from_toml(saved).model
    except SpecError:
        return True
    then, now = ([(weight.name, weight.shape) for weight in weights(decoder)] for decoder in (before, model))
    return then == now


def _lasting(key: str, before: Any, *, fits: bool) -> str:
    """Remedy for a change that cannot be allowed, of the batch or of a model whose weights no longer fit; empty for another."""
    if key.startswith("model.") and not fits:
        return "Set it back, or start another run with --name: the saved weights do not fit."
    return _batch_remedy(key, before)


def _optimizer_problem(was: str, is_now: str) -> list[Problem]:
    """Problem if moments are of another kind or dtype and cannot be resumed from; 8-bit moments are saved like AdamW's."""
    if was == is_now or {was, is_now} == {"adamw", "adamw-8bit"}:
        return []
    rule = f"is {is_now!r}, but the checkpoint has the moments of {was}"
    return [Problem("optimizer.name", rule, f'Set it back to "{was}", or start another run with --name.')]


def _batch_remedy(key: str, before: Any) -> str:
    """Remedy for a changed batch, which cannot be allowed; empty for another key.

    The step and the batch determine which sequences were read, and how many tokens: with another batch some sequences would be
    skipped or read twice, and the count of tokens would be wrong.
    """
    if not key.startswith("batch."):
        return ""
    flag = f"--{key.replace('_', '-')}"
    back = "as the run.toml in the run's folder has it" if key == "batch.ramp" else f"with {flag} {before}"
    return f"Set it back {back}, or start another run with --name: the steps done were counted in the old batch."
