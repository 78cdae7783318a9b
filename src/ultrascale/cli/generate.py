"""`ultrascale generate`: sample text from a checkpoint or an exported folder."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ultrascale.cli.parse import parse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ultrascale.train.trained import Trained


def generate(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    prompt: str = "",
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    tokenizer: Path | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Continue a prompt with a trained model.

    Example: ultrascale generate out/demo --prompt "def main(" --max-new-tokens 64

    Args:
        folder: A run folder (its newest whole checkpoint), one checkpoint, or a Hugging Face folder.
        prompt: The text to continue. Empty: a new document.
        max_new_tokens: Stop after this many tokens, or earlier at the end of a document.
        temperature: Below 1 likelier tokens are preferred; 0 always takes the likeliest.
        top_k: Draw from the k likeliest tokens only.
        top_p: Draw only from the likeliest tokens that together reach this probability.
        seed: The same seed gives the same text.
        tokenizer: A tokenizer.json, if the one that goes with the model is elsewhere.
        precision: Dtype of weights and activations.
        device: auto: CUDA when there is one.
        json: Print one JSON object.
    """
    import torch
    from tokenizers.decoders import DecodeStream

    from ultrascale.models.generate import Sampling
    from ultrascale.models.generate import generate as continue_text
    from ultrascale.parallel.data import TORCH_DTYPE
    from ultrascale.train.trained import open_trained

    trained = open_trained(folder)
    vocabulary, stop = _tokenizer(trained, tokenizer)
    ids = vocabulary.encode(prompt).ids if prompt else _document_start(stop)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    decoder = trained.decoder(dtype=TORCH_DTYPE[precision], device=where)
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, stop)
    new_ids: list[int] = []
    pieces: list[str] = []
    stream = DecodeStream(skip_special_tokens=False)
    _write(prompt, silent=json)
    for token in continue_text(decoder, ids, sampling):
        new_ids.append(token)
        pieces.append(stream.step(vocabulary, token) or "")  # None: only some bytes of a character are there yet
        _write(pieces[-1], silent=json)
    _write("\n", silent=json)
    if json:
        result = {"source": str(trained.source), "prompt": prompt, "text": "".join(pieces), "tokens": new_ids}
        print(jsonlib.dumps(result))
    return 0


def command(arguments: list[str]) -> int:
    """Run the verb; returns its exit code."""
    return parse(generate, "generate", arguments)


def _tokenizer(trained: Trained, given: Path | None) -> tuple[Tokenizer, int | None]:
    """The tokenizer, and the token that ends a document if it has one."""
    from ultrascale.data.tokenizer import load_tokenizer
    from ultrascale.models.tokenizer_files import find_tokenizer, special_tokens
    from ultrascale.spec.problems import Problem, SpecError

    if given is None and trained.tokenizer is None:
        rule = f"is not given, and none goes with {trained.source}"
        raise SpecError([Problem("tokenizer", rule, "Name a tokenizer.json with --tokenizer.")])
    file = find_tokenizer(given or trained.tokenizer or "")
    end = special_tokens(file).get("eos")
    return load_tokenizer(file), end[1] if end else None


def _document_start(stop: int | None) -> list[int]:
    """A new document follows the end of another one."""
    from ultrascale.spec.problems import Problem, SpecError

    if stop is None:
        rule = "is empty, and the tokenizer has no token that ends a document"
        raise SpecError([Problem("prompt", rule, 'Give a text to continue, such as --prompt "Once".')])
    return [stop]


def _write(text: str, *, silent: bool) -> None:
    """Text appears as it is made."""
    if not silent:
        sys.stdout.write(text)
        sys.stdout.flush()
