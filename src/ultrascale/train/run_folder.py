"""The folder a run lives in. Everything about a run is here, and what is here is enough to go on with it.

run.toml          the resolved run, as `ultrascale train` would read it again
plan.json         what was predicted          metrics.jsonl     one row a logged step
memory.json       live memory, first steps    events.jsonl      starts, resumes, saves, stops
environment.json  machine and versions        log.txt           what was said
checkpoints/      step-*/                     export/           the Hugging Face folder, at the end
tokenizer.json    a copy of the data's        recompute.json    what recompute = "auto" came down to
compiled.bin      compiled blocks, with `compile`        chosen_kernels.json   by their speed
attempt.json      under torchrun, while ranks train: where their signs of life are
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale import __version__
from ultrascale.launch.events import read_rows
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.run import Run

RANK_LOCK = ".lock"
"""Held by the rank that writes here."""
ORPHAN_SECONDS, LOOK_SECONDS = 10.0, 0.2
"""Ranks whose launcher was killed have gone after so long (`launch.orphans`)."""


@dataclass(frozen=True)
class RunFolder:
    """Paths and plain files of one run. Only rank 0 writes, except for checkpoints."""

    path: Path

    @classmethod
    def of(cls, run: Run) -> RunFolder:
        """The folder of `run`, which need not be there yet."""
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
    def commanded(self) -> Iterator[None]:
        """While inside, this process is the one command that trains here, also between two attempts of its ranks.

        Raises SpecError if another command is, or if ranks of one that was killed have not gone after some seconds.
        """
        with self._locked(".command.lock"):
            deadline = time.monotonic() + ORPHAN_SECONDS
            while True:
                try:
                    with self._locked(RANK_LOCK):
                        break
                except SpecError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(LOOK_SECONDS)
            yield

    @contextmanager
    def owned(self) -> Iterator[None]:
        """While inside, no other process may own this folder; the lock goes with the process, however it ends.

        Raises SpecError if another one does: two runs writing one folder would mix their metrics and checkpoints.
        """
        with self._locked(RANK_LOCK):
            yield

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / name, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                rule = "another process is training in this folder"
                remedy = "Wait until it ends, or give this run a --name of its own."
                raise SpecError([Problem(str(self.path), rule, remedy)]) from None
            except OSError as error:  # as on some network file systems
                told = f"{self.path} cannot be locked ({error}): start no second run there, nothing would stop it"
                warnings.warn(told, stacklevel=2)
            yield

    def write_text(self, name: str, text: str) -> None:
        """Replace a file of the folder in one piece."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{name}.tmp"
        partial.write_text(text)
        os.replace(partial, self.path / name)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file of the folder in one piece."""
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def read_json(self, name: str) -> Any:
        """A JSON file of the folder; None if it is not there, or torn."""
        try:
            return json.loads((self.path / name).read_text())
        except (OSError, json.JSONDecodeError):
            return None

    def append(self, name: str, line: str) -> None:
        """Add a line to a file of the folder, after the last one even if a crash tore that."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / name, "ab") as file:
            file.write(b"\n" * _is_torn(self.path / name) + f"{line}\n".encode())

    def metric_rows(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, without those that a crash or a full disk tore; none if it is not there."""
        rows = read_rows(self.metrics) if self.metrics.exists() else ()
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]

    def forget_metrics_from(self, step: int) -> None:
        """Drop rows of steps that will be done again, and a row torn by a crash, so that every step stands there once."""
        if not self.metrics.exists():
            return
        kept = [json.dumps(row) for row in self.metric_rows() if row["step"] < step]
        self.write_text(self.metrics.name, "".join(f"{row}\n" for row in kept))


def environment() -> dict[str, Any]:
    """Machine and versions, without anything secret: no environment variables, no user or host name."""
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


def _is_torn(path: Path) -> bool:
    """Whether a file's last line is without its end."""
    if path.stat().st_size == 0:  # or no plain file
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
