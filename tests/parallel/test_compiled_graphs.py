"""One graph a block: compiled in whole, forward and backward, for every family without experts, and every way to recompute; and
for every precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
import torch._dynamo
from models.families import FAMILIES
from parallel.fp8_blocks import blocks_as_in

from ultrascale.description.layout import Fp8Scaling, Layout
from ultrascale.kernels.attention.attention_core import attention_mask
from ultrascale.kernels.attention.attention_spans import packed_ids
from ultrascale.kernels.choice.device_kind import meta_stands_for
from ultrascale.models.decoder import Decoder
from ultrascale.parallel import apply
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.parallel.mesh import Ranks

SINKS = replace(FAMILIES["llama"], model_type="gpt_oss", attention_sinks=True, sliding_window=7)
CHOSEN = [name for name, model in FAMILIES.items() if "-" not in name]
"""One of each family: what differs within one is a size, a bias or a frequency."""


def run_compiled(decoder: Decoder, recompute: Literal["none", "selective", "full"], device: str, dtype: torch.dtype) -> None:
    """Forward and backward of two packed sequences; whatever breaks a block's graph raises."""
    torch._dynamo.reset()
    apply_recompute(decoder, Layout(recompute=recompute))
    for _, block in decoder.blocks():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    ids = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=device)
    positions = torch.arange(16, device=device).expand(2, 16)
    decoder.to(dtype)
    decoder(tokens, targets=tokens, positions=positions, document_ids=packed_ids(ids, torch.device(device))).backward()


@pytest.mark.parametrize(
    ("family", "recompute"), [*((family, "none") for family in [*CHOSEN, "sinks"]), ("llama", "selective"), ("llama", "full")]
)
def test_a_block_is_one_graph(family, recompute):
    model = replace(SINKS if family == "sinks" else FAMILIES[family], num_hidden_layers=1)
    run_compiled(Decoder(model), recompute, "cpu", torch.float32)


@pytest.mark.parametrize(("family", "recompute"), [("mistral", "none"), ("sinks", "none"), ("llama", "selective")])
def test_so_it_is_on_cuda_in_16_bits_where_attention_is_told_where_documents_end(family, recompute):
    model = replace(SINKS if family == "sinks" else FAMILIES[family], num_hidden_layers=1)
    with torch.device("meta"):
        decoder = Decoder(model)
    calls = []

    def make_mask(*arguments, **options):
        calls.append(attention_mask(*arguments, **options))
        return calls[-1]

    decoder.make_mask = make_mask
    with meta_stands_for("cuda"):
        run_compiled(decoder, recompute, "meta", torch.bfloat16)
    assert {type(mask).__name__ for mask in calls} == {"Spans"}


@pytest.mark.parametrize(("layout", "limit"), [
    (Layout(precision="bf16"), 0.02), (Layout(precision="fp16"), 0.005),
    *((Layout(precision="fp8", fp8_scaling=scaling), 1e-12) for scaling in get_args(Fp8Scaling)),
])  # fmt: skip
def test_so_it_is_in_every_precision_with_the_gradients_of_eager_blocks(layout: Layout, limit: float, compiled_by):
    """fp8 in float64 between products, where rounding tips no number over to the next of 8 bits."""
    torch._dynamo.reset()
    compiled_by("aot_eager", fullgraph=True)
    between = replace(layout, precision="fp64") if layout.precision == "fp8" else layout
    tokens, found, alone = torch.arange(16)[None], [], Ranks(0, 1, torch.device("cpu"))
    for compiled in (False, True):
        with blocks_as_in(layout):
            share = apply.build_share(FAMILIES["llama"], between, alone, seed=0, compile_blocks=compiled)
        share.decoder(tokens, targets=tokens).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in share.parameters() if parameter.grad is not None]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < limit
