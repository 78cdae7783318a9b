"""Fixtures for all folders: stand-ins for a GPU, a clock, a slow measurement, a compiler, a saved picture."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ultrascale.kernels.choice import contest, device_kind
from ultrascale.launch import forked
from ultrascale.measure.machine import ceilings
from ultrascale.measure.machine.ceilings import Peak


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Sets the folder in which this process makes temporary files, which Python decides once."""
    return lambda folder: monkeypatch.setattr(tempfile, "tempdir", str(folder))


class Clock:
    """Stands for the module `time`; a test moves its `monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], Clock]:
    """Gives a module a clock that stands still, and returns it."""

    def install(module: ModuleType) -> Clock:
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        return clock

    return install


@pytest.fixture
def forks_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether a fork of this process computes; else it is as if this process had done a backward pass with a torch that
    is built for a GPU."""
    return lambda compute: monkeypatch.setattr(forked, "_forks_here", compute)


@contextmanager
def made_up_peak() -> Iterator[list[Peak]]:
    """Runs take a made-up peak of this machine, the last of the list, which need not be measured each time."""
    peaks = [Peak(1e10, "made up")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "peak_flops", lambda *arguments: peaks[-1])
        yield peaks


@pytest.fixture
def known_peak() -> Iterator[Callable[[Peak], None]]:
    """Runs take a made-up peak of this machine; another one where that is given."""
    with made_up_peak() as peaks:
        yield peaks.append


@pytest.fixture
def kernel_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], float]], None]:
    """Has each form of a kernel take as long as is said of its name, in place of as long as it takes."""

    def take(seconds_of: Callable[[str], float]) -> None:
        monkeypatch.setattr(contest, "_timed", lambda forms, inputs, passes: {name: seconds_of(name) for name in forms})

    return take


@pytest.fixture
def cpu_as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the CPU stands for one on CUDA wherever kernels are chosen."""
    monkeypatch.setitem(device_kind._STANDS_FOR, "cpu", "cuda")


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has everything compiled by another backend, also on ranks, which are forked; by none of torch's compilers of kernels,
    which take seconds."""
    return lambda backend, **options: monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, **options))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, as they are, and no file of them."""
    figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda drawn, path, **options: saved.append(drawn))
    return saved
