from dataclasses import replace

import pytest
import torch

from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.kernels.rotary import _traced_turn, attention_factor, inverse_frequencies, rotary_angles, rotate

MODEL = Model(
    vocab_size=10, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, rope_theta=5e5,
)  # fmt: skip


def test_each_plane_turns_as_a_complex_number_and_the_gradient_turns_back():
    positions = torch.tensor([[0, 1, 5], [7, 2, 0]])
    x = torch.randn(2, 3, 2, 64, dtype=torch.float64, requires_grad=True)
    angles = rotary_angles(MODEL, positions, torch.float64)
    found = rotate(x, angles)
    turns = torch.complex(*angles)
    expected = torch.complex(x[..., :32], x[..., 32:]) * turns
    torch.testing.assert_close(found, torch.cat((expected.real, expected.imag), -1), rtol=1e-14, atol=1e-15)
    (gradient,) = torch.autograd.grad(found, x, torch.ones_like(found))
    (expected_gradient,) = torch.autograd.grad((expected.real + expected.imag).sum(), x)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-14, atol=1e-15)


def test_scores_depend_on_the_distance_alone():
    query, key = torch.randn(1, 1, 1, 64, dtype=torch.float64), torch.randn(1, 1, 1, 64, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, rotary_angles(MODEL, torch.tensor([position]), torch.float64))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("llama3", factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0),
        RopeScaling("yarn", factor=4.0, original_max_position_embeddings=2048),
        RopeScaling("yarn", factor=4.0, original_max_position_embeddings=2048, beta_fast=16, attention_factor=0.7),
        RopeScaling("yarn", factor=4.0, original_max_position_embeddings=2048, truncate=False),
    ],
    ids=["llama3", "yarn", "yarn-own-factor", "yarn-not-truncated"],
)
def test_scaled_frequencies_equal_transformers_to_the_bit(scaling):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    from ultrascale.description.architecture.rope_config import write_rope

    model = replace(MODEL, rope_scaling=scaling)
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=8192, **write_rope(model))
    frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(model), frequencies)
    assert attention_factor(scaling) == factor


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("start", "planes"), [(0, 4), (0, 2), (4, 2), (2, 2)])
def test_a_part_of_a_head_turns_plane_by_plane_and_the_rest_stays(start, planes, neighbours):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, generator=generator).requires_grad_()
    angle = torch.randn(1, 3, 1, planes, dtype=torch.float64, generator=generator)
    expected = x.detach().clone()
    for plane in range(planes):
        first = start + (2 * plane if neighbours else plane)
        second = first + (1 if neighbours else planes)
        turn = torch.polar(torch.ones_like(angle[..., plane]), angle[..., plane])
        turned = torch.complex(expected[..., first], expected[..., second]) * turn
        expected[..., first], expected[..., second] = turned.real, turned.imag
    angles = (angle.cos(), angle.sin())
    found = rotate(x, angles, start=start, neighbours=neighbours)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(_traced_turn(x, *angles, start, neighbours), expected, rtol=0, atol=1e-15)
    (grad,) = torch.autograd.grad(found, x, found.detach())  # the turn back
    torch.testing.assert_close(grad, x.detach(), rtol=0, atol=1e-14)
