"""Processor, memory, disk and GPUs of this machine, as metrics. From /proc and nvidia-smi: no package is needed."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

GIB = 2**30
EVERY_SECONDS = 10.0
"""Seconds between two looks; rows in between have no values."""
GPU_FIELDS = {
    "utilization.gpu": "utilization_percent", "memory.used": "memory_mib", "temperature.gpu": "temperature_c",
    "power.draw": "power_w", "clocks.sm": "sm_clock_mhz",
}  # fmt: skip


@dataclass
class System:
    """Figures of this machine and of the disk that holds a folder."""

    folder: Path
    _looked: float = field(default=-EVERY_SECONDS, init=False)
    _ticks: tuple[int, int] | None = field(default=None, init=False)

    def sample(self) -> dict[str, float]:
        """Values by `system/...`; empty if the last look was just now."""
        if time.monotonic() - self._looked < EVERY_SECONDS:
            return {}
        self._looked = time.monotonic()
        found: dict[str, float] = {}
        for look in (self._processor, _memory, self._disk, _gpus):
            with suppress(OSError, ValueError, IndexError, KeyError, subprocess.SubprocessError):
                found |= look()
        return {f"system/{name}": value for name, value in found.items()}

    def _processor(self) -> dict[str, float]:
        """Share of the processors' time since the last look, in percent."""
        fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
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
    """Figures of each GPU, by its number; none where there is no nvidia-smi."""
    if which("nvidia-smi") is None:
        return {}
    words = ["nvidia-smi", f"--query-gpu=index,{','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout
    return read_gpus(told)


def read_gpus(told: str) -> dict[str, float]:
    """Values of the table that nvidia-smi prints; a field that a GPU does not have is left out."""
    found = {}
    for line in told.splitlines():
        index, *values = (word.strip() for word in line.split(","))
        for name, value in zip(GPU_FIELDS.values(), values, strict=True):
            with suppress(ValueError):
                found[f"gpu{index}/{name}"] = float(value)
    return found
