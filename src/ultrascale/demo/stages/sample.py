"""Code that the model writes."""

from __future__ import annotations

from pathlib import Path

import torch

from ultrascale.demo.claims import DemoError
from ultrascale.models.generate import Sampling, generate
from ultrascale.train.start.trained import open_trained

PROMPTS = ("class Queue:", "def read(self, path):", "def test_")
NEW_TOKENS = 80
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 0


def continue_prompts(run_folder: Path) -> list[str]:
    """Each of PROMPTS with what the newest checkpoint writes after it."""
    from ultrascale.data.tokenizer import load_tokenizer

    trained = open_trained(run_folder)
    if trained.tokenizer is None:
        raise DemoError(f"{trained.source} has no tokenizer to sample with")
    tokenizer, decoder = load_tokenizer(trained.tokenizer), trained.decoder(dtype=torch.float32)
    sampling = Sampling(NEW_TOKENS, TEMPERATURE, None, TOP_P, SEED)
    return [
        tokenizer.decode([*ids, *generate(decoder, ids, sampling)])
        for ids in (tokenizer.encode(prompt).ids for prompt in PROMPTS)
    ]


def sample_words(run_folder: Path, prompt: str) -> list[str]:
    """The words of the command that gives the same text."""
    words = ["generate", str(run_folder), "--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS)]
    return [*words, "--temperature", str(TEMPERATURE), "--top-p", str(TOP_P)]
