"""The folder of a run. It holds everything about the run, and is sufficient to resume it.

run.toml          the resolved run, as `ultrascale train` would read it again
plan.json         the prediction              metrics.jsonl     one row a logged step
memory.json       live memory, first steps    events.jsonl      starts, resumes, saves, stops
environment.json  machine and versions        log.txt           console output
checkpoints/      step-*/                     export/           the Hugging Face folder, at the end
tokenizer.json    a copy of the data's        recompute.json    resolution of recompute = "auto"
compiled.bin      compiled blocks, with `compile`        chosen_kernels.json   kernels chosen by speed
tracked.json      the trackers' run ids       tracked.log       output of the trackers' libraries
attempt.json      under torchrun, while ranks train: the location of their signs of life
metrics-until-STEP.jsonl      rows of an earlier start from step 0, with -2, -3 ... if there are several up to that step
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from ultrascale import __version__
from ultrascale.description.problems import SpecError, mistake
from ultrascale.description.run import Run
from ultrascale.launch.events import read_rows
from ultrascale.open_folder import OpenFolder
from ultrascale.run_rows import metric_row

RANK_LOCK = ".lock"
"""Lock file, held by the rank that writes to this folder."""
ORPHAN_SECONDS, LOOK_SECONDS = 10.0, 0.2
"""Time after which ranks whose launcher was killed have exited (`launch.orphans`), and the polling interval."""
WATCH_SECONDS = 1.0
RESCUED = "-rescued-"
"""Separator between a run's name and the time, in the name of the folder to which a run saves after its own folder was lost."""


class RunFolderLostError(RuntimeError):
    """The run's folder was removed, moved or replaced while the run trained in it."""


class FolderClaim:
    """This process's claim on a run's folder: a descriptor of the folder, and a locked file in it.

    Raises BlockingIOError if another process holds the lock, FileNotFoundError if there is no folder.
    """

    def __init__(self, path: Path, lock: str):
        self.folder = OpenFolder(path)
        self._lock, self._one_at_a_time = lock, threading.Lock()
        try:
            self._file = self._locked()
        except BaseException:
            self.folder.close()
            raise

    def lost(self) -> str:
        """Event by which this process lost the folder, as in `was removed`; empty while it owns it. A deleted lock file is
        created and locked again, unless another process did so first."""
        with self._one_at_a_time:
            if fate := self.folder.fate():
                return fate
            try:
                if os.path.samestat(os.stat(self._lock, dir_fd=self.folder.fd), os.fstat(self._file)):
                    return ""
            except FileNotFoundError:
                pass
            except OSError:  # a failing disk does not tell who owns the folder
                return ""
            try:
                before, self._file = self._file, self._locked()
            except BlockingIOError:
                return f"was taken by another process, after its {self._lock} was removed"
            except OSError:
                return ""
            os.close(before)
            return ""

    def close(self) -> None:
        """Release the lock and the folder."""
        os.close(self._file)
        self.folder.close()

    def _locked(self) -> int:
        with _naming(self.folder.path / self._lock):
            file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666, dir_fd=self.folder.fd)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise
        except OSError as error:  # as on some network file systems
            problem = f"{self.folder.path} cannot be locked ({error}): start no second run there, nothing would stop it"
            warnings.warn(problem, stacklevel=2)
        return file


@dataclass(frozen=True)
class RunFolder:
    """Paths and plain files of one run. Only rank 0 writes, except for checkpoints.

    Files of a claimed folder are written through its descriptor, so never into another folder at the same path.
    """

    path: Path
    claim: FolderClaim | None = None

    @classmethod
    def of(cls, run: Run) -> RunFolder:
        """The folder of `run`, which may not exist yet."""
        return cls(Path(run.folder) / run.name)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def compiled(self) -> Path:
        return self.path / "compiled.bin"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @contextmanager
    def commanded(self) -> Iterator[RunFolder]:
        """Context in which this process is the only command that trains here, also between two attempts of its ranks. Yields
        the folder, claimed.

        Raises SpecError if another command is active, or if ranks of a killed command have not exited after some seconds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._claimed(".command.lock") as claimed:
            deadline = time.monotonic() + ORPHAN_SECONDS
            while True:
                try:
                    with self._claimed(RANK_LOCK):
                        break
                except SpecError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(LOOK_SECONDS)
            yield claimed

    def owned(self) -> AbstractContextManager[RunFolder]:
        """Context in which no other process may own this folder; the operating system frees the lock when the process ends.
        Yields the folder, claimed.

        Raises SpecError if another process owns it: two runs in one folder would mix their metrics and checkpoints.
        """
        return self._claimed(RANK_LOCK)

    @contextmanager
    def _claimed(self, lock: str) -> Iterator[RunFolder]:
        try:
            claim = FolderClaim(self.path, lock)
        except BlockingIOError:
            rule = "another process is training in this folder"
            remedy = "Wait until it ends, or give this run a --name of its own."
            raise mistake(str(self.path), rule, remedy) from None
        except FileNotFoundError:
            raise RunFolderLostError(f"{self.path} was removed before the run had begun. Start it again.") from None
        try:
            yield replace(self, claim=claim)
        finally:
            claim.close()

    def lost(self) -> str:
        """Event by which the run lost this folder, as in `was removed`; empty while the run owns it or has not claimed it."""
        return "" if self.claim is None else self.claim.lost()

    @contextmanager
    def watched(self, when_lost: Callable[[], None]) -> Iterator[None]:
        """Context that checks every second whether the run still owns the folder; calls `when_lost` once it does not."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(WATCH_SECONDS):
                if self.lost():
                    return when_lost()

        thread = threading.Thread(target=look, daemon=True, name="folder-watch")
        if self.claim is not None:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if self.claim is not None:  # its descriptors are about to be closed; do not wait for a disk that hangs
                thread.join(WATCH_SECONDS)

    def refuge(self) -> Path:
        """Folder for the state of a run that lost this one: this folder at its new path, or a new one beside the old path."""
        folder = None if self.claim is None else self.claim.folder
        place = folder.place() if folder is not None and folder.fate() else None
        if place is None:
            place = self.path.with_name(f"{self.path.name}{RESCUED}{time.strftime('%Y%m%d-%H%M%S')}")
            place.mkdir(parents=True)
        return place

    def rescued(self) -> list[Path]:
        """Folders saved after a folder at this path was lost."""
        beside = self.path.parent
        names = os.listdir(beside) if beside.is_dir() else []
        return sorted(beside / name for name in names if name.startswith(f"{self.path.name}{RESCUED}"))

    def write_text(self, name: str, text: str) -> None:
        """Replace a file of the folder atomically."""
        if self.claim is None:
            self.path.mkdir(parents=True, exist_ok=True)
        partial, final = self._at(f".{name}.tmp"), self._at(name)
        with _naming(self.path / name):
            with self._open(f".{name}.tmp", "w") as file:
                file.write(text)
            os.replace(partial, final, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file of the folder atomically."""
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def read_json(self, name: str) -> Any:
        """A JSON file of the folder; None if it is missing or damaged."""
        return read_json(self.path / name)

    def append(self, name: str, line: str) -> None:
        """Append a line to a file of the folder, on a new line even if a crash truncated the last one."""
        with _naming(self.path / name), self._open(name, "a+b") as file:
            file.write(b"\n" * _is_torn(file.fileno()) + f"{line}\n".encode())

    def remove(self, name: str) -> None:
        """Remove a file of the folder, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(self._at(name), dir_fd=self._fd)

    @property
    def _fd(self) -> int | None:
        return None if self.claim is None else self.claim.folder.fd

    def _at(self, name: str) -> str:
        """Path of a file of the folder, through the descriptor if there is one."""
        return name if self.claim is not None else str(self.path / name)

    def _open(self, name: str, mode: str) -> IO[Any]:
        return open(self._at(name), mode, opener=partial(os.open, mode=0o666, dir_fd=self._fd))

    def progress(self) -> str:
        """The newest checkpoint that looks complete, without those that the last start found damaged; `none` if there is none.

        Raises RunFolderLostError if the run no longer owns this folder.
        """
        from ultrascale.checkpoint.listing import newest_listed

        if fate := self.lost():
            raise RunFolderLostError(f"{self.path} {fate} while the run trained in it, and its ranks are not started again.")
        rows = read_rows(self.path / "events.jsonl")
        damaged = [row["damaged"] for row in rows if isinstance(row, dict) and isinstance(row.get("damaged"), list)]
        newest = newest_listed(self.checkpoints, without=damaged[-1] if damaged else ())
        return "none" if newest is None else newest.name

    def metric_rows(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, without rows truncated by a crash or a full disk; empty if the file is missing."""
        return [row for row in map(metric_row, read_rows(self.metrics)) if row is not None]

    def forget_metrics_from(self, steps_done: int) -> int:
        """Drop rows of steps after `steps_done`, which will be repeated, and a truncated row, so that every step has one
        row. Returns the last step dropped, or 0.
        """
        if not self.metrics.exists():
            return 0
        rows = self.metric_rows()
        last = max((row["step"] for row in rows if row["step"] > steps_done), default=0)
        self.write_text(self.metrics.name, "".join(f"{json.dumps(row)}\n" for row in rows if row["step"] <= steps_done))
        return last

    def set_metrics_aside(self) -> str:
        """Copy the rows to a new file `metrics-until-STEP.jsonl`, named after the last step. Returns its name; empty if there
        are no rows."""
        last = max((row["step"] for row in self.metric_rows()), default=0)
        if last == 0:
            return ""
        names = (f"metrics-until-{last}{suffix}.jsonl" for suffix in chain([""], (f"-{n}" for n in count(2))))
        name = next(name for name in names if not (self.path / name).exists())
        self.write_text(name, self.metrics.read_text(errors="replace"))
        return name


def read_json(path: Path) -> Any:
    """Value of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


VERSIONS = ("ultrascale", "python", "torch", "cuda", "device")
"""Facts of `environment` that may change the bits of a step."""


def environment() -> dict[str, Any]:
    """Machine and versions, without secrets: no environment variables, no user or host name."""
    import torch

    facts: dict[str, Any] = {
        "ultrascale": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context in which an OSError names `path`: one of a file opened in a folder has no more than the file's name, and one of
    a full disk not even that."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_torn(file: int) -> bool:
    """True if a file's last line has no newline."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"  # of no plain file the size is 0
