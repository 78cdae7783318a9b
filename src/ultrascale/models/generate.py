"""Text generation, one token at a time, with a KV cache.

The cache holds 2 L T K E numbers for T tokens, for latent attention too (all heads' keys and values, not the compressed ones);
with it a new token costs one row of every GEMM instead of T rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.problems import Problem, SpecError
from ultrascale.models.decoder import Decoder
from ultrascale.models.sampling import Sampling

GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy: logits divided by them overflow fp32."""


class LayerCache:
    """Keys [B, T, K, E] and values [B, T, K, E'] of one layer, in memory allocated once."""

    def __init__(self, shape: tuple[int, int, int, int], value_dim: int, *, dtype: torch.dtype, device: torch.device):
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty((*shape[:3], value_dim), dtype=dtype, device=device)
        self.length = 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; returns those of all tokens."""
        end = self.length + key.shape[1]
        self.keys[:, self.length : end] = key
        self.values[:, self.length : end] = value
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class DecoderCache:
    """Keys and values of every layer, for `Decoder.forward(cache=...)`."""

    def __init__(self, model: Model, *, batch: int, max_length: int, dtype: torch.dtype, device: torch.device):
        shape = (batch, max_length, model.num_key_value_heads, model.head_dim)
        width, count = model.value_head_dim, model.num_hidden_layers
        self.layers = [LayerCache(shape, width, dtype=dtype, device=device) for _ in range(count)]

    @property
    def length(self) -> int:
        """Number of tokens that have passed all layers."""
        return self.layers[-1].length


@torch.no_grad()
def generate(decoder: Decoder, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """New token ids after `prompt`, one by one, until `max_new_tokens`, a stop token, or the end of the model's context.

    The same seed gives the same text. Raises SpecError if `sampling` is invalid, or the prompt is empty, longer than the
    context, or has an id outside the vocabulary.
    """
    problems = sampling.problems() + prompt_problems(decoder.spec, prompt)
    if problems:
        raise SpecError(problems)
    weight = decoder.head_weight
    max_length = min(len(prompt) + sampling.max_new_tokens, decoder.spec.max_position_embeddings)
    cache = DecoderCache(decoder.spec, batch=1, max_length=max_length, dtype=weight.dtype, device=weight.device)
    generator = torch.Generator().manual_seed(sampling.seed)
    new = torch.tensor([list(prompt)], device=weight.device)
    for _ in range(len(prompt), max_length):
        logits = decoder(new, cache=cache)[0, -1]
        token = choose(logits.float().cpu(), sampling, generator)
        if token in sampling.stop_tokens:
            return
        yield token
        new = torch.tensor([[token]], device=weight.device)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id drawn from `logits` [V] fp32 on the CPU."""
    if sampling.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    probabilities, tokens = (logits / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    kept = torch.ones_like(tokens, dtype=torch.bool)
    if sampling.top_k is not None:
        kept[sampling.top_k :] = False
    if sampling.top_p is not None:
        kept &= probabilities.cumsum(-1) - probabilities < sampling.top_p
    drawn = torch.multinomial(probabilities * kept, 1, generator=generator)
    return int(tokens[drawn])


def prompt_problems(model: Model, prompt: Sequence[int]) -> list[Problem]:
    """Problems that keep `model` from continuing `prompt`; empty if there are none."""
    if not prompt:
        return [Problem("prompt", "is empty", "Give at least one token.")]
    problems: list[Problem] = []
    beyond = [token for token in prompt if not 0 <= token < model.vocab_size]
    if beyond:
        rule = f"has token id {beyond[0]}, but the vocabulary has {model.vocab_size} tokens"
        problems.append(Problem("prompt", rule, "Use the tokenizer that the model was trained with."))
    if len(prompt) >= model.max_position_embeddings:
        rule = f"has {len(prompt)} tokens, but the model's context of {model.max_position_embeddings} leaves no room for more"
        problems.append(Problem("prompt", rule, f"Give at most {model.max_position_embeddings - 1} tokens."))
    return problems
