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

Ranks are numbered with tensor parallelism fastest, so that it stays inside a node: tp, cp, dp, pp, that is
rank = ((pp_i * dp + dp_i) * cp + cp_i) * tp + tp_i. Experts are cut out of the tp * cp * dp ranks of a pipeline stage, in the
order expert_tp, ep, and what is left repeats them (expert data parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ultrascale.spec.problems import Problem

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
Axis = Literal["tp", "cp", "dp", "shard", "replicate", "pp", "ep", "expert_tp", "expert_dp"]
SCHEDULES = ("1f1b", "afab", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
"""Pipeline schedules known by name."""
_WHOLE = (
    "dp", "dp_shard", "micro_batch_size", "recompute_every", "layers_per_bucket", "tp", "cp", "pp", "virtual_stages", "ep",
    "expert_tp",
)  # fmt: skip
RANGES = dict.fromkeys(_WHOLE, (1, 1_000_000))
"""Lowest and highest value of whole numbers. The highest are far above any run: they catch slips of the finger."""
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an activation element. fp8 is the dtype of matrix products only: between them activations are bf16."""


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run."""

    dp: int = 1
    """Groups of ranks that share the batch between them."""
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
    """Dtype of the forward and backward passes. bf16, fp16 and fp8 keep parameters, gradients and optimizer state in fp32."""
    reduce_dtype: Precision | None = None
    """Dtype in which gradients are reduced over ranks. None: fp32, or fp64 when `precision` is."""
    layers_per_bucket: int = 1
    """Decoder blocks whose parameters are gathered, and gradients reduced, in one collective."""
    tp: int = 1
    """Tensor parallelism: ranks that cut every matrix product between them."""
    sequence_parallel: bool = True
    """With tp: norms and residuals are cut along the sequence. Read only if tp > 1."""
    cp: int = 1
    """Context parallelism: ranks that cut every sequence between them."""
    cp_method: Literal["ring", "all-gather", "all-to-all"] = "ring"
    """How keys and values meet all queries. Read only if cp > 1."""
    pp: int = 1
    """Pipeline parallelism: ranks that cut the layers between them."""
    virtual_stages: int = 1
    """Stages on each pipeline rank; the model is cut into pp * virtual_stages."""
    schedule: str = "1f1b"
    """Order of the pipeline's passes: a name of `SCHEDULES`, or the path of a file of actions. Read only if pp > 1."""
    layers_per_stage: tuple[int, ...] | None = None
    """Decoder blocks of each of the pp * virtual_stages stages, in the model's order. None: as even as can be."""
    ep: int = 1
    """Expert parallelism: groups of ranks that share the experts between them."""
    expert_tp: int = 1
    """Ranks that cut each expert's matrix products between them."""
    offload_activations: bool = False
    """What is saved for the backward pass waits in the host's memory."""
    offload_optimizer: bool = False
    """Optimizer state and master parameters live, and are updated, in the host's memory."""

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_stages(self) -> int:
        """Stages that the pipeline cuts the model into."""
        return self.pp * self.virtual_stages

    @property
    def expert_dp(self) -> int:
        """Ranks of a pipeline stage that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)

    def group(self, axis: Axis) -> tuple[int, int]:
        """(size, stride) of a group of ranks: its members are `stride` apart.

        dp: all ranks that reduce one gradient, cp included; shard and replicate: its parts that cut, and repeat, the training
        state; pp: two neighbours; expert_dp: the ranks that reduce one expert's gradient.
        """
        shard = 1 if self.zero_stage == 0 else self.shard_size * self.cp
        return {
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "dp": (self.dp * self.cp, self.tp),
            "shard": (shard, self.tp),
            "replicate": (self.dp * self.cp // shard, self.tp * shard),
            "pp": (min(2, self.pp), self.tp * self.cp * self.dp),
            "expert_tp": (self.expert_tp, 1),
            "ep": (self.ep, self.expert_tp),
            "expert_dp": (self.expert_dp, self.ep * self.expert_tp),
        }[axis]

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
