"""Processes on this machine, through torchrun.

torchrun watches the workers and starts all of them again when one dies; they then go on from the newest whole checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def launch_local(run_file: Path, num_processes: int, *, max_restarts: int = 3, arguments: list[str] | None = None) -> int:
    """Run the worker on `num_processes` processes of this machine and return torchrun's exit code.

    `run_file` is the resolved run that every worker reads; `arguments` are passed on to the worker.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
        f"--max-restarts={max_restarts}", "--no-python", sys.executable, "-m", "ultrascale.train.worker", str(run_file),
        *(arguments or []),
    ]  # fmt: skip
    return wait_for(subprocess.Popen(command, env=worker_environment(num_processes)))


def worker_environment(num_processes: int) -> dict[str, str]:
    """The environment of the processes: cores shared out, and every attempt with a store of its own."""
    defaults = {
        # torchrun 2.11 to 2.13 keeps its store over restarts, where new workers then find the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {**defaults, **os.environ}


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait for `process`; on Ctrl-C, which reaches it as well, give it the time to save and leave."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
