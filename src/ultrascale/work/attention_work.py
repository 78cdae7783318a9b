"""Attention's operations on one rank: heads sharded by tp, the sequence by cp, and the kernels of a stack.

Keys and values reach all queries of the sequence in one of these ways (a rank holds S/cp of each):

    ring          keys and values travel around the ring while attention computes on the previous ones (Liu et al. 2023);
                  forward once; backward once more, with their gradients
    all-gather    they are gathered first, and again backward; their gradients are reduce-scattered (Llama 3, section 3.3.2)
    all-to-all    ranks swap sequence shards for heads, of queries, keys, values and results; again backward (Jacobs et al.
                  2023)
    both          h = cp_heads neighbours swap, rings connect the cp/h groups of them (Fang and Zhao 2024, USP): a Collective
                  over axis cp is an all_to_all among h neighbours, or one that gathers among cp/h ranks, h apart

Rings and all-gathers are balanced: each rank holds an early and a late piece of the sequence, so that all compute the same
share of the causal square.
"""

from __future__ import annotations

from ultrascale.description.architecture.model import Model
from ultrascale.work.op_builders import (
    ceil_div,
    column_source,
    gathers,
    kept_alive_to_end,
    linear,
    local_source,
    moved,
    norm,
    row_linear,
    without_fp8,
)
from ultrascale.work.ops import Activation, Collective, Op, Product, Scores, Shape, When
from ultrascale.work.sharding.context_order import Masks, windowed_masks

BIAS_MULTIPLE = 16
"""Multiple to which torch pads mask rows for memory-efficient attention on CUDA (`pad_bias` in its attention.cpp)."""


def attention_work(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    """Operations from `attention_in` to `attention_out`, both [outer tokens, D]."""
    ops, names = (_latent_heads if model.latent_attention else _heads)(model, layer, shape)
    named = tuple(name.removesuffix("_repeated") for name in names)
    swapped, names, attended = _all_to_all_heads(model, shape, names)
    core = (_math if shape.kernels.attention == "math" else _flash)(model, layer, shape, names, attended)
    swap_back = _all_to_all_back(model, shape, attended)
    width = ceil_div(model.num_attention_heads, shape.tp) * model.value_head_dim
    result = "attended"
    if shape.kernels.copies_attended:
        result = "attended_copy"
        copy = Activation(result, _attended_bytes(model, shape))
        swap_back += (moved("self_attn.copy", "elementwise", ("attended",), copy),)
    is_kept = shape.kernels.attention == "flash" and not swap_back  # for the kernel's own backward pass
    rounds_again = shape.kernels.rounds_again and is_kept and shape.fp8_scaling != "delayed"
    saved, source = local_source(shape, result, width, shape.num_tokens, again=rounds_again)
    out = row_linear(
        shape, "self_attn.o_proj", source, "attention_out", width, model.hidden_size, bias=model.attention_output_bias
    )
    return (*ops, *swapped, *core, *swap_back, *saved, *kept_alive_to_end(out, ("attention_in", *named, result)))


def attended_share(sequence_length: int, window: int | None) -> float:
    """Fraction of the square of scores that a causal mask and a sliding window leave."""
    s, w = sequence_length, min(window or sequence_length, sequence_length)
    return (w * (w + 1) / 2 + (s - w) * w) / s**2


def mask_elements(window: int | None, shape: Shape) -> int:
    """Elements of the mask of layers with this sliding window; 0 if no mask is needed (plain causal attention)."""
    s = shape.sequence_length
    if shape.masks_in_kernel or (not shape.documents and (window is None or window >= s)):
        return 0
    if masks := _context_masks(window, shape):
        return masks.elements
    return (shape.micro_batch_size if shape.documents else 1) * shape.local_length * s


def mask_scratch_bytes(window: int | None, shape: Shape) -> int:
    """Peak bytes of booleans (masked positions) while that mask is built."""
    masks = _context_masks(window, shape)
    return 3 * mask_elements(window, shape) if masks is None else masks.scratch_bytes


def _context_masks(window: int | None, shape: Shape) -> Masks | None:
    """Masks over cp, if a sequence is one document."""
    if shape.cp == 1 or shape.documents or window is None:
        return None
    places, heads = shape.cp_grid
    place = None if shape.coordinates is None else shape.coordinates.cp // heads
    row_multiple = BIAS_MULTIPLE if shape.device == "cuda" else 1
    return windowed_masks(shape.sequence_length, places, place, window, row_multiple, shape.itemsize)


def mask_name(window: int | None) -> str:
    """Name of the mask activation that layers with this sliding window share."""
    return "mask" if window is None else f"mask_{window}"


def _heads(model: Model, layer: int, shape: Shape) -> tuple[tuple[Op, ...], tuple[str, str, str]]:
    """Queries, keys and values of this rank's heads, after norm and RoPE; with their names."""
    n, d, e, a = shape.num_tokens, model.hidden_size, model.head_dim, shape.itemsize
    q, kv = ceil_div(model.num_attention_heads, shape.tp) * e, ceil_div(model.num_key_value_heads, shape.tp) * e
    gather, source = column_source(shape, "attention_in", d, projections=3)
    if shape.kernels.joins_projections:
        weights = tuple(f"self_attn.{x}_proj" for x in "qkv")
        ops = [linear(shape, "self_attn.qkv_proj", source, "qkv", d, q + 2 * kv, bias=model.qkv_bias, weights=weights,
                      collectives=source.collectives)]  # fmt: skip
        query = key = value = "qkv"
        if not shape.kernels.value_is_view and (model.qk_norm or model.uses_rotary(layer)):
            value = "v"
            ops.append(moved("self_attn.v_copy", "elementwise", ("qkv",), Activation("v", n * kv * a)))
    else:
        ops = [
            linear(shape, f"self_attn.{name}_proj", source, name, d, width, bias=model.qkv_bias,
                   collectives=source.collectives if name == "q" else ())
            for name, width in (("q", q), ("k", kv), ("v", kv))
        ]  # fmt: skip
        query, key, value = "q", "k", "v"
    if model.qk_norm:
        ops += [
            norm(model, shape, f"self_attn.{x}_norm", read, f"{x}_normed", width if model.qk_norm_whole else e, width, n,
                 bias=False, over_tp=model.qk_norm_whole and shape.tp > 1)
            for x, read, width in (("q", query, q), ("k", key, kv))
        ]  # fmt: skip
        query, key = "q_normed", "k_normed"
    if model.uses_rotary(layer):
        angles = angle_names(model.is_rope_local(layer))
        ops += [_rotary(shape, x, read, n * width * a, angles) for x, read, width in (("q", query, q), ("k", key, kv))]
        query, key = "q_rotated", "k_rotated"
    if _repeats_heads(model, layer, shape) and not model.attention_sinks:
        ops += [
            moved(f"self_attn.{x}_repeat", "elementwise", (read,), Activation(f"{x}_repeated", n * q * a),
                  moved_bytes=n * (q + kv) * a)
            for x, read in ((key, key), (value if value != key else "v", value))
        ]  # fmt: skip
        key, value = (op.makes[0].name for op in ops[-2:])
    return (*gather, *ops), (query, key, value)


def _repeats_heads(model: Model, layer: int, shape: Shape) -> bool:
    """True if key/value heads are repeated, since no fused CUDA kernel takes fewer of them here. With sinks our own operation
    repeats them internally, in both passes, and saves its unrepeated inputs."""
    fewer = ceil_div(model.num_key_value_heads, shape.tp) < ceil_div(model.num_attention_heads, shape.tp)
    if shape.kernels.repeats_keys:
        return fewer
    if shape.device == "cpu" or shape.cp > 1 or shape.masks_in_kernel:
        return False
    has_mask = mask_elements(model.window(layer), shape) > 0
    return fewer and (has_mask or shape.itemsize != 2)


def angle_names(is_local: bool) -> tuple[str, str]:
    """Names of the activations that blocks share: cosines and sines of `rope_theta`, or of `rope_local_base_freq`."""
    return ("cos_local", "sin_local") if is_local else ("cos", "sin")


def _rotary(shape: Shape, name: str, read: str, num_bytes: int, angles: tuple[str, str]) -> Op:
    """RoPE of `read`. Unfused: halves are swapped, multiplied and added in separate kernels."""
    moves, scratch = (2 * num_bytes, 0) if shape.kernels.rotary else (9 * num_bytes, 3 * num_bytes)
    return Op(
        f"self_attn.{name}_rotary", "elementwise", (read,), (Activation(f"{name}_rotated", num_bytes),), angles,
        scratch_bytes=scratch, backward_scratch_bytes=scratch, moved_bytes=moves, backward_moved_bytes=moves,
    )  # fmt: skip


def _latent_heads(model: Model, layer: int, shape: Shape) -> tuple[tuple[Op, ...], tuple[str, str, str]]:
    """Latent attention (DeepSeek-V2, section 2.1): low-rank projections on every rank; the heads made from them are sharded by
    tp."""
    n, m, d, a = shape.num_tokens, shape.outer_tokens, model.hidden_size, shape.itemsize
    heads, nope, rope = ceil_div(model.num_attention_heads, shape.tp), model.qk_nope_head_dim, model.qk_rope_head_dim
    narrow, query_width = model.kv_lora_rank or 0, heads * (nope + rope)
    ops: list[Op] = []
    bf16 = without_fp8(shape) if shape.kernels.own_fp8 else shape  # low-rank projections stay in bf16
    saved, source = local_source(bf16, "attention_in", d, m)
    ops += saved
    if model.q_lora_rank is None:
        gather, wide = column_source(shape, "attention_in", d)
        ops += [*(op for op in gather if op not in saved),
                linear(shape, "self_attn.q_proj", wide, "q", d, query_width, collectives=wide.collectives)]  # fmt: skip
    else:
        ops += [
            linear(bf16, "self_attn.q_a_proj", source, "q_latent", d, model.q_lora_rank, num_tokens=m, bias=model.qkv_bias),
            norm(model, shape, "self_attn.q_a_layernorm", "q_latent", "q_narrow", model.q_lora_rank, model.q_lora_rank, m),
        ]
        gather, wide = column_source(shape, "q_narrow", model.q_lora_rank)
        ops += [*gather, linear(shape, "self_attn.q_b_proj", wide, "q", model.q_lora_rank, query_width,
                                collectives=wide.collectives)]  # fmt: skip
    ops += [
        linear(bf16, "self_attn.kv_a_proj_with_mqa", source, "kv_latent", d, narrow + rope, num_tokens=m, bias=model.qkv_bias),
        norm(model, shape, "self_attn.kv_a_layernorm", "kv_latent", "kv_narrow", narrow, narrow, m),
    ]
    gather, wide = column_source(shape, "kv_narrow", narrow)
    value_width = heads * model.v_head_dim
    ops += [
        *gather,
        linear(shape, "self_attn.kv_b_proj", wide, "kv", narrow, heads * nope + value_width, collectives=wide.collectives),
        _rotary(shape, "q", "q", n * query_width * a, angle_names(model.is_rope_local(layer))),
        # The shared rotated key is copied to all heads, after their unrotated dimensions; values are copied out.
        Op("self_attn.k_join", "elementwise", ("kv", "kv_latent"), (Activation("k", n * query_width * a),),
           angle_names(model.is_rope_local(layer)),
           moved_bytes=2 * n * query_width * a, backward_moved_bytes=2 * n * query_width * a,
           collectives=_shared_key_traffic(shape, n * rope * a)),
        moved("self_attn.v_copy", "elementwise", ("kv",), Activation("v", n * value_width * a)),
    ]  # fmt: skip
    return tuple(ops), ("q_rotated", "k", "v")


def _shared_key_traffic(shape: Shape, num_bytes: int) -> tuple[Collective, ...]:
    """Communication of the rotated key that all heads share: every tp rank needs all of it, and has a partial gradient."""
    if shape.tp == 1:
        return ()
    if shape.shards_sequence:
        return gathers("tp", num_bytes)
    return (Collective("all_reduce", "tp", num_bytes, "backward"),)


def _all_to_all_heads(
    model: Model, shape: Shape, names: tuple[str, str, str]
) -> tuple[tuple[Op, ...], tuple[str, str, str], str]:
    """All-to-all of queries, keys and values: from S/cp of all heads to S of 1/cp of them. Last, the result's name."""
    if shape.cp_grid[1] == 1:
        return (), names, "attended"
    makes = ("q_swapped", "k_swapped", "v_swapped")
    sizes = _bytes_of_swapped(model, shape)
    ops = tuple(  # keys and values travel with the queries
        _all_to_all(
            shape, f"self_attn.{make}", read, make, (num_bytes, _swapped(shape, num_bytes)), num_messages=int(make == makes[0])
        )
        for read, make, num_bytes in zip(names, makes, sizes, strict=True)
    )
    return ops, makes, "attended_swapped"


def _all_to_all_back(model: Model, shape: Shape, attended: str) -> tuple[Op, ...]:
    if attended == "attended":
        return ()
    whole = _attended_bytes(model, shape)
    return (_all_to_all(shape, "self_attn.swap_back", attended, "attended", (whole, _swapped(shape, whole)), to_heads=False),)


def _all_to_all(
    shape: Shape, name: str, read: str, make: str, sizes: tuple[int, int], *, num_messages: int = 1, to_heads: bool = True
) -> Op:
    """All-to-all. `sizes`: bytes of this rank's tokens with all heads, and of its heads over all tokens at its place of the
    ring."""
    whole, swapped = sizes
    ways: tuple[When, When] = ("forward", "backward") if to_heads else ("backward", "forward")
    stays = whole // shape.cp_grid[1]
    traffic = tuple(
        Collective("all_to_all", "cp", size, when, num_messages=num_messages,
                   leaving_bytes=None if shape.coordinates is None else size - stays)
        for size, when in zip(sizes, ways, strict=True)
    )  # fmt: skip
    return Op(name, "exchange", (read,), (Activation(make, swapped if to_heads else whole),), collectives=traffic)


def _swapped(shape: Shape, num_bytes: int) -> int:
    """Bytes of a rank's heads over all tokens at its place of the ring; `num_bytes`: of its own tokens with all heads."""
    return num_bytes * shape.swapped_tokens // max(1, shape.num_tokens * shape.cp_grid[1])


def _bytes_of_heads(model: Model, shape: Shape) -> tuple[int, int, int]:
    """Bytes of this rank's queries, keys and values."""
    n, a, tp = shape.num_tokens, shape.itemsize, shape.tp
    query = n * ceil_div(model.num_attention_heads, tp) * model.head_dim * a
    if model.latent_attention:
        return query, query, _attended_bytes(model, shape)
    key = n * _exchanged_kv_heads(model, shape) * model.head_dim * a
    return query, key, key


def _exchanged_kv_heads(model: Model, shape: Shape) -> int:
    """Key/value heads of this rank that attention gets."""
    return ceil_div(model.num_attention_heads if shape.kernels.repeats_keys else model.num_key_value_heads, shape.tp)


def _bytes_of_swapped(model: Model, shape: Shape) -> tuple[int, int, int]:
    """Bytes after sequence shards are swapped for heads: with more ranks than key heads, some go to several ranks."""
    query, key, value = _bytes_of_heads(model, shape)
    if model.latent_attention:
        return query, key, value
    heads, ranks = _exchanged_kv_heads(model, shape), shape.cp_grid[1]
    each = _key_value_heads(model, shape)
    return query, key * each * ranks // heads, value * each * ranks // heads


def _key_value_heads(model: Model, shape: Shape) -> int:
    """Key/value heads used on one rank: each that its query heads read."""
    groups, ranks = _exchanged_kv_heads(model, shape), shape.cp_grid[1]
    queries = ceil_div(model.num_attention_heads, shape.tp * ranks)
    if model.latent_attention:
        return queries
    return groups // ranks if groups % ranks == 0 else 1 if ranks % groups == 0 else queries


def _attended_bytes(model: Model, shape: Shape) -> int:
    return shape.num_tokens * ceil_div(model.num_attention_heads, shape.tp) * model.value_head_dim * shape.itemsize


def _scores(model: Model, layer: int, shape: Shape) -> Scores:
    swap = shape.cp_grid[1]
    has_mask = mask_elements(model.window(layer), shape) > 0
    return Scores(
        batch=shape.micro_batch_size,
        heads=ceil_div(model.num_attention_heads, shape.tp * swap),
        key_value_heads=_key_value_heads(model, shape),
        head_dim=model.head_dim,
        value_head_dim=model.value_head_dim,
        queries=shape.swapped_length,
        keys=shape.sequence_length,
        share=1.0 if has_mask else attended_share(shape.sequence_length, model.window(layer)),
    )


def _flash(model: Model, layer: int, shape: Shape, names: tuple[str, str, str], attended: str) -> tuple[Op, ...]:
    """Fused kernel: scores are never materialised; one fp32 number per row and head (`logsumexp`) is saved instead."""
    scores = _scores(model, layer, shape)
    rows = shape.swapped_tokens * scores.heads
    logsumexp = Activation("logsumexp", rows * shape.wide_itemsize)
    has_mask = mask_elements(model.window(layer), shape) > 0
    saves = (*dict.fromkeys(names), attended, "logsumexp", *((mask_name(model.window(layer)),) if has_mask else ()))
    square, e, v = 2 * rows * shape.sequence_length, model.head_dim, model.value_head_dim
    traffic, scratch, backward_scratch = _key_value_traffic(model, model.window(layer), shape)
    joined, joined_back = _merge_scratch_bytes(model, shape, scores)
    scratch, backward_scratch = scratch + joined, backward_scratch + joined_back
    if model.attention_sinks and _repeats_heads(model, layer, shape):  # keys and values, and backward their gradients as well
        repeated = _bytes_of_heads(model, shape)[0]
        scratch, backward_scratch = scratch + 2 * repeated, backward_scratch + 4 * repeated
    core = Op(
        "self_attn.core", "attention", tuple(dict.fromkeys(names)),
        (Activation(attended, _swapped(shape, _attended_bytes(model, shape))), logsumexp),
        saves, ("self_attn.sinks",) if model.attention_sinks else (), flops=square * (e + v),
        backward_flops=square * (3 * e + 2 * v), scratch_bytes=scratch,
        backward_scratch_bytes=backward_scratch, scores=scores, collectives=traffic,
    )  # fmt: skip
    return (core,)


def _key_value_traffic(model: Model, window: int | None, shape: Shape) -> tuple[tuple[Collective, ...], int, int]:
    """Communication of cp's ring and all-gather, and buffers for keys and values of other ranks, forward and backward."""
    places = shape.cp_grid[0]
    if places == 1:
        return (), 0, 0
    _, key, value = _bytes_of_swapped(model, shape)
    widened = shape.wide_itemsize // shape.itemsize if shape.kernels.widens_key_gradients else 1
    key, value = _swapped(shape, key), _swapped(shape, value)
    whole = (
        places * (key + value) if shape.coordinates is None else (key + value) // shape.swapped_length * shape.sequence_length
    )
    beside = "attention" if shape.rings else ""
    keys, gradients = _ring_shares(places, window, shape) if shape.rings else (1.0, 1.0)
    reach = window if window is not None and window < shape.sequence_length else None
    traffic = (
        Collective("all_gather", "cp", whole, "forward", beside, keys, reach),
        Collective("all_gather", "cp", whole, "backward", beside, keys, reach),
        Collective("reduce_scatter", "cp", widened * whole, "backward", beside, gradients, reach),
    )
    # A ring holds the current pair and the incoming one; backward their gradients as well.
    buffer_bytes = 2 * (key + value) if shape.rings else whole
    return traffic, buffer_bytes, (1 + widened) * buffer_bytes


def _merge_scratch_bytes(model: Model, shape: Shape, scores: Scores) -> tuple[int, int]:
    """Buffers, besides keys and values, where parts of attention are merged over cp (`parallel.context.context_attention`):
    forward the wide sum, one part from its kernel and its wide copy; backward wide sums of all gradients, and one part's."""
    if shape.cp_grid[0] == 1 or not shape.kernels.drops_unseen_keys:  # other frameworks' rings are not modelled in this detail
        return 0, 0
    wider = shape.wide_itemsize // shape.itemsize
    query, key, value = (_swapped(shape, size) for size in _bytes_of_swapped(model, shape))
    attended = _swapped(shape, _attended_bytes(model, shape))
    part = attended * scores.kernel_width(shape.device) // scores.value_head_dim
    forward = (wider - 1) * attended + part * (1 + wider if wider > 1 else 1)
    packed = 0 if shape.rings else wider * (key + value)  # of one part, being sent back
    return forward, wider * (query + key + value) + packed


def _ring_shares(places: int, window: int | None, shape: Shape) -> tuple[float, float]:
    """Fractions of keys and of their gradients that a ring sends when it drops what no later rank needs.

    In zigzag order the late half of rank r's keys is seen only by the r ranks before it: 3/4 of n - 1 hops of two halves. The
    gradients of the two halves travel together, except for rank 0, whose late half no other rank uses. Sliding windows, and
    documents whole on one rank, shorten the path further: not counted here.
    """
    if not shape.kernels.drops_unseen_keys or shape.documents or (window or shape.sequence_length) < shape.sequence_length:
        return 1.0, 1.0
    return 0.75, 1.0 - 0.5 / places


def _math(model: Model, layer: int, shape: Shape, names: tuple[str, str, str], attended: str) -> tuple[Op, ...]:
    """Unfused attention, S x S scores per head in memory: a GEMM, a softmax that saves its result, dropout, and a GEMM with the
    values."""
    query, key, value = names
    s = _scores(model, layer, shape)
    count = s.batch * s.heads
    elements, a = count * s.queries * s.keys, shape.itemsize
    half = 2 * elements * s.head_dim
    ops: list[Op] = []
    if s.key_value_heads < s.heads and not value.endswith("_repeated"):
        _, key_bytes, _ = _bytes_of_heads(model, shape)
        repeated = key_bytes * s.heads // s.key_value_heads
        ops += [
            moved(f"self_attn.{x}_repeat", "elementwise", (read,), Activation(f"{x}_repeated", repeated),
                  moved_bytes=key_bytes + repeated)
            for x, read in (("k", key), ("v", value))
        ]  # fmt: skip
        key, value = "k_repeated", "v_repeated"
    pair = tuple(dict.fromkeys((query, key)))
    ops += [
        Op("self_attn.scores", "attention", pair, (Activation("attention_scores", elements * a),), pair, flops=half,
           backward_flops=2 * half, product=Product(s.queries, s.keys, s.head_dim, count)),
        Op("self_attn.softmax", "attention", ("attention_scores",), (Activation("probabilities", elements * a),),
           ("probabilities",), moved_bytes=2 * elements * a, backward_moved_bytes=3 * elements * a),
    ]  # fmt: skip
    probabilities = "probabilities"
    if shape.kernels.dropout:
        dropped, mask = Activation("probabilities_dropped", elements * a), Activation("probabilities_kept", elements)
        ops.append(
            moved("self_attn.dropout", "attention", ("probabilities",), dropped, mask, moved_bytes=elements * (2 * a + 1))
        )
        probabilities = "probabilities_dropped"
    flops = 2 * elements * s.value_head_dim
    ops.append(
        Op("self_attn.context", "attention", (probabilities, value), (Activation(attended, _attended_bytes(model, shape)),),
           (probabilities, value), flops=flops, backward_flops=2 * flops,
           product=Product(s.queries, s.value_head_dim, s.keys, count))
    )  # fmt: skip
    return tuple(ops)
