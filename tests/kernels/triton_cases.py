"""Triton's kernels held to plain torch, forward and backward. Run by `test_triton.py` in a process of its own, interpreted:

TRITON_INTERPRET=1 python tests/kernels/triton_cases.py        prints a JSON line: case -> what is wrong, or ""
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Of the norm of a result: fp32 adds up in another order; bf16 is rounded once where the reference is not at all."""


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def hold(kernel: Callable[..., Any], plain: Callable[..., Any], given: list[Tensor]) -> None:
    """Results and gradients of `kernel` against `plain` in fp64."""
    dtype = given[0].dtype
    narrow = [tensor.clone().requires_grad_() for tensor in given]
    wide = [tensor.double().requires_grad_() for tensor in given]
    found, expected = ([*out] if isinstance(out, tuple) else [out] for out in (kernel(*narrow), plain(*wide)))
    grads = [random(*one.shape, dtype=dtype, seed=9 + number) for number, one in enumerate(expected)]
    found += torch.autograd.grad(found, narrow, grads)
    expected += torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == dtype and one.shape == other.shape
        distance = float(((one.double() - other).norm() / other.norm()).detach())
        assert distance < TOLERANCE[dtype], f"result {number} is {distance:.1e} off"


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def norm(dtype: torch.dtype, columns: int) -> None:
    from ultrascale.kernels.triton_norm import rms_norm

    given = [random(2, 7, columns, dtype=dtype, seed=0), random(columns, dtype=dtype, seed=1)]
    hold(lambda x, w: rms_norm(x, w, 1e-5), plain_norm, given)


def norm_of_a_sum(dtype: torch.dtype, columns: int) -> None:
    from ultrascale.kernels.triton_norm import add_rms_norm

    # Halves add up exactly, so that the rounding of the sum is not what is tested.
    parts = [(random(9, columns, dtype=torch.float32, seed=seed) * 2).round().div(2).to(dtype) for seed in (0, 1)]
    given = [*parts, random(columns, dtype=dtype, seed=2)]
    hold(lambda x, a, w: add_rms_norm(x, a, w, 1e-5), lambda x, a, w: (plain_norm(x + a, w), x + a), given)


def swiglu(dtype: torch.dtype, clamped: bool) -> None:
    from ultrascale.kernels import swiglu as ours
    from ultrascale.kernels.triton_swiglu import swiglu as kernel

    given = [random(3, 700, dtype=dtype, seed=seed) * (4 if clamped else 1) for seed in (0, 1)]
    hold(lambda g, u: kernel(g, u, clamped=clamped), ours.clamped_swiglu if clamped else ours.swiglu, given)


def rotary(dtype: torch.dtype, start: int, planes: int, neighbours: bool, batched: bool) -> None:
    from ultrascale.kernels import rotary as ours
    from ultrascale.kernels.triton_rotary import rotate as kernel

    angle = random(2 if batched else 1, 5, 1, planes, dtype=torch.float32, seed=3)
    narrow = angle.cos().to(dtype), angle.sin().to(dtype)
    wide = narrow[0].double(), narrow[1].double()
    options = {"start": start, "neighbours": neighbours}
    hold(
        lambda x: kernel(x, narrow, **options),
        lambda x: ours.rotate(x, wide, **options),
        [random(2, 5, 3, 12, dtype=dtype, seed=0)],
    )


def loss(dtype: torch.dtype, columns: int) -> None:
    from ultrascale.kernels.loss.triton_loss import loss_and_gradient_

    logits = random(6, columns, dtype=dtype, seed=0)
    targets = torch.randint(columns, (6,), generator=torch.Generator().manual_seed(1))
    targets[2] = -100
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none")
    losses = loss_and_gradient_(logits, targets)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    assert float((logits.double() - gradient).norm() / gradient.norm()) < TOLERANCE[dtype]
    assert not logits[2].any()


def norm_at_the_edges() -> None:
    """Two columns; a width of no power of two; a program of several rows, and the last of fewer; strides; wide weights."""
    from ultrascale.kernels import triton_norm

    triton_norm._PROGRAMS = 4
    single = torch.float32
    for rows, columns, scale in ((3, 2, 1.0), (11, 33, 1.0), (5, 40, 1e17), (5, 40, 1e-18)):
        x, w, added = random(rows, columns, dtype=single, seed=0) * scale, random(columns, dtype=single, seed=1), None
        hold(lambda x, w: triton_norm.rms_norm(x, w, 1e-5), plain_norm, [x, w])
        added = random(rows, columns, dtype=single, seed=2) * scale
        both = lambda x, a, w: triton_norm.add_rms_norm(x, a, w, 1e-5)  # noqa: E731
        hold(both, lambda x, a, w: (plain_norm(x + a, w), x + a), [x, added, w])
    strided, every_second = random(40, 9, dtype=single, seed=0).t(), random(80, dtype=single, seed=1)[::2]
    torch.testing.assert_close(triton_norm.rms_norm(strided, every_second, 1e-5), plain_norm(strided, every_second))
    narrow, wide = (
        random(6, 40, dtype=torch.bfloat16, seed=0).requires_grad_(),
        random(40, dtype=single, seed=1).requires_grad_(),
    )
    of_narrow, of_wide = torch.autograd.grad(triton_norm.rms_norm(narrow, wide, 1e-5).sum(), (narrow, wide))
    assert (of_narrow.dtype, of_wide.dtype) == (torch.bfloat16, single)
    added = random(6, 40, dtype=torch.bfloat16, seed=2).requires_grad_()
    outputs, wanted = triton_norm.add_rms_norm(narrow, added, wide, 1e-5), narrow.float() + added.float()
    expected = (plain_norm(wanted.bfloat16().float(), wide), wanted)
    assert [one.dtype for one in outputs] == [torch.bfloat16, torch.bfloat16]
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)
    sources = narrow, added, wide
    found, given = (torch.autograd.grad(both[0].float().sum() + both[1].float().sum(), sources) for both in (outputs, expected))
    assert [one.dtype for one in found] == [torch.bfloat16, torch.bfloat16, single]
    for one, other in zip(found, given, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=5e-2)


def norm_of_a_sum_where_one_result_is_read() -> None:
    """Of the other there is no gradient; and a gradient may be one number, expanded."""
    from ultrascale.kernels.triton_norm import add_rms_norm

    for read in (0, 1):
        x, added = (random(5, 40, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
        weight = random(40, dtype=torch.float32, seed=2).requires_grad_()
        add_rms_norm(x, added, weight, 1e-5)[read].sum().backward()
        found = [one.grad for one in (x, added, weight)]
        plain = [one.detach().requires_grad_() for one in (x, added, weight)]
        total = plain[0] + plain[1]
        (plain_norm(total, plain[2]) if read == 0 else total + 0 * plain[2]).sum().backward()
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-5)


def nothing_at_all() -> None:
    """No rows: results and gradients are empty, and the weight's gradient is zero."""
    from ultrascale.kernels.loss.triton_loss import loss_and_gradient_
    from ultrascale.kernels.triton_norm import add_rms_norm
    from ultrascale.kernels.triton_rotary import rotate
    from ultrascale.kernels.triton_swiglu import swiglu

    x, weight = torch.empty(0, 40, requires_grad=True), torch.ones(40, requires_grad=True)
    out, total = add_rms_norm(x, x, weight, 1e-5)
    assert out.shape == total.shape == (0, 40)
    assert not torch.autograd.grad([out, total], weight, [out, total])[0].any()
    assert swiglu(x, x).shape == torch.autograd.grad(swiglu(x, x).sum(), x)[0].shape == (0, 40)
    heads, angle = torch.empty(1, 0, 2, 8, requires_grad=True), torch.empty(1, 0, 1, 4)
    assert torch.autograd.grad(rotate(heads, (angle, angle)).sum(), heads)[0].shape == heads.shape
    assert loss_and_gradient_(torch.empty(0, 9), torch.empty(0, dtype=torch.int64)).shape == (0,)


def swiglu_at_the_edges() -> None:
    """Numbers whose exponentials overflow; strides; and what is no number stays none, clamped too."""
    from ultrascale.kernels import swiglu as ours
    from ultrascale.kernels.triton_swiglu import swiglu as kernel

    far = torch.tensor([-1e15, -1e4, -104.0, -90.0, -7.0, 0.0, 7.0, 90.0, 104.0, 1e4, 1e15])
    for clamped, plain in ((False, ours.swiglu), (True, ours.clamped_swiglu)):
        narrow = [far.clone().requires_grad_(), far.flip(0).requires_grad_()]
        wide = [one.detach().double().requires_grad_() for one in narrow]
        found, expected = kernel(*narrow, clamped=clamped), plain(*wide)
        for one, other in zip(
            (found, *torch.autograd.grad(found.sum(), narrow)),
            (expected, *torch.autograd.grad(expected.sum(), wide)),
            strict=True,
        ):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-30)
        gate, up = (random(7, 30, dtype=torch.float32, seed=seed) for seed in (0, 1))
        found = kernel(gate.t(), up.t(), clamped=clamped)
        torch.testing.assert_close(found, plain(gate.t(), up.t()), rtol=1e-5, atol=1e-6)
        for place in (0, 1):
            given = [torch.ones(3), torch.ones(3)]
            given[place][1] = float("nan")
            leaves = [one.requires_grad_() for one in given]
            out = kernel(*leaves, clamped=clamped)
            of_other = torch.autograd.grad(out.sum(), leaves)[1 - place]
            assert out.isnan().tolist() == of_other.isnan().tolist() == [False, True, False]


def rotary_at_the_edges() -> None:
    """One head, one plane, heads that are a part of a wider row, and angles of one token for all."""
    from ultrascale.kernels import rotary as ours
    from ultrascale.kernels.triton_rotary import rotate as kernel

    angle = random(1, 5, 1, 1, dtype=torch.float32, seed=3)
    hold(
        lambda x: kernel(x, (angle.cos(), angle.sin())),
        lambda x: ours.rotate(x, (angle.cos().double(), angle.sin().double())),
        [random(1, 5, 1, 2, dtype=torch.float32, seed=0)],
    )
    part = random(2, 5, 7, 24, dtype=torch.float32, seed=0)[:, :, 1:4, 4:16]
    wide = random(1, 1, 1, 6, dtype=torch.float32, seed=3).expand(2, 5, 1, 6)
    angles = wide.cos(), wide.sin()
    torch.testing.assert_close(kernel(part, angles), ours.rotate(part, angles))


def loss_at_the_edges() -> None:
    """A vocabulary of one; masked logits, of whole blocks too; logits whose exponentials overflow; targets with strides."""
    from ultrascale.kernels.loss.triton_loss import loss_and_gradient_

    masked, far = random(3, 9000, dtype=torch.float32, seed=0), random(3, 70, dtype=torch.float32, seed=0) * 1e4
    masked[:, 10:8500] = float("-inf")
    masked[1, :4200] = float("-inf")
    for logits in (random(3, 1, dtype=torch.float32, seed=0), masked, far):
        columns = logits.shape[1]
        targets = torch.tensor([0, 7, columns - 1, 7, -100, 7])[::2]
        wide = logits.double().requires_grad_()
        expected = F.cross_entropy(wide, targets, reduction="none")
        found = loss_and_gradient_(logits, targets)
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(expected.sum(), wide)
        torch.testing.assert_close(logits.double(), gradient, rtol=1e-4, atol=1e-6)
    faulty = torch.zeros(2, 70)
    faulty[0, 3] = float("nan")
    assert loss_and_gradient_(faulty, torch.tensor([5, 5])).isnan().tolist() == [True, False]


def narrow_adamw(name: Literal["adamw-bf16", "adamw-8bit"], rows: int, columns: int, offsets: tuple[int, int]) -> None:
    """Three updates of a part of a matrix: the codes of torch, which hash the same places; weights but for the last bit."""
    from ultrascale.kernels.choice import fused_contest, implementation
    from ultrascale.kernels.optimizers.narrow_moments import Moments, Update, WeightBox, empty_moments, update_

    implementation.is_cuda = lambda x: True
    box = WeightBox(offsets, (rows, columns), (1 << 17, 1 << 16))  # places need more than 32 bits
    kind = fused_contest.UPDATES[name]
    found = []
    for form in ("torch", "triton"):
        weights = random(rows, columns, dtype=torch.float32, seed=0)
        state = empty_moments(box, kind, weights)
        for count in range(1, 4):
            gradients = random(rows, columns, dtype=torch.float32, seed=count) * torch.logspace(-9, 0, columns)
            gradients[0, :300] = 0.0
            before = weights.clone()
            update = Update(1e-2, 0.1, 0.9, 0.999, 1e-8, count, (0xF0000000 + count, 7))
            with implementation.chosen(name, form):
                update_(weights, gradients, Moments(state, box), update)
            assert not torch.equal(weights, before)
        found.append([weights, *state.values()])
    for one, other in zip(*found, strict=True):
        wide = one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-6 if wide else 0, atol=1e-6 if wide else 0)


def narrow_adamw_at_the_edges() -> None:
    """What is no number stays none; nothing at all; and a part that is not laid out row after row is torch's."""
    from ultrascale.kernels.choice import fused_contest, implementation
    from ultrascale.kernels.optimizers import triton_adamw
    from ultrascale.kernels.optimizers.narrow_moments import Moments, Update, WeightBox, empty_moments, update_

    implementation.is_cuda = lambda x: True
    update, kernel, ran = Update(1e-2, 0.1, 0.9, 0.999, 1e-8, 1, (1, 2)), triton_adamw.update_, []
    triton_adamw.update_ = lambda *given: ran.append(given) or kernel(*given)
    for name, kind in fused_contest.UPDATES.items():
        for rows, columns in ((3, 40), (0, 40), (3, 0)):
            box = WeightBox((0, 0), (rows, columns), (9, 40))
            weights, gradients = torch.zeros(rows, columns), torch.ones(rows, columns)
            gradients[1:2, 7:8] = float("nan")
            with implementation.chosen(name, "triton"):
                update_(weights, gradients, Moments(empty_moments(box, kind, weights), box), update)
            assert weights.isnan().nonzero().tolist() == ([[1, 7]] if rows and columns else [])
        assert len(ran) == 1
        box = WeightBox((0, 0), (40, 3), (40, 3))
        with implementation.chosen(name, "triton"):
            update_(torch.zeros(3, 40).t(), torch.ones(40, 3), Moments(empty_moments(box, kind, torch.zeros(1)), box), update)
        assert len(ran) == 1
        ran.clear()
    triton_adamw.update_ = kernel


def step_of_a_model() -> None:
    """Where a run asks for Triton: every kernel inside a model, in place of torch's; the sum after attention with its norm."""
    from ultrascale.description.architecture.model import Model
    from ultrascale.kernels import triton_norm
    from ultrascale.kernels.choice import implementation
    from ultrascale.models.decoder import Decoder
    from ultrascale.models.initialise import initialise

    model = Model(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    tokens = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(0))
    found, fused = [], []
    implementation.is_cuda = lambda x: True
    kernel = triton_norm.add_rms_norm
    triton_norm.add_rms_norm = lambda *given: fused.append(given) or kernel(*given)
    for form in ("torch", "triton"):
        implementation._CHOSEN = dict.fromkeys(implementation.FORMS, form)
        decoder = Decoder(model)
        initialise(decoder, model, 0)
        loss = decoder(tokens, targets=tokens)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in decoder.parameters())])
    triton_norm.add_rms_norm = kernel
    assert len(fused) == model.num_hidden_layers
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def contests() -> None:
    """All forms that are installed run, agree, and are timed."""
    from ultrascale.catalogue.models.model_presets import preset
    from ultrascale.description.layout import Layout
    from ultrascale.kernels.choice import fused_contest, implementation

    implementation.is_cuda = lambda x: True
    model = preset("tiny-llama")
    shape = fused_contest.fused_shape(model, Layout(), 16, torch.float32)._replace(vocabulary=300, inner=48)
    for kernel in (*fused_contest.kernels_of(model, Layout()), *fused_contest.UPDATES):
        few = shape._replace(inner=2) if kernel in fused_contest.UPDATES else shape
        outcomes = fused_contest.contest(kernel, model, few, torch.device("cpu"))
        assert isinstance(outcomes["torch"], float) and isinstance(outcomes["triton"], float), (kernel, outcomes)
        assert implementation._CHOSEN[kernel] == "torch"


CASES: dict[str, Callable[[], None]] = {
    "contests": contests, "a step of a model": step_of_a_model, "norm at the edges": norm_at_the_edges,
    "norm of a sum where one result is read": norm_of_a_sum_where_one_result_is_read, "nothing at all": nothing_at_all,
    "swiglu at the edges": swiglu_at_the_edges, "rotary at the edges": rotary_at_the_edges,
    "loss at the edges": loss_at_the_edges, "narrow adamw at the edges": narrow_adamw_at_the_edges,
}  # fmt: skip
_UPDATES: tuple[Literal["adamw-bf16", "adamw-8bit"], ...] = ("adamw-bf16", "adamw-8bit")
for _update in _UPDATES:
    for _rows, _columns, _offsets in ((5, 700, (3, 0)), (3, 1100, (100_000, 512)), (2, 64, (0, 0))):
        CASES[f"{_update} of {_rows} x {_columns}"] = partial(narrow_adamw, _update, _rows, _columns, _offsets)
for _dtype, _name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
    CASES |= {
        f"norm {_name} {columns}": (lambda d=_dtype, c=columns: norm(d, c)) for columns in (64, 100)
    } | {
        f"norm of a sum {_name}": lambda d=_dtype: norm_of_a_sum(d, 72),
        f"swiglu {_name}": lambda d=_dtype: swiglu(d, False),
        f"clamped swiglu {_name}": lambda d=_dtype: swiglu(d, True),
        f"rotary {_name}": lambda d=_dtype: rotary(d, 0, 6, False, False),
        f"rotary of the first dimensions {_name}": lambda d=_dtype: rotary(d, 0, 4, False, True),
        f"rotary of the last, neighbours {_name}": lambda d=_dtype: rotary(d, 8, 2, True, True),
        f"loss {_name}": lambda d=_dtype: loss(d, 300),
        f"loss of several blocks {_name}": lambda d=_dtype: loss(d, 9000),
    }  # fmt: skip


def main() -> None:
    wrong = {}
    for name, case in CASES.items():
        try:
            case()
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
