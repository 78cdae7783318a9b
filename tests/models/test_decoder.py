from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models.families import EXPERT_FAMILIES, GPT2, LLAMA
from models.families import FAMILIES as DENSE_FAMILIES
from operations import Operations
from torch.nn import functional as F

from ultrascale.catalogue.models.model_presets import PRESETS, preset
from ultrascale.config.rules.trainable import untrainable_model
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters, score_biases, weights
from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import initialise

FAMILIES = DENSE_FAMILIES | EXPERT_FAMILIES


def build(model: Model, dtype: torch.dtype = torch.float64) -> Decoder:
    decoder = Decoder(model).to(dtype)
    initialise(decoder, model, seed=1)
    return decoder


def tokens_of(model: Model, batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(model.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_table_of_weights(family):
    model = FAMILIES[family]
    with torch.device("meta"):
        decoder = Decoder(model)
    found = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    assert sorted(found) == sorted((weight.name, weight.shape) for weight in weights(model))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == num_parameters(model)
    buffers = {name: tuple(buffer.shape) for name, buffer in decoder.named_buffers()}
    assert buffers == {bias.name: bias.shape for bias in score_biases(model)}


@pytest.mark.parametrize("family", FAMILIES)
def test_so_they_are_with_blocks_that_predict_later_tokens(family):
    """GPT-2's norms have biases, those of predictions have none."""
    model = replace(FAMILIES[family], num_nextn_predict_layers=1)
    with torch.device("meta"):
        found = {name: tuple(parameter.shape) for name, parameter in Decoder(model).named_parameters()}
    assert found == {weight.name: weight.shape for weight in weights(model)}


@pytest.mark.parametrize("name", [name for name, model in PRESETS.items() if not untrainable_model(model)])
def test_parameters_of_every_trained_preset_are_those_of_its_table(name):
    """With four blocks, equal as a model's blocks are; a thousand billion parameters have 128."""
    model = preset(name)
    model = replace(model, num_hidden_layers=min(4, model.num_hidden_layers))
    with torch.device("meta"):
        decoder = Decoder(model)
    found = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert found == {weight.name: weight.shape for weight in weights(model)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_summed_cross_entropy_of_the_logits_over_valid_targets(family):
    model = FAMILIES[family]
    decoder, tokens = build(model), tokens_of(model)
    targets = tokens.roll(-1, 1)
    targets[0, 3:9] = -100
    expected = F.cross_entropy(decoder(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = decoder(tokens, targets=targets)
    assert loss.shape == () and loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_packed_into_one_sequence_give_the_loss_and_gradients_of_each_alone(family):
    model = FAMILIES[family]
    tokens = tokens_of(model, batch=1)
    targets = tokens_of(model, batch=1).flip(1)
    lengths = [9, 1, 10]
    alone = build(model)
    parts = zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)
    total = torch.stack([alone(part, targets=goal) for part, goal in parts]).sum()
    total.backward()
    packed = build(model)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    loss = packed(tokens, targets=targets, positions=positions, document_ids=ids)
    loss.backward()
    torch.testing.assert_close(loss, total, rtol=1e-13, atol=0)
    for (name, one), other in zip(alone.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_a_token_sees_only_its_sliding_window():
    model = replace(LLAMA, sliding_window=3, num_hidden_layers=1)
    decoder, tokens = build(model), tokens_of(model)
    changed = tokens.clone()
    changed[:, 5] += 1
    changed %= model.vocab_size
    differs = (decoder(tokens) != decoder(changed)).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == [5, 6, 7]


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_bf16_and_fp32_losses_agree_with_fp64_to_their_precision(family):
    model = FAMILIES[family]
    tokens = tokens_of(model)
    exact = build(model)(tokens, targets=tokens).item()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        loss = build(model, dtype)(tokens, targets=tokens)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("model", [GPT2, FAMILIES["qwen3"]], ids=["gpt2", "qwen3"])
def test_recomputing_each_block_gives_the_same_bits(model):
    from torch.utils.checkpoint import checkpoint

    plain, recomputed, tokens = build(model), build(model), tokens_of(model)
    for layer in recomputed.layers.values():
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    for decoder in (plain, recomputed):
        decoder(tokens, targets=tokens).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3"])
def test_compiled_blocks_are_traced_whole_and_give_the_same_loss_and_gradients(family):
    model = FAMILIES[family]
    tokens = tokens_of(model)
    plain, compiled = build(model, torch.float32), build(model, torch.float32)
    for layer in compiled.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    losses = [decoder(tokens, targets=tokens) for decoder in (plain, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_document_ids_with_a_cache_are_refused():
    model = LLAMA
    tokens = tokens_of(model)

    class Full:
        length = 4
        layers = ()

    with pytest.raises(ValueError, match="document_ids"):
        build(model)(tokens, document_ids=torch.zeros_like(tokens), cache=Full())


def dropped_by(model: Model, forward: Callable[[], object]) -> list[bytes]:
    """The elements of [B, S, D] that each dropout of a forward pass drops, in the order of the pass."""
    with Operations("masked_fill_") as fills:
        forward()
    masks = [mask for _, mask, *_ in fills.inputs if mask.dim() == 3 and mask.shape[-1] == model.hidden_size]
    return [mask.numpy().tobytes() for mask in masks]


@pytest.mark.parametrize(
    "model", [LLAMA, replace(EXPERT_FAMILIES["deepseek-v3"], num_nextn_predict_layers=2)], ids=["llama", "mtp"]
)
def test_no_two_places_of_a_model_drop_the_same_elements(model):
    """The embedding and both halves of every block, those that predict too; a stage numbers its blocks as the whole model."""
    model = replace(model, dropout=0.5)
    tokens = tokens_of(model)
    keys = torch.zeros_like(tokens)
    whole = dropped_by(model, lambda: build(model)(tokens, targets=tokens.roll(-1, 1), dropout_keys=keys))
    blocks = model.num_hidden_layers + model.num_nextn_predict_layers
    assert len(whole) == len(set(whole)) == 1 + 2 * blocks
    last = Decoder(model, layers=range(1, model.num_hidden_layers), is_first=False).double()
    inputs = torch.zeros(*tokens.shape, model.hidden_size).double()
    assert dropped_by(model, lambda: last(inputs, targets=tokens, dropout_keys=keys)) == whole[3:]
