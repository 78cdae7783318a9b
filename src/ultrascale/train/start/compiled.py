"""Cache of compiled blocks for the next start, and the time that compiling took.

The output of torch's compiler (`torch.compiler.save_cache_artifacts`: Python, C++ and Triton's binaries, by a hash of the
graph, torch's version and the device) is one file in the run's folder. A resumed run loads it before its first step and
compiles nothing, even on another machine of the same kind; blocks without a matching entry are compiled. The file contains
code: trust a run's folder like the program itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ultrascale.heap import return_free_memory
from ultrascale.torch_private import seconds_of_compiling
from ultrascale.train.session.moments import LoopObserver, Session, StepDone
from ultrascale.train.step import Observer, Step

TOTAL = "total_wall_time"
"""Entry of torch's table of times for all phases of compilation, forward and backward."""


def load_compiled(path: Path) -> bool:
    """Load the compiled blocks in `path` into the compiler's cache. False if there are none, or this torch cannot read them."""
    try:
        return torch.compiler.load_cache_artifacts(path.read_bytes()) is not None
    except (OSError, RuntimeError, ValueError, EOFError):
        return False


def save_compiled(path: Path) -> bool:
    """Write the blocks that this process has compiled or loaded to `path`. False if there are none, or the disk is full."""
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return False
    written = path.with_suffix(".partial")
    try:
        written.write_bytes(artifacts[0])
        os.replace(written, path)
    except OSError:
        written.unlink(missing_ok=True)
        return False
    return True


def compile_seconds() -> float:
    """Seconds that this process has spent compiling so far; cached blocks take little."""
    return float(seconds_of_compiling().get(TOTAL, 0.0))


class KeptCompiled(LoopObserver):
    """Saves compiled blocks for the next start, once: after the first step."""

    is_done = False

    def after_step(self, session: Session, done: StepDone) -> None:
        """Save them."""
        if not self.is_done and session.ranks.is_first:
            save_compiled(session.folder.compiled)
        self.is_done = True


class FreedAfterCompiling(Observer):
    """Returns the compiler's memory to the system, once: after the first step."""

    is_done = False

    def updated(self, step: Step) -> None:
        """Free the memory."""
        if not self.is_done:
            return_free_memory()
        self.is_done = True

    passed_over = updated
