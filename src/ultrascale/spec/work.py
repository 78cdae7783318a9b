"""The table of every operation of the decoder: FLOPs, what it makes, and what it saves for the backward pass.

This is `models.decoder.Decoder` in eager mode, told as data: a list of operations that read and make named activations.
Whoever needs to know what is computed reads it: `plan.memory` replays it, `plan.time` sums it. `tests/agree` holds it to the
real decoder, name by name and byte by byte (FlopCounterMode, saved-tensor hooks), in fp32, bf16 and fp64.

    reads, makes    named activations; views are left out, they are the memory they look at
    saves           those of them that autograd keeps; two operations that save one activation keep it once
    scratch         bytes that exist only while the operation runs; they matter where the peak is
    flops           one multiply-add is two. Attention counts the full square of scores, as FlopCounterMode does: a causal
                    kernel does about half, and `plan.time` says which of the two it uses

Attention is SDPA's fused kernel: scores never exist, one fp32 number per row and head (`logsumexp`) is kept instead. Masks
(documents, sliding windows) and rotary angles are made once per micro-batch and shared by all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ultrascale.spec.layout import DTYPE_BYTES, Precision
from ultrascale.spec.model import Model

Kind = Literal["matmul", "attention", "norm", "elementwise", "embedding", "loss"]
CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**29}
"""Bytes of fp32 logits that exist at a time in `kernels.cross_entropy`; other devices than the CPU are taken for CUDA."""
MIN_CHUNK_ROWS = 128


@dataclass(frozen=True)
class Shape:
    """One micro-batch on one rank."""

    micro_batch_size: int
    sequence_length: int
    precision: Precision = "fp32"
    documents: bool = False
    """Packed documents with a mask and positions of their own."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def num_tokens(self) -> int:
        """B*S, N below."""
        return self.micro_batch_size * self.sequence_length

    @property
    def itemsize(self) -> int:
        """Bytes of one activation element."""
        return DTYPE_BYTES[self.precision]

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element of what is computed in at least fp32."""
        return max(4, self.itemsize)


@dataclass(frozen=True)
class Activation:
    """A tensor an operation makes."""

    name: str
    num_bytes: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Op:
    """One operation of the forward pass, with its backward pass."""

    name: str
    kind: Kind
    reads: tuple[str, ...]
    makes: tuple[Activation, ...]
    """The result first; then what else it keeps for itself (mean, logsumexp)."""
    saves: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    """Weights whose gradients its backward pass makes."""
    flops: int = 0
    backward_flops: int = 0
    hands_on_saved: bool = False
    """What it saved are the gradients of what it reads and of its weights already: its backward pass scales them in place."""
    scratch_bytes: int = 0
    backward_scratch_bytes: int = 0

    @property
    def passes_gradient(self) -> bool:
        """Whether the gradient of what it reads is that of its result, the same memory: a sum."""
        return len(self.reads) == 2 and self.kind == "elementwise" and not self.saves

    @property
    def kept_by_selective(self) -> bool:
        """Whether selective recomputation keeps its result: `parallel.recompute.KEPT_OPS`."""
        return self.kind in ("matmul", "attention")


def shared_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """What all blocks read: rotary angles, and a mask for each sliding window there is. They carry no gradient."""
    rows = shape.num_tokens if shape.documents else shape.sequence_length
    ops: list[Op] = []
    for window in dict.fromkeys(model.window(layer) for layer in range(model.num_hidden_layers)):
        if elements := mask_elements(window, shape):
            mask = Activation(mask_name(window), elements * shape.itemsize, False)
            ops.append(Op(mask.name, "elementwise", (), (mask,), scratch_bytes=3 * elements))  # what is hidden, as booleans
    if model.position_embedding == "rotary":
        planes = rows * model.head_dim // 2
        angles = tuple(Activation(name, planes * shape.itemsize, False) for name in ("cos", "sin"))
        # Angles in fp32, and their cosines before they are rounded.
        ops.append(Op("angles", "elementwise", (), angles, scratch_bytes=planes * 8))
    return tuple(ops)


def embedding_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """From tokens to the residual stream `hidden`."""
    n, a = shape.num_tokens, shape.itemsize
    hidden = Activation("hidden", n * model.hidden_size * a)
    if model.position_embedding == "rotary":
        return (Op("embed_tokens", "embedding", (), (hidden,), weights=("embed_tokens.weight",)),)
    rows = n if shape.documents else shape.sequence_length
    position = Activation("position", rows * model.hidden_size * a)
    token = Activation("token", hidden.num_bytes)
    # Positions are made in the forward pass unless the batch brings its own, and kept as the indices of the lookup.
    indices = () if shape.documents else (Activation("positions", rows * 8, False),)
    return (
        Op("embed_tokens", "embedding", (), (token,), weights=("embed_tokens.weight",)),
        Op("embed_positions", "embedding", (), (position, *indices), tuple(i.name for i in indices),
           ("embed_positions.weight",)),
        Op("add_positions", "elementwise", ("token", "position"), (hidden,)),
    )  # fmt: skip


@lru_cache(maxsize=64)
def block_work(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    """One decoder block, from `hidden` to `hidden_out`. Equal for layers that are equal."""
    return (
        _norm(model, shape, "input_layernorm", "hidden", "attention_in", model.hidden_size),
        *_attention(model, layer, shape),
        _add(model, shape, "attention_residual", "hidden", "attention_out", "hidden_mid"),
        _norm(model, shape, "post_attention_layernorm", "hidden_mid", "mlp_in", model.hidden_size),
        *_mlp(model, shape),
        _add(model, shape, "mlp_residual", "hidden_mid", "mlp_out", "hidden_out"),
    )


def head_work(model: Model, shape: Shape) -> tuple[Op, ...]:
    """From `hidden` to `loss`: the final norm, and the head with its loss in one (`kernels.cross_entropy`).

    The loss does the backward pass of the head in its forward pass, a chunk of rows at a time, and keeps the two gradients.
    """
    n, d, v, a, w = shape.num_tokens, model.hidden_size, model.vocab_size, shape.itemsize, shape.wide_itemsize
    rows, narrow = chunk_rows(n, v, shape.device), a < w
    # One chunk's logits, their wide copy where they are narrow, log-probabilities, and rows of hidden that count.
    room = rows * v * (a + w + (w if narrow else 0)) + rows * d * a
    # A narrow product is made before it is added to the wide gradient, which is rounded when the chunks are gone.
    room += v * d * (a + (w if shape.device == "cpu" else 0)) if narrow else 0
    kept = (Activation("head_hidden_gradient", n * d * a, False), Activation("head_weight_gradient", v * d * a, False))
    head = "embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    loss = Op(
        "loss", "loss", ("final",), (Activation("loss", w), *kept), tuple(k.name for k in kept), (head,),
        flops=6 * n * v * d, hands_on_saved=True, scratch_bytes=room + v * d * (w - a),
    )  # fmt: skip
    return _norm(model, shape, "norm", "hidden", "final", d), loss


def work(model: Model, shape: Shape) -> list[tuple[int | None, Op]]:
    """Every operation of one forward pass in order, each with the block it belongs to (None outside the blocks)."""
    blocks = [(layer, op) for layer in range(model.num_hidden_layers) for op in block_work(model, layer, shape)]
    before = [(None, op) for op in (*embedding_work(model, shape), *shared_work(model, shape))]
    return [*before, *blocks, *((None, op) for op in head_work(model, shape))]


def chunk_rows(num_rows: int, vocab_size: int, device: str) -> int:
    """Rows of logits the loss makes at a time."""
    return min(num_rows, max(MIN_CHUNK_ROWS, CHUNK_BYTES["cpu" if device == "cpu" else "cuda"] // (4 * vocab_size)))


def mask_elements(window: int | None, shape: Shape) -> int:
    """Elements of the mask of layers with this sliding window; 0 for plain causal attention, which needs none."""
    s = shape.sequence_length
    if not shape.documents and (window is None or window >= s):
        return 0
    return (shape.micro_batch_size if shape.documents else 1) * s * s


def mask_name(window: int | None) -> str:
    """The activation that layers with this sliding window share."""
    return "mask" if window is None else f"mask_{window}"


def _attention(model: Model, layer: int, shape: Shape) -> tuple[Op, ...]:
    n, s, a = shape.num_tokens, shape.sequence_length, shape.itemsize
    q, kv = model.query_size, model.key_value_size
    ops = [
        _linear(model, shape, f"self_attn.{name}_proj", "attention_in", name, model.hidden_size, width, model.qkv_bias)
        for name, width in (("q", q), ("k", kv), ("v", kv))
    ]
    query, key = "q", "k"
    if model.qk_norm:
        ops += [
            _norm(model, shape, f"self_attn.{x}_norm", x, f"{x}_normed", model.head_dim, w) for x, w in (("q", q), ("k", kv))
        ]
        query, key = "q_normed", "k_normed"
    if model.uses_rotary(layer):
        ops += [
            Op(f"self_attn.{x}_rotary", "elementwise", (read,), (Activation(f"{x}_rotated", n * w * a),), ("cos", "sin"))
            for x, read, w in (("q", query, q), ("k", key, kv))
        ]
        query, key = "q_rotated", "k_rotated"
    has_mask = mask_elements(model.window(layer), shape) > 0
    value = "v"
    if shape.device == "cuda" and kv < q and (has_mask or shape.precision != "bf16"):
        # No fused kernel on CUDA takes fewer key/value heads here: they are repeated.
        ops += [Op(f"self_attn.{x}_repeat", "elementwise", (x,), (Activation(f"{x}_repeated", n * q * a),)) for x in (key, "v")]
        key, value = f"{key}_repeated", "v_repeated"
    logsumexp = Activation("logsumexp", n * model.num_attention_heads * shape.wide_itemsize, False)
    saves = (query, key, value, "attended", "logsumexp", *((mask_name(model.window(layer)),) if has_mask else ()))
    square = 4 * n * s * q
    core = Op(
        "self_attn.core", "attention", (query, key, value), (Activation("attended", n * q * a), logsumexp), saves,
        flops=square, backward_flops=square * 5 // 2,
    )  # fmt: skip
    out = _linear(
        model, shape, "self_attn.o_proj", "attended", "attention_out", q, model.hidden_size, model.attention_output_bias
    )
    return (*ops, core, out)


def _mlp(model: Model, shape: Shape) -> tuple[Op, ...]:
    n, d, f, a = shape.num_tokens, model.hidden_size, model.intermediate_size, shape.itemsize
    product = Activation("product", n * f * a)
    up = _linear(model, shape, "mlp.up_proj", "mlp_in", "up", d, f, model.mlp_bias)
    down = _linear(model, shape, "mlp.down_proj", "product", "mlp_out", f, d, model.mlp_bias)
    if not model.gated_mlp:
        return up, Op("mlp.gelu", "elementwise", ("up",), (product,), ("up",)), down
    gate = _linear(model, shape, "mlp.gate_proj", "mlp_in", "gate", d, f, model.mlp_bias)
    swiglu = Op(
        "mlp.swiglu", "elementwise", ("gate", "up"), (product,), ("gate", "up"), backward_scratch_bytes=product.num_bytes
    )
    return gate, up, swiglu, down


def _linear(model: Model, shape: Shape, name: str, read: str, make: str, columns: int, rows: int, bias: bool) -> Op:
    n = shape.num_tokens
    weights = (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
    flops = 2 * n * rows * columns
    made = Activation(make, n * rows * shape.itemsize)
    return Op(name, "matmul", (read,), (made,), (read,), weights, flops, 2 * flops)


def _norm(model: Model, shape: Shape, name: str, read: str, make: str, size: int, width: int | None = None) -> Op:
    """Over the last `size` of `width` elements a token; the result has the dtype of the input, inside it is at least fp32."""
    width, a, w = width or size, shape.itemsize, shape.wide_itemsize
    elements, rows = shape.num_tokens * width, shape.num_tokens * width // size
    if model.norm == "layernorm":
        # Two numbers a row; torch's CPU kernel keeps them in the dtype of the input, CUDA's in fp32.
        kept_itemsize = a if shape.device == "cpu" else w
        kept = tuple(Activation(f"{make}_{x}", rows * kept_itemsize, False) for x in ("mean", "rstd"))
        scratch = backward_scratch = 0
    else:
        kept = (Activation(f"{make}_inverse_rms", rows * w, False),)
        narrow = a < w and shape.device == "cpu"
        scratch = 2 * elements * w if narrow else 0
        backward_scratch = elements * w * (4 if narrow else 2) if shape.device == "cpu" else 0
    weights = (f"{name}.weight", f"{name}.bias") if model.norm_bias and size == model.hidden_size else (f"{name}.weight",)
    saves = (read, *(k.name for k in kept))
    return Op(
        name, "norm", (read,), (Activation(make, elements * a), *kept), saves, weights,
        scratch_bytes=scratch, backward_scratch_bytes=backward_scratch,
    )  # fmt: skip


def _add(model: Model, shape: Shape, name: str, left: str, right: str, make: str) -> Op:
    made = Activation(make, shape.num_tokens * model.hidden_size * shape.itemsize)
    return Op(name, "elementwise", (left, right), (made,))
