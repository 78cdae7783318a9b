"""Workload of a plan: model, batch, machines and program; everything but the layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ultrascale.catalogue.cluster import Accelerator, Cluster
from ultrascale.catalogue.stacks.stack import Overheads, Stack, program_overheads
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.plan.costs.storage import Storage
from ultrascale.plan.layouts import Floats
from ultrascale.work.ops import Shape


@dataclass(frozen=True)
class Workload:
    """A model, a batch and the machines."""

    model: Model
    cluster: Cluster
    sequence_length: int
    sequences_per_batch: int
    stack: Stack = field(default_factory=lambda: STACKS["ultrascale"])
    documents: bool = False
    """Packed documents with masks."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""
    storage: Storage | None = None
    """Storage for checkpoints and data; None: its time is not counted."""
    save_seconds: float | None = None
    """Measured seconds that a checkpoint save blocks training; None: predicted."""
    priced_shapes: dict[Shape, Floats] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of `plan.time.blocks.price_blocks`, by shape."""

    def with_batch(self, sequences: int) -> Workload:
        """This workload with another batch. They share the prices of shapes, which are those of one micro-batch."""
        other = replace(self, sequences_per_batch=sequences)
        object.__setattr__(other, "priced_shapes", self.priced_shapes)
        return other

    @property
    def replayed(self) -> dict[str, Any]:
        """Arguments of `plan.memory.replay.plan_memory`, but for the layout and the rank."""
        return {
            "model": self.model, "sequence_length": self.sequence_length, "sequences_per_batch": self.sequences_per_batch,
            "documents": self.documents, "optimizer": self.stack.optimizer, "stack": self.stack,
            "expert_imbalance": self.expert_imbalance,
        }  # fmt: skip

    @property
    def accelerator(self) -> Accelerator:
        return self.cluster.accelerator

    @cached_property
    def overheads(self) -> Overheads:
        """Overheads that the program adds to the time of this model."""
        return program_overheads(self.stack, self.model.num_experts)

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_batch * self.sequence_length
