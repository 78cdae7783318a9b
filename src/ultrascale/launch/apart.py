"""Islands of this machine, each with its own command: an island that dies is restarted by its own launcher, without the others.

ultrascale train RUN.TOML              starts, for every island,
    ultrascale train RUN.TOML --island N       which starts and restarts the island's processes (`launch.local`)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from ultrascale.catalogue.machines import usable_cores
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.launch.orphans import terminate_with_parent
from ultrascale.launch.scratch import scratch_folder
from ultrascale.launch.stopping import handled_by


def launch_islands(run_toml: str, run: Run, flags: tuple[str, ...]) -> int:
    """Train the resolved `run`, given as text in `run_toml`, on all of its islands on this machine. Returns the highest of
    their exit codes. A stop signal is forwarded to all of them, which save and exit.

    Raises SpecError if there are GPUs, but fewer than ranks.
    """
    count, ranks, devices = run.islands.count, run.num_processes, _devices() if run.device != "cpu" else []
    if 0 < len(devices) < ranks:
        wanted = f"{count} islands of {' + '.join(map(str, run.worlds))} ranks need {ranks} GPUs"
        rule = f"is too many for this machine: {wanted}, and it has {len(devices)}"
        raise mistake("islands.count", rule, 'Start some of them elsewhere with --island, or use device = "cpu".')
    with scratch_folder("islands") as folder:
        (folder / "run.toml").write_text(run_toml)
        words = [sys.executable, "-m", "ultrascale", "train", str(folder / "run.toml"), *flags, "--island"]
        threads = str(max(1, usable_cores() // count))
        started: list[subprocess.Popen[bytes]] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            for process in started:
                if process.poll() is None:
                    process.send_signal(signal.Signals(number))

        with handled_by(pass_on):
            for island in range(count):
                visible = ",".join(devices[sum(run.worlds[:island]) : sum(run.worlds[: island + 1])])
                started.append(_start([*words, str(island)], {"CUDA_VISIBLE_DEVICES": visible} if devices else {}, threads))
            return max(process.wait() if process.wait() >= 0 else 1 for process in started)


def _devices() -> list[str]:
    """GPUs of this machine that this command may use."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[: torch.cuda.device_count()] if visible else [*map(str, range(torch.cuda.device_count()))]


def _start(words: list[str], devices: dict[str, str], threads: str) -> subprocess.Popen[bytes]:
    """Start a command in its own session: signals of the terminal reach it only through this process."""
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=terminate_with_parent,
        env={"OMP_NUM_THREADS": threads, **os.environ, **devices},
    )
