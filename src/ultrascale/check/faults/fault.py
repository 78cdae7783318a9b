"""A planted fault: its name, the mistake and who made it, the runs it can occur in, and the code that plants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ultrascale.description.architecture.model import Model
from ultrascale.description.run import Run
from ultrascale.train.trainer import Trainer

Plant = Callable[[Trainer], Iterator[None]]


@dataclass(frozen=True)
class Home:
    """The least run in which a fault can be seen."""

    preset: str = "tiny-llama"
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model that differ from the preset's."""
    micro_batches: int = 3


@dataclass(frozen=True)
class Fault:
    """A mistake that the proof must see."""

    name: str
    what: str
    """The mistake in words, with the trainer or issue it was reported in."""
    needs: str
    """In words."""
    fits: Callable[[Run], bool]
    home: Home
    plant: Callable[[Trainer], AbstractContextManager[None]]


FAULTS: dict[str, Fault] = {}
"""Every fault, by name; filled by the modules of faults as they are imported."""


def fault(name: str, what: str, *, needs: str, fits: Callable[[Run], bool], home: Home) -> Callable[[Plant], Plant]:
    """Register a generator that plants a fault into a trainer before its `yield` and takes it out after."""

    def register(plant: Plant) -> Plant:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, what, needs, fits, home, contextmanager(plant))
        return plant

    return register


def axis(name: str) -> Callable[[Run], bool]:
    """Predicate of runs: true if the layout has more than one rank along the axis `name`, such as `tp`."""
    return lambda run: getattr(run.layout, name) > 1


def with_experts(run: Run) -> bool:
    """True if the run's model has experts (MoE)."""
    return run.model.num_experts > 0


def is_tied(model: Model) -> bool:
    """True if the head shares the embedding's weights, or the last stage holds the embedding too (multi-token prediction)."""
    return model.tie_word_embeddings or model.num_nextn_predict_layers > 0
