"""What a ring of keys sends, as the planner says, beside what the masks of the trainer let travel."""

import pytest
import torch

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.parallel.context.context_masks import NOTHING, Slots, context_mask
from ultrascale.work.ops import Shape
from ultrascale.work.sharding.context_order import ring_order, windowed_masks
from ultrascale.work.work import block_work

LENGTH = 512


def slots(held: Slots) -> int:
    return 0 if held == NOTHING else held[1] - held[0]


@pytest.mark.parametrize("places", [2, 4, 8])
def test_a_causal_ring_sends_the_share_of_keys_and_of_gradients_that_is_planned(places: int) -> None:
    rows = (ring_order(LENGTH, places),)
    cpu = torch.device("cpu")
    mask = context_mask(rows, 0, document_ids=None, window=None, dtype=torch.float32, device=cpu)
    hops = [(source, hop) for source in range(places) for hop in range(1, places)]
    keys = sum(slots(mask.travels(source, hop)) for source, hop in hops)
    gradients = sum(slots(mask.gathered(source, hop)) for source, hop in hops if hop <= mask.last_hop(source))
    whole = (places - 1) * LENGTH
    ops = block_work(preset("llama-3-8b"), 0, Shape(1, LENGTH, cp=places))
    planned = [(one.kind, one.when, one.sent_share) for op in ops for one in op.collectives]
    assert planned == [
        ("all_gather", "forward", keys / whole), ("all_gather", "backward", keys / whole),
        ("reduce_scatter", "backward", gradients / whole),
    ]  # fmt: skip


@pytest.mark.parametrize("places, length", [(1, 512), (2, 512), (3, 511), (4, 509)])
@pytest.mark.parametrize("window", [7, 100, 400])
def test_masks_of_a_window_take_what_is_planned_of_every_place(places: int, length: int, window: int) -> None:
    order = ring_order(length, places)
    elements = []
    for place in range(places):
        mask = context_mask(
            (order,), place, document_ids=None, window=window, dtype=torch.float32, device=torch.device("cpu")
        )  # fmt: skip
        elements.append(sum(block.mask.numel() for hop in mask.hops for block in hop if block.mask is not None))
        assert windowed_masks(length, places, place, window, 1, 4).elements == elements[-1] > 0
    assert windowed_masks(length, places, None, window, 1, 4).elements == max(elements)
