"""Three timeouts that must increase in this order, or a run that hangs is ended before it has reported why:

    faults.hang_seconds (90)    the watchdog names the rank that hangs
    collective_timeout (100)    gloo or NCCL gives up; until then Python runs no signal handler within the collective
    the grace period (120)      after a stop signal; then the processes are killed outright

`ultrascale train --processes N` ensures the second order itself, by a longer grace period. Under torchrun and a batch system,
theirs applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from ultrascale.description.run import Run

GRACE_SECONDS = 120.0
"""Time to save after a stop signal, unless collectives may take about as long."""
LEAVING_SECONDS = 20.0
"""Time to report a collective that took too long, and exit."""
TORCHRUN_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
TORCHRUN_GRACE_SECONDS = 30.0
"""Torch's default, if the variable is not set."""


def grace_seconds(run: Run) -> float:
    """Seconds between a stop signal and SIGKILL, for ranks started by `ultrascale train --processes N`."""
    return max(GRACE_SECONDS, run.collective_timeout_seconds + LEAVING_SECONDS)


def time_limit_notes(run: Run) -> Iterator[str]:
    """Notes on a run's timeouts: `hang_seconds` not below the timeout of collectives, or a stop that may take long."""
    timeout, hang = run.collective_timeout_seconds, run.faults.hang_seconds
    if run.layout.world_size == 1:
        return
    if hang is not None and hang >= timeout:
        order = f"faults.hang_seconds = {hang:g} is not below collective_timeout_seconds = {timeout:g}"
        yield f"{order}: of a hang it may be told who waited, but not for whom."
    if grace_seconds(run) > GRACE_SECONDS:
        long = f"collective_timeout_seconds = {timeout:g}: a stop may take {grace_seconds(run):g} s if a collective hangs"
        yield f"{long}; let no batch system kill the run sooner."


def grace_notes(run: Run, environment: Mapping[str, str]) -> list[str]:
    """A note if the grace period of this rank's torchrun, from its `environment`, is not above the timeout of collectives."""
    timeout = run.collective_timeout_seconds
    grace = environment.get(TORCHRUN_GRACE, f"{TORCHRUN_GRACE_SECONDS:g}")
    if "TORCHELASTIC_RUN_ID" not in environment or run.layout.world_size == 1:
        return []
    if grace.isdigit() and int(grace) > timeout:
        return []
    return [
        f"{TORCHRUN_GRACE} = {grace} is not above collective_timeout_seconds = {timeout:g}: a stop signal while a collective "
        f"hangs ends in SIGKILL, and nobody says why. Start torchrun with {TORCHRUN_GRACE}={ceil(grace_seconds(run))}."
    ]
