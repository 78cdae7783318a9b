"""Environment variables of every rank, each with its reason. Variables that torch or NCCL set well themselves are omitted.

Variables in `launch.environment` come last and override.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ultrascale.config.rules.time_limits import TORCHRUN_GRACE
from ultrascale.jobs.job import Job


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    value: str
    reason: str


def variables(job: Job) -> list[Variable]:
    """Variables in the order of the text; each name once."""
    by_name = {var.name: var for var in (*_default_variables(job), *_configured_variables(job))}
    return list(by_name.values())


def _default_variables(job: Job) -> Iterator[Variable]:
    launch = job.launch
    yield Variable("PYTHONUNBUFFERED", "1", "Lines are in the log as soon as they are printed, even if the rank is killed next")
    yield Variable(
        TORCHRUN_GRACE,
        str(job.grace),
        f"Ranks that take longer to save and leave are killed by torchrun. Time limit: {job.grace_reason}",
    )
    if launch.network_interface is not None:
        yield Variable(
            "NCCL_SOCKET_IFNAME",
            launch.network_interface,
            "Interface over which ranks connect: a guess may be a bridge or loopback",
        )
        yield Variable("GLOO_SOCKET_IFNAME", launch.network_interface, "The same for gloo, which carries barriers and saves")
    if not job.on_gpus:
        return
    yield Variable(
        "PYTORCH_ALLOC_CONF", "expandable_segments:True",
        "Freed memory is one range: no fragmentation by tensors of many lengths; a full GPU does not stall in cudaFree. (Up to "
        "torch 2.8 called PYTORCH_CUDA_ALLOC_CONF.)",
    )  # fmt: skip
    yield Variable("NCCL_DEBUG", "WARN", "Reports the failed call and the reason; INFO prints thousands of lines per start")
    yield Variable(
        "NCCL_IB_TIMEOUT", "22", "A link that flaps for seconds is retried (4 us x 2^22 = 17 s per try) and ends nothing"
    )
    if launch.network_cards is not None:
        yield Variable("NCCL_IB_HCA", launch.network_cards, "NCCL uses only these cards, not those of storage")


def _configured_variables(job: Job) -> Iterator[Variable]:
    for text in job.launch.environment:
        name, _, value = text.partition("=")
        yield Variable(name, value, "launch.environment")
