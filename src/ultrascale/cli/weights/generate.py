"""`ultrascale generate`: sample text from a checkpoint or an exported folder."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import harmless, print_json
from ultrascale.cli.weights.opening import expect_contents, expect_device, folder_problems, open_trained_and_print
from ultrascale.config.rules.early import device_problems
from ultrascale.console import print_line
from ultrascale.description.problems import Problem, expect_none, mistake
from ultrascale.models.sampling import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ultrascale.train.start.trained import Trained


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
    json: bool = False,
) -> int:
    """Continue a prompt with a trained model.

    Example: ultrascale generate out/demo --prompt "def main(" --max-new-tokens 64

    Args:
        folder: Run folder (its newest complete checkpoint), checkpoint, or Hugging Face folder.
        prompt: Text to continue. Empty: a new document.
        max_new_tokens: Stop after this many tokens, or earlier at the end of a document, or of a chat's turn.
        temperature: Sampling temperature: values below 1 prefer likelier tokens; 0 always takes the likeliest.
        top_k: Sample only from the k likeliest tokens.
        top_p: Sample only from the likeliest tokens that together reach this probability.
        seed: Random seed; the same seed gives the same text.
        tokenizer: tokenizer.json, if the model's own is elsewhere.
        precision: Dtype of weights and activations.
        device: auto: CUDA if available.
        json: Print one JSON object.
    """
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    options = [*sampling.problems(), *_text_problems(prompt), *device_problems(device), *_file_problems(tokenizer)]
    expect_none(
        [*folder_problems(folder), *(replace(problem, key=f"--{problem.key.replace('_', '-')}") for problem in options)]
    )
    expect_contents(folder)
    from tokenizers.decoders import DecodeStream

    from ultrascale.models.generate import generate as continue_text
    from ultrascale.models.generate import prompt_problems
    from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE

    where = expect_device(device)
    trained = open_trained_and_print(folder)
    file = _tokenizer_file(trained, tokenizer)
    vocabulary, ends = _read_tokenizer(file)
    ids = vocabulary.encode(prompt).ids if prompt else _document_start(ends)
    expect_none(_vocabulary_problems(trained, file, vocabulary) or prompt_problems(trained.model, ids))
    decoder = trained.decoder(dtype=TORCH_DTYPE[precision], device=where)
    new_ids: list[int] = []
    pieces: list[str] = []
    stream = DecodeStream(skip_special_tokens=False)
    _write(prompt, silent=json)
    for token in continue_text(decoder, ids, replace(sampling, stop_tokens=ends)):
        new_ids.append(token)
        pieces.append(stream.step(vocabulary, token) or "")  # None: only some bytes of a character so far
        _write(pieces[-1], silent=json)
    _write("\n", silent=json)
    if len(ids) + len(new_ids) >= (context := trained.model.max_position_embeddings) and len(new_ids) < max_new_tokens:
        print_line(f"stopped: the model's context of {context} tokens is full", "stderr")
    if json:
        result = {"source": str(trained.source), "prompt": prompt, "text": "".join(pieces), "tokens": new_ids}
        print_json(result, "generate")
    return 0


command = partial(parse, generate, "generate")
"""Run the verb; returns its exit code."""


def _text_problems(prompt: str) -> list[Problem]:
    """Problems of a prompt that is not text: Python reads invalid bytes as lone surrogates, which no tokenizer accepts."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        return [Problem("prompt", f"must be UTF-8, but character {error.start + 1} is not", "Check the terminal's encoding.")]
    return []


def _file_problems(tokenizer: Path | None) -> list[Problem]:
    if tokenizer is None or tokenizer.is_file():
        return []
    return [Problem("tokenizer", f"there is no file {tokenizer}", "Name a tokenizer.json.")]


def _tokenizer_file(trained: Trained, file: Path | None) -> Path:
    from ultrascale.models.files.tokenizer_files import find_tokenizer

    if file is None and trained.tokenizer is None:
        rule = f"is not given, and none goes with {trained.source}"
        raise mistake("tokenizer", rule, "Name a tokenizer.json with --tokenizer.")
    return find_tokenizer(file or trained.tokenizer or "")


def _read_tokenizer(file: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the tokens that end a text; the last of them ends a document."""
    from ultrascale.data.tokenizer import load_tokenizer
    from ultrascale.models.files.tokenizer_files import end_ids

    return load_tokenizer(file), tuple(end_ids(file))


def _vocabulary_problems(trained: Trained, file: Path, vocabulary: Tokenizer) -> list[Problem]:
    """Problems if the ids of `vocabulary` are not those of the training data; a mere difference in size is printed on
    stderr."""
    remedy = "Use the tokenizer that the model was trained with."
    size, known = max(vocabulary.get_vocab().values(), default=-1) + 1, trained.model.vocab_size
    if size > known:
        return [Problem(str(file), f"has {size} ids, but the model's vocabulary has {known}", remedy)]
    expected = _fingerprints(trained)
    if expected and hashlib.sha256(file.read_bytes()).hexdigest() not in expected:
        return [Problem(str(file), f"is not the tokenizer of {trained.source} (its fingerprint differs)", remedy)]
    if size < known:
        print(f"ultrascale: {file} has {size} ids, the model {known}: the rest cannot be written as text", file=sys.stderr)
    return []


def _fingerprints(trained: Trained) -> set[str]:
    """Fingerprints of the tokenizer of the training data, from its manifests, or else of the model's own tokenizer file."""
    from ultrascale.data.manifest import NAME, load_manifest

    if trained.run is not None:
        prepared = [Path(source.path) for source in trained.run.data.sources if (Path(source.path) / NAME).exists()]
        if prepared:
            return {load_manifest(folder).tokenizer.fingerprint for folder in prepared}
    return set() if trained.tokenizer is None else {hashlib.sha256(trained.tokenizer.read_bytes()).hexdigest()}


def _document_start(ends: tuple[int, ...]) -> list[int]:
    """Tokens before a new document: the end of another one."""
    if not ends:
        rule = "is empty, and the tokenizer has no token that ends a document"
        raise mistake("prompt", rule, 'Give a text to continue, such as --prompt "Once".')
    return [ends[-1]]


def _write(text: str, *, silent: bool) -> None:
    """Write text as it is generated."""
    if not silent:
        print(harmless(text) if sys.stdout is not None and sys.stdout.isatty() else text, end="", flush=True)
