"""A run kept in a store (`checkpoint.store`): each checkpoint is written to disk first, then uploaded while training continues.

    STORE/NAME/run.json       the run's id, and the start of it that may write here: the last one that took the store over
    STORE/NAME/checkpoints/   see `checkpoint.stored`
    STORE/NAME/run.toml ...   the folder's small files, as of the last upload; export/ at the end

Each rank uploads the shards that it wrote, in a thread; rank 0 publishes once all are there. One upload is in flight at a time:
a checkpoint saved meanwhile stays on disk, and the newest is uploaded at the end. A start takes the store over, and uploads of
older starts are refused from then on, without a clock or liveness check. A failed upload is reported, and training continues;
only at the end of the run is it an error.

Nodes may have local disks (`checkpoint.disk.nodes`): each node uploads what is on its disk, and a start downloads to each the
shards that its ranks read and its disk lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ultrascale import heartbeat
from ultrascale.checkpoint import CheckpointError, CheckpointSearch, Rejected, UnknownVersionError, search
from ultrascale.checkpoint.coordination import Coordinator, coordinating
from ultrascale.checkpoint.disk.damage import verify_shards
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.disk.folders import candidates, step_folder
from ultrascale.checkpoint.disk.nodes import NodeDisks, shards_to_bring
from ultrascale.checkpoint.manifest import Manifest, decode, encode
from ultrascale.checkpoint.stored.fetch import fetch, stored_checkpoint, stored_checkpoints, stored_manifest
from ultrascale.checkpoint.stored.index import Index, key_of
from ultrascale.checkpoint.stored.publish import (
    collect_leftovers,
    files_of,
    prune_stored,
    publish_stored,
    published_version,
    upload_files,
)
from ultrascale.checkpoint.stored.unfinished import saves_on, whole_saves
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.launch.events import stamp
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILES
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import SLOW_SECONDS
from ultrascale.run_rows import event_line
from ultrascale.storage import DamagedError, MissingError, PartObject, StorageError, Store, join_url, open_store
from ultrascale.train.folder.claim import LOCAL, join_disks, known_store, read_claim, take_over
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.session.moments import LoopObserver, Outcome, Session, StepDone

LOOKING = "looking into the run's store"
BEAT_SECONDS = 5.0
Reads = Callable[[Manifest], set[str]]
"""The shards of a checkpoint that this rank reads when it resumes."""
SMALL = ("run.toml", "plan.json", "environment.json", "memory.json", "metrics.jsonl", "events.jsonl", "log.txt",
         *TOKENIZER_FILES)  # fmt: skip


@contextmanager
def opened_store(run: Run, ranks: Ranks, folder: RunFolder, *, allow_changes: bool) -> Iterator[RunStore | None]:
    """The run's store, taken over by this start of the run; None if the run has none. Collective.

    Raises CheckpointError on every rank if the store cannot be used or holds another run.
    """
    if run.checkpoint.store is None:
        yield None
        return
    store = open_store(join_url(run.checkpoint.store, run.name), to_write=True)
    with coordinating(ranks.host_group, always_new_group=True) as coordinator:
        taking = partial(take_over, store, run, folder, allow_changes=allow_changes)
        writer = coordinator.on_rank_0("taking the run over", taking)
        run_store = RunStore(store, run, folder, coordinator, writer, join_disks(store, folder, coordinator, writer))
        try:
            yield run_store
        finally:
            run_store.close()


@contextmanager
def as_checkpoint_errors() -> Iterator[None]:
    """Context in which a StorageError becomes a CheckpointError."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class Upload:
    """One rank's part in uploading a save from nodes' disks, whichever rank wrote it."""

    step: int
    save_id: str
    files: list[str]


class RunStore(LoopObserver):
    """The store, as one rank uses it."""

    def __init__(self, store: Store, run: Run, folder: RunFolder, ranks: Coordinator, writer: str, disks: NodeDisks):
        self.store, self.run, self.folder, self.disks = store, run, folder, disks
        self._ranks, self._writer = ranks, writer
        self._thread = ThreadPoolExecutor(1, "store")
        self._pending: Future[None] | None = None
        self._sending: str | None = None
        self._uploaded: Path | None = None
        """Last checkpoint that is published in the store."""
        self._verified: set[str] = set()
        self._lines: list[str] = []
        self._rejected: list[Rejected] = []
        self._failure: str | None = None
        self._may_have_leftovers = True
        """True if an earlier start or a failed upload may have left files in the store."""

    def search(self, root: Path, *, reads: Reads, process_group: dist.ProcessGroup | None = None) -> CheckpointSearch:
        """As `checkpoint.search`, but downloads a newer checkpoint that the store has and the disk lacks; to disks of nodes
        that do not share a file system, the shards that their ranks read.

        Raises CheckpointError also if the store does not respond or refuses writes: a run must not restart from scratch for
        that.
        """
        if not self.disks.are_shared:
            return self._search_disks(root, reads)
        while True:
            on_disk = search(root, process_group=process_group)
            step = -1 if on_disk.folder is None else next(c.step for c in candidates(root) if c.path == on_disk.folder)
            fetched = self._ranks.on_rank_0(LOOKING, partial(self._fetch_newer, root, step))
            if not fetched:
                rejected = () if on_disk.folder is not None else tuple(self._rejected)
                return CheckpointSearch(on_disk.folder, (*on_disk.rejected, *rejected))

    def _search_disks(self, root: Path, reads: Reads) -> CheckpointSearch:
        """Download each node's share of the newest complete checkpoint to its disk. If the disks together hold one that the
        store lacks, it is uploaded first; if that fails, so does the search, because an older checkpoint must not be used
        instead."""
        self._wait()
        ranks, lead = self._ranks, self.disks.leads
        gathered = ranks.gather(ranks.agree(LOOKING, lambda: saves_on(root) if lead else []))
        unsent = ranks.on_rank_0(LOOKING, lambda: whole_saves(gathered or [], self.disks))
        damaged: list[Rejected] = []
        rejected: list[Rejected] = []
        while True:
            step = ranks.on_rank_0(LOOKING, partial(self._next_step, rejected))
            while unsent and (step is None or unsent[0][0] > step):
                number, save_id, shares = unsent.pop(0)
                folder = step_folder(root, number)
                if problem := self._damage(folder, shares[ranks.rank]):
                    self._reject(damaged, folder, number, problem)
                    continue
                is_new = number not in {known.step for known in rejected}  # else parts in the store are unreliable
                self._upload_and_publish(folder, is_new, Upload(number, save_id, shares[ranks.rank]))
                step = number
            if step is None:
                return CheckpointSearch(None, (*damaged, *rejected))
            share = self._share(step, reads)
            bring = partial(self._bring, step, root, share) if lead else str
            problems = ranks.broadcast(ranks.gather(ranks.agree(LOOKING, bring)))
            problem = next((text for text in problems if text), "")
            if not problem:
                self._uploaded = step_folder(root, step)
                return CheckpointSearch(self._uploaded)
            self._reject(rejected, Path(key_of(step)), step, problem)

    def _share(self, step: int, reads: Reads) -> list[str] | None:
        """Shards of the store's checkpoint that belong on the disk that this rank leads; None, for all of them, if the
        checkpoint cannot be read, which `_bring` then reports. Collective."""
        ranks = self._ranks
        text = ranks.on_rank_0(LOOKING, partial(self._manifest_text, step))
        if not text:
            return None
        manifest = decode(text.encode("ascii"), self.store.where(key_of(step)))
        read = ranks.gather(ranks.agree(LOOKING, lambda: sorted(reads(manifest))))
        return ranks.on_rank_0(LOOKING, lambda: shards_to_bring(read or [], manifest.shards, self.disks))[ranks.rank]

    def _manifest_text(self, step: int) -> str:
        with suppress(CheckpointError, DamagedError, MissingError):
            stored = stored_checkpoint(self.store, step)
            if stored is not None and stored.index is not None:
                return encode(stored_manifest(self.store, stored.index)).decode("ascii")
        return ""

    def _damage(self, folder: Path, files: list[str]) -> str:
        """Damage to these files of a checkpoint, on any rank; empty if there is none. Collective."""
        problem = None
        try:
            if files:
                manifest = read_manifest(folder)
                verify_shards(folder, [shard for shard in manifest.shards.items() if shard[0] in files], manifest.save_id)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        return "\n".join(self._ranks.failures(problem).values())

    def _reject(self, rejected: list[Rejected], where: Path, step: int, problem: str) -> None:
        rejected.append(Rejected(where, step, problem))
        self._lines.append(f"damaged checkpoint passed over: {problem}")

    def _next_step(self, rejected: list[Rejected]) -> int | None:
        """On rank 0: the newest step in the store that is not in `rejected`."""
        return next(
            (stored.step for stored in stored_checkpoints(self.store) if stored.step not in {known.step for known in rejected}),
            None,
        )

    def _fetch_newer(self, root: Path, step: int) -> bool:
        """On rank 0: download the newest intact checkpoint after `step`, if there is one."""
        known = {rejected.step for rejected in self._rejected}
        for stored in stored_checkpoints(self.store):
            if stored.step <= step or stored.step in known:
                continue
            problem = self._bring(stored.step, root)
            self._rejected.append(Rejected(Path(stored.where), stored.step, problem or "does not verify on disk either"))
            if not problem:
                return True  # once is enough
            self._lines.append(f"damaged checkpoint passed over: {problem}")
        return False

    def _bring(self, step: int, root: Path, only: list[str] | None = None) -> str:
        """Download the store's checkpoint of `step`, or only the shards `only`. Returns why it is damaged, else an empty
        string.

        Raises StorageError, UnknownVersionError.
        """
        stored = stored_checkpoint(self.store, step)
        if stored is not None and stored.is_of_another_release:
            raise UnknownVersionError(stored.problem)
        try:
            if stored is None or stored.index is None:
                raise CheckpointError(f"{self.store.where(key_of(step))} is not there." if stored is None else stored.problem)
            fetch(self.store, stored.index, root, only=only)
        except (CheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and not isinstance(error, DamagedError | MissingError):
                raise
            return str(error)
        shards = "" if only is None else f": {len(only)} of its {len(stored.index.files) - 1} shards for this node"
        self._lines.append(f"step {step} came from {self.store.url}{shards}")
        return ""

    @as_checkpoint_errors()
    def bring_newest(self) -> None:
        """Download all of the store's newest checkpoint to this node's disk, for one rank that reads it alone, such as an
        export.

        Raises CheckpointError.
        """
        if not self.disks.are_shared and (step := self._next_step([])) is not None:
            problem = self._bring(step, self.folder.checkpoints)
            if problem:
                raise CheckpointError(problem)

    def catch_up(self, newest: Path | None) -> None:
        """Upload the checkpoint that the run resumes from, if an earlier start could not. Collective."""
        if newest is None:
            return
        lacking = self._ranks.on_rank_0(LOOKING, lambda: self._lacks(newest))
        if lacking:
            self._send(newest, resuming=True)
        else:
            self._uploaded = newest

    def write_node_event(self, kind: str, step: int) -> None:
        """Record the run's start or end on a disk that rank 0 does not see, for commands that query that node
        (`jobs.state`)."""
        if self.disks.leads and self._ranks.rank:
            self.folder.append("events.jsonl", event_line({**stamp(), "event": kind, "step": step}))

    def _lacks(self, newest: Path) -> bool:
        manifest = read_manifest(newest)
        return published_version(self.store, manifest.step)[1] != manifest.save_id

    def upload_later(self, folder: Path, ranks: Coordinator) -> None:
        """Start uploading a checkpoint that was just saved, unless an upload is in flight on any rank. Collective."""
        busy = self._pending is not None and not self._pending.done()
        if ranks.failures("busy" if busy else None):
            self._lines.append(f"{folder.name} is on disk only for now: {self._sending} is still on its way to the store")
            return
        self._send(folder)

    def spared(self) -> tuple[str, ...]:
        """The checkpoint that is being uploaded."""
        return () if self._sending is None else (self._sending,)

    def after_step(self, session: Session, done: StepDone) -> None:
        """Log messages of uploads since the last step."""
        lines, self._lines = self._lines, []
        session.metrics.lines(lines)

    def ended(self, session: Session, outcome: Outcome) -> None:
        """Ensure that the last checkpoint is in the store. Collective; raises CheckpointError."""
        heartbeat.beat("uploading the last checkpoint", extra_seconds=SLOW_SECONDS)
        newest = step_folder(self.folder.checkpoints, session.trainer.steps_done)
        self._wait()
        if self._uploaded != newest:
            self._send(newest, resuming=True)
            self._wait()
        if self._uploaded != newest:
            raise CheckpointError(f"{newest} is whole, but is not in {self.store.url}: {self._failure}")
        self.write_node_event("stop" if outcome.stopped else "end", outcome.steps_done)

    @as_checkpoint_errors()
    def keep_export(self, export: Path) -> None:
        """Upload the exported folder, and the small files in their final state. On rank 0, after `ended`.

        Raises CheckpointError.
        """
        put_export(self.store, export)
        self._keep_small_files()
        self.store.flush()

    def close(self) -> None:
        """Leave an unfinished upload to the next start."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        while pending is not None:
            try:
                return pending.result(BEAT_SECONDS)
            except TimeoutError:  # each request has its own time limit
                heartbeat.beat("uploading the last checkpoint", extra_seconds=SLOW_SECONDS)

    def _send(self, folder: Path, *, resuming: bool = False) -> None:
        self._sending = folder.name
        self._pending = self._thread.submit(self._upload, folder, resuming)

    def _upload(self, folder: Path, resuming: bool) -> None:
        try:
            self._upload_and_publish(folder, resuming)
        except CheckpointError as error:
            self._failure, self._may_have_leftovers = str(error), True
            self.store.take_pending()  # the failure of this upload must not refuse a later save
            self._lines.append(f"WARNING: {error} It stays on disk; the next checkpoint is tried again.")
        finally:
            self._sending = None

    def _upload_and_publish(self, folder: Path, resuming: bool, upload: Upload | None = None) -> None:
        """Upload and publish the shards of a checkpoint that ranks wrote, or `upload`. Collective; raises CheckpointError."""
        ranks, doing = self._ranks, f"keeping {folder.name} in {self.store.url}"
        mine = ranks.agree(doing, lambda: self._upload_mine(folder, resuming, upload))
        gathered = ranks.gather((mine, self.store.take_pending() if ranks.rank else {})) or []
        ranks.on_rank_0(doing, lambda: self._publish(folder, gathered, upload))
        self._uploaded, self._failure = folder, None

    def _upload_mine(self, folder: Path, resuming: bool, upload: Upload | None) -> dict[str, list[list[int]]]:
        if upload is None:
            world, rank = self._ranks.world, self._ranks.rank
            files = [file for file in files_of(read_manifest(folder)) if _rank_of(file) % world == rank]
        else:
            files = upload.files
        uploaded = upload_files(self.store, folder, files, resuming=resuming) if files else {}
        return {file: [[part.bytes, part.crc] for part in parts] for file, parts in uploaded.items()}

    def _publish(self, folder: Path, gathered: list[Any], upload: Upload | None) -> None:
        files = {
            file: tuple(PartObject(*part) for part in parts) for uploaded, _ in gathered for file, parts in uploaded.items()
        }
        for _, pending in gathered:
            self.store.add_pending(pending)
        self._keep_small_files()
        if upload is None:
            manifest = read_manifest(folder)
        else:  # this disk may hold none of its files
            manifest = stored_manifest(self.store, Index(upload.step, upload.save_id, None, 0, files))
        before, _ = published_version(self.store, manifest.step)
        self._expect_still_claimed()
        index = publish_stored(self.store, manifest, files, before=before)
        checkpoint = self.run.checkpoint
        prune_stored(
            self.store, index.step, keep=checkpoint.keep, keep_every_steps=checkpoint.keep_every_steps, verified=self._verified
        )
        if self._may_have_leftovers or before is not None:
            collect_leftovers(self.store, busy=(index.save_id,))
        self.store.flush()
        self._may_have_leftovers = False

    def _keep_small_files(self) -> None:
        self._expect_still_claimed()
        for name in SMALL:
            path = self.folder.path / name
            if path.is_file():
                self.store.write(name, path.read_bytes())

    def _expect_still_claimed(self) -> None:
        """Raises CheckpointError if another start of the run has taken the store over."""
        claim, _ = read_claim(self.store)
        if claim is None or claim["writer"] != self._writer:
            raise CheckpointError(f"{self.store.url} was taken over by another start of this run. Stop one of the two.")


def put_export(store: Store, folder: Path) -> None:
    """Upload every file of an exported folder; `config.json`, which readers look for first, comes last."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == "config.json", path))
    for path in files:
        store.write_file(f"export/{path.relative_to(folder).as_posix()}", path)


def fetch_run(url: str, into: Path) -> Path:
    """A folder `into`/NAME with the run.toml of the run kept at `url`, so that it resumes there; an existing folder stays.

    Raises SpecError if no run is kept there, or the folder is of another run, StorageError.
    """
    base, _, name = url.rstrip("/").rpartition("/")
    store = open_store(url, to_write=True)
    try:
        claim, _ = read_claim(store)
        text = store.read("run.toml").decode()
    except (MissingError, CheckpointError):
        claim, text = None, ""
    if claim is None or not base:
        raise mistake(url, "holds no run", "Give the place of a run's folder, STORE/NAME.")
    folder = RunFolder(into / name)
    if folder.path.exists() and known_store(folder).get("run_id") != claim["run_id"]:
        rule = f"is there and is not the run that {url} holds"
        raise mistake(str(folder.path), rule, "Give --folder another place on this machine.")
    if not (folder.path / "run.toml").exists():
        folder.write_text("run.toml", text)
        folder.write_json(LOCAL, {"run_id": claim["run_id"]})
    return folder.path


def _rank_of(file: str) -> int:
    """The rank that wrote a file of a checkpoint; 0 for the manifest."""
    number = file.removeprefix("rank-").removesuffix(".safetensors")
    return int(number) if number.isdigit() else 0
