"""Text files to a folder of shards and a manifest. The command may be killed and repeated at any time.

    1  find the files and cut them into shards           (names and sizes only: the same for any number of workers)
    2  write tokenizer.json, then unfinished.json        (the request: once a shard is made, another request is refused)
    3  make the shards in parallel                       (each: .bin, .idx, then its record; kept if its checksums are right)
    4  write manifest.json, remove records and unfinished.json

Every file is written under a temporary name, fsynced and renamed, so a file with its final name is complete; names are made
durable before the manifest declares the folder complete. Files of an earlier run are reused only if their checksums are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ultrascale.catalogue.machines import usable_cores
from ultrascale.config.rules.early import UNFINISHED
from ultrascale.data.files import (
    PARTIAL,
    DataCommandError,
    DataError,
    SeveralDataErrors,
    read_json,
    write_json,
    write_whole,
    writing,
)
from ultrascale.data.indexed import best_dtype
from ultrascale.data.manifest import NAME, CorpusManifest, ShardRecord, TokenizerFacts, load_manifest, save_manifest
from ultrascale.data.preparing.fetch import fetched_inputs, locked
from ultrascale.data.preparing.shards import OnBad, ShardTask, is_held_out, make_shard, record_path
from ultrascale.data.preparing.workers import run_tasks
from ultrascale.data.reading.documents import Document, PartReader
from ultrascale.data.reading.inputs import FilePart, InputFile, cut_shards, find_files
from ultrascale.data.tokenizer import tokenizer_facts, train_tokenizer, vocabulary_problem
from ultrascale.description.units import count_of
from ultrascale.failpoints import failpoint
from ultrascale.models.files.tokenizer_files import copy_beside
from ultrascale.output_file import make_durable
from ultrascale.storage import url_of
from ultrascale.storage.location import obstacle

TOKENIZER, LOCK = "tokenizer.json", ".lock"
TRAINING_CHARACTERS = 32 << 20
"""Characters of text that a tokenizer is trained on: the start of every shard, in equal shares."""


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation."""

    done_bytes: int
    total_bytes: int
    tokens: int
    stage: str
    """`bringing` if inputs are in a store, `tokenizer`, then `shards`."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a preparation, without inputs and output."""

    tokenizer: Path | None = None
    """A `tokenizer.json`, whose neighbours in a Hugging Face folder go along for exports; or else:"""
    train_tokenizer: int | None = None
    """Vocabulary of a byte-level BPE trained on the input."""
    eod: str | None = None
    """The end-of-document token. None: the usual one that the tokenizer has."""
    field: str = "text"
    """Field that holds the text in JSONL and Parquet."""
    glob: str = "*"
    """Names of files taken from folders."""
    exclude: tuple[str, ...] = ()
    """Names of files and folders left out of folders."""
    on_bad: OnBad = "fail"
    """Treatment of a bad document: end with an error, or leave it out and count it."""
    validation_fraction: float = 0.0
    """Share of documents held out."""
    shard_bytes: int | None = None
    """Input of one shard. None: a rule, see `inputs`."""

    def facts(self) -> dict[str, Any]:
        """The facts that decide the result, JSON-able. The tokenizer enters by its fingerprint; `on_bad` only if there is
        one."""
        facts = {**asdict(self), "tokenizer": None, "exclude": list(self.exclude)}
        del facts["on_bad"]
        return facts


@dataclass(frozen=True)
class Prepared:
    """The manifests of the output folder, and of the folder of held-out documents if there is one."""

    manifest: CorpusManifest
    validation: CorpusManifest | None


def prepare(
    inputs: Iterable[str | Path],
    *,
    output: str | Path,
    recipe: Recipe,
    validation: str | Path | None = None,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Makes `output` (and `validation`, by default `output`/validation, if documents are held out) from text files of this
    machine or a store.

    The result does not depend on `workers` (None: all cores), nor on whether an earlier run was killed. Raises DataError for
    bad input, an output that was made from other inputs or cannot be written, or no documents at all.
    """
    inputs, notify = list(inputs), on_progress or (lambda progress: None)
    _expect_sense(inputs, recipe, Path(output), workers, validation)
    if any(url_of(item) for item in inputs):
        _expect_ready(inputs, Path(output), recipe)

    def bringing(done_bytes: int, total_bytes: int) -> None:
        notify(Progress(done_bytes, total_bytes, 0, "bringing"))

    with fetched_inputs(inputs, Path(output), glob=recipe.glob, exclude=recipe.exclude, report=bringing) as (paths, urls):
        return _prepare(paths, urls, Path(output), recipe, validation, workers, notify)


def _prepare(
    inputs: list[Path],
    urls: dict[Path, str],
    folder: Path,
    recipe: Recipe,
    validation: str | Path | None,
    workers: int | None,
    notify: Callable[[Progress], None],
) -> Prepared:
    folders = (folder, Path(validation or folder / "validation")) if recipe.validation_fraction > 0 else (folder,)
    files = find_files(inputs, glob=recipe.glob, exclude=recipe.exclude, urls=urls)
    _expect_outside(files, folders)
    shards = cut_shards(files, recipe.shard_bytes)
    if not _has_shards(folder):
        _expect_both(shards, recipe)
    total = sum(part.weight_bytes for parts in shards for part in parts)
    for each in folders:
        with writing(each):
            each.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, folder):
        for each in folders:
            _remove(each.glob(f"*{PARTIAL}"))
        notify(Progress(0, total, 0, "tokenizer"))
        facts, request = _settle(files, shards, folder, recipe)
        tasks = _tasks(shards, folders, recipe, facts)
        done = [(0, 0)] * len(tasks)

        def report(place: int, consumed_bytes: int, tokens: int) -> None:
            done[place] = (consumed_bytes, tokens)
            notify(Progress(sum(a for a, _ in done), total, sum(b for _, b in done), "shards"))

        try:
            records = run_tasks(tasks, make_shard, workers=workers or usable_cores(), report=report)
        finally:
            for each in folders:
                _remove(each.glob(f"*{PARTIAL}"))
        return _conclude(folders, records, facts, request)


def _expect_sense(
    inputs: list[str | Path], recipe: Recipe, folder: Path, workers: int | None, validation: str | Path | None
) -> None:
    wrong: list[DataError] = [
        DataCommandError(str(item), "cannot be read: No such file or directory", "Check the path and its permissions.")
        for item in inputs
        if not (url_of(item) or os.path.lexists(item))
    ]
    if (recipe.tokenizer is None) == (recipe.train_tokenizer is None):
        wrong.append(DataError("--tokenizer", "and --train-tokenizer: exactly one is needed", "Give one of them."))
    if recipe.train_tokenizer is not None and (problem := vocabulary_problem(recipe.train_tokenizer)):
        wrong.append(problem)
    if not 0 <= recipe.validation_fraction < 1:
        rule = f"must be in [0, 1), is {recipe.validation_fraction}"
        wrong.append(DataError("--validation-fraction", rule, "0.01 is usual."))
    if validation is not None and recipe.validation_fraction == 0:
        rule = "has nothing to hold without --validation-fraction"
        wrong.append(DataError("--validation", rule, "Give both, or neither."))
    if workers is not None and workers < 1:
        wrong.append(DataError("--workers", f"must be at least 1, is {workers}", "Leave it out for all cores."))
    if recipe.shard_bytes is not None and recipe.shard_bytes < 1:
        rule = f"must be at least 1, is {recipe.shard_bytes}"
        wrong.append(DataError("--shard-bytes", rule, "Leave it out for the usual size."))
    if wrong:
        raise SeveralDataErrors(wrong)
    if recipe.tokenizer:
        tokenizer_facts(recipe.tokenizer, recipe.eod)
    if blocker := obstacle(folder):
        if blocker.is_dir():
            raise DataError(str(blocker), "is no folder that can be written", "Choose another --output.")
        raise DataCommandError(str(blocker), "is a file, and text is prepared into a folder", "Choose another --output.")


def _expect_ready(inputs: list[str | Path], folder: Path, recipe: Recipe) -> None:
    """Raises errors that can be detected before anything is downloaded from a store."""
    if (folder / LOCK).exists():
        with locked(folder / LOCK, folder):
            pass
    before = _earlier_request(folder)
    if before is None or not _has_shards(folder):
        return
    _expect_same_recipe(before, recipe, folder)
    named = [url_of(item) or os.path.abspath(item) for item in inputs]
    for file in before.get("inputs", []):
        if not any(file["file"] == name or file["file"].startswith(f"{name}/") for name in named):
            raise _no_longer(file["file"], folder)


def _expect_outside(files: list[InputFile], folders: tuple[Path, ...]) -> None:
    for folder in map(os.path.abspath, folders):
        if os.path.isfile(folder):
            raise DataCommandError(folder, "is a file, and text is prepared into a folder", "Choose another --output.")
        for file in files:
            if os.path.commonpath((folder, file.path)) == folder:
                raise DataCommandError(str(file.path), f"lies in the output folder {folder}", "Choose another --output.")


def _expect_both(shards: list[tuple[FilePart, ...]], recipe: Recipe) -> None:
    """Reads until one document is held out and one is not, before a shard is written. Bad documents are reported later."""
    count, sides = 0, set[bool]()
    for part in chain.from_iterable(shards) if recipe.validation_fraction else ():
        for item in PartReader(part, field=recipe.field, spool=Path(gettempdir())):
            if isinstance(item, Document):
                count += 1
                sides.add(is_held_out(item.key, recipe.validation_fraction))
            if len(sides) == 2 or (isinstance(item, DataError) and recipe.on_bad == "fail"):
                return
    if sides:
        share = f"{'all' if True in sides else 'none'} of {count_of(count, 'document')}"
        remedy = "Give another or leave it out: a hash of its name and place chooses each document."
        raise DataError("--validation-fraction", f"is {recipe.validation_fraction}, which holds out {share}", remedy)


def _settle(
    files: list[InputFile], shards: list[tuple[FilePart, ...]], folder: Path, recipe: Recipe
) -> tuple[TokenizerFacts, dict[str, Any]]:
    """The tokenizer and the request, from an earlier run of the same request if there was one. A folder without a finished
    shard is begun anew by another request."""
    before, now = _earlier_request(folder), recipe.facts() | {"inputs": [file.facts() for file in files]}
    path = folder / TOKENIZER
    if before is not None:
        try:
            _expect_same_recipe(before, recipe, folder)
            _expect_same_inputs(before, now, folder)
        except DataError:
            if _has_shards(folder):
                raise
            before = None
    if before is not None:
        facts = tokenizer_facts(path, recipe.eod)
        if facts.fingerprint != before["tokenizer"]:
            raise DataError(str(path), "is not the tokenizer this folder was begun with", "Put it back, or remove the folder.")
        request = {**now, "tokenizer": facts.fingerprint}
        if request != before:  # a file was repaired on the way
            write_json(folder / UNFINISHED, request)
        return facts, request
    if recipe.tokenizer:
        write_whole(path, recipe.tokenizer.read_bytes())
        with writing(folder):
            copy_beside(recipe.tokenizer, folder)
    else:
        trained = train_tokenizer(_training_texts(shards, recipe, folder), recipe.train_tokenizer or 0)
        write_whole(path, trained.to_str(pretty=True).encode())
    failpoint("prepare.tokenizer")
    facts = tokenizer_facts(path, recipe.eod)
    request = {**now, "tokenizer": facts.fingerprint}
    _remove(folder.glob("shard-*.json"))  # of a run that did not say what it was asked for
    write_json(folder / UNFINISHED, request)
    failpoint("prepare.requested")
    return facts, request


def _earlier_request(folder: Path) -> dict[str, Any] | None:
    if (folder / UNFINISHED).exists():
        return read_json(folder / UNFINISHED)
    return dict(load_manifest(folder).request) if (folder / NAME).exists() else None


def _has_shards(folder: Path) -> bool:
    """True if a shard was finished, by an earlier run of a request that is known."""
    return (folder / NAME).exists() or ((folder / UNFINISHED).exists() and any(folder.glob("shard-*.json")))


def _expect_same_recipe(before: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    now = recipe.facts()
    for key in sorted((set(now) | set(before)) - {"inputs", "tokenizer"}):  # another release may have asked for more
        if before.get(key) != now.get(key):
            option = "--" + key.replace("_", "-")
            rule = f"is {now.get(key)!r}, but {folder} was begun with {before.get(key)!r}"
            raise DataError(option, rule, _remedy(folder))
    if recipe.tokenizer and tokenizer_facts(recipe.tokenizer, recipe.eod).fingerprint != before["tokenizer"]:
        rule = f"is not the tokenizer that {folder} was begun with"
        raise DataError(str(recipe.tokenizer), rule, _remedy(folder))


def _remedy(folder: Path) -> str:
    return f"Choose another --output, or remove {folder} to begin anew."


def _no_longer(name: str, folder: Path) -> DataError:
    rule = f"is no longer among the inputs, but was when {folder} was begun"
    if "/." in name:
        rule += "; names that begin with a dot are read if --glob does too"
    return DataError(name, rule, _remedy(folder))


def _expect_same_inputs(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Checks that the files are unchanged; in an incomplete folder, they may have been repaired since."""
    complete = (folder / NAME).exists()
    earlier_files = {file["file"]: file for file in before.get("inputs", [])}
    for file in now["inputs"]:
        earlier = earlier_files.pop(file["file"], None)
        if earlier is None or (complete and earlier != file):
            raise DataError(file["file"], f"is new or has changed since {folder} was begun", _remedy(folder))
    for name in earlier_files:
        raise _no_longer(name, folder)


def _training_texts(shards: list[tuple[FilePart, ...]], recipe: Recipe, spool: Path) -> Iterator[str]:
    """A bounded sample: from every shard the first documents that are neither bad nor held out."""
    share = TRAINING_CHARACTERS // len(shards)
    for parts in shards:
        left = share
        for part in parts:
            for item in PartReader(part, field=recipe.field, spool=spool):
                if isinstance(item, Document) and not is_held_out(item.key, recipe.validation_fraction):
                    text = (item.text if item.text is not None else _first_piece(item))[:left]
                    left -= len(text)
                    yield text
                if left <= 0:
                    break
            if left <= 0:
                break


def _first_piece(document: Document) -> str:
    try:
        return next(document.pieces or iter(()), "")
    except DataError:
        return ""  # reported when the document is tokenized


def _tasks(
    shards: list[tuple[FilePart, ...]], folders: tuple[Path, ...], recipe: Recipe, facts: TokenizerFacts
) -> list[ShardTask]:
    known = [
        {shard.name: shard for shard in load_manifest(folder).shards} if (folder / NAME).exists() else {} for folder in folders
    ]
    names = [f"shard-{number:05d}" for number in range(len(shards))]
    return [
        ShardTask(
            name, parts, folders, folders[0] / TOKENIZER, facts, recipe.field, recipe.on_bad, recipe.validation_fraction,
            tuple(records.get(name) for records in known),
        )
        for name, parts in zip(names, shards, strict=True)
    ]  # fmt: skip


def _conclude(
    folders: tuple[Path, ...], records: list[tuple[ShardRecord, ...]], facts: TokenizerFacts, request: dict[str, Any]
) -> Prepared:
    dtype = best_dtype(facts.vocab_size)
    manifests = [CorpusManifest(dtype, facts, shards, request) for shards in zip(*records, strict=True)]
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.documents == 0:
            skipped = f"; {sum(manifest.skipped.values())} were skipped: {manifest.skipped}" if manifest.skipped else ""
            remedy = f"Remove {folders[0]}, then give more text, another --field, or another --validation-fraction."
            raise DataError(str(folder), f"no document was left for it{skipped}", remedy)
    for folder, manifest in zip(folders[::-1], manifests[::-1], strict=True):
        if folder != folders[0]:
            write_whole(folder / TOKENIZER, (folders[0] / TOKENIZER).read_bytes())
            with writing(folder):
                copy_beside(folders[0] / TOKENIZER, folder)
        with writing(folder):
            make_durable(folder)
        failpoint("prepare.durable")
        save_manifest(manifest, folder)
        failpoint("prepare.manifest")
        _remove(record_path(folder, shard.name) for shard in manifest.shards)
        failpoint("prepare.removed")
    _remove([folders[0] / UNFINISHED])
    return Prepared(manifests[0], manifests[1] if len(manifests) > 1 else None)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
