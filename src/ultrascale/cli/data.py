"""`ultrascale data prepare` and `ultrascale data inspect`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from ultrascale.cli.main import explain
from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, harmless, print_json
from ultrascale.console import plain_table, print_line
from ultrascale.description.problems import did_you_mean, mistake
from ultrascale.description.units import count_of, format_bytes

if TYPE_CHECKING:
    from ultrascale.data.preparing.prepare import Prepared, Progress

LINE_SECONDS = 30.0
"""Time between two lines of progress where stderr is no terminal."""
STAGE_NAMES = {"bringing": "bringing", "tokenizer": "tokenizer", "shards": "tokenizing"}
_VERBS = """ultrascale data: text to tokens.

  ultrascale data prepare INPUT... --output FOLDER   text, JSONL, CSV, TSV (.gz, .zst), Parquet, Arrow,
                                                     WebDataset or MDS to token shards
  ultrascale data inspect FOLDER                     contents of a prepared folder, with decoded samples

Each has --help with an example.
"""


def command(arguments: list[str]) -> int:
    """Run `ultrascale data ...`; returns 0 on success, 1 for bad data or a full disk, 2 for invalid usage (such as a missing
    path), 130 if stopped by Ctrl-C."""
    verbs: dict[str, Callable[..., int]] = {"prepare": prepare, "inspect": inspect}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_VERBS, end="")
        return 0 if arguments else 2
    if arguments[0] not in verbs:
        remedy = did_you_mean(arguments[0], verbs, f"Say one of {', '.join(verbs)}.", cutoff=0.5)
        raise mistake("VERB", f"there is no verb `data {arguments[0]}`", remedy)
    from ultrascale.data.files import DataError

    verb = verbs[arguments[0]]
    try:
        return parse(verb, f"data {arguments[0]}", arguments[1:])
    except DataError as error:
        return explain(error, "data")
    except KeyboardInterrupt:
        print("Stopped. Finished shards are kept; the same command goes on.", file=sys.stderr)
        return 130


def prepare(
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help_behavior_hint="(required)")],
    /,
    *,
    output: Path,
    tokenizer: Path | None = None,
    train_tokenizer: Annotated[int | None, tyro.conf.arg(metavar="VOCAB")] = None,
    eod: str | None = None,
    field: str = "text",
    glob: str = "*",
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    workers: int | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    validation_fraction: float = 0.0,
    validation: Path | None = None,
    shard_bytes: int | None = None,
    json: bool = False,
) -> int:
    """Convert text to Megatron-compatible token shards and a manifest.

    A document is a line of .jsonl, .ndjson or .json, a row of .parquet, .arrow, .csv or .tsv, a sample of .tar, .tgz or .mds,
    or any other file as a whole; .gz and .zst are read too. The same command resumes a killed run; the result does not depend
    on --workers.

    Example: ultrascale data prepare src/ --glob '*.py' --train-tokenizer 8192 --on-bad skip --validation-fraction 0.01 --output
    prepared

    Args:
        inputs: Files, or folders to search for files that are not hidden; also s3://, gs://, az:// and hf://.
        output: Folder for the shards, manifest.json and tokenizer.json.
        tokenizer: A tokenizer.json, or the Hugging Face folder that holds one.
        train_tokenizer: Alternatively, train a byte-level BPE of this vocabulary size on the input.
        eod: End-of-document token of the tokenizer, if it is not one of the usual ones.
        field: Field with the text: the column of JSONL, tables and MDS; the extension of WebDataset, or the field of its .json.
        glob: Pattern of file names to take from folders.
        exclude: Name of files or folders to skip within folders; can be repeated.
        workers: Number of processes. Default: all cores.
        on_bad: End with an error at a bad document (fail), or skip it and count it by reason (skip).
        validation_fraction: Fraction of documents held out for validation.
        validation: Folder for the documents held out. Default: OUTPUT/validation.
        shard_bytes: Input bytes per shard. Default: 2 MiB to 256 MiB, depending on the total.
        json: Print the result as JSON.
    """
    from ultrascale.data.preparing import prepare as preparation

    if tokenizer is not None and tokenizer.is_dir():
        tokenizer /= preparation.TOKENIZER

    recipe = preparation.Recipe(
        tokenizer=tokenizer, train_tokenizer=train_tokenizer, eod=eod, field=field, glob=glob, exclude=exclude, on_bad=on_bad,
        validation_fraction=validation_fraction, shard_bytes=shard_bytes,
    )  # fmt: skip
    with _bar() as draw:
        prepared = preparation.prepare(
            inputs, output=output, recipe=recipe, validation=validation, workers=workers, on_progress=draw
        )
    _print_prepared(prepared, output, validation, wanted_ids=train_tokenizer, as_json=json)
    return 0


def inspect(
    folder: tyro.conf.Positional[Path],
    /,
    *,
    document: int | None = None,
    sequence: int | None = None,
    sequence_length: int = 256,
    verify: bool = False,
    json: bool = False,
) -> int:
    """Show the contents of a prepared folder (or a Megatron prefix).

    Example: ultrascale data inspect prepared --sequence 0 --sequence-length 64

    Args:
        folder: Folder written by `ultrascale data prepare`; or a prefix, `x` for `x.bin` and `x.idx`.
        document: Show this document, counted from zero, as text.
        sequence: Show this sequence of the stream in stored order, with its documents.
        sequence_length: Tokens per sequence.
        verify: Read and verify everything: checksums, indexes, ids.
        json: Print as JSON.
    """
    from ultrascale.data.preparing import inspect as inspection

    facts = inspection.folder_facts(folder)
    if verify:
        inspection.verify_folder(folder)
        facts["verified"] = True
    if document is not None:
        facts["document"] = inspection.document_sample(folder, document)
    if sequence is not None:
        facts["sequence"] = inspection.sequence_sample(folder, sequence, sequence_length)
    if document is None and sequence is None and not json and facts["documents"]:
        facts["opening"] = inspection.opening(folder)
    if json:
        print_json(facts, "data-inspect", indent=1)
    else:
        _print_facts(facts)
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr; if that is no terminal, a line every `LINE_SECONDS`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _draw_lines()
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(),
        bars.TextColumn("{task.fields[tokens]:,} tokens"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console) as progress:
        task = progress.add_task("reading", total=None, tokens=0)

        def draw(now: Progress) -> None:
            progress.update(
                task, description=STAGE_NAMES[now.stage], completed=now.done_bytes, total=now.total_bytes, tokens=now.tokens
            )

        yield draw


def _draw_lines() -> Callable[[Progress], None]:
    printed = time.monotonic()

    def draw(now: Progress) -> None:
        nonlocal printed
        if time.monotonic() - printed >= LINE_SECONDS:
            printed = time.monotonic()
            done, total = format_bytes(now.done_bytes), format_bytes(now.total_bytes)
            print_line(f"{STAGE_NAMES[now.stage]}: {done} of {total}, {now.tokens:,} tokens", "stderr")

    return draw


def _print_prepared(
    prepared: Prepared, output: Path, validation: Path | None, *, wanted_ids: int | None, as_json: bool
) -> None:
    from ultrascale.data.reading.inputs import kind_of
    from ultrascale.data.tokenizer import loses_characters

    manifest = prepared.manifest
    if as_json:
        held_out = prepared.validation and prepared.validation.summary()
        print_json({"output": str(output), **manifest.summary(), "validation": held_out}, "data-prepare", indent=1)
        return
    documents, shards = count_of(manifest.documents, "document"), count_of(len(manifest.shards), "shard")
    print(f"{output}: {manifest.tokens:,} tokens in {documents}, {shards}")
    files = [file["file"] for file in manifest.request["inputs"]]
    texts = [file for file in files if kind_of(Path(file))[0] == "text"]
    if 0 < len(texts) < len(files):
        print(f"read as plain text, each as one document: {count_of(len(texts), 'file')}, first {texts[0]}")
    ids = manifest.tokenizer.vocab_size
    if wanted_ids is not None and ids < wanted_ids:
        print(f"the tokenizer has {ids:,} ids, fewer than the {wanted_ids:,} asked for: the text gives no more")
    if loses_characters(output / "tokenizer.json"):
        print("the tokenizer has no tokens for rare characters, such as \N{SNOWMAN}: where text has them, they are lost")
    if prepared.validation:
        is_found = validation is None or validation.resolve() == (output / "validation").resolve()
        where = "" if is_found else f", in {validation}: train reads it if data.validation names it"
        documents = count_of(prepared.validation.documents, "document")
        print(f"validation: {prepared.validation.tokens:,} tokens in {documents}{where}")
    first = {reason: where for shard in reversed(manifest.shards) for reason, where in shard.skipped_first.items()}
    for reason, count in manifest.skipped.items():
        print(f"skipped {count:,} {reason}, first {first[reason]}")
    if cuts := manifest.summary()["inexact_cuts"]:
        print(f"{cuts:,} cuts of very long documents may have changed a few ids")


def _print_facts(facts: dict[str, Any]) -> None:
    console = console_for_people()
    console.print(f"{count_of(facts['documents'], 'document')}, {facts['tokens']:,} tokens")
    table = plain_table("shard", "dtype", "documents", "tokens", left=("shard", "dtype"))
    for shard in facts["shards"]:
        table.add_row(_plain(shard["name"]), shard["dtype"], f"{shard['documents']:,}", f"{shard['tokens']:,}")
    console.print(table)
    if facts.get("verified"):
        console.print("verified: checksums, indexes and ids are right")
    if "manifest" in facts:
        tokenizer = facts["manifest"]["tokenizer"]
        console.print(f"vocabulary {tokenizer['vocab_size']:,}, end of document {_plain(tokenizer['eod_token'])}")
    if "opening" in facts:
        opening = facts["opening"]
        console.print(f"[bold]document 0[/bold] begins (--document 0 and --sequence 0 show more)\n{_shown(opening)}")
        if "note" in opening:
            console.print(f"these are ids, which cannot be decoded: {_plain(opening['note'])}")
    if "document" in facts:
        document = facts["document"]
        console.print(f"[bold]document {document['document']}[/bold], {document['tokens']:,} tokens")
        console.print(_shown(document))
    for part in facts.get("sequence", {}).get("parts", []):
        begins = "a document begins" if part["begins"] else "goes on from before"
        console.print(f"[bold]position {part['position']}[/bold], {part['tokens']:,} tokens, {begins}")
        console.print(_shown(part))


def _shown(sample: dict[str, Any]) -> str:
    """The text, or the ids if there is no tokenizer to decode them."""
    return _plain(sample["text"] if sample["text"] is not None else " ".join(map(str, sample["ids"])))


def _plain(text: str) -> str:
    """Untrusted text as markup that shows it as it is."""
    return escape(harmless(text))
