"""The exported model: a Hugging Face folder, logits compared with those of transformers, and code that the model writes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from ultrascale.demo.claims import Claim, DemoError, judged
from ultrascale.description.run import Run
from ultrascale.models.files.huggingface import export_folder
from ultrascale.models.generate import Sampling, generate
from ultrascale.train.corpora import build_loader
from ultrascale.train.start.trained import open_trained

TOLERANCE = 1e-5
"""Largest difference of logits in fp32, as a fraction of the largest logit."""


def export_newest(run_folder: Path, target: Path) -> Claim:
    """Write the newest checkpoint as a Hugging Face folder and read it back."""
    trained = open_trained(run_folder)
    export_folder(trained.weights, trained.model, target, tokenizer=trained.tokenizer, overwrite=True)
    reread = open_trained(target).weights
    equal = sum(torch.equal(weight, reread[name]) for name, weight in trained.weights.items())
    return judged(
        "an export keeps the weights", f"{equal} of {len(trained.weights)} tensors equal to the last bit",
        equal == len(trained.weights), tensors_equal=equal, tensors=len(trained.weights),
    )  # fmt: skip


def compare_with_transformers(folder: Path, run: Run) -> Claim:
    """Compare logits of held-out text from transformers with those of the trainer's decoder, both in fp32; skipped if
    transformers is not installed."""
    text = "transformers computes the same logits"
    if find_spec("transformers") is None:
        return Claim(text, "transformers is not installed: pip install transformers", "skipped")
    tokens = torch.from_numpy(build_loader(run, run.data.validation).read(range(4)).tokens)
    theirs = _transformers_logits(folder, tokens)
    with torch.no_grad():
        ours = open_trained(folder).decoder(dtype=torch.float32)(tokens)
    largest, difference = float(ours.abs().max()), float((ours - theirs).abs().max())
    return judged(
        text, f"largest difference {difference:.1e} of logits up to {largest:.1f}", difference <= TOLERANCE * largest,
        largest_difference=difference, largest_logit=largest,
    )  # fmt: skip


def _transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # read when it is imported
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


PROMPTS = ("class Queue:", "def read(self, path):", "def test_")
NEW_TOKENS = 80
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 0


def continue_prompts(run_folder: Path) -> list[str]:
    """Each of PROMPTS with the newest checkpoint's continuation."""
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
    """Words of the command that gives the same text."""
    words = ["generate", str(run_folder), "--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS)]
    return [*words, "--temperature", str(TEMPERATURE), "--top-p", str(TOP_P)]
