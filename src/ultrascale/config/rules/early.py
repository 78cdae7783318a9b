"""Fast checks without torch, before any rank starts: missing data, GPU or checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.description.run import Run

GPU_FILES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")
"""File patterns under /dev of GPU drivers: NVIDIA's, AMD's, and that of the Windows Subsystem for Linux."""
MOST_PROCESSES = 124
"""Most processes that one command starts: torch gives each process a pipe of every other, and Linux passes at most 253 file
descriptors at once."""
UNPREPARED = "is not a folder of prepared text"
MAKE_ONE = "Make one: ultrascale data prepare TEXT --output FOLDER."
UNFINISHED = "unfinished.json"
"""File of a folder that `ultrascale data prepare` has begun and not finished."""
STORE_URL = re.compile(r"[a-z][a-z0-9+.-]*:/")
"""Beginning of a URL; the ranks check what is in a store."""
_CHECKPOINT = re.compile(r"\.?step-\d{8,18}.*")


def sees_gpu(dev: Path = Path("/dev")) -> bool:
    """True if a GPU driver has files in `dev`, or if `dev` has no file `null`: such a system gives no information."""
    return not (dev / "null").exists() or any(any(dev.glob(name)) for name in GPU_FILES)


def device_problems(device: str, *, key: str = "device") -> Iterator[Problem]:
    """A problem if `device` is cuda and this machine shows no GPU."""
    if device == "cuda" and not sees_gpu():
        rule = "asks for CUDA, but this machine shows no GPU: /dev has no file of a driver"
        yield Problem(key, rule, "Use the device cpu; `ultrascale doctor` says more.")


def expect_processes(count: int) -> None:
    """Raises SpecError if `count` is more processes than can be started on one machine."""
    if count > MOST_PROCESSES:
        rule = f"must be at most {MOST_PROCESSES} on one machine, is {count:,}"
        raise mistake("--processes", rule, "Take fewer, or start them on several machines, by torchrun.")


def expect_ready(run: Run) -> None:
    """Raises SpecError, before any rank starts, if the run's data or device is missing."""
    problems = [*device_problems(run.device)]
    unfinished = {Path(source.path) for source in run.data.sources if is_unfinished(Path(source.path))}
    for source in run.data.sources:
        problems += _source_problems("data.sources", source.path)
    for source in run.data.validation:
        if unfinished.isdisjoint(Path(source.path).parents):  # else a part of the same preparation
            problems += _source_problems("data.validation", source.path)
    if problems:
        raise SpecError(problems)


def validation_folders(run: Run) -> list[Path]:
    """Folders in which `data prepare` keeps the text that it holds out of each source."""
    return [Path(source.path) / "validation" for source in run.data.sources]


def _source_problems(key: str, source: str) -> Iterator[Problem]:
    path = Path(source)
    os.fsencode(path)  # where the locale cannot encode it, is_dir() is False: UnicodeEncodeError says more
    if STORE_URL.match(source):
        return
    if is_unfinished(path):
        rule = f"{source} is unfinished: `ultrascale data prepare` failed there, or still runs"
        yield Problem(key, rule, "Run it again, with the same arguments: it goes on where it stopped.")
    elif path.is_dir() and not holds_prepared(path):
        yield Problem(key, f"{source} {UNPREPARED}", MAKE_ONE)
    elif not path.is_dir() and not _is_prefix(path):
        text, output = (source, "PREPARED") if path.is_file() else ("TEXT", source)
        of_weights = "for imported weights with --tokenizer and their folder in its place"
        remedy = f"Make it: ultrascale data prepare {text} --output {output} --train-tokenizer 4096   ({of_weights})"
        rule = f"{source} is a file that is not prepared" if path.is_file() else f"there is no prepared text at {source}"
        yield Problem(key, rule, remedy)


def data_missing_here(run: Run) -> list[str]:
    """Paths of the run's data of which this machine has nothing; other machines may have it."""
    paths = (source.path for source in (*run.data.sources, *run.data.validation))
    return [path for path in paths if not (STORE_URL.match(path) or Path(path).is_dir() or _is_prefix(Path(path)))]


def holds_prepared(folder: Path) -> bool:
    """True if `folder` has files of `ultrascale data prepare`, all or some; the contents are read later."""
    return any(any(folder.glob(name)) for name in ("manifest.json", "tokenizer.json", "*.bin", "*.idx"))


def is_unfinished(folder: Path) -> bool:
    """True if `ultrascale data prepare` has begun `folder` and not finished it."""
    return (folder / UNFINISHED).exists() and not (folder / "manifest.json").exists()


def _is_prefix(path: Path) -> bool:
    """True if `path` is the prefix of a Megatron data set (.bin or .idx); the contents are read later."""
    stem = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
    return any(stem.with_name(stem.name + ending).exists() for ending in (".bin", ".idx"))


def has_checkpoints(folder: Path) -> bool:
    """True if `folder` is a checkpoint by its name or manifest, or contains one; the contents are read later."""
    places = (folder, folder / "checkpoints")
    named = (path.name for place in places if place.is_dir() for path in place.iterdir())
    is_one = (folder / "manifest.json").exists() or _CHECKPOINT.fullmatch(folder.absolute().name) is not None
    return (folder.is_dir() and is_one) or any(map(_CHECKPOINT.fullmatch, named))


def expect_checkpoints(folder: Path) -> None:
    """Raises SpecError if `folder` contains nothing that is named like a checkpoint."""
    if not has_checkpoints(folder):
        what = "has no checkpoints" if folder.is_dir() else "there is no such folder"
        raise mistake(str(folder), what, "Give a run's folder, its `checkpoints`, or one `step-...` in it.")
