"""Checkpoints of a run while a disk may fail: what is done when one cannot be written.

A save that fails after its own retries (`checkpoint.disk.patience`) has changed nothing: what was saved before is whole. A run
of weeks should not end because a disk was full for a minute, and should not train on for days without a net either:

    told      a line on the console, an event, and to which step the run would go back
    again     after a tenth of the interval, in the foreground, so that its outcome is known
    the end   after `checkpoint.failures_allowed` in a row: by default the interval's length after the first one failed

Every rank counts alike, since `checkpoint` fails on all ranks together. A state that cannot be saved for what it is (a NaN,
parts that do not fit) ends the run at once, as does the last save of all: nothing would come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ultrascale.checkpoint import SaveFailedError, Saver, Tensors
from ultrascale.description.run import Checkpoint

RETRIES_AN_INTERVAL = 10


@dataclass
class Saves:
    """When to save, and what to make of a failure."""

    saver: Saver
    settings: Checkpoint
    report: Callable[[int, str], None]
    """Given the step and what to say of a save that failed."""
    saved_at: int
    """Steps done at the newest checkpoint; -1 if there is none."""
    failed: int = 0
    """Saves in a row."""
    retry_at: int | None = None
    _known: int = field(init=False)
    """As `saved_at`, of what is known to be on disk; a save in the background may be under way."""

    def __post_init__(self) -> None:
        self._known = self.saved_at

    def restored(self, step: int) -> None:
        """The run has gone back to the checkpoint of `step`."""
        self.saved_at, self._known, self.retry_at = step, step, None

    def is_due(self, steps_done: int) -> bool:
        """True if a save, or another try of a failed one, is due after so many steps."""
        every = self.settings.every_steps
        return (every is not None and steps_done % every == 0) or steps_done == self.retry_at

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any], *, last: bool = False) -> None:
        """Save the state of `step`. Raises CheckpointError if it cannot be saved and that must not go on; `last`: at all."""
        waits = last or self.failed > 0 or not self.settings.asynchronous

        def once() -> None:
            self.saver.save(step, tensors, facts, finite=True)
            self._known = self.saved_at  # whatever was under way is done
            if waits:
                self.saver.wait()
                self._known, self.failed = step, 0

        if last:
            once()
        elif not self._succeeds(step, once):
            return
        self.saved_at, self.retry_at = step, None

    def settle(self, step: int) -> None:
        """Wait for a save in the background; if it fails that is told, and `saved_at` is what was before."""
        try:
            self.saver.wait()
            self._known = self.saved_at
        except SaveFailedError as error:
            self.saved_at = self._known
            self.report(step, f"WARNING: a save in the background failed: {error}")

    def _succeeds(self, step: int, work: Callable[[], object]) -> bool:
        try:
            work()
            return True
        except SaveFailedError as error:
            self.failed, self.saved_at = self.failed + 1, self._known
            if self.failed > self.settings.failures_allowed:
                raise
            self.retry_at = step + max(1, (self.settings.every_steps or RETRIES_AN_INTERVAL) // RETRIES_AN_INTERVAL)
            self.report(step, self._failure_text(step, error))
            return False

    def _failure_text(self, step: int, error: SaveFailedError) -> str:
        before = "nothing is saved yet" if self.saved_at < 0 else f"the newest checkpoint is of step {self.saved_at}"
        remaining = self.settings.failures_allowed - self.failed + 1
        retry = f"once more at step {self.retry_at}; {remaining} more in a row end the run"
        return f"WARNING: saving failed at step {step}, {before}; {retry} (checkpoint.failures_allowed): {error}"
