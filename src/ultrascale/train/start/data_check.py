"""Comparison of the data with their manifests: partly before the first step, the rest while the run trains.

    at most 64 MiB a rank    all data are compared with the manifests before the first step
    more                     a sample of each shard before it, all data in the background: 64 MiB/s a rank, lowest priority

Shards are distributed over ranks. A prefix without a manifest has no checksum: the first start computes one and stores it in
the run's folder for later starts. Damage found in the background stops the run like a stop signal, with everything saved, and
then raises the error on every rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError, sha256_of
from ultrascale.data.indexed import prefix_paths
from ultrascale.data.manifest import ShardRecord
from ultrascale.data.preparing.verify import BLOCK_BYTES, BLOCKS, expect_sample, expect_whole
from ultrascale.description.units import format_bytes
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.session.moments import LoopObserver, Outcome, Session, StepDone

FOREIGN_FILE = ".data.json"
"""File in a run's folder with checksums, by fingerprint, of prefixes that have no manifest."""
AT_ONCE_BYTES = 64 << 20
BYTES_PER_SECOND = 64 << 20
MOST_SAMPLED = 1024
"""Most sampled shards of a rank, evenly spread: on slow storage their 16 reads each take a few seconds."""
LOWEST_PRIORITY, LEAVING_SECONDS = 19, 5.0


class _StoppedError(Exception):
    """The run has ended; stops the background check."""


class DataCheck(LoopObserver):
    """Checks this rank's share of the data."""

    def __init__(self, corpora: Iterable[Corpus], ranks: Ranks, folder: RunFolder, *, allow_changes: bool):
        self.ranks, self.folder, self.allow_changes = ranks, folder, allow_changes
        distinct = list({corpus.path: corpus for corpus in corpora}.values())
        self.corpora = [corpus for corpus in distinct if corpus.streamed is None]
        self.streamed = [corpus for corpus in distinct if corpus.streamed is not None]
        prepared = [shard for corpus in self.corpora if corpus.manifest for shard in _shards(corpus)]
        foreign = [shard for corpus in self.corpora if not corpus.manifest for shard in _shards(corpus)]
        self.num_sampled = sum(bool(record and record.sample_sha256) for _, record in prepared)
        self.mine = prepared[ranks.rank :: ranks.world] + (foreign if ranks.is_first else [])
        self.total_bytes = sum(corpus.num_bytes for corpus in self.corpora)
        self.is_small = self.total_bytes <= AT_ONCE_BYTES * ranks.world
        self._problem: DataError | None = None
        self._messages: list[str] = []
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._done_bytes, self._began = 0, 0.0

    def before_first_step(self) -> list[str]:
        """Check as much as the start allows, and return log lines. Collective; raises DataError on every rank."""
        try:
            if self.is_small:
                self._expect_all(lambda num_bytes: None)
            for prefix, record in [] if self.is_small else self.mine[:: -(-len(self.mine) // MOST_SAMPLED) or 1]:
                if record is not None:
                    expect_sample(prefix, record)
        except DataError as error:
            self._problem = error
        except OSError as error:
            self._problem = DataError(str(error.filename), f"cannot be read: {error.strerror}", "Check the disk and the path")
        warnings = self._raise_on_all()
        if self.streamed:
            self._expect_same_everywhere()
            phrase = "sources" if len(self.streamed) > 1 else "source"
            warnings.append(
                f"data: of {len(self.streamed)} {phrase} in a store, each shard's index and a sample is compared when opened"
            )
        if not self.corpora:
            return warnings
        if self.is_small:
            return [f"data: all {format_bytes(self.total_bytes)} read; checksums match those of data prepare", *warnings]
        size = format_bytes(min(self.num_sampled, MOST_SAMPLED * self.ranks.world) * 2 * BLOCKS * BLOCK_BYTES)
        phrase = f"data: {size} of {format_bytes(self.total_bytes)} compared with the manifests, in {2 * BLOCKS} blocks a shard"
        return [f"{phrase}; all of it is read and compared meanwhile", *warnings]

    def started(self, session: Session, until_end: ExitStack) -> None:
        """Check the rest in the background, if anything is left; request a stop if data are damaged."""
        if not self.is_small:
            arguments = (session.trainer.request_stop,)
            self._thread = threading.Thread(target=self._read_all, args=arguments, daemon=True, name="data check")
            self._thread.start()
            until_end.callback(self._stop_reading)

    def after_step(self, session: Session, done: StepDone) -> None:
        """Log messages of the background check since the last step."""
        lines, self._messages = self._messages, []
        session.metrics.lines(lines)

    def ended(self, session: Session, outcome: Outcome) -> None:
        """Log the result of the background check. Collective; raises DataError on every rank."""
        session.metrics.lines((*self._messages, *self._raise_on_all()))

    def _expect_same_everywhere(self) -> None:
        """Compares the data in stores as each rank read them. Collective; raises DataError on every rank."""
        fingerprints = self.ranks.gather_json([corpus.fingerprint() for corpus in self.streamed])
        for corpus, (first, *others) in zip(self.streamed, zip(*fingerprints, strict=True), strict=True):
            if differing := [rank for rank, other in enumerate(others, 1) if other != first]:
                problem = f"was changed while the ranks opened it: rank {differing[0]} has found other data there than rank 0"
                raise DataError(str(corpus.path), problem, "Start again; of hf://, name a commit after @.")

    def _stop_reading(self) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(LEAVING_SECONDS)

    def _raise_on_all(self) -> list[str]:
        """Raises any rank's error on every rank; where changes are allowed, returns it as warnings instead. Collective."""
        mine, self._problem = self._problem, None
        reports = self.ranks.gather_json(mine and [mine.where, mine.problem, mine.remedy])
        problems = [report for report in reports if report is not None]
        for where, problem, remedy in problems if not self.allow_changes else ():
            raise DataError(where, problem, f"{remedy.rstrip('.')}, or go on all the same with --allow-changes.")
        return [f"warning: {where}: {problem}; training goes on (--allow-changes)" for where, problem, _ in problems]

    def _read_all(self, on_change: Callable[[], None]) -> None:
        with suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        self._began = time.monotonic()
        try:
            self._expect_all(self._after_block)
            self._messages.append(f"data: {self._read()}; checksums match those of data prepare")
        except _StoppedError:
            self._messages.append(f"data: no more than {self._read()} when the run ended")
        except OSError as error:  # if the error persists, the loader's read ends the run
            self._messages.append(f"warning: the check of the data's checksums has stopped: {error}")
        except DataError as error:
            self._problem = error
            if not self.allow_changes:
                on_change()

    def _read(self) -> str:
        whose = "" if self.ranks.world == 1 else " of rank 0's share"
        return f"{format_bytes(self._done_bytes)}{whose} read in {time.monotonic() - self._began:.0f} s"

    def _after_block(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        early = self._began + self._done_bytes / BYTES_PER_SECOND - time.monotonic()
        if self._leaving.wait(max(0.0, early)):
            raise _StoppedError

    def _expect_all(self, after_block: Callable[[int], None]) -> None:
        for prefix, record in self.mine:
            if record is None:
                self._expect_as_before(prefix, after_block)
            else:
                expect_whole(prefix, record, after_block)

    def _expect_as_before(self, prefix: Path, after_block: Callable[[int], None]) -> None:
        """Compares files without a manifest with the checksums of this run's first read. Raises DataError on a change."""
        fingerprint = next(corpus.fingerprint() for corpus in self.corpora if corpus.prefixes == [prefix])
        digests = [sha256_of(path, after_block) for path in prefix_paths(prefix)]
        known = self.folder.read_json(FOREIGN_FILE)
        known = known if isinstance(known, dict) else {}
        if known.setdefault(fingerprint, digests) != digests and not self.allow_changes:
            raise DataError(str(prefix), "has changed since this run first read it", "Bring back what it was.")
        with suppress(OSError):  # a full disk is reported elsewhere
            self.folder.write_json(FOREIGN_FILE, known | {fingerprint: digests})


def _shards(corpus: Corpus) -> list[tuple[Path, ShardRecord | None]]:
    records = corpus.manifest.shards if corpus.manifest else (None,)
    return list(zip(corpus.prefixes, records, strict=True))
