from dataclasses import replace

import pytest
import torch
from models.families import DEEPSEEK_V3, EXPERT_FAMILIES, LLAMA
from models.families import FAMILIES as DENSE_FAMILIES

from ultrascale.description.architecture.model import Model
from ultrascale.description.problems import SpecError
from ultrascale.models.decoder import Decoder
from ultrascale.models.generate import DecoderCache, Sampling, choose, generate
from ultrascale.models.initialise import initialise

FAMILIES = DENSE_FAMILIES | EXPERT_FAMILIES
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def build(model: Model) -> Decoder:
    decoder = Decoder(model).double()
    initialise(decoder, model, seed=2)
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_equal_uncached_logits_for_any_split_of_the_tokens(family):
    model = FAMILIES[family]
    decoder = build(model)
    tokens = torch.randint(model.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    cache = DecoderCache(model, batch=2, max_length=24, dtype=torch.float64, device=torch.device("cpu"))
    with torch.no_grad():
        cached = torch.cat([decoder(part, cache=cache) for part in tokens.split([10, 1, 1, 5, 1, 6], 1)], 1)
        torch.testing.assert_close(cached, decoder(tokens), rtol=0, atol=1e-12)
    assert cache.length == 24


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3", "smollm3", "mixtral", "deepseek-v3", "gpt-oss"])
def test_greedy_text_is_the_argmax_of_the_full_forward_pass(family):
    decoder = build(FAMILIES[family])
    found = list(generate(decoder, PROMPT, Sampling(max_new_tokens=20, temperature=0)))
    text = list(PROMPT)
    for _ in range(20):
        text.append(int(decoder(torch.tensor([text]))[0, -1].argmax()))
    assert found == text[len(PROMPT) :]


def test_prediction_blocks_take_no_part_in_generating():
    model = replace(DEEPSEEK_V3, num_nextn_predict_layers=1)
    with_block, without = build(model), build(DEEPSEEK_V3)
    assert [number for number, _ in with_block.blocks()] == [0, 1, 2, 3]
    texts = [list(generate(decoder, PROMPT, Sampling(max_new_tokens=20))) for decoder in (with_block, without)]
    assert texts[0] == texts[1]


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    decoder = build(LLAMA)
    texts = [list(generate(decoder, PROMPT, Sampling(max_new_tokens=20, seed=seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_text_ends_before_the_stop_token_and_at_the_end_of_the_context():
    decoder = build(LLAMA)
    text = list(generate(decoder, PROMPT, Sampling(max_new_tokens=1000)))
    assert len(text) == LLAMA.max_position_embeddings - len(PROMPT)
    stop = text[5]
    assert list(generate(decoder, PROMPT, Sampling(max_new_tokens=1000, stop_tokens=(stop,)))) == text[: text.index(stop)]


def test_draws_follow_the_probabilities_that_temperature_top_k_and_top_p_leave():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)

    def shares(**options) -> list[float]:
        drawn = torch.tensor([choose(logits, Sampling(**options), generator) for _ in range(4000)])
        return (torch.bincount(drawn, minlength=4) / 4000).tolist()

    assert shares() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert shares(top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.03)
    assert shares(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30], abs=0.03)
    assert shares(temperature=0) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "prompt: is empty"),
        ([1, 97], {}, "prompt: has token id 97, but the vocabulary has 97 tokens"),
        ([1] * 64, {}, "prompt: has 64 tokens, but the model's context of 64"),
        ([1], {"temperature": -1}, "temperature: must be finite and at least 0, is -1"),
        ([1], {"temperature": float("nan")}, "temperature: must be finite and at least 0, is nan"),
        ([1], {"temperature": float("inf")}, "temperature: must be finite and at least 0, is inf"),
        ([1], {"seed": 2**64}, "seed: must be from 0"),
        ([1], {"top_p": 0}, "top_p: must be above 0"),
        ([1], {"top_k": 0}, "top_k: must be at least 1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompt, options, message):
    decoder = Decoder(replace(LLAMA, num_hidden_layers=1))
    with pytest.raises(SpecError, match=message):
        next(generate(decoder, prompt, Sampling(**options)))
