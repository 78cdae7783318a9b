"""`work.work` and `description.architecture.weights` against the decoder itself: names, FLOPs, and every byte that autograd
keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from agree.small_models import DEMO, LATENT, WITH_EXPERTS, batch_of
from agree.small_models import FAMILIES as DENSE
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout, Precision
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.plan.flops import hardware_flops_per_token, model_flops_per_token
from ultrascale.work.work import Shape, block_work, head_work, prediction_work, work

FAMILIES = DENSE | WITH_EXPERTS | {"latent": LATENT}
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def bytes_autograd_keeps(model: Model, precision: Precision, documents: bool) -> int:
    """Bytes of the distinct storages saved for the backward pass, without parameters and the batch."""
    decoder = Decoder(model).to(DTYPES[precision])
    batch = batch_of(model, 2, 64, documents=documents)
    not_counted = {t.untyped_storage()._cdata for t in [*decoder.parameters(), *batch.values()]}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in not_counted:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = decoder(**batch)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def bytes_the_table_keeps(model: Model, shape: Shape) -> int:
    """The same from the table. A block's `hidden` is the `hidden_out` of the one before."""
    made: dict[tuple[int | None, str], int] = {}
    kept: set[tuple[int | None, str]] = set()
    outside = {a.name for layer, op in work(model, shape) if layer is None for a in op.makes}
    stream: tuple[int | None, str] = (None, "hidden")
    for layer, op in work(model, shape):
        made |= {(layer, a.name): a.num_bytes for a in op.makes}
        names = {"hidden": stream} | {name: (None, name) for name in outside - {"hidden"}}
        kept |= {names.get(name, (layer, name)) for name in op.saves}
        if op.makes[0].name == "hidden_out":
            stream = (layer, "hidden_out")
    return sum(made[key] for key in kept)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_keeps_exactly_the_bytes_that_autograd_saves(family: str, precision: Precision, documents: bool) -> None:
    model = FAMILIES[family]
    assert bytes_the_table_keeps(model, Shape(2, 64, precision, documents)) == bytes_autograd_keeps(model, precision, documents)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_has_exactly_the_weights_of_the_table(family: str) -> None:
    with torch.device("meta"):
        parameters = {name: tuple(p.shape) for name, p in Decoder(FAMILIES[family]).named_parameters()}
    assert parameters == {weight.name: weight.shape for weight in weights(FAMILIES[family])}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_outside_the_blocks_and_inside_belongs_to_an_operation(family: str) -> None:
    model = FAMILIES[family]
    named = {
        name if layer is None else f"layers.{layer}.{name}" for layer, op in work(model, Shape(1, 8)) for name in op.weights
    }
    assert named == {weight.name for weight in weights(model)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "every-k"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_flops_equal_those_that_torch_counts(family: str, recompute: str) -> None:
    """FlopCounterMode knows no attention on CPU (left out on both sides) and does not count `addmm_`, which sums the gradient
    of the head: one of the loss's three products."""
    model, tokens = FAMILIES[family], 2 * 64
    layout = Layout(recompute=recompute)  # type: ignore[arg-type]
    decoder = Decoder(model)
    apply_recompute(decoder, layout)
    with FlopCounterMode(display=False) as counter:
        decoder(**batch_of(model, 2, 64, documents=False)).backward()
    table = sum(op.flops + op.backward_flops for _, op in work(model, Shape(2, 64)) if op.kind != "attention")
    for layer in range(model.num_hidden_layers):
        if layout.is_fully_recomputed(layer):  # all but the last product, whose result nobody needs again
            table += sum(op.flops for op in block_work(model, layer, Shape(2, 64))[:-2] if op.kind == "matmul")
    assert counter.get_total_flops() == table - 2 * tokens * model.vocab_size * model.hidden_size


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "olmoe", "deepseek-v2", "deepseek-v3", "latent"])
def test_flops_of_experts_and_latent_attention_equal_those_that_torch_counts(family: str, recompute: str) -> None:
    """FlopCounterMode does not know grouped products: this test tells it. Run again, a block with experts does all its
    products: their last result is kept, to be weighed. (GPT-OSS sums gradients of experts' biases in products, X/D more.)"""
    model, tokens = FAMILIES[family], 2 * 64
    layout = Layout(recompute=recompute)  # type: ignore[arg-type]
    decoder = Decoder(model)
    apply_recompute(decoder, layout)

    def grouped(left: Sequence[int], right: Sequence[int], *rest: Any, out_shape: Sequence[int], **options: Any) -> int:
        return 2 * left[0] * left[1] * right[-1]  # rows by one of the matrices each; or one group's columns by its rows

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        decoder(**batch_of(model, 2, 64, documents=False)).backward()
    table = sum(op.flops + op.backward_flops for _, op in work(model, Shape(2, 64)) if op.kind != "attention")
    for layer in range(model.num_hidden_layers if recompute == "full" else 0):
        ops = block_work(model, layer, Shape(2, 64))
        again = ops if model.is_moe(layer) else ops[:-2]
        table += sum(op.flops for op in again if op.kind == "matmul")
    assert counter.get_total_flops() == table - 2 * tokens * model.vocab_size * model.hidden_size


def test_flops_of_predicting_a_token_more_equal_those_that_torch_counts() -> None:
    """A block like the last, what joins the two streams before it, and the head again; none of it is in the model's FLOPs."""
    model, shape = replace(WITH_EXPERTS["deepseek-v3"], num_nextn_predict_layers=1), Shape(2, 64)

    def grouped(left: Sequence[int], right: Sequence[int], *rest: Any, out_shape: Sequence[int], **options: Any) -> int:
        return 2 * left[0] * left[1] * right[-1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        Decoder(model)(**batch_of(model, 2, 64, documents=False)).backward()
    more = (*prediction_work(model, shape), *block_work(model, model.num_hidden_layers, shape), *head_work(model, shape))
    ops = (*(op for _, op in work(model, shape)), *more)
    table = sum(op.flops + op.backward_flops for op in ops if op.kind != "attention")
    assert counter.get_total_flops() == table - 2 * (2 * shape.num_tokens * model.vocab_size * model.hidden_size)
    plain = replace(model, num_nextn_predict_layers=0)
    assert model_flops_per_token(model, 64) == model_flops_per_token(plain, 64)
    added = hardware_flops_per_token(model, Layout(), shape) - hardware_flops_per_token(plain, Layout(), shape)
    products = sum(op.flops + op.backward_flops for op in more if op.kind != "attention") / shape.num_tokens
    attention = sum(op.flops for op in more if op.kind == "attention") / shape.num_tokens
    assert added == pytest.approx(products + 3.5 * attention * 65 / 128)


def test_model_flops_are_six_per_weight_of_a_product_and_token_plus_attention() -> None:
    products = sum(w.numel for w in weights(DEMO) if len(w.shape) == 2 and w.part != "embedding")
    attention = 12 * DEMO.num_hidden_layers * DEMO.query_size
    assert model_flops_per_token(DEMO, 256, full_attention=True) == 6 * products + attention * 256
    assert model_flops_per_token(DEMO, 256) == 6 * products + attention * 257 / 2


def test_full_recomputation_costs_a_forward_pass_of_the_blocks_without_its_last_product() -> None:
    products = sum(w.numel for w in weights(DEMO) if w.layer == 0 and len(w.shape) == 2)
    last = DEMO.intermediate_size * DEMO.hidden_size
    attention = 4 * DEMO.query_size * 257 / 2
    plain, full = (hardware_flops_per_token(DEMO, Layout(recompute=way), Shape(1, 256)) for way in ("none", "full"))  # type: ignore[arg-type]
    assert full - plain == DEMO.num_hidden_layers * (2 * (products - last) + attention)
