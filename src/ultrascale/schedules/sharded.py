"""ZeRO's collectives in the list of a pipeline rank: the rules of `accumulate` applied to any order of passes.

    stage 0, 1   gradients of a stage accumulate locally, and are reduced in its last B or W; parameters gathered once
    stage 2      gradients sharded in every B or W (less memory, more traffic); parameters gathered once
    stage 3      parameters also gathered for every F, B and I (in the first stage, which does all in W, for W)

I reduces nothing: some weight gradients are computed only in W. The planner counts the same (`plan.time.data_traffic`,
`plan.columns.rank_state`). For stages 2 and 3, reducing only once a step would be stage 1, in traffic and memory: choose stage
1 for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ultrascale.schedules.actions import Action, Kind

FINISHES = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
"""Passes after which a micro-batch's gradients of a stage are complete."""


def sharded(actions: Sequence[Action], zero_stage: int, reduces_from: int = 2) -> list[Action]:
    """Actions of one rank, annotated with what to do with gradients and gathered parameters; `reduces_from` as in
    `accumulate`."""
    passes_left = Counter(part.stage for action in actions for part in action.parts if part.kind in FINISHES)

    def with_flags(part: Action) -> Action:
        finishes = part.kind in FINISHES
        passes_left[part.stage] -= finishes
        is_last = finishes and not passes_left[part.stage]
        return Action(
            *part[:3],
            reduce_gradients=is_last or (finishes and zero_stage >= reduces_from),
            sum_replicas=is_last,
            keep_parameters=zero_stage < 3 and not is_last,
        )

    return [_joined([with_flags(part) for part in action.parts]) for action in actions]


def _joined(parts: list[Action]) -> Action:
    return parts[0] if len(parts) == 1 else parts[0]._replace(overlapped_with=parts[1])
