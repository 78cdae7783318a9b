"""One rank of a run under injected faults: the trainer's own worker, with faults planted at the steps of the storm."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ultrascale import heartbeat
from ultrascale.checkpoint.disk.folders import candidates
from ultrascale.failpoints import VARIABLE
from ultrascale.launch.warm import FOLDER_VARIABLE
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import local
from ultrascale.soak.in_place import next_save, stand_still
from ultrascale.soak.storm import KINDS, Planted, fire, heal, read
from ultrascale.train import worker
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.step import StepResult
from ultrascale.train.trainer import Trainer

STORM_VARIABLE = "ULTRASCALE_STORM"
"""Environment variable with the storm's folder."""
FOR_EVER_SECONDS = 3600
SLOW_SECONDS = 0.3
"""Seconds added to each forward pass of a slow rank; those of the others take some hundredths."""


@dataclass
class Storm:
    """Faults planned for this rank."""

    folder: Path
    faults: dict[int, Planted]
    """Fault by step."""
    stop_at: int | None
    pending_fault: Planted | None = field(init=False, default=None)
    """Fault to strike in this step."""
    trainer: Trainer | None = field(init=False, default=None)
    ends_at: dict[int, Planted] = field(init=False, default_factory=dict)
    """Faults that end after a number of steps, by that number."""

    @classmethod
    def from_environment(cls) -> Storm:
        """The storm named by the environment."""
        path, rank = Path(os.environ[STORM_VARIABLE]), int(os.environ["RANK"])
        faults, stop_at = read(path)
        return cls(path.parent, {fault.step: fault for fault in faults if fault.rank == rank}, stop_at)

    def before_step(self, trainer: Trainer) -> None:
        """Request the end of the run, or prepare a fault."""
        self.trainer, self.pending_fault = trainer, self.faults.get(trainer.steps_done)
        if trainer.steps_done == self.stop_at and trainer.ranks.is_first:
            trainer.request_stop()
        if self.pending_fault is not None and self.pending_fault.kind in _AT_ONCE and fire(self.folder, self.pending_fault):
            _AT_ONCE[self.pending_fault.kind](trainer, self.pending_fault)

    def after_step(self, steps_done: int) -> None:
        """Record the faults that have ended."""
        for step in [step for step in self.ends_at if step <= steps_done]:
            heal(self.folder, self.ends_at.pop(step))

    def strike_at(self, moment: str) -> None:
        """Strike if this is the fault's moment."""
        fault = self.pending_fault
        if moment == "forward" and any(fault.kind == "slow" for fault in self.ends_at.values()):
            time.sleep(SLOW_SECONDS)
        if fault is None or fault.moment != moment or fault.kind in _AT_ONCE:
            return
        self.pending_fault = None
        if fire(self.folder, fault):
            assert self.trainer is not None
            if fault.kind in ("stall", "slow"):
                self.ends_at[fault.step + KINDS[fault.kind].steps] = fault
            _AT_A_MOMENT[fault.kind](self.trainer, fault)


def plant(storm: Storm) -> None:
    """Report each step, and each moment of a step, to `storm`."""
    train_step, beat = Trainer.train_step, heartbeat.beat

    def step(trainer: Trainer) -> StepResult:
        storm.before_step(trainer)
        result = train_step(trainer)
        storm.after_step(trainer.steps_done)
        return result

    def beat_and_strike(doing: str, *, extra_seconds: float | None = None) -> None:
        beat(doing, extra_seconds=extra_seconds)
        storm.strike_at(doing)

    Trainer.train_step = step  # pyright: ignore[reportAttributeAccessIssue]
    heartbeat.beat = beat_and_strike


def _die(trainer: Trainer, fault: Planted) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_save(trainer: Trainer, fault: Planted) -> None:
    os.environ[VARIABLE] = f"{fault.moment}:{fault.rank}:1"


def _cut_power(trainer: Trainer, fault: Planted) -> None:
    pids = [beat.pid for beat in heartbeat.read(Path(os.environ[FOLDER_VARIABLE])) if beat.pid != os.getpid()]
    for pid in (_launcher(), *pids, os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _terminate_launcher(trainer: Trainer, fault: Planted) -> None:
    os.kill(_launcher(), signal.SIGTERM)


def _launcher() -> int:
    return int(sys.argv[sys.argv.index("--launcher") + 1])


def _raise(trainer: Trainer, fault: Planted) -> None:
    raise RuntimeError(f"fault {fault.number} of the storm")


def _segfault(trainer: Trainer, fault: Planted) -> None:
    ctypes.string_at(0)


def _leave(trainer: Trainer, fault: Planted) -> None:
    os._exit(0)


def _drop(trainer: Trainer, fault: Planted) -> None:
    """Cut all connections, as a switch that loses its state: the next read or write fails."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.shutdown(socket.SHUT_RDWR)


def _disk(trainer: Trainer, fault: Planted) -> None:
    next_save(Path(os.environ[STORM_VARIABLE]).parent, fault, _hang_seconds(trainer))


def _stall(trainer: Trainer, fault: Planted) -> None:
    stand_still(_hang_seconds(trainer))


def _hang_seconds(trainer: Trainer) -> float:
    seconds = trainer.run.faults.hang_seconds
    assert seconds is not None, "a storm runs under a watchdog"
    return seconds


def _slow_down(trainer: Trainer, fault: Planted) -> None:
    time.sleep(SLOW_SECONDS)  # and at each "forward" from now on


def _stop(trainer: Trainer, fault: Planted) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _lock(trainer: Trainer, fault: Planted) -> None:
    library, until = ctypes.PyDLL(None), time.monotonic() + FOR_EVER_SECONDS
    while time.monotonic() < until:
        library.usleep(ctypes.c_uint(1_000_000))


def _skip(trainer: Trainer, fault: Planted) -> None:
    object.__setattr__(trainer.ranks, "__class__", _SkipsOnce)


class _SkipsOnce(Ranks):
    """Ranks of which this one skips the next reduction over all."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "__class__", Ranks)
        return values


def _other_shape(trainer: Trainer, fault: Planted) -> None:
    trainer.ranks.sum(torch.zeros(3, dtype=torch.int64))


def _spoil_loss(trainer: Trainer, fault: Planted) -> None:
    """Corrupt the loss of the next micro-batch, and with it the gradient."""
    forward = trainer.passes.forward

    def spoilt(*arguments: Any, **options: Any) -> torch.Tensor:
        trainer.passes.forward = forward
        return forward(*arguments, **options) * float("nan")

    trainer.passes.forward = spoilt


def _flip_weight(trainer: Trainer, fault: Planted) -> None:
    """Flip one of the lower bits of one element: too little to change the loss, too much for rounding to undo."""
    weight = local(trainer.share.parameters()[fault.number % len(trainer.share.parameters())].detach())
    if weight.numel():
        weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)


def _flip_bit(trainer: Trainer, fault: Planted) -> None:
    path = _shard_of_newest(trainer)
    if path is not None:
        with open(path, "r+b") as file:
            offset = random.Random(fault.number).randrange(path.stat().st_size)
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << fault.number % 8]))
    _die(trainer, fault)


def _cut_short(trainer: Trainer, fault: Planted) -> None:
    path = _shard_of_newest(trainer)
    if path is not None:
        os.truncate(path, path.stat().st_size // 2)
    _die(trainer, fault)


def _shard_of_newest(trainer: Trainer) -> Path | None:
    """A shard of the newest checkpoint; None if there is no earlier one to go back to."""
    checkpoints = sorted(candidates(RunFolder.of(trainer.run).checkpoints), key=lambda checkpoint: checkpoint.step)
    return next(iter(sorted(checkpoints[-1].path.glob("*.safetensors")))) if len(checkpoints) > 1 else None


Strike = Callable[[Trainer, Planted], None]
_AT_ONCE: dict[str, Strike] = {
    "kill-in-save": _die_in_save, "skip": _skip, "shape": _other_shape, "flip-file": _flip_bit, "cut-file": _cut_short,
    "nan": _spoil_loss, "flip-bit": _flip_weight, "full-disk": _disk, "flaky-disk": _disk, "slow-disk": _disk,
}  # fmt: skip
"""Faults that strike before the step."""
_AT_A_MOMENT: dict[str, Strike] = {
    "kill": _die, "power-cut": _cut_power, "terminate": _terminate_launcher, "raise": _raise, "segfault": _segfault,
    "leave": _leave, "stop": _stop, "lock": _lock, "drop": _drop, "stall": _stall, "slow": _slow_down,
}  # fmt: skip


def main() -> int:
    """Run one rank under the storm named by the environment."""
    plant(Storm.from_environment())
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
