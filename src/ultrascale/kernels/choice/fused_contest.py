"""Benchmark that picks the forms of norm, RoPE, SwiGLU, loss, experts' GEMMs and narrow AdamW: `kernels.choice.contest` among
`FORMS`.

Each is timed as the model calls it, forward and backward, on a rank's tokens of one micro-batch; an optimizer update on a
feed-forward matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.kernels.choice.contest import MOST_BYTES, Form, Outcomes, measure
from ultrascale.kernels.choice.implementation import FORMS, Kernel, chosen, not_installed
from ultrascale.kernels.choice.wide import at_least_fp32
from ultrascale.kernels.grouped_matmul import grouped_linear
from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy
from ultrascale.kernels.norm import add_rms_norm, rms_norm
from ultrascale.kernels.optimizers.narrow_moments import Kind, Moments, Update, WeightBox, empty_moments, update_
from ultrascale.kernels.rotary import rotate
from ultrascale.kernels.swiglu import clamped_swiglu, swiglu

GATED = ("silu", "swigluoai")
"""Activations of gated layers that `kernels.swiglu` implements."""
UPDATES: dict[Kernel, Kind] = {"adamw-bf16": "bf16", "adamw-8bit": "8bit"}
"""Optimizers whose update is benchmarked, and the dtype of their moments. torch's fused AdamW has no alternative."""


class FusedShape(NamedTuple):
    """Shapes of one rank's kernels."""

    tokens: int
    """Tokens of a micro-batch; with sequence parallelism norms get a part of them."""
    norm_tokens: int
    hidden: int
    heads: int
    head_dim: int
    rotary_dim: int
    inner: int
    """Width of a feed-forward layer, or of an expert."""
    vocabulary: int
    experts: int
    """Experts on this rank."""
    expert_rows: int
    """(Token, expert) pairs on this rank, if all ranks' tokens are spread evenly."""
    dtype: torch.dtype


def fused_shape(model: Model, layout: Layout, sequence_length: int, dtype: torch.dtype) -> FusedShape:
    """Shapes of a rank of `layout`."""
    tokens = layout.micro_batch_size * sequence_length // layout.cp
    local_tokens = tokens // (layout.tp if layout.sequence_parallel else 1)
    inner = model.moe_intermediate_size if model.num_experts else model.intermediate_size
    return FusedShape(
        tokens, local_tokens, model.hidden_size,
        model.num_attention_heads // layout.tp, model.head_dim, model.rotary_dim,
        inner // (layout.expert_tp if model.num_experts else layout.tp), model.vocab_size,
        max(1, model.num_experts // layout.ep), local_tokens * model.num_experts_per_tok * layout.expert_tp, dtype,
    )  # fmt: skip


def kernels_of(model: Model, layout: Layout) -> Iterator[Kernel]:
    """Kernels of `FORMS` that a run of `model` calls. With tp the loss is `parallel.tensor.tensor_loss`, which is not among
    them."""
    if model.norm == "rmsnorm":
        yield "norm"
        if model.block_norms.before_mlp:
            yield "norm_of_sum"
    if model.position_embedding == "rotary":
        yield "rotary"
    if model.gated_mlp and model.activation in GATED:
        yield "swiglu"
    if layout.tp == 1:
        yield "loss"
    if model.num_experts:
        yield "experts"


def outside_graphs(model: Model) -> tuple[Kernel, ...]:
    """Kernels that use the chosen form even if blocks are compiled: MoE layers are not part of a graph (`models.experts`)."""
    if not model.num_experts:
        return ()
    return ("swiglu", "experts") if model.activation in GATED else ("experts",)


def contest(kernel: Kernel, model: Model, shape: FusedShape, device: torch.device, *, bitwise: bool = False) -> Outcomes:
    """Seconds of each form of `kernel`, forward and backward, or the reason why it is excluded."""
    shape = shape._replace(dtype=torch.float32) if kernel in UPDATES else shape
    function, inputs = _CASES[kernel](model, shape, _Draw(shape, device))
    forms = {form: not_installed(form) or _form(kernel, form, function) for form in FORMS[kernel]}
    with nullcontext() if kernel not in UPDATES else torch.no_grad():
        return measure(forms, inputs, bitwise=bitwise)


def _form(kernel: Kernel, form: str, function: Form) -> Form:
    def run(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        with chosen(kernel, form):
            return function(*inputs)

    return run


class _Draw:
    """Random tensors of one dtype, with fewer rows if `MOST_BYTES` requires."""

    def __init__(self, shape: FusedShape, device: torch.device):
        self.dtype, self.device = shape.dtype, device
        self.generator = torch.Generator(device).manual_seed(0)

    def rows(self, wanted: int, width: int) -> int:
        """Number of rows of `width` elements that fit, at most `wanted`."""
        return max(1, min(wanted, MOST_BYTES // (width * self.dtype.itemsize)))

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device).to(self.dtype)


Case = tuple[Form, list[Tensor]]
"""A kernel as the model calls it, and its inputs."""


def _norm(model: Model, shape: FusedShape, draw: _Draw) -> Case:
    rows = draw.rows(shape.norm_tokens, shape.hidden)
    return partial(rms_norm, eps=model.norm_eps), [draw(rows, shape.hidden), _scale(model, draw(shape.hidden))]


def _norm_of_sum(model: Model, shape: FusedShape, draw: _Draw) -> Case:
    rows = draw.rows(shape.norm_tokens, shape.hidden)
    streams = [draw(rows, shape.hidden) for _ in range(2)]
    return partial(add_rms_norm, eps=model.norm_eps), [*streams, _scale(model, draw(shape.hidden))]


def _scale(model: Model, weight: Tensor) -> Tensor:
    """Factors of a norm, as from `models.norms.RMSNorm.scale`."""
    return at_least_fp32(weight) + 1 if model.zero_centered_norm else weight


def _rotary(model: Model, shape: FusedShape, draw: _Draw) -> Case:
    rows = draw.rows(shape.tokens, shape.heads * shape.head_dim)
    angles = torch.rand(1, rows, 1, shape.rotary_dim // 2, generator=draw.generator, device=draw.device)
    turn = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)
    latent = {"start": model.qk_nope_head_dim, "neighbours": True} if model.latent_attention else {}
    return partial(rotate, angles=turn, **latent), [draw(1, rows, shape.heads, shape.head_dim)]


def _swiglu(model: Model, shape: FusedShape, draw: _Draw) -> Case:
    rows = draw.rows(shape.tokens, 2 * shape.inner)
    function = clamped_swiglu if model.activation == "swigluoai" else swiglu
    return function, [draw(rows, shape.inner), draw(rows, shape.inner)]


def _loss(model: Model, shape: FusedShape, draw: _Draw) -> Case:
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=draw.generator, device=draw.device)
    weight = draw(shape.vocabulary, shape.hidden) / shape.hidden**0.5
    return linear_cross_entropy, [draw(shape.tokens, shape.hidden), weight, targets]


def _experts(model: Model, shape: FusedShape, draw: _Draw) -> Case:
    rows = draw.rows(shape.expert_rows, shape.hidden)
    ends = torch.arange(1, shape.experts + 1, device=draw.device) * rows // shape.experts
    counts = ends.diff(prepend=ends.new_zeros(1))
    return partial(grouped_linear, counts=counts), [draw(rows, shape.hidden), draw(shape.experts, shape.inner, shape.hidden)]


def _update(kind: Kind, model: Model, shape: FusedShape, draw: _Draw) -> Case:
    """Second update of a matrix, on copies of its moments, so that every pass does the same."""
    size = draw.rows(shape.inner, shape.hidden), shape.hidden
    box, weights, gradients = WeightBox((0, 0), size, size), draw(*size), draw(*size)
    begun = empty_moments(box, kind, weights)
    how = Update(1e-3, 0.1, 0.9, 0.95, 1e-8, count=1, keys=(1, 2))
    update_(weights, gradients, Moments(begun, box), how)

    def again(weights: Tensor, gradients: Tensor) -> tuple[Tensor, ...]:
        updated, state = weights.clone(), {name: moment.clone() for name, moment in begun.items()}
        update_(updated, gradients, Moments(state, box), how._replace(count=2, keys=(3, 4)))
        return updated, *state.values()

    return again, [weights, gradients]


_CASES: dict[Kernel, Callable[[Model, FusedShape, _Draw], Case]] = {
    "norm": _norm, "norm_of_sum": _norm_of_sum, "rotary": _rotary, "swiglu": _swiglu, "loss": _loss, "experts": _experts,
    "adamw-bf16": partial(_update, "bf16"), "adamw-8bit": partial(_update, "8bit"),
}  # fmt: skip
