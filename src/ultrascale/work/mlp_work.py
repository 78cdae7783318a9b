"""Feed-forward operations on one rank: the dense layer sharded by tp, and experts by ep and expert_tp.

Experts: every token is copied to its k experts' ranks (`dispatch`), each rank runs one grouped GEMM over its experts' tokens,
and results return (`combine`) and are summed with their scores. No token is dropped; a rank that is chosen more often than the
mean gets `shape.expert_imbalance` times as many (Lepikhin et al. 2021; Gale et al. 2023). Tokens are sharded over tp before
routing, so that no two ranks send the same one.
"""

from __future__ import annotations

from dataclasses import replace

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW
from ultrascale.work.op_builders import (
    FP8_BYTES,
    GemmInput,
    ceil_div,
    column_scales,
    column_source,
    fp8_scratch_bytes,
    gathers,
    in_own_fp8,
    kept_alive_to_end,
    linear,
    local_source,
    moved,
    narrow_bytes,
    row_linear,
    row_scales,
    scatters,
)
from ultrascale.work.ops import Activation, Collective, Op, Product, Shape
from ultrascale.work.sharding.places import even_part

ROW_BYTES = 8
"""Bytes per row of a permutation, in int64: the row's source, or an expert chosen by a token."""


def mlp_work(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    """Operations from `mlp_in` to `mlp_out`, both [outer tokens, D]."""
    if not model.is_moe(layer):
        return _dense(model, shape, "mlp", model.intermediate_size, "mlp_in", "mlp_out")
    if not model.shared_expert_intermediate_size:
        return kept_alive_to_end(_experts(model, shape, "mlp_out"), ("mlp_in",))
    width = model.shared_expert_intermediate_size
    num_bytes = shape.outer_tokens * model.hidden_size * shape.itemsize
    total = Op("mlp.add_shared", "elementwise", ("routed_out", "shared_out"), (Activation("mlp_out", num_bytes),),
               moved_bytes=3 * num_bytes, backward_moved_bytes=2 * num_bytes, keeps_alive=("mlp_in",))  # fmt: skip
    # Sent before the shared expert and awaited after it: send and receive buffers exist meanwhile.
    routed = _experts(model, shape, "routed_out")
    under_way = 1 + max(i for i, op in enumerate(routed) if op.name in ("mlp.permute", "mlp.dispatch"))
    shared = _dense(model, shape, "mlp.shared_experts", width, "mlp_in", "shared_out", prefix="shared_")
    sent = tuple(activation.name for op in routed[:under_way] if op.name == "mlp.permute" for activation in op.makes[:1])
    shared = (*shared[:-1], replace(shared[-1], keeps_alive=(*shared[-1].keeps_alive, *sent)))
    return *routed[:under_way], *shared, *routed[under_way:], total


def _dense(model: Model, shape: Shape, block: str, width: int, read: str, make: str, *, prefix: str = "") -> tuple[Op, ...]:
    if shape.mlp_chunks > 1 and block == "mlp":
        return (_in_chunks(model, shape, width, read, make),)
    d, f, bias = model.hidden_size, shape.tp_part(width), model.mlp_bias
    names = ("gate", "up") if model.gated_mlp else ("up",)
    gather, source = column_source(shape, read, d, projections=len(names))
    ops = list(gather)
    if shape.kernels.joins_projections and model.gated_mlp:
        weights = tuple(f"{block}.{name}_proj" for name in names)
        ops.append(linear(shape, f"{block}.gate_up_proj", source, f"{prefix}gate_up", d, 2 * f, bias=bias, weights=weights,
                          collectives=source.collectives))  # fmt: skip
        names = ("gate_up",)
    else:
        ops += [
            linear(shape, f"{block}.{name}_proj", source, f"{prefix}{name}", d, f, bias=bias,
                   collectives=() if index else source.collectives)
            for index, name in enumerate(names)
        ]  # fmt: skip
    ops += _activate(model, shape, block, tuple(prefix + name for name in names), f"{prefix}product", shape.num_tokens * f)
    saved, source = _activated_source(
        model, shape, f"{prefix}product", f, shape.num_tokens, tuple(prefix + name for name in names)
    )
    down = row_linear(shape, f"{block}.down_proj", source, make, f, d, bias=bias)
    made = (f"{prefix}{name}" for name in names)
    return (*ops, *saved, *kept_alive_to_end(down, (read, *made, f"{prefix}product")))


def _in_chunks(model: Model, shape: Shape, width: int, read: str, make: str) -> Op:
    """The dense layer, one piece of the tokens after the other (`parallel.activations.mlp_chunks`): its input is saved, and
    wide activations exist for one piece only, in the backward pass with their gradients."""
    a, w, d, n = shape.itemsize, shape.wide_itemsize, model.hidden_size, ceil_div(shape.num_tokens, shape.mlp_chunks)
    piece = replace(shape, micro_batch_size=1, sequence_length=n * shape.cp, mlp_chunks=1)
    inside = _dense(model, piece, "mlp", width, read, make)
    products = [op for op in inside if op.kind == "matmul"]
    tokens = shape.num_tokens  # the last piece may be shorter
    recomputed_flops = sum(op.flops // n * tokens for op in products[:-1])
    wide = n * width * a
    gated = model.gated_mlp
    sums = 0
    if a < w:  # in fp32, next to one GEMM result of a piece and the returned tensors
        sizes = [op.product.n * op.product.k for op in products if op.product is not None]
        sums = (w - a) * sum(sizes) + a * max(sizes)
    flops = sum(op.flops // n * tokens for op in products)
    return Op(
        "mlp.pieces", "matmul", (read,), (Activation(make, tokens * d * a),), (read,),
        tuple(name for op in products for name in op.weights), flops, 2 * flops + recomputed_flops,
        scratch_bytes=(3 if gated else 2) * wide, backward_scratch_bytes=(6 if gated else 3) * wide + sums,
        pieces=shape.mlp_chunks, inside=inside,
    )  # fmt: skip


def _activate(
    model: Model, shape: Shape, block: str, reads: tuple[str, ...], make: str, elements: int, *, extra: tuple[str, ...] = ()
) -> list[Op]:
    """act(gate) * up, or act(up), with `elements` elements. `extra`: other factors of the result, also saved for it."""
    a = shape.itemsize
    product = Activation(make, elements * a)
    if _keeps_narrow_gates(model, shape):
        gates = tuple(Activation(f"{name}_fp8", narrow_bytes(shape, 2 * elements // len(reads))) for name in reads)
        names, size = tuple(act.name for act in gates), sum(act.num_bytes for act in gates)
        return [
            Op(f"{block}.swiglu", "elementwise", (*reads, *extra), (product, *gates), (*names, *extra),
               backward_scratch_bytes=3 * product.num_bytes, moved_bytes=3 * elements * a + size,
               backward_moved_bytes=6 * elements * a + size)
        ]  # fmt: skip
    fused_name = f"{block}.swiglu" if model.gated_mlp else f"{block}.gelu"
    if not model.gated_mlp:
        return [Op(fused_name, "elementwise", (*reads, *extra), (product,), (*reads, *extra), moved_bytes=2 * elements * a,
                   backward_moved_bytes=3 * elements * a)]  # fmt: skip
    if shape.kernels.swiglu:
        # Without Triton the inputs are clamped first.
        clamped = product.num_bytes if model.activation == "swigluoai" else 0
        return [
            Op(fused_name, "elementwise", (*reads, *extra), (product,), (*reads, *extra),
               scratch_bytes=clamped, backward_scratch_bytes=product.num_bytes + clamped,
               moved_bytes=3 * elements * a, backward_moved_bytes=5 * elements * a)
        ]  # fmt: skip
    activated = Activation(f"{make}_activated", elements * a)
    gate, up = reads[0], reads[-1]  # the same if one GEMM computed both
    return [
        Op(f"{block}.silu", "elementwise", (gate,), (activated,), (gate,), moved_bytes=2 * elements * a,
           backward_moved_bytes=3 * elements * a),
        Op(f"{block}.multiply", "elementwise", (activated.name, up, *extra), (product,), (activated.name, up, *extra),
           moved_bytes=3 * elements * a, backward_moved_bytes=6 * elements * a),
    ]  # fmt: skip


def _keeps_narrow_gates(model: Model, shape: Shape) -> bool:
    return shape.kernels.keeps_narrow_gates and shape.precision in NARROW and model.gated_mlp


def _activated_source(
    model: Model, shape: Shape, read: str, width: int, num_tokens: int, gates: tuple[str, ...]
) -> tuple[tuple[Op, ...], GemmInput]:
    """Source of the GEMM that reads the result of `_activate` on `gates`."""
    ops, source = local_source(shape, read, width, num_tokens)
    if _keeps_narrow_gates(model, shape):
        kept = tuple(f"{gate}_fp8" for gate in gates)
        source = source._replace(saved=kept, recomputed_bytes=num_tokens * width * shape.itemsize)
    return ops, source


def _experts(model: Model, shape: Shape, make: str) -> tuple[Op, ...]:
    """Routing, dispatch, the experts of this rank, and combine: `make` [outer tokens, D]."""
    d, a, k = model.hidden_size, shape.itemsize, model.num_experts_per_tok
    n = shape.outer_tokens if shape.shards_sequence else shape.tp_part(shape.num_tokens)  # routed tokens of this rank
    routed = _dispatched_tokens(model, shape, n * k) if shape.ep > 1 else n * k
    arrived = routed * shape.expert_tp
    local, f = len(shape.local_experts(model.num_experts)), shape.expert_tp_part(model.moe_intermediate_size)
    return (
        *_route(model, shape, n),
        *_dispatch(shape, n * k * d * a, routed * d * a, arrived * d * a, arrived),
        *_grouped(model, shape, arrived, local, f),
        *_combine(model, shape, make, n, routed * d * a, arrived * d * a),
    )


def _dispatched_tokens(model: Model, shape: Shape, sent: int) -> int:
    """Rows that arrive at this rank's experts if every ep rank sends `sent`, evenly over all experts."""
    if shape.coordinates is None:
        return round(sent * max(1.0, shape.expert_imbalance))
    experts = model.num_experts
    return shape.ep * sum(even_part(sent, experts, expert)[1] for expert in shape.local_experts(experts))


def _route(model: Model, shape: Shape, n: int) -> list[Op]:
    """Scores of all experts, the k best, and `n` tokens sorted by expert. Without sequence parallelism every tp rank scores all
    tokens."""
    d, a, k, x = model.hidden_size, shape.itemsize, model.num_experts_per_tok, model.num_experts
    m = shape.outer_tokens
    logits = Activation("router_logits", m * x * shape.wide_itemsize)
    chosen = Activation("chosen_experts", m * k * ROW_BYTES)
    kept = (Activation("router_probabilities", logits.num_bytes), chosen)
    flops, weights = 2 * m * x * d, ("mlp.router.weight", "mlp.router.bias") if model.mlp_bias else ("mlp.router.weight",)
    rows = Activation("permuted_rows", n * k * ROW_BYTES)
    permuted = Activation("permuted" if _sorts(shape) else "expert_in", n * k * d * a)
    wide = (m + x) * d * shape.wide_itemsize if shape.wide_itemsize > a else 0  # of one side and the result, at least in fp32
    return [
        Op("mlp.router", "matmul", ("mlp_in",), (logits,), ("mlp_in",), weights, flops, 2 * flops, product=Product(m, x, d),
           scratch_bytes=wide, backward_scratch_bytes=wide),
        Op("mlp.choose", "router", ("router_logits",), (Activation("scores", m * k * shape.wide_itemsize), *kept),
           tuple(act.name for act in kept), moved_bytes=4 * logits.num_bytes, backward_moved_bytes=4 * logits.num_bytes,
           collectives=_choices_gathered(model, shape)),
        moved("mlp.permute", "permute", ("mlp_in",), permuted, rows),
    ]  # fmt: skip


def _choices_gathered(model: Model, shape: Shape) -> tuple[Collective, ...]:
    """Communication of experts with limited capacity: dropping is decided per whole sequence
    (`parallel.expert.expert_sequences`), so choices and weights of its tokens go to all ranks that hold some of them."""
    if model.expert_capacity_factor is None:
        return ()
    each = shape.micro_batch_size * 2 * model.num_experts_per_tok * shape.wide_itemsize
    over_tp = [Collective("all_gather", "tp", each * shape.local_length, "forward")] if shape.shards_sequence else []
    over_cp = [Collective("all_gather", "cp", each * shape.sequence_length, "forward")] if shape.cp > 1 else []
    return *over_tp, *over_cp


def _dispatch(shape: Shape, sent: int, received: int, gathered: int, rows: int) -> list[Op]:
    """Copies of tokens sent to the ranks of their experts and there, `rows` of them, sorted by expert."""
    ops, name = [], "permuted"
    if shape.ep > 1:
        traffic = _exchanged(shape, sent, received)
        ops.append(Op("mlp.dispatch", "exchange", (name,), (Activation("dispatched", received),), collectives=traffic))
        name = "dispatched"
    if shape.expert_tp > 1:
        ops.append(Op("mlp.expert_gather", "gather", (name,), (Activation("gathered", gathered),),
                      collectives=gathers("expert_tp", gathered),
                      backward_scratch_bytes=_reduction_scratch_bytes(shape, received, gathered)))  # fmt: skip
        name = "gathered"
    if not _sorts(shape):
        return ops
    # Rows from several ranks are grouped by expert, and ungrouped afterwards; the order is saved.
    order = () if name == "permuted" else (Activation("sorted_rows", rows * ROW_BYTES),)
    return [*ops, moved("mlp.sort", "permute", (name,), Activation("expert_in", gathered), *order)]


def _sorts(shape: Shape) -> bool:
    """True if a rank sorts received rows by expert, in addition to the order in which they were sent."""
    return shape.kernels.sorts_own_rows or shape.ep * shape.expert_tp > 1


def _exchanged(shape: Shape, sent: int, received: int) -> tuple[Collective, ...]:
    """All-to-all of tokens and, in the backward pass, of their gradients; without a given rank, the slower direction's time
    counts."""
    out_bytes, back_bytes = (max(sent, received),) * 2 if shape.coordinates is None else (sent, received)
    return Collective("all_to_all", "ep", out_bytes, "forward"), Collective("all_to_all", "ep", back_bytes, "backward")


def _reduction_scratch_bytes(shape: Shape, sum_bytes: int, parts: int) -> int:
    """Buffers besides the sum over expert_tp (`sum_bytes`): all ranks' parts and, for narrow rows, the wide sum before
    rounding."""
    return 0 if shape.kernels.weighs_before_combining else parts + sum_bytes * (shape.wide_itemsize // shape.itemsize - 1)


def _grouped(model: Model, shape: Shape, tokens: int, local: int, f: int) -> list[Op]:
    """The experts' three projections, each one grouped GEMM over the experts of this rank."""
    d, a = model.hidden_size, shape.itemsize
    m = max(1, tokens // local)
    names = ("gate", "up") if model.gated_mlp else ("up",)

    def grouped(
        name: str, source: GemmInput, make: str, columns: int, rows: int, weights: tuple[str, ...],
        scales: tuple[Collective, ...] = (),
    ) -> Op:  # fmt: skip
        flops = 2 * tokens * rows * columns
        sums = 2 * local * tokens * rows if model.mlp_bias else 0  # bias gradients by expert: a GEMM with ones
        suffixes = ("weight", "bias") if model.mlp_bias else ("weight",)
        parameters = tuple(f"mlp.experts.{weight}_proj.{suffix}" for weight in weights for suffix in suffixes)
        own_fp8 = in_own_fp8(shape, source)
        together = names.index(name) + 1 if own_fp8 and name in names else 1  # results that one fp8 call holds so far
        # The GEMM results and each row's expert bias, next to the sums.
        biased = (together + 1) * tokens * rows * a if model.mlp_bias else 0
        room, backward_room = fp8_scratch_bytes(shape, source, tokens, columns, rows, experts=local, biased_bytes=biased)
        if own_fp8 and not shape.fp8_gathered:
            room += (together - 1) * local * rows * columns * FP8_BYTES
            if name == names[0]:  # all weights are quantised before the GEMMs, one after the other
                rounded = local * rows * columns * (len(names) * FP8_BYTES + shape.wide_itemsize)
                room = max(room, rounded - tokens * rows * a)
        result = Activation(make, tokens * rows * a)
        return Op(
            f"mlp.experts.{name}_proj", "matmul", (source.read,), (result,), source.saved, parameters, flops, 2 * flops + sums,
            scratch_bytes=room, backward_scratch_bytes=source.recomputed_bytes + backward_room,
            product=Product(m, rows, columns, local), collectives=scales, in_fp8=source.in_fp8,
        )  # fmt: skip

    saved, source = local_source(shape, "expert_in", d, tokens)
    scales = column_scales(shape, "expert_tp", tokens, local, len(names))
    if shape.kernels.joins_projections and model.gated_mlp:
        ops = [grouped("gate_up", source, "expert_gate_up", d, 2 * f, names, scales)]
        reads = ("expert_gate_up",)
    else:
        ops = [grouped(name, source, f"expert_{name}", d, f, (name,), scales if name == names[0] else ()) for name in names]
        reads = tuple(f"expert_{name}" for name in names)
    weighed = ("scores",) if shape.kernels.weighs_before_combining else ()
    activated = _activate(model, shape, "mlp.experts", reads, "expert_product", tokens * f, extra=weighed)
    narrow, down = _activated_source(model, shape, "expert_product", f, tokens, reads)
    of_down = row_scales(shape, "expert_tp", tokens, local, d)
    last = grouped("down", down, "expert_out", f, d, ("down",), of_down)
    return [*saved, *ops, *activated, *narrow, *kept_alive_to_end((last,), ("expert_in", *reads, "expert_product"))]


def _combine(model: Model, shape: Shape, make: str, n: int, sent: int, gathered: int) -> list[Op]:
    """Results sent back to their tokens' ranks and summed with their scores."""
    d, a, k = model.hidden_size, shape.itemsize, model.num_experts_per_tok
    name, returned, ops = "expert_out", n * k * d * a, list[Op]()
    if _sorts(shape):
        ops.append(moved("mlp.unsort", "permute", (name,), Activation("expert_back", gathered)))
        name = "expert_back"
    if shape.expert_tp > 1:
        ops.append(Op("mlp.expert_scatter", "exchange", (name,), (Activation("expert_sum", sent),),
                      collectives=scatters("expert_tp", gathered),
                      scratch_bytes=_reduction_scratch_bytes(shape, sent, gathered)))  # fmt: skip
        name = "expert_sum"
    if shape.ep > 1:
        traffic = _exchanged(shape, sent, returned)
        ops.append(Op("mlp.combine", "exchange", (name,), (Activation("combined", returned),), collectives=traffic))
        name = "combined"
    summed = n * d * a
    weighed = shape.kernels.weighs_before_combining
    cut_over_tp = shape.tp > 1 and not shape.shards_sequence
    total = Activation(f"{make}_cut" if cut_over_tp else make, summed)
    wide = shape.wide_itemsize // a
    if widened := shape.kernels.widens_before_weighing and wide > 1:
        ops.append(moved("mlp.widen", "elementwise", (name,), Activation("wide_rows", returned * wide),
                         moved_bytes=(1 + wide) * returned))  # fmt: skip
        name = "wide_rows"
    saves = ("permuted_rows",) if weighed else (name, "scores", "permuted_rows")
    # Backward: each row's gradient, its result, and their product, all wide, before the first is rounded.
    room = 0 if weighed or widened else returned * ((3 if wide > 1 else 2) * wide - 1)
    sums = 0 if weighed else 2 * wide * summed  # forward: the sum and the summand, both wide
    ops.append(
        Op("mlp.unpermute", "permute", (name,) if weighed else (name, "scores"), (total,), saves, moved_bytes=returned + summed,
           backward_moved_bytes=2 * returned + summed, scratch_bytes=sums, backward_scratch_bytes=room)
    )  # fmt: skip
    if cut_over_tp:
        whole = shape.num_tokens * d * a
        of_scores = shape.num_tokens * k * shape.wide_itemsize  # each rank's gradient of its own tokens' weights
        traffic = (
            Collective("all_gather", "tp", whole, "forward"),
            Collective("all_gather", "tp", whole, "backward"),
            Collective("all_gather", "tp", of_scores, "backward"),
        )
        ops.append(Op("mlp.whole", "gather", (total.name,), (Activation(make, whole),), collectives=traffic))
    return ops
