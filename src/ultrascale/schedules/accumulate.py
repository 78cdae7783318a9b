"""Gradient accumulation on one pipeline stage: F0 B0 F1 B1 ..., and where ZeRO's collectives run.

    stage 0, 1   F0k B0k   F1k B1k   F2k B2rs    gradients accumulate locally, reduced once; parameters gathered once
    stage 2      F0k B0rk  F1k B1rk  F2k B2rs    gradients sharded at once (less memory, more traffic); gathered once
    stage 3      F0  B0r   F1  B1r   F2  B2rs    parameters also gathered for every pass of every layer

(r: reduce-scatter gradients over dp_shard; s: and sum them over dp_replicate; k: keep gathered parameters.) Over m
micro-batches of P parameters on n ranks, a rank sends about P (n-1)/n elements for every all-gather and every reduce-scatter:
stage 1 has one of each, stage 2 one gather and m reductions, stage 3 2m gathers and m reductions. Source: Rajbhandari et al.
2020, section 7; playbook, "ZeRO".
"""

from __future__ import annotations

from ultrascale.schedules.actions import Action, Kind


def accumulate(num_micro_batches: int, zero_stage: int, reduces_from: int = 2) -> list[Action]:
    """Actions of one training step of one rank. `reduces_from`: lowest ZeRO stage that reduces after every micro-batch.

    Raises ValueError if there is no micro-batch or the stage is not 0, 1, 2 or 3.
    """
    if num_micro_batches < 1:
        raise ValueError(f"a step needs at least one micro-batch, got {num_micro_batches}")
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO stages are 0, 1, 2 and 3, got {zero_stage}")
    actions: list[Action] = []
    for index in range(num_micro_batches):
        last = index == num_micro_batches - 1
        keep = zero_stage < 3
        actions.append(Action(Kind.FORWARD, index, keep_parameters=keep))
        backward = Action(
            Kind.BACKWARD,
            index,
            reduce_gradients=last or zero_stage >= reduces_from,
            sum_replicas=last,
            keep_parameters=keep and not last,
        )
        actions.append(backward)
    return actions
