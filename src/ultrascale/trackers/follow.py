"""Sends rows of a growing `metrics.jsonl` to trackers, each in its own thread, and retries failures.

Also sends figures of this machine: CPU, memory, disk and GPUs, from /proc and nvidia-smi without a package.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

from ultrascale.run_rows import metric_row
from ultrascale.trackers.tracker import RunFacts, TrackedRecord, Tracker

OPEN = {"wandb": "WandbRun", "mlflow": "MlflowRun", "trackio": "TrackioRun", "tensorboard": "TensorboardRun"}
LIVE_SECONDS = 60.0
"""Age in seconds up to which a row gets current figures of this machine."""
MOST_READ = 2**20
"""Bytes read at a time."""


@dataclass(frozen=True)
class Pauses:
    """Pauses of a feed."""

    look_seconds: float = 0.5
    """Polling interval of the file."""
    first_wait_seconds: float = 1.0
    """Time from a failure to the first retry; doubled up to the longest."""
    longest_wait_seconds: float = 300.0


@dataclass
class FollowedRows:
    """Rows of a growing file, which is replaced by a shorter one when a run rewinds to a checkpoint."""

    path: Path
    _inode: int = field(default=-1, init=False)
    _position: int = field(default=0, init=False)

    def new(self) -> list[dict[str, Any]]:
        """Complete rows since the last call; all of them again if the file was replaced."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._position:
                    self._inode, self._position = stat.st_ino, 0
                file.seek(self._position)
                text = file.read(MOST_READ)
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1] if len(text) < MOST_READ or b"\n" in text else text
        self._position += len(whole)
        return [row for row in map(_row, whole.splitlines()) if row]

    def again(self) -> None:
        """Restart at the first row."""
        self._position = 0


def _row(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        row = metric_row(json.loads(line))
        if row is not None and isinstance(row.get("time"), int | float):
            return row
    return {}


@dataclass
class Feed:
    """Sends rows to one tracker of a run."""

    sink: str
    facts: RunFacts
    record: TrackedRecord
    say: Callable[[str], None]
    lock: threading.Lock
    """Lock of `record`, which the feeds of a run share."""
    ending: Callable[[], str]
    pauses: Pauses
    over: threading.Event = field(default_factory=threading.Event)
    """Set when no more rows will come."""
    done: bool = field(default=False, init=False)
    _tracker: Tracker | None = field(default=None, init=False)
    _last: int = field(default=0, init=False)
    _failed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._rows = FollowedRows(self.facts.folder / "metrics.jsonl")
        self._system = System(self.facts.folder)

    def run(self) -> None:
        """Send the tracker every row until the run is over. Reports a failure once, and retries at growing intervals."""
        wait = self.pauses.first_wait_seconds
        while True:
            try:
                self._open()
                while not self._send_new():
                    wait = self.pauses.first_wait_seconds
                self._close()
                return
            except Exception as error:  # any exception of a library
                self._say_failed(error)
                self._rows.again()
                if self.over.is_set() and wait > self.pauses.first_wait_seconds:
                    return
                self.over.wait(wait)
                wait = min(2 * wait, self.pauses.longest_wait_seconds)

    def _open(self) -> None:
        if self._tracker is not None:
            return
        settings = getattr(self.facts.run.log, self.sink)
        module = importlib.import_module(f"ultrascale.trackers.to_{self.sink}")
        self._tracker = tracker = getattr(module, OPEN[self.sink])(self.facts, self.record.id(self.sink, settings.id))
        with self.lock:
            last_step, behind = self.record.last_step(self.sink, tracker.id), self.record.behind(self.sink, tracker.id)
            self._last = last_step if tracker.last_step is None else tracker.last_step + behind
            if not behind:  # else it is kept until a row is sent, whose number the tracker then has
                self._note()

    def _send_new(self) -> bool:
        """Send new rows. Returns True if those were the last."""
        assert self._tracker is not None
        over = self.over.is_set()  # read first, so that no row that arrives in between is left out
        rows = self._rows.new()
        for row in rows:
            if row["step"] <= self._last:
                continue
            self._tracker.write(row["step"], row["time"], self._values(row))
            self._last = row["step"]
            with self.lock:
                self._note()
            self._say_well()
        if not rows and not over:
            self.over.wait(self.pauses.look_seconds)
        return over and not rows

    def _note(self) -> None:
        assert self._tracker is not None
        with suppress(OSError):  # a full disk: the next row tries again
            self.record.save(self.sink, self._tracker.id, self._last)

    def _values(self, row: dict[str, Any]) -> dict[str, float]:
        """Finite numbers of a row, with the plan's values and, for a current row, the machine's figures."""
        values = {key: value for key, value in row.items() if key not in ("step", "time")} | self.facts.plan
        if self.facts.run.log.system_metrics and self.sink != "wandb" and time.time() - row["time"] < LIVE_SECONDS:
            values |= self._system.sample()
        return {key: float(value) for key, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}

    def _close(self) -> None:
        assert self._tracker is not None
        self._tracker.close(self.ending())
        self.done = True

    def _say_failed(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            why = " ".join(str(error).split())[:300] or "no reason given"
            problem = f"{type(error).__name__}: {why}"
            remedy = "Training goes on; metrics.jsonl has them, and it is tried again."
            self.say(f"warning: {self.sink} takes no rows ({problem}). {remedy}")

    def _say_well(self) -> None:
        if self._failed:
            self._failed = False
            self.say(f"{self.sink} takes rows again, and has been given those it lacked")


def follow(
    folder: Path,
    say: Callable[[str], None],
    over: Callable[[], bool],
    *,
    close_seconds: float,
    sinks: Iterable[str] = (),
    pauses: Pauses = Pauses(),
) -> bool:
    """Feed the trackers of the run in `folder` until `over`, and then for at most `close_seconds`. Returns True if every
    tracker has every row."""
    facts = RunFacts.read(folder)
    record, lock = TrackedRecord.read(folder, facts.run.name), threading.Lock()
    shared = (facts, record, say, lock)
    feeds = [Feed(sink, *shared, ending=lambda: last_event(folder), pauses=pauses) for sink in sinks or facts.run.log.sinks]
    threads = [threading.Thread(target=feed.run, daemon=True, name=feed.sink) for feed in feeds]
    for thread in threads:
        thread.start()
    while not over():
        time.sleep(pauses.look_seconds / 2)
    for feed in feeds:
        feed.over.set()
    until = time.monotonic() + close_seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    for feed in feeds:
        if not feed.done:
            remedy = f"`python -m ultrascale.trackers {folder}` sends the rest"
            say(f"warning: {feed.sink} has not taken every row; metrics.jsonl has them, and {remedy}")
    return all(feed.done for feed in feeds)


def last_event(folder: Path) -> str:
    """Event that ended the run: `end`, `stop`, or `crash` if events.jsonl has neither at its end."""
    ending = "crash"
    with suppress(OSError):
        for line in (folder / "events.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                kind = json.loads(line).get("event")
                ending = kind if kind in ("end", "stop") else "crash" if kind == "start" else ending
    return ending


GIB = 2**30
EVERY_SECONDS = 10.0
"""Seconds between two samples; rows in between have no values."""
GPU_FIELDS = {
    "utilization.gpu": "utilization_percent", "memory.used": "memory_mib", "temperature.gpu": "temperature_c",
    "power.draw": "power_w", "clocks.sm": "sm_clock_mhz",
}  # fmt: skip


@dataclass
class System:
    """Figures of this machine and of the disk that holds a folder."""

    folder: Path
    _sampled_at: float = field(default=-EVERY_SECONDS, init=False)
    _ticks: tuple[int, int] | None = field(default=None, init=False)

    def sample(self) -> dict[str, float]:
        """Values by `system/...`; empty if the last sample is too recent."""
        if time.monotonic() - self._sampled_at < EVERY_SECONDS:
            return {}
        self._sampled_at = time.monotonic()
        values: dict[str, float] = {}
        for look in (self._processor, _memory, self._disk, _gpus):
            with suppress(OSError, ValueError, IndexError, KeyError, subprocess.SubprocessError):
                values |= look()
        return {f"system/{name}": value for name, value in values.items()}

    def _processor(self) -> dict[str, float]:
        """CPU utilization since the last sample, in percent."""
        fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        total, idle = sum(fields), fields[3] + fields[4]
        before, self._ticks = self._ticks, (total, idle)
        if before is None or total == before[0]:
            return {"load": os.getloadavg()[0]}
        busy = 1 - (idle - before[1]) / (total - before[0])
        return {"cpu_percent": 100 * busy, "load": os.getloadavg()[0]}

    def _disk(self) -> dict[str, float]:
        stat = os.statvfs(self.folder)
        return {"disk_free_gib": stat.f_bavail * stat.f_frsize / GIB}


def _memory() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
    return {"memory_used_gib": (kib["MemTotal"] - kib["MemAvailable"]) * 1024 / GIB}


def _gpus() -> dict[str, float]:
    """Figures of each GPU, by its number; empty without nvidia-smi."""
    if which("nvidia-smi") is None:
        return {}
    words = ["nvidia-smi", f"--query-gpu=index,{','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout
    return read_gpus(printed)


def read_gpus(printed: str) -> dict[str, float]:
    """Values from the table that nvidia-smi prints; fields that a GPU does not have are omitted."""
    figures = {}
    for line in printed.splitlines():
        index, *values = (word.strip() for word in line.split(","))
        for name, value in zip(GPU_FIELDS.values(), values, strict=True):
            with suppress(ValueError):
                figures[f"gpu{index}/{name}"] = float(value)
    return figures
