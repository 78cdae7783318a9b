"""Checkpoints of a run on a disk that may fail: the response to a failed save.

A save that fails after its own retries (`checkpoint.disk.patience`) has changed nothing: earlier checkpoints are intact. A run
of weeks should not end because a disk was full for a minute, nor should it train for days without a checkpoint:

    report    a line on the console, an event, and the step to which the run would go back
    retry     after a tenth of the interval, in the foreground, so that its outcome is known; after the last step, at once
    abort     after `checkpoint.failures_allowed` failures in a row: by default one interval after the first failure

Every rank counts alike, since `checkpoint` fails on all ranks together. A state that cannot be saved because of its contents (a
NaN, parts that do not fit) ends the run at once, as does a failure of the last save: there would be no retry.
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
    """Decides when to save, and how to respond to a failure."""

    saver: Saver
    settings: Checkpoint
    report: Callable[[int, str], None]
    """Called with the step and a message about a failed save."""
    saved_at: int
    """Steps done at the newest checkpoint; -1 if there is none."""
    last_step: int
    """Number of steps of the run: its last save is after them."""
    failed: int = 0
    """Failed saves in a row."""
    retry_at: int | None = None
    _known: int = field(init=False)
    """As `saved_at`, but only saves known to be on disk; a save in the background may be in flight."""

    def __post_init__(self) -> None:
        self._known = self.saved_at

    def restored(self, step: int) -> None:
        """The run has gone back to the checkpoint of `step`."""
        self.saved_at, self._known, self.retry_at = step, step, None

    def is_due(self, steps_done: int) -> bool:
        """True if a save, or the retry of a failed one, is due after so many steps."""
        every = self.settings.every_steps
        return (every is not None and steps_done % every == 0) or steps_done == self.retry_at

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any], *, last: bool = False) -> None:
        """Save the state of `step`. Raises CheckpointError if it fails and training must not go on; with `last`, on any
        failure."""
        waits = last or self.failed > 0 or not self.settings.asynchronous

        def once() -> None:
            self.saver.save(step, tensors, facts, finite=True)
            self._known = self.saved_at  # a pending save is finished by now
            if waits:
                self.saver.wait()
                self._known, self.failed = step, 0

        if last:
            once()
        elif not self._succeeds(step, once):
            return
        self.saved_at, self.retry_at = step, None

    def settle(self, step: int) -> None:
        """Wait for a save in the background. If it fails, that is reported, and `saved_at` returns to its earlier value."""
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
            pause = max(1, (self.settings.every_steps or RETRIES_AN_INTERVAL) // RETRIES_AN_INTERVAL)
            self.retry_at = min(step + pause, self.last_step)
            self.report(step, self._failure_text(step, error))
            return False

    def _failure_text(self, step: int, error: SaveFailedError) -> str:
        before = "nothing is saved yet" if self.saved_at < 0 else f"the newest checkpoint is of step {self.saved_at}"
        remaining = self.settings.failures_allowed - self.failed + 1
        if step >= self.last_step:
            retry = "once more at once, since no step is left; if that fails too, the run ends without it"
        else:
            retry = f"once more at step {self.retry_at}; {remaining} more in a row end the run"
        return f"WARNING: saving failed at step {step}, {before}; {retry} (checkpoint.failures_allowed): {error}"
