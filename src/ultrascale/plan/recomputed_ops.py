"""Which operations of a block run a second time, in its backward pass."""

from __future__ import annotations

from ultrascale.plan.stage_work import EXPERTS
from ultrascale.spec.layout import Layout
from ultrascale.spec.op_builders import is_fp8
from ultrascale.spec.ops import Op
from ultrascale.spec.recomputed import Again


def computed_again(layout: Layout, layer: int | None, ops: tuple[Op, ...], *, stops_behind: bool) -> list[Op]:
    """Those of block `layer` (None: not a block) that `layout` runs again.

    `stops_behind`: the last operation that saves something is run too, as one that autograd sees whole; torch stops before a
    plain product, whose input is all it keeps.
    """
    again = None if layer is None else layout.again(layer)
    return [] if again is None else again_of(again, ops, stops_behind=stops_behind)


def again_of(again: Again, ops: tuple[Op, ...], *, stops_behind: bool) -> list[Op]:
    """The same by what a block computes again."""
    last = max(index for index, op in enumerate(ops) if op.saves)
    run = ops[: last + (stops_behind or bool(ops[last].inside))]
    if again.whole:
        return list(run)
    sums = {name for op in ops if op.kept(again.kinds) for name in op.reads}
    return [op for op in run if not op.kept(again.kinds) and not (op.makes_partial_sums and op.makes[0].name in sums)]


def sent_again(layout: Layout, layer: int | None, ops: tuple[Op, ...]) -> list[Op]:
    """Operations of block `layer` whose messages recomputation repeats: up to the last that saves something, with the sum that
    it is one with; or those whose results selective recomputation does not keep."""
    again = None if layer is None else layout.again(layer)
    if again is None:
        return []
    last = max(index for index, op in enumerate(ops) if op.saves)
    run = ops[: last + 1 + ops[last].makes_partial_sums]
    if again.whole:
        return list(run)
    made_again = [op for op in run if op.again_kind in again.kinds]
    read = {name for op in made_again for name in op.reads}
    return [op for op in run if op in made_again or op.name == "mlp.expert_gather"
            or op.kind == "router" or any(item.axis == "cp" for item in op.collectives)
            or ((op.kind == "gather" or op.makes_partial_sums) and op.makes[0].name in read)]  # fmt: skip


def adds_bias_apart(op: Op) -> bool:
    """Whether a product's bias is added by an operation of its own: then selective recomputation keeps the product without it,
    beside the sum that the next operation reads. So with experts and in fp8; elsewhere a bias is part of the product."""
    is_apart = op.name.startswith(EXPERTS) or is_fp8(op)
    return op.kind == "matmul" and is_apart and any(name.endswith(".bias") for name in op.weights)
