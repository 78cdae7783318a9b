"""What a planted fault is: a name, what goes wrong and who did it, where it can occur, and how it is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ultrascale.spec.model import Model
from ultrascale.spec.run import Run
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
    """What goes wrong, and where it has."""
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
    """Whether a run has more than one rank along an axis."""
    return lambda run: getattr(run.layout, name) > 1


def with_experts(run: Run) -> bool:
    """Whether the run's model has experts."""
    return run.model.num_experts > 0


def is_tied(model: Model) -> bool:
    """Whether embedding and head are one, or the last stage has the embedding too."""
    return model.tie_word_embeddings or model.num_nextn_predict_layers > 0
