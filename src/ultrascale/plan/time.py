"""First-order time of a step: the FLOPs of the model over what matrix products reach on the device.

    model FLOPs     6 N per token, N the weights of matrix products (the head with them, the input embedding and norms not),
                    plus 12 x (heads x head dim) x context per token and layer for attention
    context         causal: what a token sees, (S+1)/2 on average or less with a sliding window; full: S, as the playbook,
                    nanotron and FlopCounterMode count
    hardware FLOPs  what is computed: recomputed blocks again, and attention's scores again in its backward pass (7/6 of it)
    MFU, HFU        model or hardware FLOPs over the *peak*; both conventions of context are given, and each says which

Not in it: communication (gathers and reductions are taken as hidden behind computation), element-wise work, the optimizer,
data, stragglers. Real runs are slower, small models and many nodes most of all; prices for these come with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.work import Op, Shape, block_work, head_work

NOT_IN_IT = "communication, element-wise work, the optimizer and data loading"
CONVENTION = "6N + attention, causal; peak is dense, without sparsity"


@dataclass(frozen=True)
class TimePlan:
    """How long a step takes, at best, and how well it uses the devices."""

    seconds_per_step: float
    tokens_per_step: int
    tokens_per_second: float
    model_flops_per_token: float
    """Forward and backward, context as a causal mask leaves it."""
    model_flops_per_token_full: float
    """The same with the full square of attention scores."""
    hardware_flops_per_token: float
    """With what is computed twice; causal."""
    mfu: float
    """Model FLOPs over the peak, causal."""
    mfu_full: float
    hfu: float
    """Hardware FLOPs over the peak, causal."""
    peak_flops_per_second: float
    """Of one device, dense."""
    achievable_fraction: float
    num_devices: int

    def seconds_for(self, tokens: float) -> float:
        """Time to train on `tokens`, without interruptions."""
        return tokens / self.tokens_per_second


def plan_time(
    model: Model,
    layout: Layout,
    *,
    sequence_length: int,
    sequences_per_batch: int,
    peak_flops_per_second: float,
    achievable_fraction: float,
) -> TimePlan:
    """The time of a step if each device reaches `achievable_fraction` of its peak on all matrix products and attention."""
    tokens = sequences_per_batch * sequence_length
    causal = model_flops_per_token(model, sequence_length)
    full = model_flops_per_token(model, sequence_length, full_attention=True)
    hardware = hardware_flops_per_token(model, layout, sequence_length)
    rate = peak_flops_per_second * achievable_fraction * layout.dp
    seconds = hardware * tokens / rate
    per_second = tokens / seconds
    peak = peak_flops_per_second * layout.dp
    return TimePlan(
        seconds_per_step=seconds,
        tokens_per_step=tokens,
        tokens_per_second=per_second,
        model_flops_per_token=causal,
        model_flops_per_token_full=full,
        hardware_flops_per_token=hardware,
        mfu=causal * per_second / peak,
        mfu_full=full * per_second / peak,
        hfu=hardware * per_second / peak,
        peak_flops_per_second=peak_flops_per_second,
        achievable_fraction=achievable_fraction,
        num_devices=layout.dp,
    )


def model_flops_per_token(model: Model, sequence_length: int, *, full_attention: bool = False) -> float:
    """FLOPs a token costs, forward and backward, each multiply-add as two; see the head of this file for what counts."""
    products, attention = _flops(model, sequence_length, full_attention)
    return 3 * (products + attention)


def hardware_flops_per_token(model: Model, layout: Layout, sequence_length: int) -> float:
    """FLOPs a token really takes, recomputation included; context as a causal mask leaves it."""
    products, attention = _flops(model, sequence_length, False)
    again = sum(
        _recomputed(model, layer, sequence_length) for layer in range(model.num_hidden_layers) if layout.recomputes(layer)
    )
    return 3 * products + 3.5 * attention + again


def mean_context(sequence_length: int, window: int | None) -> float:
    """Positions a token attends to on average, itself included, under a causal mask and a sliding window."""
    w = min(window or sequence_length, sequence_length)
    return (w * (w + 1) / 2 + (sequence_length - w) * w) / sequence_length


def _flops(model: Model, sequence_length: int, full_attention: bool) -> tuple[float, float]:
    """Forward FLOPs of one token: matrix products, attention."""
    shape = Shape(1, sequence_length)
    products = sum(op.flops / 3 for op in head_work(model, shape))  # the loss does its backward pass in its forward pass
    attention = 0.0
    for layer in range(model.num_hidden_layers):
        for op in block_work(model, layer, shape):
            if op.kind == "attention":
                attention += op.flops * (
                    1.0 if full_attention else mean_context(sequence_length, model.window(layer)) / sequence_length
                )
            else:
                products += op.flops
    return products / sequence_length, attention / sequence_length


def _recomputed(model: Model, layer: int, sequence_length: int) -> float:
    """FLOPs of running a block again, per token: torch stops before the last operation, whose result nobody needs."""
    ops = block_work(model, layer, Shape(1, sequence_length))
    last = max(index for index, op in enumerate(ops) if op.saves)
    share = mean_context(sequence_length, model.window(layer)) / sequence_length

    def flops(op: Op) -> float:
        return op.flops * (share if op.kind == "attention" else 1.0)

    return sum(flops(op) for op in ops[:last]) / sequence_length
