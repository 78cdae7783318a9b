"""The corpora of a run and the tokenizer that they share. Does not import torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from ultrascale.config.rules.early import expect_ready
from ultrascale.data.loader import Loader
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.progress import sequences_after
from ultrascale.description.rank_environment import env_world_size
from ultrascale.description.run import Run, Source
from ultrascale.description.units import count_of
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILE, find_tokenizer
from ultrascale.storage import url_of

PADDED_TO = 128
"""Multiple to which vocabularies are padded on each tp rank, so that the GEMM of the logits is fast."""
SPARE_VOCABULARY = 1 / 8
"""Largest number of unused rows, as a share of the tokenizer's ids, that counts as padding."""


def with_absolute_paths(run: Run) -> Run:
    """`run` with absolute paths to its data and tokenizer, so that they resolve from any working directory."""

    def absolute(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(replace(source, path=url_of(source.path) or os.path.abspath(source.path)) for source in sources)

    data, tokenizer = run.data, run.data.tokenizer
    return replace(
        run,
        data=replace(
            data,
            sources=absolute(data.sources),
            validation=absolute(data.validation),
            tokenizer=None if tokenizer is None else os.path.abspath(tokenizer),
        ),
    )


def build_loader(run: Run, sources: tuple[Source, ...]) -> Loader:
    """The loader of a run over `sources`."""
    return Loader(
        sources,
        sequence_length=run.batch.sequence_length,
        vocab_size=run.model.vocab_size,
        seed=run.seed,
        document_mask=run.data.document_mask,
    )


def expect_startable(run: Run) -> None:
    """Raise SpecError or DataError if the run's device or data are missing, or its prepared folders cannot be trained on. Runs
    before any rank starts. Stores and foreign prefixes are left to the ranks; so is everything if this process is a rank."""
    expect_ready(run)
    if env_world_size() > 1:
        return
    data = run.data
    training, *validation = (
        tuple(source for source in sources if url_of(source.path) is None and Path(source.path).is_dir())
        for sources in (data.sources, *((source,) for source in data.validation))
    )
    held_out = {str(place): build_loader(run, sources) for place, sources in enumerate(validation) if sources}
    if training:
        expect_one_tokenizer(run, build_loader(run, training), held_out)


def vocabulary_notes(run: Run, training: Loader) -> list[str]:
    """A note if the model's vocabulary is far larger than that of the corpora, beyond padding to a multiple: the trainers of
    the field pad to a multiple of at most 128 x tp. Foreign corpora record no tokenizer."""
    ids = max((corpus.tokenizer.vocab_size for corpus in training.corpora if corpus.tokenizer is not None), default=0)
    rows, multiple = run.model.vocab_size, PADDED_TO * run.layout.tp
    if not ids or rows - ids < multiple or rows - ids <= SPARE_VOCABULARY * ids:
        return []
    unused = f"{rows - ids:,} rows of the model's embedding and of its logits cost time and memory for nothing"
    remedy = f"for a new run set model.vocab_size = {-(-ids // multiple) * multiple}"
    return [f"model.vocab_size = {rows}, and the tokenizer of data.sources has {ids} ids: {unused}; {remedy}."]


def repeat_lines(run: Run, training: Loader) -> list[str]:
    """A line for each corpus that the run reads more than once."""
    epochs = zip(training.sources, training.epochs(sequences_after(run.batch, run.steps)), strict=True)
    return [f"data: {count_of(run.steps, 'step')} read {source.path} {n:.1f} times" for source, n in epochs if round(n, 1) > 1]


def validation_loaders(run: Run) -> dict[str, Loader]:
    """A loader for each validation corpus, by the name of its metric: val/loss, or val/loss/CORPUS if there are several. Its
    sequences do not depend on the run's seed, so that runs with other seeds are measured on the same ones.

    CORPUS is the corpus's name; where several corpora share a name, the part of the path in which they differ.
    """
    run, sources = replace(run, seed=0), run.data.validation
    if len(sources) == 1:
        return {"val/loss": build_loader(run, sources)}
    names = [Path(source.path).name for source in sources]
    if len(set(names)) < len(names):
        shared = os.path.commonpath([os.path.dirname(source.path) for source in sources])
        names = [os.path.relpath(source.path, shared) for source in sources]
    return {f"val/loss/{name}": build_loader(run, (source,)) for name, source in zip(names, sources, strict=True)}


def expect_one_tokenizer(run: Run, training: Loader, validation: dict[str, Loader]) -> None:
    """Raises SpecError if a validation corpus was prepared with another tokenizer than the training corpus, or if
    `data.tokenizer` is missing or differs. Foreign corpora, which do not record a tokenizer, pass."""
    corpora = [*training.corpora, *(corpus for loader in validation.values() for corpus in loader.corpora)]
    known = [(corpus.path, corpus.tokenizer.fingerprint) for corpus in corpora if corpus.tokenizer is not None]
    problems = []
    if known:
        first, fingerprint = known[0]
        rule, remedy = f"was prepared with another tokenizer than {first}", "Prepare all corpora with the same tokenizer.json."
        problems += [Problem(str(path), rule, remedy) for path, other in known if other != fingerprint]
    problems += _tokenizer_problems(run.data.tokenizer, known)
    if problems:
        raise SpecError(problems)


def expect_tokenizer_of(folder: Path, training: Loader) -> None:
    """Raises SpecError if ids of a corpus stand for other tokens than in the `tokenizer.json` of a Hugging Face folder, for
    which its weights were trained. Ids that only one of the two has pass, as does a folder or corpus without the file."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return
    problems, of_folder = [], _tokens_by_id(file)
    for corpus in training.corpora:
        recorded = corpus.tokenizer.fingerprint if corpus.tokenizer and corpus.tokenizer_path is None else None
        if recorded not in (None, hashlib.sha256(file.read_bytes()).hexdigest()):
            rule, remedy = (
                f"has lost its {TOKENIZER_FILE}, which was not that of {folder}",
                "Prepare it again for these weights.",
            )
            problems.append(Problem(str(corpus.path), rule, remedy))
        of_corpus = {} if corpus.tokenizer_path is None else _tokens_by_id(corpus.tokenizer_path)
        differing = sorted(number for number in of_folder.keys() & of_corpus.keys() if of_folder[number] != of_corpus[number])
        if differing:
            first = differing[0]
            example = f"{count_of(len(differing), 'id')} differ, {first} is {of_corpus[first]!r}, there {of_folder[first]!r}"
            rule = f"was prepared with another tokenizer than that of {folder}: {example}"
            remedy = f"Prepare it for these weights: ultrascale data prepare TEXT --tokenizer {file} --output ANOTHER"
            problems.append(Problem(str(corpus.path), rule, remedy))
    if problems:
        raise SpecError(problems)


def _tokens_by_id(file: Path) -> dict[int, str]:
    from ultrascale.data.tokenizer import load_tokenizer

    return {number: token for token, number in load_tokenizer(file).get_vocab(with_added_tokens=True).items()}


def _tokenizer_problems(tokenizer: str | None, known: list[tuple[Path, str]]) -> list[Problem]:
    if tokenizer is None:
        return []
    remedy = "Name the tokenizer.json that the corpora were prepared with, or leave data.tokenizer out."
    try:
        file = find_tokenizer(tokenizer)
    except SpecError as error:
        return [Problem("data.tokenizer", f"{problem.key} {problem.rule}", remedy) for problem in error.problems]
    if known and hashlib.sha256(file.read_bytes()).hexdigest() != known[0][1]:
        return [Problem("data.tokenizer", f"{file} is not the tokenizer that {known[0][0]} was prepared with", remedy)]
    return []
