"""fp8: what is rounded, which layers are, and that ranks, recomputation and compilation do not change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from operations import Operations
from parallel.tensor_cases import OneRank
from parallel.test_precision import LLAMA, gradients_and_weights, run_of
from ranks import run_ranks
from torch.nn import functional as F
from train.small_runs import same, small_run, state, stop_at, train_in_turn

from ultrascale.config.resolve import resolve
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.kernels.fp8.fp8_linear import fp8_linear
from ultrascale.kernels.fp8.fp8_matrices import FORWARD, GRADIENT, Scaling, narrow, product
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.precision.fp8_products import apply_fp8
from ultrascale.work.work import Shape, block_work

WIDE = replace(
    LLAMA, hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
    no_rope_layer_interval=1, model_type="smollm3",
)  # fmt: skip
SCALINGS: list[Scaling] = ["row", "tensor"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_torchs_own_scaled_product_gives_what_ours_does(scaling):
    left, right = narrow(torch.randn(32, 64), scaling), narrow(torch.randn(48, 64), scaling)
    ours = product(left, right, torch.bfloat16)
    scales = [s.reshape(()) if scaling == "tensor" else s.contiguous() for s in (left.scale, right.scale.t())]
    theirs = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left.values, right.values.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
    )  # fmt: skip
    assert ((ours.float() - theirs.float()).norm() / ours.float().norm()) < 4e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_row_that_is_large_takes_nothing_from_others_only_where_each_has_its_scale(scaling):
    wide = torch.randn(4, 64)
    wide[0] *= 1e6
    found = narrow(wide, scaling)
    errors = ((found.values.float() * found.scale - wide).norm(dim=1) / wide.norm(dim=1))[1:]
    assert (errors < 0.04).all() if scaling == "row" else (errors > 0.5).all()


@pytest.mark.parametrize("scaling, limit", [("row", 0.045), ("tensor", 0.09)])
def test_results_and_gradients_are_those_of_the_exact_products_within_the_format(scaling, limit):
    hidden, weights = torch.randn(2, 96, 64), [torch.randn(80, 64), torch.randn(32, 64)]
    biases = [torch.randn(80), torch.randn(32)]
    grads = [torch.randn(2, 96, 80), torch.randn(2, 96, 32)]
    found: list[list[torch.Tensor]] = []
    for exact in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, *weights, *biases)]
        inputs, (first, second), own = leaves[0], leaves[1:3], leaves[3:]
        if exact:
            out = (F.linear(inputs, first, own[0]), F.linear(inputs, second, own[1]))
        else:
            out = fp8_linear(inputs, [first, second], own, scaling)
        torch.autograd.backward(out, grads)
        found.append([*out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for exact, narrowed in zip(*found, strict=True):
        assert 1e-7 < (narrowed - exact).norm() / exact.norm() < limit or torch.equal(narrowed, exact)
    assert torch.equal(found[0][-1], found[1][-1])  # a bias's gradient is a plain sum


def test_gradients_of_one_scale_are_in_the_wide_format_and_of_a_scale_a_row_in_the_fine_one():
    for scaling in SCALINGS:
        leaf = torch.randn(4, 16, requires_grad=True)
        with Operations("_to_copy") as casts:
            fp8_linear(leaf, [torch.randn(16, 16, requires_grad=True)], [], scaling)[0].sum().backward()
        seen = {options.get("dtype") for options in casts.options}
        assert FORWARD in seen and (GRADIENT in seen) == (scaling == "tensor")


def test_products_of_blocks_are_in_fp8_and_nothing_else():
    for kept in (0, 1):
        share = build_share(
            replace(LLAMA, num_hidden_layers=4),
            Layout(precision="fp8", fp8_keep_blocks=kept),
            Ranks(0, 1, torch.device("cpu")),
            seed=0,
        )
        tokens = torch.arange(8)[None]
        with torch.no_grad(), Operations("scaled_product") as products:
            share.decoder(tokens, targets=tokens)
        assert len(products.inputs) == 7 * (4 - 2 * kept)
        assert LLAMA.vocab_size not in {len(right) for _, _, right, *_ in products.inputs}


@pytest.mark.parametrize("scaling, recompute", [("row", "none"), ("row", "selective"), ("tensor", "full")])
def test_two_micro_batches_on_one_rank_give_the_bits_of_one_on_each_of_two_ranks(scaling, recompute):
    words: dict[str, Any] = {"precision": "fp8", "fp8_scaling": scaling, "recompute": recompute}

    def run(**layout):
        own = run_of(LLAMA, **layout)
        return replace(own, layout=replace(own.layout, **words))

    alone = gradients_and_weights(0, run())
    plain = run_ranks(2, gradients_and_weights, run(dp=2))
    for one, *others in zip(alone, *plain, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("layout", [{"dp": 2, "zero_stage": 3}, {"tp": 2}, {"cp": 2, "fp8_scaling": "tensor"}])
def test_a_stopped_run_goes_on_to_the_same_bits(home, layout):
    changes: dict[str, Any] = {"layout": Layout(precision="fp8", **layout), "steps": 5}
    changes["optimizer"] = replace(small_run(home).optimizer, warmup_steps=1, decay_steps=2)
    whole, run = (small_run(home, name=name, **changes) for name in ("whole", "stopped"))
    outcomes = train_in_turn([(whole, None), (run, stop_at(3)), (run, None)])
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [5, 3, 5]
    assert same(state(run), state(whole))


def test_a_compiled_block_computes_in_fp8_too():
    found = []
    for compiled in (False, True):
        share = build_share(LLAMA, Layout(precision="fp8"), Ranks(0, 1, torch.device("cpu")), seed=0, compile_blocks=compiled)
        tokens = torch.arange(16)[None]
        loss = share.decoder(tokens, targets=tokens)
        loss.backward()
        norms = torch.stack([p.grad.norm() for p in share.parameters() if p.grad is not None])
        found.append((loss.detach(), norms))
    (eager, own), (fast, other) = found
    assert abs(eager - fast) < 2e-3 * eager and ((own - other).norm() / own.norm()) < 0.02


def kept_bytes(scaling: Scaling) -> int:
    """What autograd keeps of a block, without its parameters."""
    decoder = Decoder(WIDE).to(torch.bfloat16)
    apply_fp8(decoder, Layout(precision="fp8", fp8_scaling=scaling), OneRank())
    storages: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(2, 64, WIDE.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = decoder.layers["0"](hidden, None, None)
        assert out.requires_grad
        return sum(storages.values())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_table_keeps_what_autograd_saves(scaling):
    """But for scales: 4 bytes for each token and input of products that are scaled by row."""
    shape = Shape(2, 64, "fp8")
    ops = block_work(WIDE, 0, shape)
    made = {one.name: one.num_bytes for op in ops for one in op.makes}
    planned = sum(made[name] for name in {name for op in ops for name in op.saves} if name in made)
    tokens = shape.num_tokens
    planned += tokens * WIDE.hidden_size * 2  # the block's input
    scales = 4 * 4 * (tokens if scaling == "row" else 1)
    assert kept_bytes(scaling) == pytest.approx(planned + scales, rel=0.01)


def test_refusals_name_what_fp8_does_not_go_with_and_settings_nobody_reads_are_told():
    base = {"batch.sequence_length": 64, "layout.precision": "fp8"}
    for words, key in (
        ({"model.preset": "tiny-llama", "layout.tp": 2, "layout.tp_overlap": True}, "layout.tp_overlap"),
        ({"model.preset": "tiny-llama", "layout.fp8_keep_blocks": 50}, "layout.fp8_keep_blocks"),
    ):
        with pytest.raises(SpecError) as caught:
            resolve(None, base | words, require_data=True)
        assert key in [problem.key for problem in caught.value.problems], key
