"""What is to be trained, on what, with which program: everything a plan needs but the layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.storage import Storage
from ultrascale.spec.cluster import Cluster
from ultrascale.spec.model import Model
from ultrascale.spec.ops import Shape
from ultrascale.spec.stack import Overheads, Stack, program_overheads
from ultrascale.spec.stack_files import STACKS


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
    """None: what reading and writing cost is left out."""
    priced_shapes: dict[Shape, NDArray[np.float64]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What `plan.time.blocks.price_blocks` worked out so far."""

    @cached_property
    def overheads(self) -> Overheads:
        """What the program adds to the time of this model."""
        return program_overheads(self.stack, self.model.num_experts)

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_batch * self.sequence_length
