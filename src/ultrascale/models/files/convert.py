"""Converts foreign checkpoints (pickles: `pytorch_model.bin`, `.pt`, `.pth`, `.ckpt`) to a folder of safetensors.

No other code of ours reads a pickle. Each file is read by a separate process, confined as `models.files.unpickle` says, which
gets two open files and an empty environment; its output is checked like any untrusted safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ultrascale.description.architecture.huggingface import PICKLES
from ultrascale.description.parsing import parse_json
from ultrascale.description.problems import mistake
from ultrascale.models.files import unpickle
from ultrascale.models.files.folders import fill_folder
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILES
from ultrascale.models.files.weight_files import INDEX_FILE, WEIGHTS_FILE, indexed_shards, is_exported

PICKLE_INDEX = "pytorch_model.bin.index.json"
_BESIDE = ("config.json", "generation_config.json", *TOKENIZER_FILES)
SECONDS = 7200
_TRUST = "Take the model from somebody you trust, or in safetensors."


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    folder: Path
    files: int
    tensors: int
    left_out: tuple[str, ...]
    """Entries that are not tensors."""
    confined_by: tuple[str, ...]
    """Confinement of the processes that read the pickles; with `unconfined` "seccomp filter" may be missing."""
    has_config: bool


def convert(source: Path, folder: Path, *, overwrite: bool = False, unconfined: bool = False) -> Converted:
    """Convert the pickles in `source` (a folder, or one file) to safetensors in the new `folder`, with config and tokenizer.

    Raises SpecError if there are no pickles, one is refused, `folder` must not be replaced, or the kernel supports no seccomp
    filter and `unconfined` is not set; FolderError for errors of the disk.
    """
    files = _pickles(source)
    beside = source if source.is_dir() else source.parent
    with fill_folder(folder, is_ours=is_exported, overwrite=overwrite, source=beside) as out:
        names, reports = {}, []
        for number, file in enumerate(files, 1):
            name = WEIGHTS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            reports.append(_unpickled(file, out / name, unconfined=unconfined))
            names |= _names(out / name, file, names)
        if len(files) > 1:
            (out / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=1), encoding="utf-8")
        for name in _BESIDE:
            if (beside / name).is_file():
                shutil.copyfile(beside / name, out / name)
        has_config = (out / "config.json").is_file()
    left_out = tuple(name for report in reports for name in report["left_out"])
    return Converted(folder, len(files), len(names), left_out, tuple(reports[0]["confined_by"]), has_config)


def _pickles(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if (source / PICKLE_INDEX).is_file():
        return indexed_shards(source / PICKLE_INDEX)
    pickles = sorted(path for path in source.glob("*") if path.suffix in PICKLES and path.is_file()) if source.is_dir() else []
    chosen = [path for path in pickles if path.name == "pytorch_model.bin"] or pickles
    if len(chosen) != 1:
        rule = f"holds {len(pickles)} files ending in {', '.join(PICKLES)}" if source.is_dir() else "is not there"
        raise mistake(str(source), rule, "Give one such file, or a folder with one or with an index.")
    return chosen


def _unpickled(file: Path, target: Path, *, unconfined: bool) -> dict[str, list[str]]:
    """Have a confined process write the tensors of `file` to `target`; returns its report."""
    try:
        source = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise mistake(str(file), f"cannot be read: {error.strerror}", "Copy the whole folder.") from None
    written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    words = [sys.executable, "-I", unpickle.__file__, str(source), str(written), *(["unconfined"] if unconfined else [])]
    try:
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                words, pass_fds=(source, written), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1"}, cwd="/", timeout=SECONDS,
            )  # fmt: skip
            output.seek(0)
            text = output.read(1 << 16)
    except subprocess.TimeoutExpired:
        raise mistake(str(file), f"was not read within {SECONDS} s", _TRUST) from None
    finally:
        os.close(source)
        os.close(written)
    return _parsed_answer(file, done.returncode, text)


def _parsed_answer(file: Path, code: int, text: bytes) -> dict[str, list[str]]:
    try:
        answer = parse_json(text.splitlines()[-1])
        if code == 0 and all(isinstance(answer[key], list) for key in ("left_out", "confined_by")):
            return {key: [_printable(str(entry)) for entry in answer[key]] for key in ("left_out", "confined_by")}
        reason = _printable(str(answer["error"]))
    except (ValueError, KeyError, TypeError, IndexError):
        reason = f"the process that read it ended with {code}"
    raise mistake(str(file), f"is refused: {reason}", _TRUST)


def _printable(text: str) -> str:
    """Untrusted text as one line without terminal control characters."""
    return "".join(c if c.isprintable() else " " for c in text)[:500]


def _names(path: Path, file: Path, others: dict[str, str]) -> dict[str, str]:
    """Tensors in a written file, by name; raises if one is in two files."""
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = dict.fromkeys(opened.keys(), path.name)
    except SafetensorError as error:
        raise mistake(str(file), f"is refused: no safetensors came of it ({error})", _TRUST) from None
    if twice := sorted(tensors.keys() & others.keys()):
        raise mistake(str(file), f"repeats {_printable(', '.join(twice[:5]))}", "Copy the whole folder again.")
    return tensors
