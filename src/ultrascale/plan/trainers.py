"""Which layouts a trainer can run at all: the axes, ZeRO stages, schedules and ways to recompute of each stack.

`spec.stack` says what a program keeps in memory and hides behind computation; this table says what it lets one ask for. A
search for a stack stays inside it. Read off each trainer's arguments (versions of 2025 and 2026); `plan.flags` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.recomputed import MODULES, OURS_ALONE
from ultrascale.spec.stack import STACKS, Stack


@dataclass(frozen=True)
class Abilities:
    """What one trainer can be asked for."""

    zero_stages: tuple[int, ...]
    zero_stages_with_pipeline: tuple[int, ...] = ()
    hybrid_stages: tuple[int, ...] = ()
    """ZeRO stages whose state can be cut over a part of the data-parallel ranks, and repeated by the others."""
    tensor: bool = True
    cp_methods: tuple[str, ...] = ()
    """Empty: no context parallelism."""
    cp_alone: bool = False
    """Context parallelism goes with neither tensor parallelism nor a pipeline."""
    schedules: tuple[str, ...] = ()
    """Empty: no pipeline."""
    experts: bool = False
    expert_tensor: bool = False
    recompute: tuple[str, ...] = ("none", "full")
    modules: frozenset[str] = frozenset()
    """Parts of a block that can be recomputed by their names (`spec.recomputed.MODULES`)."""
    any_micro_batches: bool = False
    """Interleaved pipelines run any number of micro-batches; else they want a multiple of pp."""
    equal_stages: bool = False
    """All stages but the last hold as many layers: a number of layers a stage is what can be asked for."""
    cp_pieces: int = 1
    """Of one length, that a rank holds of a sequence: 2 where an early and a late one must be as long."""

    def cuts(self, num_layers: int, num_stages: int) -> bool:
        """Whether so many layers can be cut into so many stages."""
        return not self.equal_stages or -(-num_layers // -(-num_layers // num_stages)) == num_stages

    @property
    def every_zero_stage(self) -> tuple[int, ...]:
        """With or without a pipeline."""
        return tuple(sorted({*self.zero_stages, *self.zero_stages_with_pipeline}))

    @property
    def hybrid(self) -> bool:
        return bool(self.hybrid_stages)


BOTH = "ring+all-to-all"
ABILITIES: dict[str, Abilities] = {
    "ultrascale": Abilities(
        (0, 1, 2, 3), (0, 1, 2, 3), (1, 2, 3), True, ("ring", "all-gather", "all-to-all", BOTH), False,
        ("1f1b", "afab", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"), True, True,
        ("none", "selective", "full", "every-k"), frozenset(MODULES), any_micro_batches=True,
    ),
    # fully_shard always: reshard_after_forward "never" is stage 2, "always" 3. In pipelines torch reduces gradients once a
    # step, and parameters stay whole unless told otherwise: stage 1.
    "torchtitan": Abilities(
        (2, 3), (1,), (1, 2, 3), True, ("ring", "all-gather"), False,
        ("1f1b", "afab", "interleaved", "zb-v", "dualpipe-v"), True, True, ("none", "selective", "full", "every-k"),
        equal_stages=True, cp_pieces=2,
    ),
    # --use-distributed-optimizer is stage 1; --num-distributed-optimizer-instances makes it hybrid.
    "megatron": Abilities(
        (0, 1), (0, 1), (1,), True, ("ring", "all-gather", "all-to-all", BOTH), False, ("1f1b", "interleaved"), True, True,
        ("none", "selective", "full"), frozenset(MODULES) - OURS_ALONE, cp_pieces=2,
    ),
    "nanotron": Abilities((0, 1), (0, 1), (), True, (), False, ("1f1b", "afab"), True, False, ("none", "full")),
    # Composer's FSDP: NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD.
    "llm-foundry": Abilities((0, 2, 3), (), (2, 3), False, (), False, (), False, False, ("none", "full")),
    # Megatron-DeepSpeed: its pipeline runs with ZeRO 0 and 1; Ulysses, the all-to-all form of context parallelism, asserts that
    # tensor and pipeline parallelism are 1; MiCS cuts over a part of the ranks at stage 3 alone.
    "deepspeed": Abilities(
        (0, 1, 2, 3), (0, 1), (3,), True, ("all-to-all",), True, ("1f1b",), True, False, ("none", "full"),
    ),
}  # fmt: skip


def abilities(stack: Stack) -> Abilities:
    """What `stack` can run; a stack of one's own can run everything."""
    return ABILITIES.get(stack.name, ABILITIES["ultrascale"])


def stack_called(name: str) -> Stack:
    """The stack of this name. Raises SpecError with the names of those whose abilities are known."""
    if name in ABILITIES:
        return STACKS[name]
    raise SpecError([Problem("stack", f"there is no trainer called {name!r}", f"Choose one of {', '.join(ABILITIES)}.")])
