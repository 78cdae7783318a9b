"""Parallel layout of a run: how its processes shard model, batch and training state, and what each does with its share.

Data parallelism is one mechanism with a few settings (Rajbhandari et al. 2020; playbook, "ZeRO"): `dp` ranks each take a share
of the batch; each group of `dp_shard` of them shards one copy of the training state as the ZeRO stage says, and `dp / dp_shard`
such groups are replicas (hybrid sharding, HSDP).

    stage   parameters                 gradients                                   optimizer state
    0       unsharded                  unsharded, all-reduced once per step        unsharded
    1       unsharded within a step    accumulated, reduce-scattered once          sharded
    2       unsharded within a step    reduce-scattered every micro-batch          sharded
    3       all-gathered per layer     reduce-scattered every micro-batch          sharded

Between steps the master parameters of stages 1 to 3 are sharded as well: each rank updates its shard, and the parameters are
all-gathered again in the next forward pass. That costs the all-gather that every form of ZeRO needs after its update.

Ranks are numbered with tensor parallelism fastest, so that it stays inside a node: tp, cp, dp, pp, that is rank = ((pp_i * dp +
dp_i) * cp + cp_i) * tp + tp_i. Experts are sharded over the tp * cp * dp ranks of a pipeline stage, in the order expert_tp, ep;
the remaining factor replicates them (expert data parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import gcd
from typing import Literal

from ultrascale.description.problems import Problem
from ultrascale.description.recomputed import FULL, MODULES, BlockRecompute, modes_of, parse_mode
from ultrascale.description.schedules import SCHEDULE_FILES, SCHEDULES, USUAL, KnownSchedule, schedule_for
from ultrascale.description.units import divisors

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Fp8Scaling = Literal["row", "tensor", "delayed"]
Axis = Literal["tp", "cp", "dp", "shard", "replicate", "pp", "ep", "expert_tp", "expert_dp", "expert_shard"]
PipelineRuntime = Literal["ultrascale", "torch"]
CpMethod = Literal["ring", "all-gather", "all-to-all", "ring+all-to-all"]
AttentionCore = Literal["auto", "fastest", "sdpa", "varlen", "cudnn", "flex", "flash-2", "flash-3", "flash-4"]
_COUNTS = (
    "dp", "dp_shard", "micro_batch_size", "recompute_every", "layers_per_bucket", "tp", "cp", "cp_heads", "pp",
    "virtual_stages", "ep", "expert_tp", "mlp_chunks",
)  # fmt: skip
RANGES = dict.fromkeys(_COUNTS, (1, 1_000_000))
"""Lowest and highest value of whole numbers. The upper bounds are far above any run: they catch typing errors."""
EMBEDDING_AND_HEAD = 2
"""Stages that a pipeline may have more than the model has layers: one with the embedding alone, one with the head alone, as of
Llama 3 405B (section 3.3.2)."""
MOST_NAMED = 4096
"""Largest ep that an error message suggests: the number of ranks that it must divide is a product, and may be astronomical."""
LONGEST_HISTORY = 4096
"""Longest history of amax values in fp8: four times Transformer Engine's default."""
OFFLOAD_FROM_BYTES = 1 << 16
"""Smaller saved tensors stay on the device: offloading one costs the launch of a copy, about 10 microseconds, and frees almost
nothing."""
OFFLOAD_RESIDENT = 2
"""Blocks whose activations are on the device although they are offloaded: one in transfer, one in use."""
NARROW: dict[Precision, float] = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Precisions of GEMMs only, with the bytes of an operand's element including the scale of its block: MXFP8 has one of 8 bits
per 32 elements (OCP Microscaling 1.0), NVFP4 one in fp8 per 16, and one in fp32 per tensor (NVIDIA, 2025)."""
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, **dict.fromkeys(NARROW, 2)}
"""Bytes of an activation element. Between narrow GEMMs activations are bf16."""


def cp_grid(cp: int, method: CpMethod, cp_heads: int) -> tuple[int, int]:
    """(positions in the ring, ranks at each position that exchange sequence for heads)."""
    heads = min(cp, {"all-to-all": cp, "ring+all-to-all": cp_heads}.get(method, 1))
    return cp // heads, heads


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run."""

    dp: int = 1
    """Data-parallel degree: number of groups of ranks that share the global batch."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: training state that is sharded over `dp_shard` ranks. 0: nothing; 1: optimizer state; 2: also gradients; 3:
    also parameters (FSDP)."""
    dp_shard: int | None = None
    """Data-parallel ranks that shard one copy of the training state, each with its ranks of cp; fewer than `dp` is hybrid
    sharding (HSDP). None: all of `dp`, or 1 for stage 0."""
    micro_batch_size: int = 1
    """Micro-batch size: sequences in one forward pass of a rank. A batch of several micro-batches is gradient accumulation."""
    recompute: str = "none"
    """Activation checkpointing: activations recomputed in the backward pass. none; named modules joined by +, such as
    norm+moe_act (`description.recomputed`); selective: the modules that save most bytes per second of recomputation; full:
    whole blocks; every-k: one block in every `recompute_every`; auto: the fastest choice that fits, found by the planner;
    blocks: block by block as in `recompute_blocks`."""
    recompute_every: int = 2
    """For recompute = "every-k": blocks 0, k, 2k, ... are recomputed."""
    recompute_budget: int | None = None
    """For recompute = "auto": bytes of activations that a rank's blocks may save for the backward pass, such as "20GiB". None:
    all free memory."""
    recompute_blocks: tuple[str, ...] = ()
    """For recompute = "blocks": the mode of each block in the model's order, such as ["norm+mlp_act x 20", "none x 12"];
    `description.recomputed` has the names."""
    attention: AttentionCore = "auto"
    """Attention kernel, which also implements document masks and sliding windows: sdpa (PyTorch's, with a mask of S x S
    elements), varlen (flash attention with document boundaries), cudnn, flex (FlexAttention), flash-2, flash-3, flash-4 (the
    flash-attn packages); `description.attention_cores` lists what each supports. fastest: all that apply are timed once at the
    run's shapes. auto: fastest on CUDA, sdpa on the CPU."""
    precision: Precision = "fp32"
    """Dtype of the forward and backward passes. All but fp64 keep parameters, gradients and optimizer state in fp32 (mixed
    precision). mxfp8 and nvfp4 have a scale for each block of 32 and 16 elements: Blackwell computes with them, and they are
    planned only."""
    fp8_scaling: Fp8Scaling = "row"
    """Granularity of fp8 scales: row, one per row (token, output feature), or tensor, one per tensor, both from current values;
    delayed, one per tensor from the amax of earlier steps. Read only if precision = "fp8"."""
    fp8_amax_history_len: int = 16
    """Number of steps whose amax (largest magnitude) is kept. Read only if fp8_scaling = "delayed"."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Amax behind a scale: the largest of the history, or that of the last step. Read only if fp8_scaling = "delayed"."""
    fp8_keep_blocks: int = 0
    """Number of first blocks, and of last blocks, that compute in bf16. Read only if precision is fp8, mxfp8 or nvfp4."""
    fp8_all_gather: bool = False
    """Quantize parameters before their all-gather: they are sent and stay unsharded in 8 or 4 bits instead of 16, with the same
    results. Read only if precision is fp8, mxfp8 or nvfp4, and with a ZeRO stage."""
    reduce_dtype: Precision | None = None
    """Dtype in which gradients are reduced over ranks. None: fp32, or fp64 if `precision` is fp64."""
    layers_per_bucket: int = 1
    """Decoder blocks per bucket: their parameters are all-gathered, and gradients reduced, in one collective."""
    tp: int = 1
    """Tensor-parallel degree: ranks that shard every GEMM."""
    sequence_parallel: bool = True
    """Sequence parallelism: norms and residuals are sharded along the sequence over tp (Korthikanti et al. 2022). Read only if
    tp > 1."""
    tp_overlap: bool = False
    """Overlap the GEMMs of tp with their all-gather and reduce-scatter: a GEMM begins with local positions, and sends rows as
    they are finished (PyTorch's symmetric memory). Needs sequence_parallel, CUDA, and all ranks of tp in one node. Read only if
    tp > 1."""
    cp: int = 1
    """Context-parallel degree: ranks that shard every sequence."""
    cp_method: CpMethod = "ring"
    """Method by which all queries meet all keys and values: ring attention, in zigzag order; an all-gather of keys and values;
    all-to-alls that exchange sequence for heads (Ulysses); or rings of groups that do. Read only if cp > 1."""
    cp_heads: int = 1
    """For cp_method = "ring+all-to-all": neighbouring ranks that exchange sequence for heads in an all-to-all; rings join cp /
    cp_heads such groups."""
    pp: int = 1
    """Pipeline-parallel degree: ranks that share the layers."""
    virtual_stages: int = 1
    """Virtual pipeline stages per rank (interleaving); the model is split into pp * virtual_stages stages."""
    schedule: str = USUAL
    """Pipeline schedule, the order of passes, which decides the bubble: a name in `SCHEDULES`, or a file of actions. Read only
    if pp > 1."""
    pipeline_runtime: PipelineRuntime = "ultrascale"
    """Runtime that executes the schedule: this package's, or torch.distributed.pipelining. Passes, messages, results and memory
    are the same. Read only if pp > 1."""
    layers_per_stage: tuple[int, ...] | None = None
    """Decoder blocks in each of the pp * virtual_stages stages, in the model's order. None: split as evenly as possible."""
    ep: int = 1
    """Expert-parallel degree: groups of ranks that share the experts."""
    expert_tp: int = 1
    """Tensor-parallel degree of the experts: ranks that shard each expert's GEMMs."""
    partition_checkpoints: bool = False
    """Each rank of tp saves its own positions of the input of a fully recomputed block, which is all-gathered in the backward
    pass. For tp without sequence parallelism, which shards that input already."""
    mlp_chunks: int = 1
    """Chunks of a micro-batch's tokens in dense feed-forward layers, in the forward pass and, recomputed, in the backward
    pass."""
    offload_activations: bool = False
    """Keep activations saved for the backward pass in host memory."""
    offload_optimizer: bool = False
    """Keep and update optimizer state and master parameters in host memory."""

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def axes_words(self) -> str:
        """Axes with a degree above 1, with the schedule of pp and the method of cp: `dp16 tp2 pp2 interleaved x4`, and `tp2
        without sp` without sequence parallelism; empty for one rank."""
        names = {"dp": "dp", "tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep", "expert_tp": "etp"}
        axes = [f"{short}{getattr(self, name)}" for name, short in names.items() if getattr(self, name) > 1]
        if self.tp > 1 and not self.sequence_parallel:
            axes.insert(axes.index(f"tp{self.tp}") + 1, "without sp")
        if self.pp > 1:
            axes.append(f"{self.schedule} x{self.virtual_stages}" if self.virtual_stages > 1 else self.schedule)
        if self.cp > 1:
            swap = self.cp_grid[1]
            axes.append(f"{self.cp_method} {swap}" if 1 < swap < self.cp else self.cp_method)
        return " ".join(axes)

    @property
    def zero_words(self) -> str:
        """`ZeRO 1`; `ZeRO 1/4` if dp has several replicas, each sharded over four ranks."""
        return f"ZeRO {self.zero_stage}" + (f"/{self.shard_size}" if self.zero_stage and self.dp_replicate > 1 else "")

    @property
    def num_stages(self) -> int:
        """Number of stages into which the pipeline splits the model."""
        return self.pp * self.virtual_stages

    @property
    def known_schedule(self) -> KnownSchedule | None:
        """Facts of the pipeline's schedule; None if there is no pipeline, or if its actions come from a file."""
        return SCHEDULES.get(self.schedule) if self.pp > 1 else None

    @property
    def cp_grid(self) -> tuple[int, int]:
        """(positions in the ring, ranks at each position that exchange sequence for heads); rank i of cp is at position i //
        heads."""
        return cp_grid(self.cp, self.cp_method, self.cp_heads)

    @property
    def expert_dp(self) -> int:
        """Expert data-parallel degree: ranks of a pipeline stage that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def expert_shard_size(self) -> int:
        """Ranks that shard one copy of an expert's training state: at most as many as for other weights."""
        return 1 if self.zero_stage == 0 else gcd(self.expert_dp, self.shard_size * self.cp)

    def group(self, axis: Axis) -> tuple[int, int]:
        """(size, stride) of a group of ranks: its members are `stride` apart.

        dp: all ranks that reduce one gradient, cp included; shard and replicate: its subgroups that shard, and replicate, the
        training state; pp: two neighbours; expert_dp: the ranks that reduce one expert's gradient; expert_shard: its subgroup
        that shards the training state.
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
            "expert_shard": (self.expert_shard_size, self.ep * self.expert_tp),
        }[axis]

    @property
    def shard_size(self) -> int:
        """Ranks that shard one copy of the training state."""
        if self.dp_shard is not None:
            return self.dp_shard
        return 1 if self.zero_stage == 0 else self.dp

    @property
    def dp_replicate(self) -> int:
        """Number of replicas of the training state."""
        return self.dp // self.shard_size

    @property
    def master_dtype(self) -> Precision:
        """Dtype of parameters between steps, of accumulated gradients, and of optimizer state."""
        return "fp64" if self.precision == "fp64" else "fp32"

    @property
    def gradient_reduce_dtype(self) -> Precision:
        return self.reduce_dtype or self.master_dtype

    def block_recompute(self, layer: int) -> BlockRecompute | None:
        """Recomputation of block `layer` (counted from zero) in its backward pass; None if nothing is recomputed."""
        assert self.recompute != "auto", "auto is resolved first: plan.recompute_choice"
        if self.recompute == "blocks":
            modes = modes_of(self.recompute_blocks)
            return parse_mode(modes[min(layer, len(modes) - 1)])  # multi-token prediction blocks: as the last block
        if self.recompute == "every-k":
            return FULL if layer % self.recompute_every == 0 else None
        return parse_mode(self.recompute)

    def is_fully_recomputed(self, layer: int) -> bool:
        """True if block `layer` (counted from zero) is recomputed as a whole in the backward pass."""
        recomputation = self.block_recompute(layer)
        return recomputation is not None and recomputation.whole

    def problems(self) -> list[Problem]:
        """Every broken rule, with keys relative to `layout`."""
        rule_problems: list[Problem] = []
        for key, (low, high) in RANGES.items():
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                rule_problems.append(
                    Problem(f"layout.{key}", f"must be from {low} to {high}, is {value}", "Give a number in this range.")
                )
        if rule_problems:
            return rule_problems
        return [
            *self._data_problems(), *self._recompute_problems(), *self._precision_problems(), *self._tensor_problems(),
            *self._context_problems(), *self._pipeline_problems(), *self._expert_problems(),
        ]  # fmt: skip

    def _data_problems(self) -> Iterator[Problem]:
        if self.dp_shard is None:
            return
        if self.dp % self.dp_shard:
            rule = f"must divide dp = {self.dp}, is {self.dp_shard}"
            yield Problem("layout.dp_shard", rule, f"Choose one of {[*divisors(self.dp)]}, or leave it out.")
        if self.zero_stage == 0 and self.dp_shard != 1:
            rule = f"ZeRO stage 0 cuts nothing, but dp_shard is {self.dp_shard}"
            yield Problem("layout.dp_shard", rule, "Leave it out, or set zero_stage to 1, 2 or 3.")

    def _recompute_problems(self) -> Iterator[Problem]:
        budget, blocks = self.recompute_budget, self.recompute_blocks
        if budget is not None and self.recompute != "auto":
            rule = f'is read with recompute = "auto" only, but that is "{self.recompute}"'
            yield Problem("layout.recompute_budget", rule, 'Leave it out, or set layout.recompute = "auto".')
        elif budget is not None and budget < 1:
            yield Problem("layout.recompute_budget", f"must be a number of bytes above 0, is {budget}", 'Such as "20GiB".')
        if (self.recompute == "blocks") != bool(blocks):
            rule = "is empty" if not blocks else f'is read with recompute = "blocks" only, but that is "{self.recompute}"'
            remedy = 'Write ["selective+mlp x 20", "none x 12"]' if not blocks else 'Set layout.recompute = "blocks"'
            yield Problem("layout.recompute_blocks", rule, f'{remedy}, or let recompute = "auto" choose.')
        if self.partition_checkpoints and (self.tp == 1 or self.sequence_parallel):
            why = "there is one rank of tp" if self.tp == 1 else "with sequence parallelism a block's input is cut already"
            yield Problem("layout.partition_checkpoints", f"has nothing to cut: {why}", "Leave it out.")
        elif self.partition_checkpoints and self.recompute not in ("full", "every-k", "auto", "blocks"):
            rule = f'cuts inputs of blocks that are computed again as a whole, but layout.recompute is "{self.recompute}"'
            yield Problem("layout.partition_checkpoints", rule, 'Leave it out, or set layout.recompute = "full".')
        if self.recompute not in ("every-k", "auto", "blocks"):
            try:
                parse_mode(self.recompute)
            except ValueError as error:
                choices = f"none, selective, full, every-k, auto, blocks, or of {', '.join(MODULES)}, joined by +"
                yield Problem("layout.recompute", str(error), f"Choose one of {choices}.")
        try:
            modes_of(blocks)
        except ValueError as error:
            yield Problem("layout.recompute_blocks", str(error), 'Such as ["full x 4", "selective+mlp x 20", "none x 8"].')

    def _precision_problems(self) -> Iterator[Problem]:
        if self.precision == "fp64" and self.reduce_dtype not in (None, "fp64"):
            rule = f"must be fp64 when precision is, is {self.reduce_dtype}"
            yield Problem("layout.reduce_dtype", rule, "Leave it out.")
        if not 0 <= self.fp8_keep_blocks <= RANGES["micro_batch_size"][1]:
            yield Problem("layout.fp8_keep_blocks", f"must be at least 0, is {self.fp8_keep_blocks}", "Give 0 or more.")
        if not 1 <= self.fp8_amax_history_len <= LONGEST_HISTORY:
            rule = f"must be from 1 to {LONGEST_HISTORY} steps, is {self.fp8_amax_history_len}"
            yield Problem("layout.fp8_amax_history_len", rule, "16 is usual, 1024 Transformer Engine's.")
        if self.precision == "fp32" and self.reduce_dtype == "fp64":
            yield Problem("layout.reduce_dtype", "is wider than the gradients, fp32", "Leave it out.")
        if self.reduce_dtype == "fp16" and self.precision != "fp16":
            rule = f"sums of gradients in fp16 overflow without loss scaling, which precision = {self.precision} has not"
            yield Problem("layout.reduce_dtype", rule, "Use bf16, or leave it out.")
        if self.reduce_dtype in NARROW:
            yield Problem(
                "layout.reduce_dtype",
                f"sums of gradients in {self.reduce_dtype} lose most of them",
                "Use bf16, or leave it out.",
            )

    def _tensor_problems(self) -> Iterator[Problem]:
        if self.tp_overlap and not self.sequence_parallel:
            rule = "has no effect without sequence_parallel: sums that are not scattered leave nothing to begin with"
            yield Problem("layout.tp_overlap", rule, "Leave it out, or set sequence_parallel.")

    def _context_problems(self) -> Iterator[Problem]:
        swaps = [n for n in range(2, self.cp) if self.cp % n == 0]
        if self.cp_method != "ring+all-to-all":
            if self.cp_heads > 1:
                rule = f'is read with cp_method = "ring+all-to-all" only, is {self.cp_heads}'
                yield Problem("layout.cp_heads", rule, "Leave it out, or choose that method.")
        elif self.cp > 1 and self.cp_heads not in swaps:
            rule = f"must divide cp = {self.cp} and be neither 1 (ring) nor cp (all-to-all), is {self.cp_heads}"
            remedy = f"Choose one of {swaps}." if swaps else 'Use cp_method = "ring" or "all-to-all".'
            yield Problem("layout.cp_heads", rule, remedy)

    def _pipeline_problems(self) -> Iterator[Problem]:
        if self.schedule not in SCHEDULES and not self.schedule.endswith(SCHEDULE_FILES):
            nearest = get_close_matches(self.schedule, SCHEDULES, n=1)
            rule = f"must be one of {', '.join(SCHEDULES)}, or a file ({', '.join(SCHEDULE_FILES)}), is {self.schedule!r}"
            remedy = f"Did you mean {nearest[0]!r}?" if nearest else f"{USUAL} is usual."
            yield Problem("layout.schedule", rule, remedy)
        elif self.pp > 1 and (problem := self._virtual_stages_problem()):
            yield Problem("layout.virtual_stages", *problem)
        if (known := self.known_schedule) and known.even_ranks and self.pp % 2:
            rule = f"must be even for {known.name}, which pairs ranks from both ends, is {self.pp}"
            yield Problem("layout.pp", rule, f'Use {self.pp - 1} or {self.pp + 1}, or schedule = "{known.inferior_to}".')
        layers = self.layers_per_stage
        if layers is not None and (len(layers) != self.num_stages or min(layers) < 0 or min(layers[1:-1], default=1) < 1):
            stages = f"pp x virtual_stages = {self.num_stages} stages"
            rule = f"must name a number for each of {stages}, above 0 but at the ends, is {list(layers)}"
            yield Problem("layout.layers_per_stage", rule, "Change it, or leave it out for an even cut.")

    def _virtual_stages_problem(self) -> tuple[str, str] | None:
        if (known := self.known_schedule) is None:
            return None  # a file defines which stages each rank holds
        required, virtual_stages = known.virtual_stages, self.virtual_stages
        if required is None:
            remedy = f'Use 2 or more, or schedule = "{USUAL}".'
            return None if virtual_stages >= 2 else (f"must be at least 2 for {self.schedule}, is {virtual_stages}", remedy)
        better = SCHEDULES.get(known.inferior_to)
        other = better.name if better and better.virtual_stages == virtual_stages else schedule_for(virtual_stages)
        remedy = f'Use {required}, or schedule = "{other}".'
        return None if virtual_stages == required else (f"must be {required} for {self.schedule}, is {virtual_stages}", remedy)

    def _expert_problems(self) -> Iterator[Problem]:
        ranks, expert_ranks = self.tp * self.cp * self.dp, self.ep * self.expert_tp
        if ranks % expert_ranks:
            choices = [n for n in range(1, min(ranks, MOST_NAMED) + 1) if ranks % (n * self.expert_tp) == 0]
            remedy = f"Choose one of {choices}." if choices else f"expert_tp = {self.expert_tp} must divide it alone."
            yield Problem("layout.ep", f"ep x expert_tp = {expert_ranks} must divide tp x cp x dp = {ranks}", remedy)
