"""The table of every operation of the decoder: FLOPs, results, and what it saves for the backward pass.

This describes `models.decoder.Decoder` in eager mode as data: operations (`work.ops`) that read and produce named activations,
on one rank under tensor, sequence, context and expert parallelism, with the kernels of a stack. Users: `plan.memory.replay` and
`plan.columns.footprint` simulate it, `plan.flops` and `plan.time.blocks` sum it. `tests/agree` compares it with the real
decoder, name by name and byte by byte (FlopCounterMode, saved-tensor hooks), in fp32, bf16 and fp64; what the decoder does not
support yet is compared with published formulas (`tests/plan/test_work_table.py`).

Masks (documents, sliding windows) and RoPE angles are computed once per micro-batch and shared by all blocks. Shapes: N tokens
of a rank inside tensor-parallel regions (B*S/cp), M outside them (N/tp with sequence parallelism).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ultrascale.description.architecture.model import Model
from ultrascale.work.attention_work import (
    angle_names,
    attended_share,
    attention_work,
    mask_elements,
    mask_name,
    mask_scratch_bytes,
)
from ultrascale.work.mlp_work import mlp_work
from ultrascale.work.op_builders import (
    add,
    ceil_div,
    column_source,
    dropout,
    exchanged_bytes,
    linear,
    moved,
    norm,
    scatter,
    scatters,
    without_fp8,
)
from ultrascale.work.ops import Activation, Collective, Op, Product, Scores, Shape

CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**29}
"""Bytes of fp32 logits in memory at a time in `kernels.loss.cross_entropy`; devices other than the CPU count as CUDA."""
MIN_CHUNK_ROWS = 128
SLAB_BYTES = 2**27
"""Bytes of fp32 logits in one slab of the vocabulary (`kernels.loss.cross_entropy_columns`)."""
SLAB_COLUMNS_MULTIPLE = 128
"""Width of GEMM tiles on CUDA, of which slabs are a multiple."""
INDEX_BYTES = 8

__all__ = [
    "Activation", "Collective", "Op", "Product", "Scores", "Shape", "attended_share", "block_work", "chunk_rows",
    "embedding_work", "head_work", "mask_elements", "mask_name", "next_token_work", "prediction_block_work",
    "prediction_head_work", "prediction_work", "shared_work", "slab_columns", "work",
]  # fmt: skip


def shared_work(model: Model, shape: Shape, layers: tuple[int, ...] | None = None) -> tuple[Op, ...]:
    """Work that blocks share: RoPE angles, and a mask for each sliding window in use. It has no gradient. `layers`: of a stage;
    None: of the whole model."""
    rows = shape.num_tokens if shape.documents or shape.cp > 1 else shape.local_length  # over cp each sequence has its order
    ops: list[Op] = []
    for window in dict.fromkeys(map(model.window, range(model.num_hidden_layers) if layers is None else layers)):
        if elements := mask_elements(window, shape):
            mask = Activation(mask_name(window), elements * shape.itemsize)
            ops.append(Op(mask.name, "elementwise", (), (mask,), scratch_bytes=mask_scratch_bytes(window, shape)))
    if model.position_embedding == "rotary":
        planes = rows * model.rotary_dim // 2
        kinds = map(model.is_rope_local, range(model.num_hidden_layers) if layers is None else layers)
        for names in dict.fromkeys(map(angle_names, kinds)):
            angles = tuple(Activation(name, planes * shape.itemsize) for name in names)
            # fp32 angles, and their cosines before rounding.
            ops.append(Op("angles", "elementwise", (), angles, scratch_bytes=planes * 8))
    return tuple(ops)


@lru_cache(maxsize=4096)
def embedding_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """Work from tokens to the residual stream `hidden` [M, D]. With tp each rank looks up tokens in its shard of the
    vocabulary."""
    n, d, a = shape.num_tokens, model.hidden_size, shape.itemsize
    whole = n * d * a
    learned = model.position_embedding != "rotary"
    result = "embedded" if model.dropout else "hidden"
    total = "token" if learned else result
    name = "unscaled" if model.scale_embedding else total
    partial = f"{name}_partial" if shape.shards_sequence else name
    sums = () if shape.tp == 1 or shape.shards_sequence else (Collective("all_reduce", "tp", whole, "forward"),)
    # With the vocabulary sharded: each token's local row, and whether it is on another rank.
    places = (Activation("embed_rows", n * INDEX_BYTES), Activation("embed_elsewhere", n))
    kept = places if shape.tp > 1 else ()
    ops = [
        Op("embed_tokens", "embedding", (), (Activation(partial, whole), *kept), tuple(activation.name for activation in kept),
           ("embed_tokens.weight",), moved_bytes=2 * whole, backward_moved_bytes=3 * whole, collectives=sums,
           scratch_bytes=whole + 2 * exchanged_bytes(shape, whole) if sums else 0)  # summed in a copy
    ]  # fmt: skip
    if shape.shards_sequence:
        ops.append(scatter(shape, "embed_scatter", partial, name, d, hideable=""))
    if model.scale_embedding:
        ops.append(moved("embed_scale", "elementwise", (name,), Activation(total, shape.outer_tokens * d * a)))
    if learned:
        ops += _positions(model, shape, result)
    if model.dropout:
        ops.append(dropout(shape, "embedding_dropout", result, "hidden", d, shape.outer_tokens))
    return tuple(ops)


def _positions(model: Model, shape: Shape, result: str) -> tuple[Op, ...]:
    """Learned position embeddings, added to the tokens."""
    m, d, a = shape.outer_tokens, model.hidden_size, shape.itemsize
    are_given = shape.documents or shape.cp > 1
    rows = m if are_given else shape.outer_length
    position = Activation("position", rows * d * a)
    # Positions are computed in the forward pass unless the batch has them, and saved as the lookup's indices.
    indices = () if are_given or shape.tp > 1 else (Activation("positions", rows * INDEX_BYTES),)
    return (
        Op("embed_positions", "embedding", (), (position, *indices), tuple(i.name for i in indices),
           ("embed_positions.weight",), moved_bytes=2 * position.num_bytes, backward_moved_bytes=2 * position.num_bytes),
        add(shape, "add_positions", "token", "position", result, d, m),
    )  # fmt: skip


def block_work(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    """One decoder block, from `hidden` to `hidden_out`, both [M, D]. Equal layers share one cached result."""
    return _work_of_kind(model, first_alike(model)[layer], shape)


@lru_cache(maxsize=256)
def first_alike(model: Model) -> tuple[int, ...]:
    """For every block, multi-token prediction blocks included, the first block with the same work."""
    first: dict[tuple[bool, int | None, bool], int] = {}
    layers = range(model.num_hidden_layers + model.num_nextn_predict_layers)
    kinds = ((model.is_moe(layer), model.window(layer), model.uses_rotary(layer)) for layer in layers)
    return tuple(first.setdefault(kind, layer) for layer, kind in enumerate(kinds))


@lru_cache(maxsize=2048)
def _work_of_kind(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    m, d = shape.outer_tokens, model.hidden_size
    drops_any = bool(shape.kernels.dropout or model.dropout)
    norms, ops = model.block_norms, list[Op]()
    around_attention, around_mlp = (norms.before_attention, norms.after_attention), (norms.before_mlp, norms.after_mlp)
    halves = (
        ("attention", "hidden", "hidden_mid", attention_work(model, layer, shape), around_attention),
        ("mlp", "hidden_mid", "hidden_out", mlp_work(model, layer, shape), around_mlp),
    )
    for half, stream, total, half_ops, (before, after) in halves:
        if before:
            ops += [norm(model, shape, before, stream, f"{half}_in", d, d, m), *half_ops]
        else:
            ops += [_renamed(op, {f"{half}_in": stream}) for op in half_ops]
        added = f"{half}_out"
        if after:
            ops.append(norm(model, shape, after, added, f"{half}_normed", d, d, m))
            added = f"{half}_normed"
        if drops_any:
            ops.append(dropout(shape, f"{half}_dropout", added, f"{half}_dropped", d, m))
            added = f"{half}_dropped"
        ops.append(add(shape, f"{half}_residual", stream, added, total, d, m))
    return tuple(ops)


def input_gather(model: Model, shape: Shape) -> Collective:
    """All-gather of a block's input over tp, if each rank saved a shard (`Layout.partition_checkpoints`)."""
    return Collective("all_gather", "tp", shape.num_tokens * model.hidden_size * shape.itemsize, "backward")


@lru_cache(maxsize=4096)
def prediction_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """Work of a multi-token prediction block before its transformer block: the embedding of future tokens (`next_token_work`)
    and the previous output, through one GEMM (DeepSeek-V3, section 2.2)."""
    return (*next_token_work(model, shape), *_mtp_projection_work(model, shape))


@lru_cache(maxsize=4096)
def next_token_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """Work from future tokens to `coming` [M, D]: the embedding again, with newly computed indices."""
    first, *rest = (_renamed(op, {"hidden": "coming"}) for op in embedding_work(replace(model, dropout=0.0), shape))
    if shape.tp == 1:
        indices = Activation("coming_tokens", shape.num_tokens * INDEX_BYTES)
        first = replace(first, makes=(*first.makes, indices), saves=(*first.saves, indices.name))
    return (first, *rest)


@lru_cache(maxsize=4096)
def prediction_block_work(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    """A multi-token prediction block, from `hidden` and `coming` to `hidden_out`, all [M, D]; never in fp8."""
    block = (_renamed(op, {"hidden": "predicted"}) for op in block_work(model, layer, without_fp8(shape)))
    return (*_mtp_projection_work(model, shape), *block)


@lru_cache(maxsize=4096)
def prediction_head_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """Work from a prediction block's `hidden` to its `loss`: its own norm, and the model's head."""
    first, *rest = head_work(replace(model, norm="rmsnorm"), shape)
    return (replace(first, name="shared_head.norm", weights=("shared_head.norm.weight",)), *rest)


def _renamed(op: Op, names: dict[str, str]) -> Op:
    """The operation with its activations renamed, including names with the suffix `_partial`."""

    def name(old: str) -> str:
        whole = old.removesuffix("_partial")
        return names.get(whole, whole) + old[len(whole) :]

    return replace(
        op, reads=tuple(map(name, op.reads)), saves=tuple(map(name, op.saves)), keeps_alive=tuple(map(name, op.keeps_alive)),
        makes=tuple(activation._replace(name=name(activation.name)) for activation in op.makes),
    )  # fmt: skip


def _mtp_projection_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """Work from `hidden` and `coming` to `predicted`, [M, D]: one GEMM, whose columns tp gathers."""
    m, d, model = shape.outer_tokens, model.hidden_size, replace(model, norm="rmsnorm")
    joined = Activation("joined", m * 2 * d * shape.itemsize)
    gather, source = column_source(without_fp8(shape), joined.name, 2 * d)
    make = "predicted" if shape.tp == 1 else "columns"
    project = linear(shape, "eh_proj", source, make, 2 * d, shape.tp_part(d), collectives=source.collectives)
    return (
        norm(model, shape, "enorm", "coming", "coming_in", d, d, m),
        norm(model, shape, "hnorm", "hidden", "hidden_in", d, d, m),
        moved("join", "elementwise", ("coming_in", "hidden_in"), joined),
        *gather,
        project,
        *_gather_columns(shape, d),
    )  # fmt: skip


def _gather_columns(shape: Shape, d: int) -> tuple[Op, ...]:
    """All-gather of a GEMM's columns to whole rows, as a sum over ranks with zeros elsewhere."""
    if shape.tp == 1:
        return ()
    whole = shape.num_tokens * d * shape.itemsize
    traffic = scatters("tp", whole) if shape.shards_sequence else (Collective("all_reduce", "tp", whole, "forward"),)
    result = Activation("predicted", shape.outer_tokens * d * shape.itemsize)
    room = whole + exchanged_bytes(shape, whole)  # zeros around the columns
    return (Op("columns_home", "exchange", ("columns",), (result,), scratch_bytes=room, collectives=traffic),)


@lru_cache(maxsize=4096)
def head_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """Work from `hidden` [M, D] to `loss`: final norm, head and loss. With tp each rank has its shard of the vocabulary."""
    final = norm(model, shape, "norm", "hidden", "final", model.hidden_size, model.hidden_size, shape.outer_tokens)
    head = "embed_tokens" if model.tie_word_embeddings else "lm_head"
    gather, source = column_source(without_fp8(shape), "final", model.hidden_size)
    if shape.kernels.cross_entropy in ("chunked", "by-rows"):
        gather = tuple(replace(op, collectives=op.collectives[:1]) for op in gather if op.kind == "gather")
        return final, *gather, _chunked_loss(model, shape, head, source.read)
    vocabulary = shape.tp_part(model.vocab_size)
    project = linear(shape, head, source, "logits", model.hidden_size, vocabulary, collectives=source.collectives)
    if shape.tp == 1 or not shape.kernels.gathers_logits:
        return final, *gather, project, _loss(shape, "logits", shape.num_tokens * vocabulary)
    elements = shape.num_tokens * vocabulary * shape.tp
    whole = Activation("logits_whole", elements * shape.wide_itemsize)
    traffic = (Collective("all_gather", "tp", whole.num_bytes, "forward"),)
    collect = Op("logits.gather", "gather", ("logits",), (whole,), collectives=traffic)
    return final, *gather, project, collect, _loss(shape, whole.name, elements)


def _chunked_loss(model: Model, shape: Shape, head: str, read: str) -> Op:
    """Fused head and loss (`kernels.loss.cross_entropy`, over tp `parallel.tensor.tensor_loss`).

    It runs the head's backward pass in its forward pass, by chunks of rows, and saves the two gradients, that of `hidden`
    already summed over tp. For each row of a chunk three numbers are gathered: maximum, sum of exponentials, target. By slabs
    (`kernels.loss.cross_entropy_columns`) logits are computed twice, and two numbers of all rows are gathered at once. Other
    trainers' chunks ("by-rows") are taken to be as large as ours.
    """
    n, d, a, w = shape.num_tokens, model.hidden_size, shape.itemsize, shape.wide_itemsize
    v, largest = shape.tp_part(model.vocab_size), ceil_div(model.vocab_size, shape.tp)  # ranks agree on chunks by the largest
    kept = (
        Activation("head_hidden_gradient", shape.outer_tokens * d * a),
        Activation("head_weight_gradient", v * d * a),
    )
    columns = _slab_columns(shape, largest)
    by_slabs = columns is not None
    if by_slabs:
        room = _slab_loss_scratch_bytes(shape, d, largest)
    else:
        room = (
            _loss_scratch_bytes(shape, d, v)
            if shape.tp == 1
            else _parallel_loss_scratch_bytes(shape, d, v, chunk_rows(n, largest, shape.device))
        )
    if by_slabs:
        # Per logit: written and copied twice, log-softmax and softmax, scaled into place, read by two GEMMs.
        moves, sums, parts = n * v * (7 * a + 7 * w), n * d, -(-v // (columns or v))
    else:
        # Per logit: written, read into its wide copy, log-softmax, exponential, gradient, read by two GEMMs.
        moves, sums, parts = n * v * (2 * a + 6 * w), v * d, -(-n // chunk_rows(n, largest, shape.device))
    moves += parts * sums * 2 * (w + (a if a < w else 0))  # read, and written, with a narrow product between
    return Op(
        "loss", "loss", (read,), (Activation("loss", w), *kept), tuple(k.name for k in kept), (f"{head}.weight",),
        flops=(8 if by_slabs else 6) * n * v * d, hands_on_saved=True, scratch_bytes=room, product=Product(n, v, d),
        forward_products=2 if by_slabs else 1, moved_bytes=moves, collectives=_chunked_traffic(shape, d, largest),
    )  # fmt: skip


def _slab_columns(shape: Shape, v: int) -> int | None:
    """`slab_columns` of the loss that has slabs."""
    has_slabs = shape.kernels.cross_entropy == "chunked"
    return slab_columns(shape.num_tokens, v, shape.itemsize, shape.device) if has_slabs else None


def _chunked_traffic(shape: Shape, d: int, v: int) -> tuple[Collective, ...]:
    if shape.tp == 1:
        return ()
    n, rows = shape.num_tokens, chunk_rows(shape.num_tokens, v, shape.device)
    by_slabs = _slab_columns(shape, v) is not None
    sizes = [n] if by_slabs else [rows] * (n // rows) + ([n % rows] if n % rows else [])
    each = 2 if by_slabs else 3
    joined = [Collective("all_gather", "tp", shape.tp * size * each * shape.wide_itemsize, "forward") for size in sizes]
    kind = "reduce_scatter" if shape.shards_sequence else "all_reduce"
    return *joined, Collective(kind, "tp", n * d * shape.itemsize, "forward")


def _loss_scratch_bytes(shape: Shape, d: int, v: int) -> int:
    """Temporary bytes besides the two gradients at the loss's own peak."""
    a, w = shape.itemsize, shape.wide_itemsize
    rows, narrow = chunk_rows(shape.num_tokens, v, shape.device), a < w
    # One chunk's logits, their wide copy if they are narrow, log-probabilities, and the valid rows of hidden.
    room = rows * v * (a + w + (w if narrow else 0)) + rows * d * a
    # A narrow GEMM result is added to the wide gradient, which is rounded after the chunks are freed.
    room += v * d * (a + (w if shape.device == "cpu" else 0)) if narrow else 0
    return room + v * d * (w - a)


def _parallel_loss_scratch_bytes(shape: Shape, d: int, v: int, rows: int) -> int:
    """Temporary bytes of the loss over tp: exponentials overwrite the logits, and hidden's gradient is summed after chunks are
    freed."""
    a, w, n = shape.itemsize, shape.wide_itemsize, shape.num_tokens
    narrow = a < w
    chunk = rows * v * (a + (w if narrow else 0)) + rows * d * a + (v * d * a if narrow else 0)
    # Of each row: the target's index, its logit, the three numbers that are gathered, normalizer, loss, and three masks.
    chunk += rows * (INDEX_BYTES + 6 * w + 3)
    in_chunks = chunk + (n - shape.outer_tokens) * d * a + v * d * (w - a)
    summed = n * d * a + exchanged_bytes(shape, n * d * a) + v * d * (w - a)
    return max(in_chunks, summed)


def _slab_loss_scratch_bytes(shape: Shape, d: int, v: int) -> int:
    """Temporary bytes of the loss by slabs of the vocabulary, on one rank or over tp."""
    a, w, n = shape.itemsize, shape.wide_itemsize, shape.num_tokens
    columns = slab_columns(n, v, a, shape.device)
    assert columns is not None
    # A slab, its wide copy and the softmax of that. The gradient of hidden is summed in fp32, in narrow parts, one a slab.
    in_slabs = n * columns * (a + 2 * w) + n * d * (w + a) - shape.outer_tokens * d * a
    if shape.tp == 1:
        return in_slabs
    summed = n * d * a + exchanged_bytes(shape, n * d * a)
    gathered = shape.outer_tokens * d * a if shape.shards_sequence else 0  # the gathered tensor, still held by the decoder
    return gathered + max(in_slabs, summed)


def _loss(shape: Shape, read: str, elements: int) -> Op:
    """Cross-entropy of `elements` logits, as `Kernels.cross_entropy` specifies."""
    a, w, way = shape.itemsize, shape.wide_itemsize, shape.kernels.cross_entropy
    traffic, result = _loss_traffic(shape), Activation("loss", w)
    if way in ("fused", "compiled"):
        return Op("loss", "loss", (read,), (result,), (read,), hands_on_saved=way == "fused",
                  moved_bytes=4 * elements * a, backward_moved_bytes=2 * elements * a, collectives=traffic)  # fmt: skip
    kept = Activation("softmax", elements * w)
    eager, wide = way == "eager", 2 + (shape.tp > 1 and not shape.kernels.gathers_logits)
    # eager: the copy coexists with logits and log-softmax, and backward with two more wide ones, one of them rounded. With a
    # sharded vocabulary three: DTensor's loss adds exponentials to a gradient of targets alone, then scales the sum.
    held = (read,) if shape.kernels.gathers_logits and shape.tp > 1 else ()  # the program still references the gathered logits
    return Op(
        "loss", "loss", (read,), (result, kept), (kept.name, *held), scratch_bytes=elements * (w if eager else w - a),
        backward_scratch_bytes=elements * (wide * w - a) if eager else 0, moved_bytes=elements * (a + 6 * w),
        backward_moved_bytes=elements * (a + 4 * w), collectives=traffic,
    )  # fmt: skip


def _loss_traffic(shape: Shape) -> tuple[Collective, ...]:
    """Communication with a sharded vocabulary: each row's maximum, sum of exponentials and target logit are all-reduced in
    fp32."""
    if shape.tp == 1 or shape.kernels.gathers_logits:
        return ()
    return (Collective("all_reduce", "tp", shape.num_tokens * 4, "forward"),) * 3


def work(model: Model, shape: Shape) -> list[tuple[int | None, Op]]:
    """Every operation of one forward pass in order, each with the block it belongs to (None outside the blocks)."""
    blocks = [(layer, op) for layer in range(model.num_hidden_layers) for op in block_work(model, layer, shape)]
    before = [(None, op) for op in (*embedding_work(model, shape), *shared_work(model, shape))]
    return [*before, *blocks, *((None, op) for op in head_work(model, shape))]


def slab_columns(num_rows: int, vocab_size: int, itemsize: int, device: str) -> int | None:
    """Columns of logits in one slab of the loss; None if the loss runs by chunks of rows.

    Slabs are used for activations narrower than fp32 on CUDA whose logits take several chunks of rows: see
    `kernels.loss.cross_entropy_columns`. `vocab_size`: of this rank.
    """
    if device == "cpu" or itemsize >= 4 or chunk_rows(num_rows, vocab_size, device) >= num_rows:
        return None
    columns = SLAB_BYTES // (4 * num_rows) // SLAB_COLUMNS_MULTIPLE * SLAB_COLUMNS_MULTIPLE
    return min(vocab_size, max(SLAB_COLUMNS_MULTIPLE, columns))


def chunk_rows(num_rows: int, vocab_size: int, device: str) -> int:
    """Rows of logits in one chunk of the loss."""
    return min(num_rows, max(MIN_CHUNK_ROWS, CHUNK_BYTES["cpu" if device == "cpu" else "cuda"] // (4 * vocab_size)))
