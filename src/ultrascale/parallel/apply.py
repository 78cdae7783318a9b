"""Applies a layout to a model, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ultrascale.config.rules.run_rules import compiled_halves
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.attention_cores import FLASH_HEAD_DIM
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.kernels.attention.attention_core import attention_mask
from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import initialise
from ultrascale.parallel.activations.mlp_chunks import apply_mlp_chunks
from ultrascale.parallel.activations.offload import apply_activation_offload
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.parallel.context.context_parallel import apply_context_parallel
from ultrascale.parallel.data.data_parallel import apply_data_parallel
from ultrascale.parallel.expert.expert_parallel import apply_expert_parallel
from ultrascale.parallel.mesh import Mesh, Ranks
from ultrascale.parallel.precision.fp8_gather import gather_in_fp8
from ultrascale.parallel.precision.fp8_history import history_of
from ultrascale.parallel.precision.fp8_products import apply_fp8
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE, apply_mixed_precision
from ultrascale.parallel.share import TIED, LocalParameter, Share
from ultrascale.parallel.tensor.tensor_parallel import apply_tensor_parallel
from ultrascale.plan.time.stage_cut import stage_layers
from ultrascale.schedules.actions import splits_backward
from ultrascale.schedules.build import smallest_schedule, stages_of_ranks
from ultrascale.torch_private import expect_parts
from ultrascale.work.sharding.places import WeightShard, shard_of


def build_share(
    model: Model,
    layout: Layout,
    ranks: Ranks,
    *,
    seed: int,
    sequence_length: int | None = None,
    compile_blocks: bool = False,
    draw_on_device: bool = False,
) -> Share:
    """This rank's share of `model`, sharded as `layout` says, on its device, with the initial weights of `seed`.

    `sequence_length` decides where the model is split into pipeline stages, unless the layout does. The weights have the same
    bits for every layout. A process group of `layout.world_size` ranks must be initialised unless that is one. Raises SpecError
    for what can be planned but not run, and for compiled blocks under a schedule (built-in or from a file) that splits backward
    passes in two.
    """
    expect_parts()
    expect_trainable(model, layout)
    if (
        compile_blocks
        and layout.pp > 1
        and splits_backward(*smallest_schedule(layout.schedule, layout.pp, layout.virtual_stages))
    ):
        raise SpecError([compiled_halves(layout.schedule)])
    mesh = Mesh(model, layout, ranks)
    places = {weight.name: shard_of(weight, layout, mesh.coordinates) for weight in weights(model)}
    stages = {
        number: build_stage(bare, mesh, compile_blocks=compile_blocks)
        for number, bare in _bare_stages(model, layout, mesh, sequence_length or model.max_position_embeddings)
    }
    for stage in stages.values():
        # Allocate memory, then fill in the values.
        stage.to_empty(device=ranks.device)
        initialise(
            stage,
            model,
            seed,
            places={name: places[name] for name, _ in stage.named_parameters()},
            draw_on_device=draw_on_device,
        )
        # Without FSDP2, mixed precision keeps copies of the parameters in the compute dtype.
        if mesh.data is None and layout.precision != layout.master_dtype:
            apply_mixed_precision(stage, TORCH_DTYPE[layout.precision])
    gathered = gather_in_fp8(model, stages, layout, mesh, TORCH_DTYPE[layout.precision])
    history = history_of(model, stages, layout, ranks.device)
    return Share(model, layout, mesh, stages, _local_parameters(model, stages, places), history, gathered)


def build_stage(stage: Decoder, mesh: Mesh, *, compile_blocks: bool) -> Decoder:
    """Shard and wrap a pipeline stage, in place; its parameters stay on the meta device."""
    layout = mesh.layout
    # 1. Shapes only: no rank ever allocates the whole model to get its shard.
    stage.to(TORCH_DTYPE[layout.master_dtype])
    # 2. The shard of each weight that a rank holds, and the communication within a block.
    apply_attention(stage, layout)
    apply_tensor_parallel(stage, layout, mesh)
    apply_context_parallel(stage, layout, mesh, compiled=compile_blocks)
    apply_expert_parallel(stage, layout, mesh)
    apply_fp8(stage, layout, mesh)
    apply_mlp_chunks(stage, layout)
    # 3. Recomputation inside compilation, so that the compiler sees which tensors need not be saved.
    apply_recompute(stage, layout, compiled=compile_blocks)
    # 4. Compilation inside FSDP2: all-gathers of parameters stay outside the compiled graph.
    if compile_blocks:
        for _, block in stage.blocks():
            block.forward = torch.compile(block.forward)
        stage.loss = partial(stage.loss, compiled=True)
    # 5. Activation offload, after recomputation has decided what is saved for the backward pass.
    apply_activation_offload(stage, layout)
    # 6. Data parallelism, and with it mixed precision.
    if mesh.data is not None:
        apply_data_parallel(stage, layout, mesh.data, mesh.expert_data)
    return stage


def apply_attention(stage: Decoder, layout: Layout) -> None:
    """Build masks in the form that `layout.attention` takes, in place. Heads too wide for flash attention use a dense mask
    tensor.

    If the kernel is still to be chosen by measurement (`train.start.chosen_kernels`), the rule of
    `kernels.attention.attention_core` applies.
    """
    core = layout.attention
    if core in ("auto", "fastest", "varlen") and stage.spec.head_dim > FLASH_HEAD_DIM:
        core = "sdpa"
    if core not in ("auto", "fastest"):
        stage.make_mask = partial(attention_mask, core=core)


def _bare_stages(model: Model, layout: Layout, mesh: Mesh, sequence_length: int) -> Iterator[tuple[int, Decoder]]:
    """Pipeline stages of this rank, on the meta device, each with its stage number."""
    with torch.device("meta"):
        if layout.pp == 1:
            yield 0, Decoder(model)
            return
        layers, last = stage_layers(model, layout, sequence_length), layout.num_stages - 1
        for number in stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)[mesh.coordinates.pp]:
            yield number, Decoder(model, layers=layers[number], is_first=number == 0, is_last=number == last)


def _local_parameters(model: Model, stages: dict[int, Decoder], places: dict[str, WeightShard]) -> list[LocalParameter]:
    table = {weight.name: weight for weight in weights(model)}
    return [
        LocalParameter(name, parameter, table[name], places[name], is_second=name == TIED and not stage.is_first)
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    ]
