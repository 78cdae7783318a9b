"""Faults of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ultrascale.check.faults.fault import Home, axis, fault, is_tied
from ultrascale.description.run import Run
from ultrascale.description.schedules import SCHEDULES
from ultrascale.parallel.pipeline import pipeline_passes
from ultrascale.parallel.pipeline.pipeline_passes import Passing
from ultrascale.parallel.pipeline.pipeline_weights import Waiting
from ultrascale.parallel.share import TIED, Share, local
from ultrascale.schedules.actions import Action
from ultrascale.schedules.ends import has_mirrors
from ultrascale.train.trainer import Trainer

HOME = Home(layout={"pp": 2, "layers_per_stage": (2, 1)})
TIED_ENDS = "pp > 1, tied embedding"
MIRRORS = "a schedule with two copies of the weights"
MIRRORED = Home(layout={"pp": 2, "layers_per_stage": (2, 1),
                        "schedule": next(name for name, one in SCHEDULES.items() if one.copies > 1)})  # fmt: skip
ZERO_BUBBLE = next(name for name, one in SCHEDULES.items() if one.splits_backward)


def _mirrored(run: Run) -> bool:
    return has_mirrors(run.layout)


def _tied_ends(run: Run) -> bool:
    return run.layout.pp > 1 and is_tied(run.model)


@fault("pp-order", "the last stage takes the targets of another micro-batch", needs="pp > 1, several micro-batches",
       fits=lambda run: run.layout.pp > 1 and run.batch.sequences_per_batch > run.layout.dp * run.layout.micro_batch_size,
       home=HOME)  # fmt: skip
def _order(trainer: Trainer) -> Iterator[None]:
    train = trainer.passes.train

    def reordered(micro_batches: Any, num_targets: int) -> Any:
        others = [*micro_batches[1:], micro_batches[0]]
        mixed = [replace(own, targets=other.targets) for own, other in zip(micro_batches, others, strict=True)]
        return train(mixed, num_targets)

    with patch.object(trainer.passes, "train", reordered):
        yield


@fault("pp-gradient-dropped", "the gradient of the first micro-batch never reaches the stage before", needs="pp > 1",
       fits=axis("pp"), home=HOME)  # fmt: skip
def _gradient_dropped(trainer: Trainer) -> Iterator[None]:
    backward = Passing._backward

    def dropping(passing: Passing, part: Action, gradient: Tensor | None) -> Tensor | None:
        found = backward(passing, part, gradient)
        return torch.zeros_like(found) if found is not None and part.micro_batch == 0 else found

    with patch.object(Passing, "_backward", dropping):
        yield


@fault("pp-documents", "stages after the first do not know the documents (torchtitan)", needs="pp > 1, documents",
       fits=lambda run: run.layout.pp > 1 and run.data.document_mask, home=HOME)  # fmt: skip
def _documents(trainer: Trainer) -> Iterator[None]:
    forward = trainer.passes.forward

    def blind(batch: Any, *, stage: int = 0, given: Tensor | None = None) -> Tensor:
        seen = batch if stage == 0 else replace(batch, document_ids=torch.zeros_like(batch.document_ids))
        return forward(seen, stage=stage, given=given)

    with patch.object(trainer.passes, "forward", blind):
        yield


@fault("pp-tied", "gradients of a tied embedding on first and last stage are not added up", needs=TIED_ENDS, fits=_tied_ends,
       home=HOME)  # fmt: skip
def _tied(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_sum_tied", lambda share: None):
        yield


@fault("pp-tied-twice", "gradients of a tied embedding are added up twice (Megatron#844)", needs=TIED_ENDS, fits=_tied_ends,
       home=HOME)  # fmt: skip
def _tied_twice(trainer: Trainer) -> Iterator[None]:
    sum_tied = Share._sum_tied

    def twice(share: Share) -> None:
        sum_tied(share)
        sum_tied(share)

    with patch.object(Share, "_sum_tied", twice):
        yield


@fault("pp-tied-updated-twice", "the last stage updates its copy of a tied embedding once more", needs=TIED_ENDS,
       fits=_tied_ends, home=HOME)  # fmt: skip
def _tied_updated_twice(trainer: Trainer) -> Iterator[None]:
    update = trainer.update

    def twice(norm: float) -> float:
        ends = [one.parameter for one in trainer.share.held if one.name == TIED and one.is_second]
        before = [local(parameter).detach().clone() for parameter in ends]
        rate = update(norm)
        with torch.no_grad():
            for parameter, old in zip(ends, before, strict=True):
                local(parameter).add_(local(parameter) - old)
        return rate

    with patch.object(trainer, "update", twice):
        yield


@fault("pp-weights-dropped", "a zero-bubble W forgets one matrix", needs="a zero-bubble schedule",
       fits=lambda run: bool((known := run.layout.known_schedule) and known.splits_backward),
       home=Home(layout={"pp": 2, "schedule": ZERO_BUBBLE, "layers_per_stage": (2, 1)}))  # fmt: skip
def _weights_dropped(trainer: Trainer) -> Iterator[None]:
    make = pipeline_passes.make_gradients

    def forgetful(waiting: Waiting) -> None:
        make(waiting[:-1])

    with patch.object(pipeline_passes, "make_gradients", forgetful):
        yield


@fault("pp-mirror", "the two copies of a stage do not add up their gradients (DualPipe)", needs=MIRRORS, fits=_mirrored,
       home=MIRRORED)  # fmt: skip
def _mirror(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_sum_mirrors", lambda share: None):
        yield


@fault("pp-mirror-twice", "the two copies of a stage add up their gradients twice (DualPipe)", needs=MIRRORS, fits=_mirrored,
       home=MIRRORED)  # fmt: skip
def _mirror_twice(trainer: Trainer) -> Iterator[None]:
    sum_mirrors = Share._sum_mirrors

    def twice(share: Share) -> None:
        sum_mirrors(share)
        sum_mirrors(share)

    with patch.object(Share, "_sum_mirrors", twice):
        yield


@fault("pp-mirror-drifts", "one of the two copies of a stage is updated with its own half of the gradient (DualPipe)",
       needs=MIRRORS, fits=_mirrored, home=MIRRORED)  # fmt: skip
def _mirror_drifts(trainer: Trainer) -> Iterator[None]:
    sum_mirrors = Share._sum_mirrors

    def one_sided(share: Share) -> None:
        own = [None if one.parameter.grad is None else local(one.parameter.grad).clone() for one in share.held]
        sum_mirrors(share)
        for one, gradient in zip(share.held, own, strict=True):
            if share.mirror < share.mesh.at.pp and one.parameter.grad is not None:
                local(one.parameter.grad).copy_(torch.zeros(()) if gradient is None else gradient)

    with patch.object(Share, "_sum_mirrors", one_sided):
        yield


@fault("norm-of-mirrors", "the norm counts both copies of a stage (DualPipe)", needs=MIRRORS, fits=_mirrored, home=MIRRORED)
def _norm_of_mirrors(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_counts", lambda share, one: not one.is_second and not one.place.copy):
        yield
