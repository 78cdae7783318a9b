"""Liveness reports of this rank: signs of life, a stack on demand, torch's flight recorder on demand.

Under `ultrascale train --processes N` the launcher has created the folder and started the watchdog. Under torchrun the first
rank of each node does both, and sends the path to the others of its node; after a failure the next attempt reads the folder
(`train.start.attempts`).

In phases that may take longer than any step (`slow_part`), waits for other ranks have a longer limit, and the watchdog does not
report a hang (`parallel.time_limits`).
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ultrascale import console, heartbeat
from ultrascale.description.run import Run
from ultrascale.launch.scratch import SIGNS_PREFIX, folder_with_space, sweep
from ultrascale.launch.warm import FOLDER_VARIABLE
from ultrascale.launch.watchdog import DUMP_MARK, RECORDED, STACK_SIGNAL
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import SLOW_SECONDS
from ultrascale.torch_private import flight_record
from ultrascale.train.trainer import Trainer

FOLDER_PREFIX = SIGNS_PREFIX
LOOK_SECONDS = 0.5


_folder_of_torchrun: Path | None = None


@dataclass
class Signs:
    """Folder of this rank's signs of life, and its owner."""

    folder: Path | None = None
    """None: there is no watchdog."""
    leads: bool = False
    """True if this rank created the folder, for the ranks of its node."""
    is_kept: bool = False
    """True to leave the folder in place for the next attempt."""
    has_begun: bool = False
    """True once this rank is ready for its first step."""


def signs_folder() -> Path | None:
    """Folder that this rank's watchdog and the next attempt read; None if there is no watchdog."""
    return Path(os.environ[FOLDER_VARIABLE]) if has_launcher() else _folder_of_torchrun


def started_by_torchrun() -> bool:
    """True if torchrun started this rank, and will restart it if it fails."""
    return not has_launcher() and "TORCHELASTIC_RUN_ID" in os.environ


def has_launcher() -> bool:
    """True if `ultrascale train --processes N` started this rank."""
    return FOLDER_VARIABLE in os.environ


@contextmanager
def watched(run: Run, ranks: Ranks) -> Iterator[Signs]:
    """Context in which a watchdog outside this process checks that this rank makes progress."""
    global _folder_of_torchrun
    if ranks.world * run.islands.count == 1 or run.faults.hang_seconds is None:
        yield Signs()
        return
    with ExitStack() as leaving:
        given = os.environ.get(FOLDER_VARIABLE)
        signs = Signs(Path(given)) if given else leaving.enter_context(_folder_of_node(ranks))
        folder = _folder_of_torchrun = signs.folder
        if folder is None:
            yield signs
            return
        try:
            stack = leaving.enter_context(open(folder / f"{ranks.process}.stack", "w"))
            faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
            leaving.callback(faulthandler.unregister, STACK_SIGNAL)
            group_prefix = "" if ranks.store is None else f"island {ranks.island}, "
            # From here on the signal may come.
            heartbeat.start(folder, ranks.process, hang_seconds=run.faults.hang_seconds, group_prefix=group_prefix)
            leaving.callback(heartbeat.stop)
        except OSError as error:
            problem = f"a hang of it will not be seen: no room for its signs of life in {folder} ({error.strerror})"
            console.print_line(f"warning: rank {ranks.rank} is not watched, and {problem}", "stderr")
        over = threading.Event()
        threading.Thread(target=_record_on_demand, args=(folder, ranks.process, over), daemon=True, name="recorder").start()
        leaving.callback(over.set)
        yield signs


@contextmanager
def _folder_of_node(ranks: Ranks) -> Iterator[Signs]:
    """A folder for this node's ranks, with a watchdog. Collective over all ranks."""
    signs = Signs()
    node, prepared = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '0')}", ""
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    with ExitStack() as leaving:
        if leads:
            sweep()
            try:
                prepared = str(folder_with_space(FOLDER_PREFIX, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))))
            except OSError as error:
                problem = f"no place has room for signs of life ({error.strerror})"
                console.print_line(f"warning: ranks are not watched, and a hang of them will not be seen: {problem}", "stderr")
        if prepared:
            leaving.callback(lambda: None if signs.is_kept else shutil.rmtree(prepared, ignore_errors=True))
            words = [sys.executable, "-m", "ultrascale.launch.watchdog", prepared, "--parent", str(os.getpid())]
            watchdog = subprocess.Popen(words, stdin=subprocess.DEVNULL)
            leaving.callback(watchdog.wait)
            leaving.callback(watchdog.terminate)
        gathered = [text.partition("\n") for text in ranks.gather_text(f"{node}\n{prepared}")]
        node_folder = next((folder for name, _, folder in gathered if name == node and folder), None)
        signs.folder, signs.leads = Path(node_folder) if node_folder else None, leads
        yield signs


def _record_on_demand(folder: Path, rank: int, over: threading.Event) -> None:
    """Write torch's flight recorder when the watchdog requests it. (Impossible while another thread holds the interpreter's
    lock: then the recorders of the other ranks show what they wait for.)"""
    while not over.wait(LOOK_SECONDS):
        if (folder / DUMP_MARK).exists():
            with suppress(OSError):
                if (record := flight_record()) is not None:
                    (folder / f"{rank}.trace.json").write_text(record)
                (folder / f"{rank}.{RECORDED}").touch()
            return


@contextmanager
def slow_part(trainer: Trainer, doing: str, then_seconds: float) -> Iterator[None]:
    """Context in which waits for ranks may take SLOW_SECONDS; afterwards `then_seconds`. All ranks enter and leave together."""
    mesh, ranks = trainer.share.mesh, trainer.ranks
    with heartbeat.patient(doing, SLOW_SECONDS):
        mesh.limit_waits(ranks, SLOW_SECONDS)
        try:
            yield
            ranks.barrier()
        finally:
            mesh.limit_waits(ranks, then_seconds)
