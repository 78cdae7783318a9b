"""Attention over several ranks equals attention on one, in results and gradients, and sends no more than it says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from parallel.context_cases import BATCH, HEADS, WIDTH, Case, errors_of, masks_and_heads
from ranks import run_ranks
from torch.distributed.utils import _recursive_to

from ultrascale.description.layout import Layout
from ultrascale.parallel.context import context_attention, context_gather, context_masks, context_ring, context_swap
from ultrascale.parallel.context import context_parallel as context
from ultrascale.parallel.context.context_masks import ContextMask, Documents, context_mask, document_rows, whole_documents
from ultrascale.parallel.context.context_parallel import ContextParallel
from ultrascale.parallel.context.context_ring import Messages, RingGradients
from ultrascale.parallel.tags import Tag
from ultrascale.work.sharding.context_order import ring_order, span, views


def worst(found: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """The largest error of each case over ranks and results."""
    return {name: max(max(errors[name].values()) for errors in found) for name in found[0]}


@pytest.mark.parametrize(
    ("world", "method", "cp_heads"),
    [
        (2, "ring", 1), (3, "ring", 1), (4, "ring", 1), (2, "all-gather", 1), (3, "all-gather", 1), (2, "all-to-all", 1),
        (4, "all-to-all", 1), (4, "ring+all-to-all", 2),
    ],
)  # fmt: skip
def test_every_method_is_exact_under_every_mask(world, method, cp_heads):
    found = worst(run_ranks(world, errors_of, masks_and_heads(method, cp_heads)))
    assert {name: error for name, error in found.items() if not error < 1e-13} == {}


UNUSUAL = {
    "sinks": Case(sinks=True),
    "sinks and documents": Case(sinks=True, documents=True),
    "sinks, gathered": Case("all-gather", sinks=True, window=4),
    "sinks, swapped": Case("all-to-all", sinks=True),
    "narrow values": Case(value_width=4, documents=True),
    "narrow values, swapped": Case("all-to-all", value_width=4),
    "one group": Case("all-to-all", groups=1),
    "a window of one": Case(window=1),
    "a window longer than the sequence": Case(window=99),
    "two tokens": Case(length=2),
    "five tokens in documents": Case(length=5, documents=True),
}


def test_sinks_narrow_values_and_short_sequences_are_exact_too():
    found = worst(run_ranks(2, errors_of, UNUSUAL))
    assert {name: error for name, error in found.items() if not error < 1e-13} == {}


def test_heads_that_ranks_do_not_share_evenly_are_sent_to_all_that_read_them():
    assert context_swap._heads_read(heads=12, groups=3, ranks=2) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert context_swap._heads_read(heads=8, groups=2, ranks=4) == [0, 0, 1, 1]
    assert context_swap._heads_read(heads=8, groups=4, ranks=2) is None


def test_fp32_is_as_exact_as_fp32_and_bf16_as_bf16():
    cases = {
        f"{dtype}-{method}": Case(method, dtype=dtype, documents=True, length=96)
        for dtype in (torch.float32, torch.bfloat16)
        for method in ("ring", "all-gather", "all-to-all")
    }
    found = worst(run_ranks(2, errors_of, cases))
    assert all(error < (1e-6 if "float32" in name else 3e-2) for name, error in found.items()), found


def with_collectives() -> None:
    """What runs on CUDA: NCCL's collectives, which gloo has too."""
    context_gather.runs_collectives = lambda key, mask: len(set(mask.lengths)) == 1


def test_gathering_by_collectives_is_exact_too():
    cases = {str(i): Case("all-gather", length=48, documents=bool(i), fault=with_collectives) for i in (0, 1)}
    assert max(worst(run_ranks(3, errors_of, cases)).values()) < 1e-13


def block_by_block() -> None:
    """What long documents get, however short they are."""
    context_masks.PAIRS_OF_A_CALL = 0
    context_masks._blocks.cache_clear()


def test_documents_block_by_block_are_exact_too():
    cases = {
        f"{method}, window {window}, {length}": Case(method, documents=True, window=window, length=length, fault=block_by_block)
        for method in ("ring", "all-gather", "all-to-all")
        for window in (None, 4)
        for length in (31, 48)
    }
    cases |= {"bf16": Case(dtype=torch.bfloat16, documents=True, length=96, fault=block_by_block)}
    found = worst(run_ranks(4, errors_of, cases))
    assert found.pop("bf16") < 3e-2
    assert max(found.values()) < 1e-13, found


def forget_log_sum_exp() -> None:
    context_attention.join = lambda out, lse, part, part_lse: out.lerp_(part, 0.5)


def drop_last_gradient() -> None:
    add = RingGradients.add

    def forgetful(self: RingGradients, distance: int, gradient: torch.Tensor | None) -> None:
        is_last = distance == self.ring.size - 1
        add(self, distance, gradient * 0 if is_last and gradient is not None else gradient)

    RingGradients.add = forgetful


def order_off_by_one() -> None:
    own = context.local_positions
    context.local_positions = lambda rows, layout, rank: own(rows, layout, (rank + 1) % layout.cp)


def window_in_slots() -> None:
    context_masks._positions = lambda rows, place, slots: torch.arange(*slots).expand(len(rows), -1)


def keys_of_the_rank_before() -> None:
    hops = context_ring.RingKeys.hops

    def stale(self: context_ring.RingKeys):  # the second hop works on the first one's keys
        for held in hops(self):
            yield (
                held
                if held is None or not held.first
                else context_ring.KeyValueBlock(held.key.roll(1, 2), held.value, held.first)
            )

    context_ring.RingKeys.hops = stale


FAULTS: dict[str, tuple[Callable[[], None], dict, tuple[str, ...]]] = {
    "a merge forgets the log-sum-exp": (forget_log_sum_exp, {}, ("out", "query", "key", "value")),
    "the last hop's gradient of keys is dropped": (drop_last_gradient, {}, ("key", "value")),
    "the order is off by one rank": (order_off_by_one, {"length": 30}, ("out", "query", "key", "value")),
    "a window is measured in slots": (window_in_slots, {"window": 5}, ("out", "query", "key", "value")),
    "keys are shifted on the way": (keys_of_the_rank_before, {"window": 5}, ("out",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name):
    fault, options, seen_in = FAULTS[name]
    found = run_ranks(3, errors_of, {"broken": Case(fault=fault, **options)})
    largest = {result: max(errors["broken"][result] for errors in found) for result in found[0]["broken"]}
    assert all(largest[result] > 1e-3 for result in seen_in), largest
    if name.startswith("the last hop"):
        assert largest["out"] < 1e-13 and largest["query"] < 1e-13


def messages_of(rank: int, case: Case) -> tuple[int, int]:
    """Elements this rank sends: keys and values forward and backward, and gradients of them."""
    sent = {Tag.KEYS: 0, Tag.KEY_GRADIENTS: 0}
    start = Messages.__init__

    def counting(self: Messages, group, tag, sends, receives) -> None:
        sent[tag] += sum(tensor.numel() for _, tensor in sends)
        start(self, group, tag, sends, receives)

    Messages.__init__ = counting
    errors_of(rank, {"": case})
    return sent[Tag.KEYS], sent[Tag.KEY_GRADIENTS]


def own_elements(world: int, length: int) -> int:
    """Of a rank's keys and values."""
    return 2 * BATCH * (length // world) * 2 * WIDTH


def test_a_causal_ring_sends_a_quarter_less_than_all_keys_to_all():
    sent = run_ranks(4, messages_of, Case(length=32))
    whole = 4 * 3 * own_elements(4, 32)
    assert sum(keys for keys, _ in sent) == 2 * whole * 3 // 4
    # Gradients pick up the halves as they go: each rank's are whole once a rank that sees its late half has added its share.
    assert sum(gradients for _, gradients in sent) <= whole


def test_a_window_ends_the_journey_of_keys_that_are_out_of_reach():
    sent = run_ranks(4, messages_of, Case(length=64, window=2))
    one_position = own_elements(4, 64) // 16
    # The last key of a piece of 8 is seen by the piece after it. Early pieces' go 3 hops, late ones' 1; where both go, as ranks
    # 1 and 2 have it, so does what lies between them, slots 7 to 15. Keys go twice, forward and backward.
    rank_0, rank_1_or_2, rank_3 = 1 + 1 + 1, 9 + 1 + 1, 1
    assert sum(keys for keys, _ in sent) == 2 * one_position * (rank_0 + 2 * rank_1_or_2 + rank_3)


def test_documents_that_are_whole_on_one_rank_send_nothing():
    ids = torch.arange(8).repeat_interleave(8).expand(BATCH, -1)
    mask = context_mask(
        document_rows(ids.numpy(), 2), 0, document_ids=ids, window=None, dtype=torch.float64, device=torch.device("cpu")
    )
    assert [len(blocks) for blocks in mask.hops] == [1, 0]
    assert mask.travels(0, 1) == mask.travels(1, 1) == (0, 0)


def packed(length: int, mean: int, sequences: int = 1) -> torch.Tensor:
    """Ids of documents of random lengths."""
    generator = torch.Generator().manual_seed(length)
    begins = torch.rand(sequences, length, generator=generator) < 1 / mean
    return begins.long().cumsum(1)


def test_long_packed_documents_have_no_masks_and_no_pairs_that_nobody_sees():
    length, ring = 1 << 17, 16
    ids = packed(length, 2000)
    rows = document_rows(ids.numpy(), ring)
    pairs = 0
    for place in (0, 9):
        mask = context_mask(rows, place, document_ids=ids, window=None, dtype=torch.bfloat16, device=torch.device("cpu"))
        blocks = [block for hop in mask.hops for block in hop]
        assert all(block.mask is None for block in blocks)
        sizes = [(b.queries.stop - b.queries.start, b.keys.stop - b.keys.start, b.is_causal) for b in blocks]
        pairs = sum(queries * (queries + 1) // 2 if causal else queries * keys for queries, keys, causal in sizes)
        assert pairs == sum(piece.work for piece in rows[0][place])


@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("mean", [3, 40, 1000])
def test_what_travels_is_what_somebody_sees(window, mean):
    """By all pairs at once, as by one place after the other."""
    rows = document_rows(packed(400, mean, sequences=2).numpy(), 5)
    found = context_masks._needs(rows, window)
    for source, distance in product(range(5), range(5)):
        seen = [view.keys for order in rows for view in views(order[(source - distance) % 5], order[source], window)]
        assert found[source][distance] == span(seen)


def test_what_a_rank_knows_of_documents_stays_where_it_is():
    """FSDP2 takes tensors that a model is called with to the device; here to none, which cannot be read back."""
    ids = packed(64, 9)
    (kept,) = _recursive_to(Documents(ids, 2), torch.device("meta"), False)  # pyright: ignore
    assert whole_documents(kept, 2) == (ids, document_rows(ids.numpy(), 2))


def test_plain_causal_attention_needs_no_mask_and_half_the_square():
    mask = mask_of(rank=1, world=4, length=64)
    areas = [sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks) for blocks in mask.hops]
    assert areas == [16 * 16, 16 * 16 // 2, 16 * 16 // 2, 16 * 16 // 2]
    assert all(block.mask is None for blocks in mask.hops for block in blocks)
    assert [block.is_causal for blocks in mask.hops for block in blocks] == [True, False, False, False]


def mask_of(*, rank: int, world: int, length: int) -> ContextMask:
    rows = (ring_order(length, world),)
    return context_mask(rows, rank, document_ids=None, window=None, dtype=torch.float64, device=torch.device("cpu"))


def saved_bytes(rank: int) -> int:
    assert dist.group.WORLD is not None
    cp = ContextParallel(Layout(cp=2), dist.group.WORLD)
    mask = cp.make_mask(16, 16, document_ids=None, window=None, dtype=torch.float32, device=torch.device("cpu"))
    query, key, value = (torch.randn(1, 16, heads, WIDTH, requires_grad=True) for heads in (HEADS, 2, 2))
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = cp.core(query, key, value, mask)
    out.sum().backward()
    return sum(saved.values())


def test_own_queries_keys_values_the_result_and_a_number_per_row_are_saved_and_no_more():
    row = HEADS * WIDTH + 2 * 2 * WIDTH + HEADS * WIDTH + HEADS
    assert run_ranks(2, saved_bytes) == [16 * row * 4] * 2


def test_slots_that_are_not_this_ranks_are_refused():
    assert dist.is_initialized() is False
    with pytest.raises(ValueError, match="gives this rank 8 of 16 tokens, not 7"):
        one_of_two(Layout(cp=2)).make_mask(
            7, 7, document_ids=torch.zeros(1, 16), window=None, dtype=torch.float32, device=torch.device("cpu")
        )


def one_of_two(layout: Layout) -> ContextParallel:
    class Group:
        def rank(self) -> int:
            return 0

    return ContextParallel(layout, Group())  # pyright: ignore[reportArgumentType]
