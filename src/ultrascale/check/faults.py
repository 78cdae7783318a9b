"""Planted faults: the classic ways to be wrong, each of which the proof must see. A proof that cannot fail proves nothing.

missing-reduce    one rank's gradients are never added to the others'
mean-of-means     each rank divides by its own count of valid targets (transformers#34191, nanotron, DeepSpeed)
counted-twice     one parameter's gradient is added once too often (pytorch#160285; tied embeddings)
shifted-batch     a rank reads its neighbour's sequences (picotron cp>1, dp=1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ultrascale.parallel.share import local
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.progress import StepSpan
from ultrascale.train.trainer import Trainer

FAULTS = ("missing-reduce", "mean-of-means", "counted-twice", "shifted-batch")


def expect_fault(name: str, num_processes: int) -> None:
    """Raise SpecError unless `name` is a fault (or `all`) that can be planted among so many processes."""
    if name != "all" and name not in FAULTS:
        raise SpecError([Problem("--plant", f"knows no fault {name!r}", f"Choose one of {', '.join(FAULTS)}, or all.")])
    if num_processes < 2:
        rule = "these are faults between processes, and there is one"
        raise SpecError([Problem("--plant", rule, "Add --processes 2.")])


@contextmanager
def planted(fault: str | None, trainer: Trainer) -> Iterator[None]:
    """While inside, `trainer` has the fault. None plants nothing. Raises KeyError for a fault that is not known."""
    if fault is None:
        yield
        return
    undo = _PLANT[fault](trainer)
    try:
        yield
    finally:
        undo()


def _missing_reduce(trainer: Trainer) -> Callable[[], None]:
    """Rank 1 sends zeros into every reduction of gradients."""
    originals = {name: getattr(dist, name) for name in ("all_reduce", "reduce_scatter_tensor")}

    def silenced(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [t for t in (*arguments, *options.values()) if isinstance(t, torch.Tensor)]
            if trainer.ranks.rank == 1 and tensors and tensors[-1].dim() == 1 and tensors[-1].numel() > 2:
                tensors[-1].zero_()
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(dist, name, silenced(name))

    def undo() -> None:
        for name, original in originals.items():
            setattr(dist, name, original)

    return undo


def _mean_of_means(trainer: Trainer) -> Callable[[], None]:
    agree = trainer._agree_on_targets

    def own_mean(micro_batches: Any) -> int:
        agree(micro_batches)
        return sum(batch.num_targets for batch in micro_batches) * trainer.ranks.world

    return _replace(trainer, "_agree_on_targets", own_mean)


def _counted_twice(trainer: Trainer) -> Callable[[], None]:
    forward_backward = trainer._forward_backward

    def doubled(*arguments: Any) -> torch.Tensor:
        sums = forward_backward(*arguments)
        for name, parameter in trainer.share.named():
            if name == "embed_tokens.weight" and parameter.grad is not None:
                local(parameter.grad).mul_(2)
        return sums

    return _replace(trainer, "_forward_backward", doubled)


def _shifted_batch(trainer: Trainer) -> Callable[[], None]:
    read = trainer.read_micro_batches

    def shifted(span: StepSpan) -> Any:
        shift = trainer.run.layout.micro_batch_size if trainer.ranks.rank == 1 else 0
        return read(StepSpan(span.first_sequence + shift, span.num_sequences))

    return _replace(trainer, "read_micro_batches", shifted)


def _replace(trainer: Trainer, name: str, value: Any) -> Callable[[], None]:
    setattr(trainer, name, value)
    return lambda: delattr(trainer, name)


_PLANT = {
    "missing-reduce": _missing_reduce,
    "mean-of-means": _mean_of_means,
    "counted-twice": _counted_twice,
    "shifted-batch": _shifted_batch,
}
