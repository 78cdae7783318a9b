"""A trace of one rank, requested by a rank of a run: in a separate process, with limits on time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from ultrascale.config.resolve import to_toml
from ultrascale.description.run import Run

TRACE_SECONDS = 180.0
"""Longest time of a trace. A trace takes some ten seconds; neither a start nor an error report should wait longer than this."""
MOST_RANKS = 16_384
"""Most ranks of a job that is traced: the largest measured (`benchmarks/trace`); the time for larger jobs is unknown."""


class NoTraceError(RuntimeError):
    """No trace could be made; the message says why."""


def traced_rank(run: Run, rank: int, *, seconds: float = TRACE_SECONDS) -> dict[str, Any]:
    """Output of `ultrascale trace --json` for `rank` on CUDA. Raises NoTraceError if the job has more than `MOST_RANKS`, or the
    trace takes longer than `seconds`, lacks host memory, or fails."""
    world = run.layout.world_size
    if world > MOST_RANKS:
        raise NoTraceError(f"{world} ranks are more than the {MOST_RANKS} of the largest trace that was measured")
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as described:  # the run's folder may not have it yet
            described.write(to_toml(run))
            described.flush()
            words = [sys.executable, "-m", "ultrascale", "trace", described.name, "--rank", str(rank), "--device", "cuda"]
            done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=seconds, check=True)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise NoTraceError(f"it took longer than {seconds:.0f} s") from None
    except subprocess.CalledProcessError as failure:
        lines = [line.strip() for line in (failure.stderr or "").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ultrascale:")] or lines[-1:]
        raise NoTraceError(" ".join(errors) or f"it ended with {failure.returncode}") from failure
    except (OSError, ValueError) as failure:
        raise NoTraceError(f"{type(failure).__name__}: {failure}") from failure
