"""What a run at the shapes of `kernel_speed.py` would choose, and the peak of head and loss."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from kernel_shapes import (
    DEVICE,
    DTYPE,
    FFN,
    HAS_CUDA,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    LENGTH,
    NUM_DOCUMENTS,
    ROWS,
    VOCAB,
    random,
)  # fmt: skip
from torch import Tensor
from torch.nn import functional as F

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.attention_cores import CoreRequirements
from ultrascale.description.layout import Layout
from ultrascale.kernels.attention.attention_contest import AttentionShape
from ultrascale.kernels.attention.attention_contest import contest as attention_contest
from ultrascale.kernels.choice.contest import ContestResult, decide
from ultrascale.kernels.choice.fused_contest import UPDATES, fused_shape, kernels_of
from ultrascale.kernels.choice.fused_contest import contest as fused_contest
from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy


def contests() -> Iterator[ContestResult]:
    """What a run of these shapes would choose: one sequence of Llama 3 8B; without CUDA the CPU's cores at toy sizes."""
    shape = AttentionShape(1, LENGTH, HEADS, KEY_HEADS, HEAD_DIM, HEAD_DIM, DTYPE)
    wanted = CoreRequirements("cuda" if HAS_CUDA else "cpu", "bf16" if HAS_CUDA else "fp32", (None,))
    masks = (
        ("attention, causal", wanted), ("attention, 8 documents", wanted._replace(documents=True)),
        ("attention, a window", wanted._replace(windows=(LENGTH // NUM_DOCUMENTS,))),
    )  # fmt: skip
    for name, one in masks:
        yield decide(name, [attention_contest(shape, one, DEVICE, compiled=False)])
    model, layout = preset("llama-3-8b"), Layout()
    fused = fused_shape(model, layout, ROWS, DTYPE)._replace(
        hidden=HIDDEN, heads=HEADS, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM, inner=FFN, vocabulary=VOCAB
    )
    for kernel in (*kernels_of(model, layout), *UPDATES) if HAS_CUDA else ():  # elsewhere there is nothing to choose from
        yield decide(kernel, [fused_contest(kernel, model, fused, DEVICE)])


def loss_peaks() -> dict[str, int]:
    """Peak bytes of head and loss in bf16, forward and backward, beside what is given; without CUDA nothing."""
    if not HAS_CUDA:
        return {}

    def unfused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    peaks = {}
    for width in (2048, 4096):
        hidden, weight = random(ROWS, width).requires_grad_(), random(VOCAB, width).requires_grad_()
        targets = torch.randint(VOCAB, (ROWS,), device=DEVICE)
        for name, loss_of in (("unfused", unfused), ("ours", linear_cross_entropy)):
            torch.cuda.synchronize()
            gc.collect()  # a timer's buffer in a cycle of references would be in `before`, and gone at the peak
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(loss_of(hidden, weight, targets), (hidden, weight))
            peaks[f"{name}, D = {width}"] = torch.cuda.max_memory_allocated() - before
    return peaks
