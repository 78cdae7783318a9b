"""`Saver`: repeated saves during a run, in the foreground or in the background, and removal of old checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ultrascale.checkpoint.coordination import Coordinator, coordinating
from ultrascale.checkpoint.disk.folders import candidates, check_writable, discard, step_folder, sweep
from ultrascale.checkpoint.disk.nodes import NodeDisks, find_disks, verify_on_disks
from ultrascale.checkpoint.errors import CheckpointError, LostContactError, SaveFailedError
from ultrascale.checkpoint.loading import verify
from ultrascale.checkpoint.saving import SavePlan, copy_to_host, expect_same_folder, plan_save, write_and_publish
from ultrascale.checkpoint.slices import Tensors
from ultrascale.open_folder import OpenFolder


class Saver:
    """Saves into `root` and keeps the `keep` newest valid checkpoints (0: all) and every multiple of `keep_every_steps`.

    A new checkpoint is read back in full, once, before any older one is removed for it.

    All methods are collective over `process_group` (all ranks by default). The constructor checks that every rank can write and
    sees what rank 0 writes, and removes leftovers of killed runs, so one job at a time may own `root`. Rank 0 holds that folder
    open: once the path no longer leads to it, nothing is written or removed there, and each save fails until `use` names
    another place. With `disks` (`disk.nodes.find_disks`), `root` may be on several disks: each then has the shards of its own
    ranks, and its leader does there what rank 0 does otherwise.

    With `asynchronous`, `save` returns once the data are copied to host memory (each rank copies only what it will write), and
    a thread does the rest through its own gloo group. At most one save is pending: the next one waits for it. An error in the
    background is raised on every rank by the next `save`, `wait` or `close`.

    `published` is called with each checkpoint once it is published, on every rank, in the thread that wrote it. Checkpoints
    that `spared` returns on a rank that removes are not removed yet.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 2,
        keep_every_steps: int | None = None,
        asynchronous: bool = False,
        process_group: dist.ProcessGroup | None = None,
        published: Callable[[Path, Coordinator], None] | None = None,
        spared: Callable[[], Collection[str]] = tuple,
        disks: NodeDisks | None = None,
    ):
        if keep < 0 or (keep_every_steps is not None and keep_every_steps < 1):
            raise CheckpointError(
                f"keep {keep}, keep_every_steps {keep_every_steps}: expected keep >= 0 and a positive interval."
            )
        self.root = Path(root)
        self.keep = keep
        self.keep_every_steps = keep_every_steps
        self._published, self._spared = published, spared
        self._pending: Future[Path] | None = None
        self._verified: set[str] = set()
        self._resources = ExitStack()
        self._ranks = self._resources.enter_context(coordinating(process_group, always_new_group=True))
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._ranks.agree("before the first save", lambda: check_writable(self.root))
        self._disks = disks or self._expect_one_folder()
        doing = "removing leftovers"
        self.swept: list[str] = self._ranks.agree(doing, lambda: sweep(self.root) if self._disks.leads else [])
        """Names of unfinished saves and deletions of earlier runs that this rank removed."""
        self._open_folder: OpenFolder | None = None
        self._resources.callback(self._release)
        self.use(self.root)

    def _expect_one_folder(self) -> NodeDisks:
        """Raises CheckpointError on every rank if `root` is a different folder for some ranks, as on local disks of several
        nodes."""
        disks = find_disks(self.root, self._ranks)
        doing = f"looking for what rank 0 wrote into {self.root}"
        self._ranks.agree(doing, lambda: _expect_seen(disks))
        return disks

    def use(self, root: Path) -> None:
        """Save into `root` from now on; creates it if its parent exists. Raises CheckpointError, also for the pending save."""
        self.wait()
        self._verified.clear()
        self.root = Path(root)
        self._ranks.agree(f"opening {self.root}", self._open)

    def fate(self) -> str:
        """Event by which `root` was lost, as in `was removed`, on a rank that holds it; empty while the path leads to the
        original folder."""
        return "" if self._open_folder is None else self._open_folder.fate()

    def _open(self) -> None:
        self._release()
        if self._disks.leads:
            self.root.mkdir(exist_ok=True, parents=self._ranks.rank > 0)  # a refuge is created on rank 0's disk alone
            self._open_folder = OpenFolder(self.root)

    def _release(self) -> None:
        if self._open_folder is not None:
            self._open_folder.close()
            self._open_folder = None

    def save(self, step: int, tensors: Tensors, metadata: dict[str, Any], *, finite: bool = False) -> Path:
        """Save as `checkpoint.save` does. Returns the checkpoint's folder, which exists once `wait` returns.

        Raises CheckpointError on every rank, SaveFailedError if the disk is to blame, for this save or for the pending one; in
        the latter case this save was not begun. With `finite` also if any rank holds a NaN or an infinity, so that no good
        checkpoint is removed for a corrupt one.
        """
        self.wait()
        plan = plan_save(self.root, step, tensors, metadata, ranks=self._ranks, finite=finite)
        plan = replace(plan, open_folder=self._open_folder, disks=self._disks)
        if self._thread is None:
            return self._write(plan)
        copied = self._ranks.agree(f"copying step {step} to host memory", lambda: copy_to_host(plan))
        self._pending = self._thread.submit(self._write, copied)
        return step_folder(self.root, step)

    def wait(self) -> Path | None:
        """Wait for the pending save. Returns its folder, None if there was none. Raises its CheckpointError, once."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the pending save and free the thread and the group. Raises its CheckpointError."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._resources.close()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, plan: SavePlan) -> Path:
        try:
            folder = write_and_publish(plan, ranks=self._ranks)
            self._verified.discard(folder.name)  # another save of the same step
            if self._published is not None:
                self._published(folder, self._ranks)
            if self.keep:
                self._prune(plan.step, folder)
        except LostContactError:
            raise
        except CheckpointError as error:
            raise SaveFailedError(str(error)) from error
        return folder

    def _prune(self, step: int, newest: Path) -> None:
        """Remove checkpoints older than the `keep` newest valid ones up to `step`, the newest of which must be valid.

        Later steps (an abandoned future) stay until training passes them.
        """
        listed = self._ranks.agree("listing checkpoints", lambda: self._listed(up_to=step) if self._disks.leads else [])
        checkpoints = self._ranks.broadcast(_newest_first(self._ranks.gather(listed) or []))
        if len(checkpoints) <= self.keep:
            return
        self._verify(newest.name)
        num_kept, doomed = 0, []
        for number, name in checkpoints:
            if num_kept < self.keep:
                num_kept += self._is_valid(name)
            elif not (self.keep_every_steps and number % self.keep_every_steps == 0):
                doomed.append(name)
        if doomed:
            self._ranks.agree("removing old checkpoints", lambda: self._discard(doomed) if self._disks.leads else None)

    def _discard(self, doomed: list[str]) -> None:
        """Remove these checkpoints from this disk, as far as it has them."""
        for name in doomed:
            expect_same_folder(self._open_folder)
            if name not in self._spared():
                discard(self.root / name)

    def _listed(self, *, up_to: int) -> list[tuple[int, str]]:
        return [(candidate.step, candidate.path.name) for candidate in candidates(self.root) if candidate.step <= up_to]

    def _is_valid(self, name: str) -> bool:
        try:
            self._verify(name)
        except LostContactError:
            raise
        except CheckpointError:
            return False
        return True

    def _verify(self, name: str) -> None:
        """Read the checkpoint back in full, unless that was done before. Collective. Raises CheckpointError."""
        if name not in self._verified:
            if self._disks.are_shared:
                verify(self.root / name, ranks=self._ranks)
            else:
                verify_on_disks(self.root / name, ranks=self._ranks, disks=self._disks)
            self._verified.add(name)


def _newest_first(listed: list[list[tuple[int, str]]]) -> list[tuple[int, str]]:
    """Checkpoints on any disk, in the order of `candidates`: rank 0's disk may be new, and lack what the others hold."""
    return sorted(
        {(step, name) for of_disk in listed for step, name in of_disk},
        key=lambda entry: (-entry[0], entry[1].startswith("."), entry),
    )


def _expect_seen(disks: NodeDisks) -> None:
    if disks.leaders[disks.rank]:
        remedy = "set `folder` to one that all nodes mount, or keep the run in a bucket (checkpoint.store)"
        raise CheckpointError(f"it is not there: this node has a disk of its own, and a save needs one for all; {remedy}.")
