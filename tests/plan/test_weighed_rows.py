"""Rows that experts return: torchtitan saves an fp32 copy of them for the gradient of the scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.work.ops import Op, Shape
from ultrascale.work.work import block_work

MODEL = PRESETS["qwen3-30b-a3b"]
TOKENS, CHOSEN, WIDTH = 512, MODEL.num_experts_per_tok, MODEL.hidden_size


def _ops(stack: str, widens: bool | None = None) -> tuple[Op, ...]:
    kernels = STACKS[stack].kernels
    if widens is not None:
        kernels = replace(kernels, widens_before_weighing=widens)
    return block_work(MODEL, 5, Shape(1, TOKENS, "bf16", device="cuda", kernels=kernels))


def _saved_rows(ops: tuple[Op, ...]) -> int:
    (last,) = (op for op in ops if op.name == "mlp.unpermute")
    sizes = {made.name: made.num_bytes for op in ops for made in op.makes}
    return max(sizes[name] for name in last.saves)


def test_rows_cast_before_they_are_weighed_are_saved_in_fp32() -> None:
    saved: list[Tensor] = []
    rows = torch.randn(TOKENS, CHOSEN, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(TOKENS, 1, CHOSEN, requires_grad=True)
    with saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        torch.bmm(scores, rows.float()).to(torch.bfloat16)
    wide = TOKENS * CHOSEN * WIDTH * 4
    assert max(kept.nbytes for kept in saved) == wide == _saved_rows(_ops("torchtitan"))
    assert _saved_rows(_ops("torchtitan", widens=False)) == wide // 2


@pytest.mark.parametrize("stack", ["transformers", "automodel", "maxtext"])
def test_stacks_that_weigh_narrow_rows_save_those(stack: str) -> None:
    assert _ops(stack) == _ops(stack, widens=False)
