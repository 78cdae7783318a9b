"""Which operations of a block run a second time, in its backward pass."""

from __future__ import annotations

from ultrascale.spec.layout import Layout
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
    run = ops[: last + stops_behind]
    if again.whole:
        return list(run)
    sums = {name for op in ops if op.kept(again.kinds) for name in op.reads}
    return [op for op in run if not op.kept(again.kinds) and not (op.makes_partial_sums and op.makes[0].name in sums)]
