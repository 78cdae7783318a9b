"""A run kept in a store (`checkpoint.store`): each checkpoint is on disk first, and goes to the store behind training.

    STORE/NAME/run.json       which run this is, and which start of it writes here: the last one that took it over
    STORE/NAME/checkpoints/   see `checkpoint.stored`
    STORE/NAME/run.toml ...   the folder's small files, as they were at the last upload; export/ at the end

Ranks upload the shards that they wrote, each in a thread; rank 0 publishes once all are there. One checkpoint is on its way at
a time: one that is saved meanwhile stays on disk, and the newest is uploaded at the end. A start takes the run over, and what
an older one has under way is refused from then on: no clock is asked who is alive. An upload that fails is told, and training
goes on; only at the end it is an error.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ultrascale import heartbeat
from ultrascale.checkpoint import CheckpointError, Rejected, Search, UnknownVersionError, search
from ultrascale.checkpoint.coordination import Coordinator, coordinating
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.disk.folders import candidates, step_folder
from ultrascale.checkpoint.stored import (
    collect_leftovers,
    fetch,
    found_in,
    prune_stored,
    publish_stored,
    upload_files,
)
from ultrascale.checkpoint.stored.publish import files_of, seen
from ultrascale.config.resolve import run_from_toml
from ultrascale.description.problems import SpecError, mistake
from ultrascale.description.run import Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import SLOW_SECONDS
from ultrascale.storage import ConflictError, MissingError, Part, StorageError, Store, Version, join_url, open_store
from ultrascale.train.folder.resume import decisive_parts
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.session.moments import LoopObserver, Outcome, Session, StepDone

CLAIM = "run.json"
LOOKING = "looking into the run's store"
BEAT_SECONDS = 5.0
LOCAL = ".store.json"
"""In the run's folder: which run of the store it is."""
SMALL = ("run.toml", "plan.json", "environment.json", "memory.json", "metrics.jsonl", "events.jsonl", "log.txt",
         "tokenizer.json")  # fmt: skip


HISTORY = ("metrics.jsonl", "events.jsonl", "log.txt")


@contextmanager
def opened_store(run: Run, ranks: Ranks, folder: RunFolder, *, allow_changes: bool) -> Iterator[RunStore | None]:
    """The run's store, taken over by this start of it; None if it has none. Collective.

    Raises CheckpointError on every rank if it cannot be used or holds another run."""
    if run.checkpoint.store is None:
        yield None
        return
    store = open_store(join_url(run.checkpoint.store, run.name))
    with coordinating(ranks.host_group, own_group=True) as coordinator:
        taking = partial(take_over, store, run, folder, allow_changes=allow_changes)
        writer = coordinator.on_rank_0("taking the run over", lambda: _told(taking))
        own = RunStore(store, run, folder, coordinator, writer)
        try:
            yield own
        finally:
            own.close()


def take_over(store: Store, run: Run, folder: RunFolder, *, allow_changes: bool = False) -> str:
    """Make this start of `run` the one that writes to the store; the name that it is known by there.

    Raises CheckpointError if the store holds another run than the folder or `run`, StorageError."""
    claimed, version = read_claim(store)
    local = folder.read_json(LOCAL)
    known = local.get("run_id") if isinstance(local, dict) else None
    if claimed is not None and known != claimed["run_id"] and (known is not None or candidates(folder.checkpoints)):
        told = f"{store.url} holds another run than {folder.path}"
        raise CheckpointError(f"{told}. Give this one a --name of its own, or another checkpoint.store.")
    if claimed is not None:
        _expect_same_run(store, run, ("batch",) if allow_changes else ("model", "batch"))
    run_id = claimed["run_id"] if claimed is not None else known or uuid.uuid4().hex
    writer = uuid.uuid4().hex
    try:
        store.publish(CLAIM, json.dumps({"run_id": run_id, "writer": writer}).encode(), replacing=version)
    except ConflictError as error:
        raise CheckpointError(f"{store.url}: another process is starting this run at this moment. Start it once.") from error
    if claimed is not None and not candidates(folder.checkpoints):
        _bring_history(store, folder)
    folder.write_json(LOCAL, {"run_id": run_id})
    return writer


def _bring_history(store: Store, folder: RunFolder) -> None:
    """Copies the run's history from the store into a folder that lacks it."""
    for name in HISTORY:
        if not (folder.path / name).exists():
            with suppress(MissingError):
                folder.write_text(name, store.read(name).decode())


def read_claim(store: Store) -> tuple[dict[str, Any] | None, Version | None]:
    """Claim of a store (its run's id and its writer) and the claim's version; None each if there is none. Raises
    CheckpointError if it is no claim of a run, StorageError."""
    try:
        data, version = store.read_version(CLAIM)
    except MissingError:
        return None, None
    try:
        claim = json.loads(data)
        if isinstance(claim["run_id"], str) and isinstance(claim["writer"], str):
            return claim, version
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(f"{store.where(CLAIM)} is not of a run. Name another checkpoint.store, or remove it.")


def _expect_same_run(store: Store, run: Run, parts: tuple[str, ...]) -> None:
    """Raises CheckpointError if the store's run differs in one of these parts; `restore` tells each in full."""
    try:
        text = store.read("run.toml").decode()
        kept = decisive_parts(run_from_toml(text, where=store.where("run.toml")))
    except (MissingError, SpecError, UnicodeDecodeError):
        return  # its checkpoints say
    now = decisive_parts(run)
    differing = [key for key in parts if kept[key] != now[key]]
    if differing:
        told = f"holds another run: its {' and '.join(differing)} {'is' if len(differing) == 1 else 'are'} not this one's"
        raise CheckpointError(f"{store.url} {told}. Give this run a --name of its own, or another checkpoint.store.")


class RunStore(LoopObserver):
    """The store as one rank uses it."""

    def __init__(self, store: Store, run: Run, folder: RunFolder, ranks: Coordinator, writer: str):
        self.store, self.run, self.folder = store, run, folder
        self._ranks, self._writer = ranks, writer
        self._thread = ThreadPoolExecutor(1, "store")
        self._pending: Future[None] | None = None
        self._sending: str | None = None
        self._uploaded: Path | None = None
        """The last one that is published there."""
        self._verified: set[str] = set()
        self._lines: list[str] = []
        self._rejected: list[Rejected] = []
        self._failure: str | None = None
        self._may_have_leftovers = True
        """True if an earlier start or a failed upload may have left files there."""

    def search(self, root: Path, *, process_group: dist.ProcessGroup | None = None) -> Search:
        """As `checkpoint.search`, with what the store has and the disk lacks: a newer checkpoint there is brought here.

        Raises CheckpointError also if the store does not answer: a run must not begin anew because of that."""
        while True:
            found = search(root, process_group=process_group)
            step = -1 if found.folder is None else next(one.step for one in candidates(root) if one.path == found.folder)
            fetched = self._ranks.on_rank_0(LOOKING, partial(_told, partial(self._fetch_newer, root, step)))
            if not fetched:
                rejected = () if found.folder is not None else tuple(self._rejected)
                return Search(found.folder, (*found.rejected, *rejected))

    def _fetch_newer(self, root: Path, step: int) -> bool:
        """On rank 0: bring the newest whole checkpoint after `step` here, if there is one."""
        known = {rejected.step for rejected in self._rejected}
        for one in found_in(self.store):
            if one.step <= step or one.step in known:
                continue
            if one.is_of_another_release:
                raise UnknownVersionError(one.problem)
            try:
                if one.index is None:
                    raise CheckpointError(one.problem)
                fetch(self.store, one.index, root)
            except (CheckpointError, StorageError) as error:
                if isinstance(error, StorageError) and not _is_damage(error):
                    raise
                self._rejected.append(Rejected(Path(one.where), one.step, str(error)))
                self._lines.append(f"damaged checkpoint passed over: {error}")
                continue
            self._lines.append(f"step {one.step} came from {self.store.url}")
            self._rejected.append(Rejected(Path(one.where), one.step, "does not verify on disk either"))  # once is enough
            return True
        return False

    def catch_up(self, newest: Path | None) -> None:
        """Upload the checkpoint that the run goes on from, if an earlier start could not. Collective."""
        if newest is None:
            return
        lacking = self._ranks.on_rank_0(LOOKING, lambda: _told(lambda: self._lacks(newest)))
        if lacking:
            self._send(newest, resuming=True)
        else:
            self._uploaded = newest

    def _lacks(self, newest: Path) -> bool:
        manifest = read_manifest(newest)
        return seen(self.store, manifest.step)[1] != manifest.save_id

    def offer(self, folder: Path, ranks: Coordinator) -> None:
        """Begin to upload a checkpoint that was just saved, unless another is on its way on any rank. Collective."""
        busy = self._pending is not None and not self._pending.done()
        if ranks.failures("busy" if busy else None):
            self._lines.append(f"{folder.name} is on disk only for now: {self._sending} is still on its way to the store")
            return
        self._send(folder)

    def spared(self) -> tuple[str, ...]:
        """The checkpoint that is being read."""
        return () if self._sending is None else (self._sending,)

    def after_step(self, session: Session, done: StepDone) -> None:
        """Say what there is to say since the last step."""
        found, self._lines = self._lines, []
        for line in found:
            session.metrics.line(line)

    def ended(self, session: Session, outcome: Outcome) -> None:
        """See that the last checkpoint is in the store. Collective; raises CheckpointError."""
        heartbeat.beat("uploading the last checkpoint", extra_seconds=SLOW_SECONDS)
        newest = step_folder(self.folder.checkpoints, session.trainer.steps_done)
        self._wait()
        if self._uploaded != newest:
            self._send(newest, resuming=True)
            self._wait()
        if self._uploaded != newest:
            raise CheckpointError(f"{newest} is whole, but is not in {self.store.url}: {self._failure}")

    def keep_export(self, export: Path) -> None:
        """Put the exported folder there, and the small files as they are at the end. On rank 0, after `ended`.

        Raises CheckpointError."""
        _told(lambda: (put_folder(self.store, "export", export), self._keep_small_files()))

    def close(self) -> None:
        """Leave what is on its way to the next start."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        while pending is not None:
            try:
                return pending.result(BEAT_SECONDS)
            except TimeoutError:  # each request has a limit of its own
                heartbeat.beat("uploading the last checkpoint", extra_seconds=SLOW_SECONDS)

    def _send(self, folder: Path, *, resuming: bool = False) -> None:
        self._sending = folder.name
        self._pending = self._thread.submit(self._upload, folder, resuming)

    def _upload(self, folder: Path, resuming: bool) -> None:
        ranks, doing = self._ranks, f"keeping {folder.name} in {self.store.url}"
        try:
            mine = ranks.agree(doing, lambda: _told(lambda: self._upload_mine(folder, resuming)))
            gathered = ranks.gather(mine) or []
            ranks.on_rank_0(doing, lambda: _told(lambda: self._publish(folder, gathered)))
            self._uploaded, self._failure = folder, None
        except CheckpointError as error:
            self._failure, self._may_have_leftovers = str(error), True
            self._lines.append(f"WARNING: {error} It stays on disk; the next checkpoint is tried again.")
        finally:
            self._sending = None

    def _upload_mine(self, folder: Path, resuming: bool) -> dict[str, list[list[int]]]:
        files = [file for file in files_of(read_manifest(folder)) if _rank_of(file) % self._ranks.world == self._ranks.rank]
        found = upload_files(self.store, folder, files, resuming=resuming) if files else {}
        return {file: [[part.bytes, part.crc] for part in parts] for file, parts in found.items()}

    def _publish(self, folder: Path, gathered: list[dict[str, list[list[int]]]]) -> None:
        files = {file: tuple(Part(*part) for part in parts) for one in gathered for file, parts in one.items()}
        self._keep_small_files()
        step = read_manifest(folder).step
        before, _ = seen(self.store, step)
        self._expect_own()
        index = publish_stored(self.store, folder, files, before=before)
        kept = self.run.checkpoint
        prune_stored(self.store, step, keep=kept.keep, keep_every_steps=kept.keep_every_steps, verified=self._verified)
        if self._may_have_leftovers or before is not None:
            collect_leftovers(self.store, busy=(index.save_id,))
        self._may_have_leftovers = False

    def _keep_small_files(self) -> None:
        self._expect_own()
        for name in SMALL:
            path = self.folder.path / name
            if path.is_file():
                self.store.write(name, path.read_bytes())

    def _expect_own(self) -> None:
        """Raises CheckpointError if another start of the run has taken it over."""
        claim, _ = read_claim(self.store)
        if claim is None or claim["writer"] != self._writer:
            raise CheckpointError(f"{self.store.url} was taken over by another start of this run. Stop one of the two.")


def put_folder(store: Store, prefix: str, folder: Path) -> None:
    """Every file of a folder and those below; what readers look for first, `config.json`, is the last to appear."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == "config.json", path))
    for path in files:
        store.write_file("/".join(part for part in (prefix, path.relative_to(folder).as_posix()) if part), path)


def fetch_run(url: str, into: Path) -> Path:
    """A folder `into`/NAME with the run.toml of the run kept at `url`, so that it goes on there; an older folder stays.

    Raises SpecError if no run is kept there, or the folder is of another run, StorageError."""
    base, _, name = url.rstrip("/").rpartition("/")
    store = open_store(url)
    try:
        claim, _ = read_claim(store)
        text = store.read("run.toml").decode()
    except (MissingError, CheckpointError):
        claim, text = None, ""
    if claim is None or not base:
        raise mistake(url, "holds no run", "Give the place of a run's folder, STORE/NAME.")
    folder = RunFolder(into / name)
    local = folder.read_json(LOCAL)
    if folder.path.exists() and (not isinstance(local, dict) or local.get("run_id") != claim["run_id"]):
        rule = f"is there and is not the run that {url} holds"
        raise mistake(str(folder.path), rule, "Give --folder another place on this machine.")
    if not (folder.path / "run.toml").exists():
        folder.write_text("run.toml", text)
        folder.write_json(LOCAL, {"run_id": claim["run_id"]})
    return folder.path


def _told(work: Callable[[], Any]) -> Any:
    """Result of `work`. Raises CheckpointError, which ranks report to each other, for a StorageError."""
    try:
        return work()
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _is_damage(error: StorageError) -> bool:
    from ultrascale.storage import DamagedError

    return isinstance(error, DamagedError | MissingError)


def _rank_of(file: str) -> int:
    """The rank that wrote a file of a checkpoint; 0 for the manifest."""
    number = file.removeprefix("rank-").removesuffix(".safetensors")
    return int(number) if number.isdigit() else 0
