"""Builders of operations that all parts of a block use: GEMMs, norms, sums, and communication between tensor-parallel ranks.

Column-parallel GEMMs read the whole sequence, row-parallel ones produce partial sums (Shoeybi et al. 2019). With sequence
parallelism (Korthikanti et al. 2022) tensors between such regions are sharded along the sequence:

                  before a column-parallel GEMM      after a row-parallel GEMM
    plain         -; all-reduce of the gradient      all-reduce; -
    sequence      all-gather; reduce-scatter         reduce-scatter; all-gather
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW
from ultrascale.work.ops import Activation, Axis, Collective, Hideable, Op, OpKind, Product, Shape

FP8_BYTES, FP8_MULTIPLE = 1, 16
"""Bytes per element in fp8, and the multiple to which GEMM dimensions are zero-padded on CUDA (`kernels.fp8.fp8_matrices`)."""
SCALE_BYTES = 4
HASHED_BYTES, HASH_PASSES = 4, 20
"""Bytes of the hash words that decide what is dropped, and number of memory accesses per word (`kernels.dropout`)."""
SUM_OF_A_PAIR = 2
"""Number of ranks up to which whole tensors are exchanged and added over gloo; more ranks use its all-reduce."""


class GemmInput(NamedTuple):
    """Input of a GEMM, and the part of it that is saved for the weight's gradient."""

    read: str
    saved: tuple[str, ...]
    recomputed_bytes: int = 0
    """Bytes recomputed in the backward pass, for a moment."""
    collectives: tuple[Collective, ...] = ()
    """Communication of the first GEMM that reads it."""
    in_fp8: bool = False
    """True if the saved tensor is in fp8 or narrower."""


def ceil_div(size: int, ranks: int) -> int:
    """Largest of `ranks` parts of `size`."""
    return -(-size // ranks)


def exchanged_bytes(shape: Shape, whole: int) -> int:
    """Temporary bytes while tp ranks sum `whole` bytes, besides it and the result (`parallel.tensor.tensor_traffic`).

    On the CPU: parts from other ranks and copies of the parts sent to them; without parts two ranks send the whole tensor. NCCL
    sends from copies of all parts, and adds whole tensors in place. Parts of a single sequence are contiguous already.
    """
    several = shape.micro_batch_size > 1
    if shape.shards_sequence:
        remote_bytes = whole * (shape.tp - 1) // shape.tp
        return (1 + several) * remote_bytes if shape.device == "cpu" else several * whole
    return whole if shape.device == "cpu" and shape.tp == SUM_OF_A_PAIR else 0


def gathered_scratch_bytes(shape: Shape, whole: int) -> int:
    """Temporary bytes besides `whole` while they are all-gathered over tp: on the CPU parts from other ranks, on CUDA all parts
    by rank if there are several sequences or different lengths."""
    if shape.device == "cpu":
        return whole * (shape.tp - 1) // shape.tp
    return whole if shape.micro_batch_size > 1 or shape.local_length % shape.tp else 0


def linear(
    shape: Shape,
    name: str,
    source: GemmInput,
    make: str,
    columns: int,
    rows: int,
    *,
    num_tokens: int | None = None,
    bias: bool = False,
    weights: tuple[str, ...] = (),
    collectives: tuple[Collective, ...] = (),
) -> Op:
    """GEMM [tokens, columns] x [columns, rows], with this rank's sizes. `weights`: several weights joined in one GEMM."""
    n = shape.num_tokens if num_tokens is None else num_tokens
    names = weights or (name,)
    suffixes = ("weight", "bias") if bias else ("weight",)
    flops, backward_flops = _product_flops(shape, source, n, columns, rows)
    unbiased = (
        n * rows * shape.itemsize if bias and in_own_fp8(shape, source) else 0
    )  # the GEMM result next to its sum with the bias
    room, backward_room = fp8_scratch_bytes(shape, source, n, columns, rows, biased_bytes=unbiased)
    return Op(
        name, "matmul", (source.read,), (Activation(make, n * rows * shape.itemsize),), source.saved,
        tuple(f"{module}.{suffix}" for module in names for suffix in suffixes), flops, backward_flops,
        scratch_bytes=room, backward_scratch_bytes=source.recomputed_bytes + backward_room, product=Product(n, rows, columns),
        collectives=collectives, in_fp8=source.in_fp8,
    )  # fmt: skip


def fp8_multiple(shape: Shape, size: int) -> int:
    """Padded size of the dimension that an fp8 GEMM sums over, or of its result's last dimension."""
    return size if shape.device == "cpu" else ceil_div(size, FP8_MULTIPLE) * FP8_MULTIPLE


def _product_flops(shape: Shape, source: GemmInput, n: int, columns: int, rows: int) -> tuple[int, int]:
    """FLOPs of a GEMM and of its two backward GEMMs, with padding."""
    flops = 2 * n * rows * columns
    if not in_own_fp8(shape, source):
        return flops, 2 * flops
    whole_n, whole_columns, whole_rows = (fp8_multiple(shape, size) for size in (n, columns, rows))
    forward = 2 * n * whole_rows * whole_columns  # that of dx has the same sizes
    return forward, forward + 2 * rows * whole_n * whole_columns


def in_own_fp8(shape: Shape, source: GemmInput) -> bool:
    """True if a GEMM that reads `source` is in fp8, by our own code."""
    return shape.kernels.own_fp8 and source.in_fp8


def fp8_scratch_bytes(
    shape: Shape, source: GemmInput, n: int, columns: int, rows: int, *, experts: int = 1, biased_bytes: int
) -> tuple[int, int]:
    """Temporary bytes besides a GEMM, if in fp8, and its two backward GEMMs: the quantised weight, and before that its fp32
    quotient; the gradient in the two forms that the GEMMs need, each first scaled and divided in fp32; and during the GEMMs, on
    CUDA the copies that `native_scratch_bytes` counts, on the CPU factors and result in fp32 (`kernels.fp8.fp8_linear`).
    `experts`: run one after the other, with each row's expert scales. `biased_bytes`: temporary bytes of adding biases after a
    GEMM, in fp8 or not, when weights are quantised already."""
    if not in_own_fp8(shape, source):
        return biased_bytes, 0
    a, w = FP8_BYTES, shape.wide_itemsize
    forward = backward = w * ((n * columns + n * rows) // experts + rows * columns)
    if shape.device != "cpu":
        each, turned = n // experts, (False, False)
        forward = native_scratch_bytes(shape, each, columns, rows)
        home = native_scratch_bytes(shape, each, rows, columns, lies=(True, False))
        backward = max(home, native_scratch_bytes(shape, rows, each, columns, lies=turned))
    narrow = 0 if shape.fp8_gathered else experts * rows * columns * a
    by_row = shape.fp8_scaling == "row"  # else dW reads the transpose of dx's gradient, without scaling first
    roundings, wides = (2, 3 if experts > 1 else 2) if by_row else (1, 1)
    quotient = narrow // a * w - n * rows * shape.itemsize  # while the weight is quantised there is no result yet
    return narrow + max(forward + biased_bytes, quotient), narrow + roundings * n * rows * a + max(
        wides * n * rows * w, backward
    )


def native_scratch_bytes(shape: Shape, m: int, k: int, n: int, *, lies: tuple[bool, bool] = (True, True)) -> int:
    """Temporary bytes of an fp8 GEMM of [m, k] and [n, k] on CUDA: copies of factors that are not row-major (`lies`: which are)
    or are padded, and a result with padding columns."""
    whole_k, whole_n = fp8_multiple(shape, k), fp8_multiple(shape, n)
    left = 0 if lies[0] and whole_k == k else m * whole_k
    right = 0 if lies[1] and (whole_n, whole_k) == (n, k) else whole_n * whole_k
    return (left + right) * FP8_BYTES + (0 if whole_n == n else m * whole_n * shape.itemsize)


def narrow_bytes(shape: Shape, elements: int) -> int:
    """Bytes of a factor of narrow GEMMs, with the scales of its blocks."""
    return ceil(elements * NARROW[shape.precision])


def local_source(
    shape: Shape, read: str, width: int, num_tokens: int, *, again: bool = False
) -> tuple[tuple[Op, ...], GemmInput]:
    """Source of a GEMM whose input is already on this rank, and its operations. torch's compiler saves it too: it recomputes
    nothing that the weight's gradient reads. `again`: it is saved unquantised, and quantised again for that gradient."""
    num_bytes = num_tokens * width * shape.itemsize
    if shape.precision in NARROW:
        narrow = Activation(f"{read}_fp8", narrow_bytes(shape, num_tokens * width))
        quotient = num_tokens * width * shape.wide_itemsize if shape.kernels.own_fp8 else 0
        moves = num_bytes + narrow.num_bytes
        op = Op(f"{read}.quantise", "elementwise", (), (narrow,), moved_bytes=moves, backward_moved_bytes=moves if again else 0,
                scratch_bytes=quotient)  # fmt: skip
        return (op,), GemmInput(read, (read,), narrow.num_bytes) if again else GemmInput(read, (narrow.name,), in_fp8=True)
    return (), GemmInput(read, (read,))


def column_source(shape: Shape, read: str, width: int, *, projections: int = 1) -> tuple[tuple[Op, ...], GemmInput]:
    """Source of column-parallel GEMMs of `read` [outer tokens, width], with the part that is saved.

    `projections`: number of weights that multiply it."""
    scales = column_scales(shape, "tp", shape.num_tokens, 1, projections)
    if not shape.shards_sequence:
        ops, source = local_source(shape, read, width, shape.num_tokens)
        if shape.tp > 1:
            whole = shape.num_tokens * width * shape.itemsize
            source = source._replace(collectives=(Collective("all_reduce", "tp", whole, "backward", "product"), *scales))
        return ops, source
    gathered = f"{read}_whole"
    whole = shape.num_tokens * width * shape.itemsize
    in_narrow = shape.precision in NARROW and not (shape.precision == "fp8" and shape.kernels.fp8_scaling == "row")
    narrow = narrow_bytes(shape, shape.num_tokens * width) if in_narrow else whole
    traffic = [Collective("all_gather", "tp", narrow, "forward", "product")]
    traffic += [Collective("reduce_scatter", "tp", whole, "backward", "product"), *scales]
    if shape.precision == "fp8" and shape.fp8_scaling == "row" and shape.kernels.own_fp8:
        traffic.append(Collective("all_gather", "tp", shape.num_tokens * SCALE_BYTES, "forward"))
    if shape.kernels.gathers_again:
        ops, source = local_source(shape, read, width, shape.outer_tokens)
        traffic.append(Collective("all_gather", "tp", narrow, "backward", "product"))
        source = GemmInput(gathered, source.saved, narrow, in_fp8=source.in_fp8)
    else:
        ops, source = local_source(shape, gathered, width, shape.num_tokens)
    gather = Op(
        f"{read}.gather", "gather", (read,), (Activation(gathered, whole),), collectives=tuple(traffic),
        scratch_bytes=gathered_scratch_bytes(shape, whole), backward_scratch_bytes=exchanged_bytes(shape, whole),
    )  # fmt: skip
    return ((*ops, gather) if source.saved != (f"{gathered}_fp8",) else (gather, *ops)), source


def _agrees_on_scales(shape: Shape, ranks: int) -> bool:
    """True if ranks agree on scales GEMM by GEMM; delayed scales need one message per step instead."""
    return shape.precision == "fp8" and ranks > 1 and shape.kernels.own_fp8 and shape.fp8_scaling != "delayed"


def column_scales(shape: Shape, axis: Axis, num_tokens: int, experts: int, projections: int) -> tuple[Collective, ...]:
    """Amaxes that ranks of column-parallel fp8 GEMMs all-reduce: of sharded tensors with one scale. Those of weights gathered
    in fp8 are known already."""
    ranks = shape.tp if axis == "tp" else shape.expert_tp
    if not _agrees_on_scales(shape, ranks):
        return ()
    if shape.fp8_scaling == "row":
        return (Collective("all_reduce", axis, projections * num_tokens * SCALE_BYTES, "backward"),)
    counts = (1 if shape.fp8_gathered else 1 + projections), projections
    of_inputs, of_grads = (count * experts * SCALE_BYTES for count in counts)
    return Collective("all_reduce", axis, of_inputs, "forward"), Collective("all_reduce", axis, of_grads, "backward")


def row_scales(shape: Shape, axis: Axis, num_tokens: int, experts: int, rows: int) -> tuple[Collective, ...]:
    """Scales of a row-parallel GEMM: input and weight are sharded, the gradient is not. The scales of weights all-gathered in
    fp8 are known already."""
    ranks = shape.tp if axis == "tp" else shape.expert_tp
    if not _agrees_on_scales(shape, ranks):
        return ()
    of_input, of_weight = (num_tokens, experts * rows) if shape.fp8_scaling == "row" else (experts, experts)
    count = of_input + (0 if shape.fp8_gathered else of_weight)
    return (Collective("all_reduce", axis, count * SCALE_BYTES, "forward"),)


def without_fp8(shape: Shape) -> Shape:
    """Shape for GEMMs that stay in bf16 in an fp8 run."""
    return replace(shape, precision="bf16") if shape.precision in NARROW else shape


def row_linear(
    shape: Shape, name: str, source: GemmInput, make: str, columns: int, rows: int, *, bias: bool = False
) -> tuple[Op, ...]:
    """A row-parallel GEMM and the sum over its ranks: `make` [outer tokens, rows]."""
    whole = shape.num_tokens * rows * shape.itemsize
    if shape.tp == 1:
        return (linear(shape, name, source, make, columns, rows, bias=bias),)
    scales = row_scales(shape, "tp", shape.num_tokens, 1, rows)
    if not shape.shards_sequence:
        sums = (Collective("all_reduce", "tp", whole, "forward", "product"), *scales)
        return (linear(shape, name, source, make, columns, rows, bias=bias, collectives=sums),)
    product = linear(shape, name, source, f"{make}_partial", columns, rows, bias=bias, collectives=scales)
    total = scatter(shape, f"{name}.scatter", f"{make}_partial", make, rows)
    if in_own_fp8(shape, source):  # one operation, whose factors stay alive until its end
        rounded = 0 if shape.fp8_gathered else columns * rows * FP8_BYTES
        total = replace(total, keeps_alive=source.saved, scratch_bytes=total.scratch_bytes + rounded)
    return product, total


def kept_alive_to_end(ops: tuple[Op, ...], names: tuple[str, ...]) -> tuple[Op, ...]:
    """`ops` of a module whose local variables keep all of `names` alive until its last operation is done."""
    return (*ops[:-1], replace(ops[-1], keeps_alive=(*ops[-1].keeps_alive, *names)))


def scatter(shape: Shape, name: str, read: str, make: str, width: int, *, hideable: Hideable = "product") -> Op:
    """Reduce-scatter of partial sums [tokens, width] to [outer tokens, width]."""
    whole = shape.num_tokens * width * shape.itemsize
    return Op(
        name, "exchange", (read,), (Activation(make, shape.outer_tokens * width * shape.itemsize),),
        collectives=scatters("tp", whole, hideable),
        scratch_bytes=exchanged_bytes(shape, whole), backward_scratch_bytes=gathered_scratch_bytes(shape, whole),
    )  # fmt: skip


def norm(
    model: Model,
    shape: Shape,
    name: str,
    read: str,
    make: str,
    size: int,
    width: int,
    num_tokens: int,
    *,
    bias: bool = True,
    over_tp: bool = False,
) -> Op:
    """Norm over the last `size` of `width` elements per token; the result has the input's dtype, computed in fp32 or wider.

    `bias`: it has one if the model's norms have. `over_tp`: the elements are sharded over tp, and each pass sums one number per
    row.
    """
    a, w = shape.itemsize, shape.wide_itemsize
    elements, rows = num_tokens * width, num_tokens * (width // size)
    scratch = backward_scratch = 0
    forward, backward = 2 * a, 3 * a  # reads and writes of an element
    if model.norm == "layernorm":
        # Two numbers a row; torch's CPU kernel keeps them in the dtype of the input, CUDA's in fp32.
        kept_itemsize = a if shape.device == "cpu" else w
        kept = tuple(Activation(f"{make}_{x}", rows * kept_itemsize) for x in ("mean", "rstd"))
    else:
        kept = (Activation(f"{make}_inverse_rms", rows * w),)
        widened = model.zero_centered_norm
        kept += (Activation(f"{make}_scale", size * w),) if widened else ()  # 1 + weight
        in_parts = shape.device == "cpu" or over_tp or (widened and a < w)  # separate kernels; otherwise CUDA has one
        narrow = a < w and in_parts
        scratch = 2 * elements * w if narrow else 0
        backward_scratch = elements * w * (4 if narrow else 2) if in_parts else 0
        if shape.device == "cpu" or over_tp:  # `kernels.norm._RMSNorm`; with widened weights a fused form is one kernel
            forward, backward = (2 * a + 7 * w, 3 * a + 18 * w) if narrow else (5 * a, 15 * a)
    saves = (read, *(k.name for k in kept))
    if not shape.kernels.norm and model.norm != "layernorm":  # F.layer_norm is one kernel in any program
        # An fp32 copy and the normalised elements are saved instead of the input, one kernel each.
        kept = (*kept, Activation(f"{make}_wide", elements * w), Activation(f"{make}_normalised", elements * a))
        saves = tuple(k.name for k in kept)
        scratch, forward, backward = elements * w, 5 * a + 5 * w, 6 * a + 8 * w
    suffixes = ("weight", "bias") if model.norm_bias and bias else ("weight",)
    sums = tuple(Collective("all_reduce", "tp", rows * w, when) for when in ("forward", "backward")) if over_tp else ()
    return Op(
        name, "norm", (read,), (Activation(make, elements * a), *kept), saves, tuple(f"{name}.{s}" for s in suffixes),
        collectives=sums, scratch_bytes=scratch, backward_scratch_bytes=backward_scratch,
        moved_bytes=elements * forward, backward_moved_bytes=elements * backward,
    )  # fmt: skip


def moved(
    name: str, kind: OpKind, reads: tuple[str, ...], result: Activation, *kept: Activation, moved_bytes: int | None = None
) -> Op:  # fmt: skip
    """An operation that only reads and writes `moved_bytes`, in either pass; None: it copies. `kept`: what it makes and saves
    beside its result."""
    moves = 2 * result.num_bytes if moved_bytes is None else moved_bytes
    saves = tuple(activation.name for activation in kept)
    return Op(name, kind, reads, (result, *kept), saves, moved_bytes=moves, backward_moved_bytes=moves)


def gathers(axis: Axis, num_bytes: int) -> tuple[Collective, Collective]:
    """Forward all-gather of a tensor, and backward reduce-scatter of its gradient."""
    forward = Collective("all_gather", axis, num_bytes, "forward")
    return forward, Collective("reduce_scatter", axis, num_bytes, "backward")


def scatters(axis: Axis, num_bytes: int, hideable: Hideable = "") -> tuple[Collective, Collective]:
    """Forward reduce-scatter of partial sums, and backward all-gather of their gradient."""
    forward = Collective("reduce_scatter", axis, num_bytes, "forward", hideable)
    return forward, Collective("all_gather", axis, num_bytes, "backward", hideable)


def add(shape: Shape, name: str, left: str, right: str, make: str, width: int, num_tokens: int) -> Op:
    """left + right. In the backward pass the gradients of the two branches are summed where they meet again."""
    num_bytes = num_tokens * width * shape.itemsize
    passes = 2 if shape.kernels.compiled else 3
    return Op(
        name, "elementwise", (left, right), (Activation(make, num_bytes),),
        moved_bytes=passes * num_bytes, backward_moved_bytes=(passes - 1) * num_bytes,
    )  # fmt: skip


def dropout(shape: Shape, name: str, read: str, make: str, width: int, num_tokens: int) -> Op:
    """Dropout: saves a mask of one byte per element if the stack does; ours (`kernels.dropout`) recomputes it."""
    elements = num_tokens * width
    if not shape.kernels.dropout:
        return _hashed_dropout(shape, name, read, make, width, num_tokens)
    result, mask = Activation(make, elements * shape.itemsize), Activation(f"{make}_kept", elements)
    return moved(name, "elementwise", (read,), result, mask, moved_bytes=2 * result.num_bytes + mask.num_bytes)


def _hashed_dropout(shape: Shape, name: str, read: str, make: str, width: int, num_tokens: int) -> Op:
    elements, a = num_tokens * width, shape.itemsize
    result_bytes = elements * a
    # Hash words and a scratch copy, with the words of rows and columns; then the result and the mask.
    room = max(2 * elements * HASHED_BYTES + (num_tokens + width) * HASHED_BYTES, result_bytes + elements) - result_bytes
    moves = elements * (2 * a if shape.kernels.compiled else 3 * a + HASHED_BYTES * HASH_PASSES)
    return Op(
        name, "elementwise", (read,), (Activation(make, result_bytes),), scratch_bytes=room, backward_scratch_bytes=room,
        moved_bytes=moves, backward_moved_bytes=moves,
    )  # fmt: skip
