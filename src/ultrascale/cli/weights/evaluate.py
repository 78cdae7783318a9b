"""`ultrascale evaluate`: the loss of trained weights on any corpus."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import print_json, waiting
from ultrascale.cli.weights.opening import expect_contents, expect_device, folder_problems, open_trained_and_print
from ultrascale.config.rules.early import device_problems
from ultrascale.description.problems import Problem, expect_none, mistake
from ultrascale.description.run import Source

if TYPE_CHECKING:
    from ultrascale.data.loader import Loader
    from ultrascale.train.start.trained import Trained

USUAL_LENGTH = 2048
"""Tokens a sequence for weights without a run, if their context holds as many."""

LARGEST_EXPONENT = 700
"""Nats whose exponential is no longer a number."""


def evaluate(
    folder: Annotated[Path, tyro.conf.Positional],
    corpora: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS ...")] = (),
    /,
    sequences: int | None = None,
    sequence_length: int | None = None,
    document_mask: bool | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    json: bool = False,
) -> int:
    """Measure the loss of trained weights on corpora made by `ultrascale data prepare`.

    Prints nats per token, perplexity, and bits per byte of text, which also compares models of different tokenizers.

    Example: ultrascale evaluate out/demo data/held-out

    Args:
        folder: Run folder (its newest complete checkpoint), checkpoint, or Hugging Face folder.
        corpora: Prepared folders or Megatron prefixes. None: the validation data of the run.
        sequences: Evaluate this many sequences of each corpus. None: all; of the run's validation data as many as the run does.
        sequence_length: Tokens per sequence. None: those of the run; without a run 2,048, or the model's context.
        document_mask: Tokens see only their own document. None: as in the run; without a run, true.
        precision: Dtype of weights and activations. None: as in the run; without a run, fp32.
        device: auto: CUDA if available.
        json: Print one JSON object.
    """
    least = {"sequences": sequences, "sequence-length": sequence_length}
    wrong = [Problem(f"--{name}", f"must be at least 1, is {n}", "") for name, n in least.items() if n is not None and n < 1]
    options = [replace(problem, key=f"--{problem.key}") for problem in device_problems(device)]
    expect_none([*folder_problems(folder), *wrong, *options])
    expect_contents(folder)
    from ultrascale.data.loader import Loader
    from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE
    from ultrascale.train.corpora import expect_tokenizer_of

    where = expect_device(device)
    trained = open_trained_and_print(folder)
    run, context = trained.run, trained.model.max_position_embeddings
    length = sequence_length or (run.batch.sequence_length if run else min(USUAL_LENGTH, context))
    if length > context:
        raise mistake("--sequence-length", f"is {length}, but the model's context is {context} tokens", f"At most {context}.")
    paths = corpora or tuple(source.path for source in (run.data.validation if run else ()))
    if not paths:
        known = f"{trained.source} names no validation data"
        raise mistake("CORPUS", f"is not given, and {known}", "Name a folder made by `ultrascale data prepare`.")
    if document_mask is None:
        document_mask = run is None or run.data.document_mask
    loaders = {
        path: Loader(
            (Source(path),),
            sequence_length=length,
            vocab_size=trained.model.vocab_size,
            seed=0,
            document_mask=document_mask,
        )
        for path in paths
    }
    if trained.tokenizer is not None:
        for loader in loaders.values():
            expect_tokenizer_of(trained.tokenizer.parent, loader)
    asked = sequences or (run.evaluation.sequences if run and not corpora else None)
    dtype = TORCH_DTYPE[precision or (run.layout.precision if run else "fp32")]
    decoder = trained.decoder(dtype=dtype, device=where)
    with waiting("evaluating"):
        results = [_evaluated(trained, decoder, path, loader, asked) for path, loader in loaders.items()]
    if json:
        print_json({"source": str(trained.source), "sequence_length": length, "corpora": results}, "evaluate")
        return 0
    for result in results:
        share = f"{result['sequences']:,} of {loaders[result['corpus']].sequences_per_epoch[0]:,} sequences"
        size = f"{share}, {result['targets']:,} predicted tokens"
        parts = [f"loss {result['loss']:.4f}" if result["loss"] is not None else "no finite loss"]
        parts += [f"perplexity {result['perplexity']:.4g}"] if result["perplexity"] is not None else []
        parts += [f"{result['bits_per_byte']:.4f} bits per byte"] if result["bits_per_byte"] is not None else []
        print(f"{result['corpus']}: {', '.join(parts)} ({size})")
    return 0


command = partial(parse, evaluate, "evaluate")
"""Run the verb; returns its exit code."""


def _evaluated(trained: Trained, decoder: Any, path: str, loader: Loader, sequences: int | None) -> dict[str, Any]:
    from ultrascale.data.tokenizer import bytes_by_id
    from ultrascale.train.evaluate import evaluate_alone

    read = min(sequences or loader.sequences_per_epoch[0], loader.sequences_per_epoch[0])
    total, counts = evaluate_alone(decoder, loader, read)
    targets = int(counts.sum())
    loss = total / targets if targets and math.isfinite(total) else None
    file = trained.tokenizer or loader.corpora[0].tokenizer_path
    sizes = {} if file is None else bytes_by_id(file)
    num_bytes = sum(size * int(counts[token]) for token, size in sizes.items() if token < len(counts))
    return {
        "corpus": path,
        "sequences": read,
        "targets": targets,
        "loss": loss,
        "perplexity": None if loss is None or loss > LARGEST_EXPONENT else math.exp(loss),
        "bits_per_byte": None if loss is None or not num_bytes else total / math.log(2) / num_bytes,
    }
