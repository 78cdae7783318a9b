"""Bitwise repeatable training: `deterministic = true` of a run.

On CUDA some of torch's kernels add in the order in which threads arrive: gradients of gathers and of attention, and products
that cuBLAS splits where its workspace allows. In deterministic mode torch takes other kernels, or raises an error that names
the operation without one; flash attention runs its backward pass in a fixed order; a kernel whose gradients differ between two
passes is never chosen (`kernels.choice.contest`), and the compiler does not choose by timing. On the CPU everything here is
deterministic anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as of_torch

from ultrascale.description.run import Run
from ultrascale.torch_private import compiler_settings

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Workspace sizes with which cuBLAS gives the same bits every time (cuBLAS's documentation, "Results Reproducibility"). The
large one costs 24 MiB and no speed.
"""


@contextmanager
def deterministic(run: Run) -> Iterator[None]:
    """Context in which torch is deterministic if `run` asks for it. Enter it before this process uses CUDA."""
    if not run.deterministic:
        yield
        return
    if os.environ.get(WORKSPACE_VARIABLE) not in WORKSPACES:
        os.environ[WORKSPACE_VARIABLE] = WORKSPACES[0]
    before = torch.are_deterministic_algorithms_enabled()
    filled = of_torch.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(True)
    # Filling is a pass over all new memory, and no code here reads unwritten memory.
    of_torch.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if run.compile:
        _steady_compiler()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        of_torch.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]


def deterministic_line(run: Run) -> list[str]:
    """Line for the log if the run is deterministic; none otherwise."""
    if not run.deterministic:
        return []
    return ["deterministic: torch's deterministic algorithms; kernels whose gradients differ between two passes take no part"]


def _steady_compiler() -> None:
    """Make torch's compiler choose kernels without timing, where it can."""
    config = compiler_settings()
    if hasattr(config, "deterministic"):
        config.deterministic = True
