"""A layout put on a model, in one order."""

from __future__ import annotations

from functools import partial

import torch

from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import initialise
from ultrascale.parallel.data import apply_data_parallel
from ultrascale.parallel.mesh import build_mesh
from ultrascale.parallel.precision import TORCH_DTYPE, apply_mixed_precision
from ultrascale.parallel.recompute import apply_recompute
from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.trainable import expect_trainable


def build_decoder(
    model: Model, layout: Layout, *, device: torch.device, seed: int, compile_blocks: bool = False, draw_on_device: bool = False
) -> Decoder:
    """The decoder of this rank: cut as `layout` says, on `device`, with the initial weights of `seed`.

    Weights are the same bits for every layout. A process group of `layout.dp` ranks must be up unless that is one. Raises
    SpecError for what can be planned but not run.
    """
    expect_trainable(model, layout)
    # 1. Shapes only: no rank ever holds the whole model on its way to a part of it.
    with torch.device("meta"):
        decoder = Decoder(model).to(TORCH_DTYPE[layout.master_dtype])
    # 2. Recomputation inside compilation, so that the compiler sees what it may drop.
    apply_recompute(decoder, layout)
    # 3. Compilation inside sharding: gathering parameters stays outside the compiled graph.
    if compile_blocks:
        for _, block in decoder.blocks():
            block.forward = torch.compile(block.forward)
        decoder.loss = partial(decoder.loss, compiled=True)
    # 4. Data parallelism, and with it mixed precision.
    if layout.dp > 1:
        apply_data_parallel(decoder, layout, build_mesh(layout, device))
    # 5. Memory, then values.
    decoder.to_empty(device=device)
    initialise(decoder, model, seed, draw_on_device=draw_on_device)
    # 6. On one rank mixed precision is copies of the values.
    if layout.dp == 1 and layout.precision != layout.master_dtype:
        apply_mixed_precision(decoder, TORCH_DTYPE[layout.precision])
    return decoder
