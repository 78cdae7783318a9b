"""The watchdog of a node: a separate process that reads the ranks' signs of life, and detects when they stop.

    python -m ultrascale.launch.watchdog FOLDER --parent PID

It shares only files with the ranks (`ultrascale.heartbeat`), so that a rank which is suspended, spins, or holds the
interpreter's lock cannot block it. When a rank is overdue it makes every rank write its stack (faulthandler does that in C,
without the lock) and torch's flight recorder, writes rank, collective and source line to `hang.json`, and kills the culprits:
the others then lose contact at once, and the launcher restarts them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ultrascale import console
from ultrascale.heartbeat import SKIPPED_FILES, Heartbeat, read

LOOK_SECONDS = 0.25
DUMP_SECONDS = 1.5
"""Seconds for a rank that does not wait for others to write its flight recorder; it cannot while the interpreter's lock is
held.
"""
MOST_DUMP_SECONDS = 10.0
"""Most seconds for all stacks, and for the flight recorders of waiting ranks: they can write, but a busy machine may be
slow."""
MOST_WOKEN_SECONDS = 60.0
"""Most seconds for a suspended rank to write its stack while the others are stopped, for very busy machines or disks."""
STACK_SIGNAL = signal.SIGUSR2
MOST_ARRIVALS, MOST_WAITING = 8, 2
HANG_FILE, DUMP_MARK, RECORDED = "hang.json", "dump", "recorded"
_MASKS = ("SigPnd", "ShdPnd", "SigBlk")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_SIZE = re.compile(r"\((\d+)\)$")
"""Size of a group of ranks, at the end of its name."""


@dataclass(frozen=True)
class Hang:
    """The findings about an overdue rank."""

    culprits: tuple[int, ...]
    """Ranks that the others waited for; all ranks if unknown."""
    reason: str
    """One line."""
    ranks: dict[int, str]
    """State of each rank, and its current source line."""
    steps_done: int


def watch(folder: Path, is_wanted: Callable[[], bool]) -> Hang | None:
    """Poll until a rank of `folder` is overdue, and handle the hang; None if `is_wanted` becomes False before."""
    while is_wanted():
        if _is_overdue(folder):
            time.sleep(LOOK_SECONDS)  # after a sleep, a machine wakes its ranks a little later than its clock
            if _is_overdue(folder):
                return _declare(folder)
        time.sleep(LOOK_SECONDS)
    return None


def _is_overdue(folder: Path) -> bool:
    return any(beat.overdue > 0 and _state(beat.pid) for beat in read(folder))


def _declare(folder: Path) -> Hang:
    beats = [beat for beat in read(folder) if _state(beat.pid)]
    stopped = [beat.rank for beat in beats if _state(beat.pid) in ("T", "t")]
    with suppress(OSError):  # a full disk: kill the culprit all the same
        (folder / DUMP_MARK).touch()
    before = {beat.pid: _writing_stacks(beat.pid) for beat in beats}
    _send(beats, STACK_SIGNAL)
    _wait_for_dumps(folder, [beat for beat in beats if beat.rank not in stopped], before)
    with _stopped_processes([beat for beat in beats if beat.rank not in stopped and stopped]):
        for beat in beats:
            if beat.rank in stopped:
                _wake_for_its_stack(folder, beat, before[beat.pid])
    hang = judge(beats, stopped, {beat.rank: innermost_line(_stack(folder, beat.rank)) for beat in beats})
    partial = folder / f"{HANG_FILE}.tmp"
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(hang)))
        partial.replace(folder / HANG_FILE)
    _send([beat for beat in beats if beat.rank in hang.culprits], signal.SIGKILL)
    return hang


def _send(beats: list[Heartbeat], number: int) -> None:
    """Send a signal to the ranks that still exist."""
    for beat in beats:
        with suppress(ProcessLookupError):
            os.kill(beat.pid, number)


def _wait_for_dumps(folder: Path, beats: list[Heartbeat], before: dict[int, set[str]]) -> None:
    """Waits until every rank has written its stack and its flight recorder, or its time is over."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < MOST_DUMP_SECONDS:
        stacks = all(_has_written(folder, beat, before[beat.pid]) for beat in beats if _state(beat.pid))
        late = [beat for beat in beats if _state(beat.pid) and not (folder / f"{beat.rank}.{RECORDED}").exists()]
        if stacks and (not late or (waited > DUMP_SECONDS and not any(beat.waiting for beat in late))):
            return
        time.sleep(0.01)


def _wake_for_its_stack(folder: Path, beat: Heartbeat, before: set[str]) -> None:
    """Continue a suspended process until it has handled the pending signal that writes its stack, then suspend it again. If it
    is suspended again before that, it is continued again: the one who suspends it may still be active, and the writing thread
    need not be the training thread. (A process held by a debugger does not continue.)"""
    deadline = time.monotonic() + (MOST_WOKEN_SECONDS if _state(beat.pid) == "T" else 0.0)
    with suppress(ProcessLookupError):
        os.kill(beat.pid, signal.SIGCONT)
        while not _has_written(folder, beat, before) and time.monotonic() < deadline:
            time.sleep(0.01)
            if _state(beat.pid) == "T":
                os.kill(beat.pid, signal.SIGCONT)
        os.kill(beat.pid, signal.SIGSTOP)


@contextmanager
def _stopped_processes(beats: list[Heartbeat]) -> Iterator[None]:
    """Context in which these ranks are suspended, so that a culprit that is continued cannot make progress with them."""
    try:
        _send(beats, signal.SIGSTOP)
        yield
    finally:
        _send(beats, signal.SIGCONT)


def _has_written(folder: Path, beat: Heartbeat, before: set[str]) -> bool:
    """True if a rank's stack is complete: faulthandler writes it line by line, in its signal handler."""
    return bool(_stack(folder, beat.rank)) and not _writing_stacks(beat.pid) - before


def _writing_stacks(pid: int) -> set[str]:
    """Threads of a process with a pending or blocked stack signal, which is blocked while they handle it. Empty without
    /proc."""
    threads = set()
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):
            masks = [line.partition(":") for line in path.read_text(errors="replace").splitlines()]
            if any(int(mask, 16) >> STACK_SIGNAL - 1 & 1 for name, _, mask in masks if name in _MASKS):
                threads.add(path.parent.name)
    return threads


def judge(beats: list[Heartbeat], stopped: list[int], lines: dict[int, str]) -> Hang:
    """Find the ranks to blame for a hang. `stopped`: ranks whose processes are suspended; `lines`: each rank's source line."""
    doing = {beat.rank: _doing(beat, lines.get(beat.rank, "")) for beat in beats}
    steps = min((beat.steps_done for beat in beats), default=0)
    prefix = f"no sign of life in step {steps}"
    busy = [beat.rank for beat in beats if not beat.waiting]
    if stopped:
        waiting = [beat.rank for beat in beats if beat.waiting and beat.rank not in stopped]
        details = "; ".join(f"rank {rank} {doing[rank]}" for rank in [*stopped, *waiting[:1]])
        why = f"{_names(stopped)} stopped by a signal (SIGSTOP, or a debugger)"
        return Hang(tuple(stopped), f"{prefix}: {why}: {details}", doing, steps)

    def absent(culprits: list[int]) -> Hang:
        where = "; ".join(f"rank {rank}: {doing[rank]}" for rank in culprits)
        others = next(f"rank {rank} {text}" for rank, text in doing.items() if rank not in culprits)
        return Hang(tuple(culprits), f"{prefix}: {where}, and did not come to where {others}", doing, steps)

    if busy and len(busy) < len(beats):
        return absent(busy)
    if (differing := disagreement(beats)) is not None:
        odd, text = differing
        return Hang(odd, f"{prefix}: {text}", doing, steps)
    if behind := _behind(beats):
        return absent(behind)
    everybody = tuple(beat.rank for beat in beats)
    where = "; ".join(f"rank {rank} {text}" for rank, text in doing.items())
    return Hang(everybody, f"{prefix}: {where}{_elsewhere(beats)}", doing, steps)


def keep_hang(folder: Path, keep: Path) -> None:
    """Copy stacks, flight recorders and the verdict to `keep`, because `folder` is removed with the attempt."""
    target = keep / f"hang-{time.strftime('%Y%m%d-%H%M%S')}"
    with suppress(OSError):  # a full disk, or a run's folder that was removed
        target.mkdir(exist_ok=True)
        for pattern in (HANG_FILE, "*.stack", "*.trace.json"):
            for file in folder.glob(pattern):
                shutil.copy(file, target)


def meanwhile(beats: list[Heartbeat], rank: int, missed: list[str]) -> str:
    """Continuation of the report that `rank` died: its last state, and which ranks waited for what. `missed`: reports of ranks
    before they were ended; for ranks without one, their signs of life."""
    where = [f" (its last sign of life: {beat.doing})" for beat in beats if beat.rank == rank]
    waited = [f"rank {beat.rank} {_doing(beat, '')}" for beat in beats if beat.rank != rank and beat.waiting]
    return "".join(where) + "".join(f"; {text}" for text in [*missed, *waited][:MOST_WAITING])


def _elsewhere(beats: list[Heartbeat]) -> str:
    """Ranks of other nodes, unseen by this watchdog, that ranks of this node wait for."""
    groups = {beat.collectives[-1].group for beat in beats if beat.waiting and beat.collectives}
    beyond = sorted(group for group in groups if (size := _SIZE.search(group)) and int(size[1]) > len(beats))
    if not beyond:
        return ""
    return f". Others of {', '.join(beyond)} are on other nodes: look at the network between, and at what is told there"


def disagreement(beats: list[Heartbeat]) -> tuple[tuple[int, ...], str] | None:
    """The first collective of a group that its ranks did not all call in the same order, and the ranks that differ: all of them
    if there is no majority."""
    came: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for beat in beats:
        for group, number, what, _ in beat.collectives:
            came[group, number][beat.rank] = what
    for (group, number), whats in sorted(came.items()):
        if len(set(whats.values())) > 1:
            most, count = Counter(whats.values()).most_common(1)[0]
            odd = [rank for rank, what in whats.items() if what != most] if count * 2 > len(whats) else list(whats)
            lines = {beat.rank: op.line for beat in beats for op in beat.collectives if op[:2] == (group, number)}
            arrivals = [f"rank {rank} came to {what}{_in_brackets(lines[rank])}" for rank, what in sorted(whats.items())]
            words = ", ".join(arrivals[:MOST_ARRIVALS])
            return tuple(sorted(odd)), f"collective {number} of {group} differs: {words}"
    return None


def _behind(beats: list[Heartbeat]) -> list[int]:
    """Ranks that wait elsewhere while others wait in a collective that they have not reached; none if that holds for all."""
    ahead: dict[str, int] = {}
    for beat in beats:
        if beat.collectives and beat.collectives[-1].what.startswith(beat.doing):
            group, number, _, _ = beat.collectives[-1]
            ahead[group] = max(number, ahead.get(group, -1))
    came = {beat.rank: {op.group: op.number for op in beat.collectives} for beat in beats}
    behind = [
        rank
        for rank, numbers in came.items()
        if any(numbers[group] < most for group, most in ahead.items() if group in numbers)
    ]
    return behind if len(behind) < len(beats) else []


def innermost_line(stack: str) -> str:
    """The innermost line of our code in a faulthandler stack of all threads, for the training thread: the one deepest in our
    code. Empty if there is none."""
    best: list[str] = []
    for thread in stack.split("\n\n"):
        if "_bootstrap_inner" in thread:
            continue
        frames = [(match["file"].rpartition("/ultrascale/"), match) for match in _FRAME.finditer(thread)]
        inside = [(file, match) for (_, package, file), match in frames if package and not file.startswith(("tests/", "src/"))]
        inside = [(file, match) for file, match in inside if file not in SKIPPED_FILES] or inside
        lines = [f"{file}:{match['line']} in {match['function']}" for file, match in inside]
        best = max(best, lines, key=len)
    return best[0] if best else ""


def _stack(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.stack"
    return path.read_text(errors="replace") if path.exists() else ""


def _doing(beat: Heartbeat, line: str) -> str:
    if not line and beat.waiting and beat.collectives and beat.collectives[-1].what.startswith(beat.doing):
        line = beat.collectives[-1].line
    return f"{'waited in ' if beat.waiting else 'was at '}{beat.doing}{_in_brackets(line)}"


def _in_brackets(line: str) -> str:
    return f" ({line})" if line else ""


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'are' if len(ranks) > 1 else 'is'}"


def _state(pid: int) -> str:
    """The letter of a process's state in /proc; `?` for a live process without /proc, empty if it is gone or dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state in ("Z", "X") else state
    except OSError:
        if Path("/proc/self").exists():
            return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "?"


def main() -> int:
    """Watch until the parent is gone or a rank is overdue."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals of a terminal or batch system are for the run, which we outlast
    hang = watch(arguments.folder, lambda: os.getppid() == arguments.parent)
    if hang is not None:
        console.print_line(f"ultrascale: hang: {hang.reason}", "stderr")
    return 0


if __name__ == "__main__":
    sys.exit(main())
