"""What a checkpoint of a run holds, and going on from one.

Tensors go by global names (`model.layers.0.mlp.up_proj.weight`, `optimizer.exp_avg.layers.0.mlp.up_proj.weight`), so any layout
can read what any other wrote. Beside them stands JSON: steps done, the resolved run, and what the data was. Nothing else
decides the next step: its sequences follow from the step alone, and no random number is drawn in training.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ultrascale.checkpoint import CheckpointError, Search, load, read_metadata, search
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import to_toml
from ultrascale.spec.run import Run
from ultrascale.train.optimizer import MOMENTS, set_steps_done
from ultrascale.train.trainer import Trainer


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank by global name, as the tensors (or DTensors) that training uses."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.decoder.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            tensors[f"optimizer.{moment}.{name}"] = trainer.optimizer.state[parameter][moment]
    return tensors


def facts_of(trainer: Trainer) -> dict[str, Any]:
    """The JSON beside the tensors."""
    noise = trainer.noise_scale
    return {
        "steps_done": trainer.steps_done,
        "run": to_toml(trainer.run),
        "decides": decisive_parts(trainer.run),
        "data": trainer.loader.fingerprint(),
        "noise_scale": noise.state() if noise is not None else None,
    }


def restore(trainer: Trainer, checkpoint: Path, *, allow_changes: bool = False) -> None:
    """Set `trainer` to the state in `checkpoint`, whatever layout wrote it.

    Raises SpecError if the run or its data are not those of the checkpoint (unless `allow_changes`), and CheckpointError if the
    files are damaged; nothing is changed then.
    """
    facts = read_metadata(checkpoint)
    if not allow_changes:
        _expect_same_run(trainer, facts, checkpoint)
    load(checkpoint, tensors_of(trainer))
    trainer.steps_done = facts["steps_done"]
    set_steps_done(trainer.optimizer, trainer.steps_done)
    if trainer.noise_scale is not None and facts["noise_scale"] is not None:
        trainer.noise_scale.load_state(facts["noise_scale"])


def restore_newest(trainer: Trainer, root: Path, *, allow_changes: bool = False) -> Search:
    """Restore the newest checkpoint under `root` that is whole, if there is one. Says which, and why newer ones were not.

    Raises as `restore` does, and CheckpointError if there are checkpoints and none of them is whole.
    """
    found = search(root, process_group=trainer.ranks.host_group)
    if found.folder is None and found.rejected:
        damage = "\n  ".join(f"{rejected.folder.name}: {rejected.reason}" for rejected in found.rejected)
        remedy = "Bring one back from elsewhere, or remove them all to start the run over"
        raise CheckpointError(f"{root}: no checkpoint is whole. {remedy}.\n  {damage}")
    if found.folder is not None:
        restore(trainer, found.folder, allow_changes=allow_changes)
    return found


def decisive_parts(run: Run) -> dict[str, Any]:
    """What must not change on the way, as plain data. Where the data lies does not matter; its fingerprint stands for it."""
    model = asdict(run.model)
    model.pop("name")
    data = {"weights": [source.weight for source in run.data.sources], "document_mask": run.data.document_mask}
    parts = {"model": model, "batch": asdict(run.batch), "data": data, "seed": run.seed}
    return json.loads(json.dumps(parts))  # tuples as the lists they are read back as


def _expect_same_run(trainer: Trainer, facts: dict[str, Any], checkpoint: Path) -> None:
    remedy = "Set it back, start another run with --name, or go on all the same with --allow-changes."
    problems = [
        Problem(key, f"is {now!r}, but {checkpoint.name} was trained with {before!r}", remedy)
        for key, before, now in _differences("", facts["decides"], decisive_parts(trainer.run))
    ]
    if facts["data"] != trainer.loader.fingerprint():
        rule = f"the prepared data is not what {checkpoint.name} was trained on (its fingerprint differs)"
        problems.append(Problem("data.sources", rule, remedy))
    if problems:
        raise SpecError(problems)


def _differences(key: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        return [d for k in keys for d in _differences(f"{key}.{k}".lstrip("."), before.get(k), now.get(k))]
    return [] if before == now else [(key, before, now)]
