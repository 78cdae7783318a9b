"""How a run is cut over its processes, and what each process does with its share.

Data parallelism is one mechanism with knobs (Rajbhandari et al. 2020; playbook, "ZeRO"): `dp` ranks each take a share of the
batch; groups of `dp_shard` of them keep one copy of the training state between them, cut as the ZeRO stage says, and
`dp / dp_shard` such groups repeat it (hybrid sharding).

    stage   parameters          gradients                             optimizer state
    0       whole               whole, all-reduced once a step        whole
    1       whole in a step     summed here, reduce-scattered once    cut
    2       whole in a step     reduce-scattered every micro-batch    cut
    3       gathered per layer  reduce-scattered every micro-batch    cut

Between steps the master parameters of stages 1 to 3 are cut as well: each rank updates its share, and they are gathered again
when the next forward pass meets them. That costs the all-gather that every form of ZeRO needs after its update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ultrascale.spec.problems import Problem

Precision = Literal["fp64", "fp32", "bf16"]
RANGES = {key: (1, 1_000_000) for key in ("dp", "dp_shard", "micro_batch_size", "recompute_every", "layers_per_bucket")}
"""Lowest and highest value of whole numbers. The highest are far above any run: they catch slips of the finger."""
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run."""

    dp: int = 1
    """Processes that share the batch between them; the number of processes."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is cut over `dp_shard` ranks; see the table above."""
    dp_shard: int | None = None
    """Ranks that hold one copy of the training state together. None: all of `dp`, or 1 for stage 0."""
    micro_batch_size: int = 1
    """Sequences in one forward pass of one rank."""
    recompute: Literal["none", "selective", "full", "every-k"] = "none"
    """Activations computed again in the backward pass: none; all but the results of matrix products and attention
    (selective: norms, rotary, activation functions and products); whole blocks (full); one block of every `recompute_every`
    (every-k)."""
    recompute_every: int = 2
    """For recompute = "every-k": blocks 0, k, 2k, ... are recomputed."""
    precision: Precision = "fp32"
    """Dtype of the forward and backward passes. bf16 keeps parameters, gradients and optimizer state in fp32."""
    reduce_dtype: Precision | None = None
    """Dtype in which gradients are reduced over ranks. None: fp32, or fp64 when `precision` is."""
    layers_per_bucket: int = 1
    """Decoder blocks whose parameters are gathered, and gradients reduced, in one collective."""

    @property
    def shard_size(self) -> int:
        """Ranks that hold one copy of the training state together."""
        if self.dp_shard is not None:
            return self.dp_shard
        return 1 if self.zero_stage == 0 else self.dp

    @property
    def dp_replicate(self) -> int:
        """Copies of the training state."""
        return self.dp // self.shard_size

    @property
    def master_dtype(self) -> Precision:
        """Dtype of parameters between steps, of accumulated gradients, and of the optimizer's state."""
        return "fp64" if self.precision == "fp64" else "fp32"

    @property
    def gradient_reduce_dtype(self) -> Precision:
        return self.reduce_dtype or self.master_dtype

    def recomputes(self, layer: int) -> bool:
        """Whether the whole block `layer` (counted from zero) is computed again in the backward pass."""
        if self.recompute == "every-k":
            return layer % self.recompute_every == 0
        return self.recompute == "full"

    def problems(self) -> list[Problem]:
        """Every rule the fields break, with keys relative to `layout`."""
        found: list[Problem] = []
        for key, (low, high) in RANGES.items():
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                found.append(
                    Problem(f"layout.{key}", f"must be from {low} to {high}, is {value}", "Give a number in this range.")
                )
        if found:
            return found
        if self.dp_shard is not None:
            divisors = [n for n in range(1, self.dp + 1) if self.dp % n == 0]
            if self.dp_shard not in divisors:
                rule = f"must divide dp = {self.dp}, is {self.dp_shard}"
                found.append(Problem("layout.dp_shard", rule, f"Choose one of {divisors}, or leave it out."))
            if self.zero_stage == 0 and self.dp_shard != 1:
                rule = f"ZeRO stage 0 cuts nothing, but dp_shard is {self.dp_shard}"
                found.append(Problem("layout.dp_shard", rule, "Leave it out, or set zero_stage to 1, 2 or 3."))
        if self.precision == "fp64" and self.reduce_dtype not in (None, "fp64"):
            rule = f"must be fp64 when precision is, is {self.reduce_dtype}"
            found.append(Problem("layout.reduce_dtype", rule, "Leave it out."))
        if self.precision == "fp32" and self.reduce_dtype == "fp64":
            found.append(Problem("layout.reduce_dtype", "is wider than the gradients, fp32", "Leave it out."))
        return found
