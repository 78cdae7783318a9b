"""A compiled block keeps what its products read: torch's compiler recomputes nothing that a weight's gradient reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch import compile as functorch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack import Kernels
from ultrascale.work.ops import Shape
from ultrascale.work.work import block_work

WIDTH, FFN, TOKENS = 64, 160, 32


def _mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    narrow = rms_norm(x, (WIDTH,), norm)
    return x + (silu(narrow @ gate) * (narrow @ up)) @ down


def test_torch_saves_the_inputs_of_a_compiled_mlp_s_products() -> None:
    saved: list[int] = []

    def forward(gm: Any, example_inputs: Any) -> Any:
        results = gm.graph.output_node().args[0][1:]
        saved.extend(one.meta["val"].numel() for one in results if not one.name.startswith("primals"))
        return functorch.make_boxed_func(gm.forward)

    def backward(gm: Any, example_inputs: Any) -> Any:
        return functorch.make_boxed_func(gm.forward)

    shapes = ((TOKENS, WIDTH), (WIDTH,), (WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH))
    inputs = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    functorch.aot_function(_mlp, forward, backward, functorch.min_cut_rematerialization_partition)(*inputs)
    assert saved.count(TOKENS * WIDTH) == 1  # the norm's result
    assert saved.count(TOKENS * FFN) == 3  # gate, up, and what `down` reads


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_plan_of_a_compiled_block_keeps_them_too(name: str) -> None:
    def kept(compiled: bool) -> dict[str, int]:
        shape = Shape(1, 4096, "bf16", device="cuda", kernels=Kernels(compiled=compiled))
        ops = block_work(PRESETS[name], 5, shape)
        results = {made.name: made.num_bytes for op in ops for made in op.makes}
        return {read: results.get(read, 0) for op in ops if op.kind == "matmul" for read in op.saves}

    assert kept(True) == kept(False)
