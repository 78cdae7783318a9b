"""Known pipeline schedules, one row each: the facts that rules, planner, trainer, check and page need.

Its order of passes is a function of `schedules.kinds`; a new schedule is such a function and a row here.

    placement         stages of rank r of p                                        copies of the weights
    around            r, p + r, 2p + r, ...                                        1
    there and back    r and 2p - 1 - r, a V: the loss is where the tokens are      1
    both ends         r and p - 1 - r, each for half of the micro-batches          2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placement = Literal["around", "there and back", "both ends"]


@dataclass(frozen=True)
class KnownSchedule:
    """Facts of one schedule."""

    name: str
    title: str
    paper: str
    builder: str
    """File of `schedules.kinds`, and its function."""
    virtual_stages: int | None = 1
    """Virtual pipeline stages per rank; None: two or more, and the builder takes the number."""
    placement: Placement = "around"
    splits_backward: Literal["", "all", "ends"] = ""
    """Backward passes that are split into input gradients (I) and weight gradients (W): none, all, or those that fill and drain
    two streams."""
    pairs: bool = False
    """True if a forward pass runs beside the backward pass of another micro-batch."""
    forward_first: bool = False
    """True if all forward passes precede the first backward pass."""
    in_rounds: bool = False
    """True if micro-batches pass through a rank's stages in rounds of as many as there are ranks, or a few more
    (`kinds.interleaved`)."""
    warm_up: int = 1
    """Micro-batches per rank within which the schedule fills and drains; between them it repeats itself."""
    aliases: tuple[str, ...] = ()
    """Names in papers and in other frameworks."""
    pattern: str = ""
    """Pattern of the names in published runs; if several match, the last row counts."""
    torch: str = ""
    """Name in torch.distributed.pipelining, without `Schedule`."""
    inferior_to: str = ""
    """A schedule that is at least as fast in no more memory, so that searches leave this one out; `because` gives the
    reason."""
    because: str = ""

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return 2 if self.placement == "both ends" else 1

    @property
    def even_ranks(self) -> bool:
        """True if the number of ranks must be even."""
        return self.placement == "both ends"

    @property
    def fills_from(self) -> int:
        """Micro-batches per rank below which a pipeline is never full; 0: no such limit."""
        return 0 if self.placement == "around" else 2

    @property
    def round_actions(self) -> int:
        """Actions of a rank while one micro-batch enters a full pipeline, or one from each end."""
        passes = 1 if self.pairs else 3 if self.splits_backward == "all" else 2
        return passes * (self.virtual_stages or 1) * self.copies

    def stages_a_rank(self, virtual_stages: int) -> int:
        """Stages that a micro-batch passes on a rank; `virtual_stages` if any number is allowed."""
        return self.virtual_stages or virtual_stages

    def stages_of_ranks(self, pp: int, num_stages: int) -> list[list[int]]:
        """Stages held by each rank."""
        if pp == 1 or self.placement == "around":
            return [list(range(rank, num_stages, pp)) for rank in range(pp)]
        return [[rank, num_stages - 1 - rank] for rank in range(pp)]


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        KnownSchedule(
            "1f1b", "one forward, one backward", "Narayanan et al. 2021, PipeDream-flush", "one_f_one_b",
            pattern="1f1b", torch="1F1B",
        ),
        KnownSchedule(
            "afab", "all forward, all backward (GPipe)", "Huang et al. 2018", "afab", forward_first=True,
            aliases=("gpipe",), pattern=r"gpipe|\bafab", torch="GPipe",
            inferior_to="1f1b", because="has the same bubble and holds fewer micro-batches",
        ),
        KnownSchedule(
            "interleaved", "interleaved 1F1B", "Narayanan et al. 2021, section 2.2", "interleaved", None, in_rounds=True,
            aliases=("1f1b-interleaved",), pattern="interleav", torch="Interleaved1F1B",
        ),
        KnownSchedule("breadth-first", "breadth-first", "Lamy-Poirier 2022", "breadth_first", None, forward_first=True),
        KnownSchedule(
            "zb-h1", "zero bubble H1", "Qi et al. 2023", "zb_h1", splits_backward="all", warm_up=2,
            aliases=("zero-bubble",), pattern="zb|zero.?bubble",
        ),
        KnownSchedule(
            "zb-v", "zero bubble V", "Qi et al. 2024", "zb_v", 2, "there and back", splits_backward="all", warm_up=2,
            aliases=("zbv",), pattern="zb-?v", torch="ZBVZeroBubble",
        ),
        KnownSchedule(
            "dualpipe", "DualPipe", "DeepSeek-V3 2024, section 3.2.1", "dualpipe", 1, "both ends",
            splits_backward="ends", pairs=True, warm_up=3, pattern="dualpipe",
            inferior_to="dualpipe-v", because="holds the weights once, for a bubble of half a pass more",
        ),
        KnownSchedule(
            "dualpipe-v", "DualPipeV", "DeepSeek 2025", "dualpipe_v", 2, "there and back",
            splits_backward="ends", pairs=True, warm_up=3, aliases=("dualpipev",), pattern="dualpipe-?v", torch="DualPipeV",
        ),
    )
}  # fmt: skip
"""Schedules by name. If several are suitable, the first is chosen."""
USUAL = next(iter(SCHEDULES))
SCHEDULE_ALIASES = {
    alias: schedule.name
    for schedule in SCHEDULES.values()
    for alias in (*schedule.aliases, schedule.torch.lower())
    if alias not in ("", schedule.name)
}
"""Schedule names by the names in papers and in other frameworks."""
SCHEDULE_FILES = (".csv", ".json")
"""File extensions of schedules given as actions."""


def schedule_for(virtual_stages: int, placement: Placement = "around") -> str:
    """Default schedule of ranks with this many stages."""
    wanted_stages = virtual_stages if virtual_stages == 1 or placement != "around" else None
    return next(
        name
        for name, schedule in SCHEDULES.items()
        if (schedule.virtual_stages, schedule.placement) == (wanted_stages, placement)
    )
