"""The cut of blocks into pipeline stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.time.stage_cut import _costs, balanced_layers, stage_layers


def slowest(model: Model, counts: tuple[int, ...], length: int) -> float:
    blocks, head = _costs(model, length)
    ends = [sum(counts[:k]) for k in range(len(counts) + 1)]
    sums = [sum(blocks[a:b]) for a, b in pairwise(ends)]
    return max([*sums[:-1], sums[-1] + head])


def best(model: Model, stages: int, length: int) -> float:
    """By trying all cuts."""
    layers, found = model.num_hidden_layers, []
    for inner in combinations_with_replacement(range(layers + 1), stages - 1):
        counts = tuple(b - a for a, b in pairwise((0, *inner, layers)))
        if min(counts[1:-1], default=1) >= 1:
            found.append(slowest(model, counts, length))
    return min(found)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "deepseek-v2-lite", "gpt-oss-20b", "mistral-7b-v0.1", "deepseek-v3"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_other_cut_has_a_faster_slowest_stage(name, stages):
    model = replace(PRESETS[name], num_hidden_layers=min(PRESETS[name].num_hidden_layers, 16))
    for length in (512, 8192):
        counts = balanced_layers(model, stages, length)
        assert sum(counts) == model.num_hidden_layers and len(counts) == stages
        assert slowest(model, counts, length) == pytest.approx(best(model, stages, length), rel=1e-9)


def test_the_head_counts_and_the_last_stage_gets_fewer_blocks():
    model = PRESETS["llama-3.2-1b"]
    assert balanced_layers(model, 4, 4096) == (5, 5, 5, 1)
    assert slowest(model, (4, 4, 4, 4), 4096) / slowest(model, (5, 5, 5, 1), 4096) == pytest.approx(1.54, abs=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_any_number_of_stages_up_to_two_more_than_blocks_has_a_block_in_each_but_the_ends(name):
    model = PRESETS[name]
    for stages in {1, 2, 3, 8, model.num_hidden_layers, model.num_hidden_layers + 2}:
        if stages <= model.num_hidden_layers + 2:
            counts = balanced_layers(model, stages, 4096)
            assert len(counts) == stages and sum(counts) == model.num_hidden_layers
            assert min(counts) >= 0 and min(counts[1:-1], default=1) >= 1


def test_llama_3_405b_is_cut_as_published_with_one_block_less_at_both_ends():
    """Grattafiori et al. 2024, section 3.3.2: 126 layers over 16 ranks, one less on the first and on the last."""
    counts = balanced_layers(PRESETS["llama-3.1-405b"], 16, 8192)
    assert counts == (7, *[8] * 14, 7)


def test_a_given_cut_is_taken_and_one_that_cannot_be_is_refused():
    model = PRESETS["llama-3.2-1b"]
    assert stage_layers(model, Layout(pp=2, layers_per_stage=(16, 0)), 64) == (range(16), range(16, 16))
    assert [len(layers) for layers in stage_layers(model, Layout(pp=4), 4096)] == [5, 5, 5, 1]
    with pytest.raises(SpecError, match="must share 16 layers among 2 stages"):
        stage_layers(model, Layout(pp=2, layers_per_stage=(16, 1)), 64)
    with pytest.raises(SpecError, match="Use at most 18 stages"):
        stage_layers(model, Layout(pp=19), 64)
