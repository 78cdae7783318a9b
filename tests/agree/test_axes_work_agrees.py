"""The table of work against one rank of tp, cp and ep: FLOPs of every product, and every byte that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import torch
from agree.axes import Case, RankStep
from agree.layouts import EXPERTS, MODEL
from agree.test_work_agrees import bytes_the_table_keeps
from ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ultrascale.description.layout import Layout
from ultrascale.parallel.data.data_parallel import sharded_modules
from ultrascale.plan.memory.replay import rank_shape
from ultrascale.work.work import block_work, work

Sizes = Sequence[int]
OPS = torch.ops.ultrascale
RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


def _columns(hidden: Sizes, weights: list[Sizes], *rest: Any, out_shape: list[Sizes], **options: Any) -> int:
    return sum(2 * prod(out) * hidden[-1] for out in out_shape)


def _columns_backward(
    grads: list[Sizes], hidden: Sizes, weights: list[Sizes], group: str, length: int, want: bool, **options: Any
) -> int:
    return (1 + want) * sum(2 * prod(grad) * hidden[-1] for grad in grads)


def _row(inner: Sizes, weight: Sizes, *rest: Any, **options: Any) -> int:
    return 2 * prod(inner) * weight[0]


def _grouped(left: Sizes, right: Sizes, *rest: Any, **options: Any) -> int:
    return 2 * left[0] * left[1] * right[-1]


COUNTED = {
    OPS.column_products: _columns, OPS.column_products_backward: _columns_backward, OPS.row_product: _row,
    torch.ops.aten._grouped_mm: _grouped,
}  # fmt: skip
"""What FlopCounterMode does not know: operations of ours that it does not look into, from the shapes they are called with."""


def work_of(rank: int, cases: list[Case]) -> list[tuple[int, int]]:
    """FLOPs of one micro-batch on a rank, attention's left out, and the bytes that its forward pass saves."""
    found = []
    for case in cases:
        step = RankStep(case, rank)
        (batch,) = step.batches()
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
            step.train([batch])
        attention = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
        found.append((counter.get_total_flops() - attention, _saved_bytes(step, batch)))
    return found


def _saved_bytes(step: RankStep, batch: Any) -> int:
    """Of distinct storages, without parameters, gathered or not, and the batch."""
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.passes.forward(batch)
    assert loss.requires_grad
    tensors = [*_parameters(step), *(one for one in vars(batch).values() if isinstance(one, torch.Tensor))]
    not_counted = {one.untyped_storage()._cdata for one in tensors}
    return sum(storage.nbytes() for key, storage in kept.items() if key not in not_counted)


def _parameters(step: RankStep) -> Iterator[torch.Tensor]:
    for stage in step.share.stages.values():
        yield from stage.parameters()
        for module in sharded_modules(stage):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from (one._unsharded_param for one in group.fsdp_params)


def planned_flops(case: Case) -> int:
    """Of the table; FlopCounterMode does not count `addmm_`, which sums the gradient of the head."""
    model, layout = case.model, case.layout
    shape = rank_shape(layout, case.length, documents=False, device="cpu")
    total = sum(op.flops + op.backward_flops for _, op in work(model, shape) if op.kind != "attention")
    for layer in range(model.num_hidden_layers):
        if layout.is_fully_recomputed(layer):
            ops = block_work(model, layer, shape)
            # A product of tp is one operation with its sum, and torch stops behind it; so it is with rows of experts.
            whole = layout.tp > 1 or model.is_moe(layer)
            total += sum(op.flops for op in (ops if whole else ops[:-2]) if op.kind == "matmul")
    vocabulary = -(-model.vocab_size // layout.tp)
    return total - 2 * shape.num_tokens * vocabulary * model.hidden_size


def test_flops_and_saved_bytes_of_a_rank_are_those_of_the_table() -> None:
    dense = [
        Case(MODEL, replace(cut, micro_batch_size=2, recompute=recompute), num_micro_batches=1)
        for recompute in RECOMPUTE
        for cut in (Layout(tp=2), Layout(tp=2, sequence_parallel=False), Layout(cp=2), Layout(cp=2, cp_method="all-to-all"))
    ]
    experts = [
        Case(EXPERTS, replace(cut, micro_batch_size=2), num_micro_batches=1)
        for cut in (
            Layout(tp=2),
            Layout(tp=2, sequence_parallel=False),
            Layout(tp=2, expert_tp=2),
            Layout(tp=2, ep=2),
            Layout(dp=2, ep=2),
        )
    ]
    by_rank = run_ranks(2, work_of, [*dense, *experts], timeout_seconds=120)
    for index, case in enumerate([*dense, *experts]):
        flops = [rows[index][0] for rows in by_rank]
        # Of experts a rank has what was chosen; all ranks together have what is planned.
        assert sum(flops) == 2 * planned_flops(case), str(case)
        if case.layout.recompute == "none":
            shape = rank_shape(case.layout, case.length, documents=False, device="cpu")
            saved = [rows[index][1] for rows in by_rank]
            assert sum(saved) == 2 * bytes_the_table_keeps(case.model, shape), str(case)
