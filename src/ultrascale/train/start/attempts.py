"""Cause of the end of the previous attempt, if no launcher of ours saw it end.

`ultrascale train --processes N` sees its ranks end and records why. torchrun restarts ranks without telling them why, so they
look for the cause themselves:

    attempt.json        in the run's folder while ranks train: the nodes and folders that hold their signs of life
    the signs           each rank's last sign of life, and its cause of death if it could write one; the watchdog's verdict;
                        N.refused where rank N was refused before any step, by a SpecError or its data

The last signs also tell when the attempt ended. A rank cannot know the signal or exit code of another rank: only torchrun sees
them and does not pass them on, so such a rank is reported as ended "without a word". The report comes at the next start.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ultrascale import console, heartbeat
from ultrascale.contact import names
from ultrascale.data.files import DataError
from ultrascale.description.problems import SpecError
from ultrascale.launch.events import stamp
from ultrascale.launch.restarts import read_account, summary
from ultrascale.launch.scratch import scratch_places
from ultrascale.launch.watchdog import HANG_FILE, disagreement, keep_hang, meanwhile
from ultrascale.parallel.arrival import give_up
from ultrascale.parallel.mesh import Ranks
from ultrascale.run_rows import event_line
from ultrascale.storage import StorageError
from ultrascale.train.folder.run_folder import RunFolder, RunFolderLostError, read_json
from ultrascale.train.watch.signs_of_life import FOLDER_PREFIX, Signs

ATTEMPT_FILE = "attempt.json"
_FOLDER = re.compile(f"{FOLDER_PREFIX}[A-Za-z0-9_]+")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
MOST_NAMED = 2
"""Most quoted messages of ranks that lost contact with the rank that ended."""


@contextmanager
def attempt(folder: RunFolder, ranks: Ranks, signs: Signs) -> Iterator[None]:
    """Context in which ranks train that no launcher of ours watches. On entry, records in the events how the previous attempts
    ended, if they did not end in order. Collective; rank 0 owns the folder."""
    here = {"node": socket.gethostname(), "folder": signs.folder.name} if signs.leads and signs.folder else None
    nodes = ranks.gather_json(here)
    before = ranks.gather_json(_before(folder) if ranks.is_first else None)[0]
    gathered = ranks.gather_json(_local_reports(before) if signs.leads else [])
    again = any(int(text) > 0 for text in ranks.gather_text(os.environ.get(RESTARTS, "0")))  # each agent counts its own
    if ranks.is_first:
        reports = [report for of_rank in gathered for report in of_rank]
        if before is not None and not was_refused(reports, before):
            _record(folder, failure_of(reports, before, folder, again=again))
        node_records = [node for node in nodes if node is not None]
        with suppress(OSError):  # a full disk ends no run
            folder.write_json(ATTEMPT_FILE, {"world": ranks.world, "nodes": node_records})
    ranks.barrier()
    if signs.leads:
        _remove_signs(before, folder)
    signs.is_kept = True
    try:
        yield
    except (SpecError, DataError) as error:
        if isinstance(error, SpecError) or not (signs.has_begun or type(error.__cause__) is StorageError):
            # Refused before any step: the next start would be refused for the same reason, unless a store was unreachable.
            give_up(str(error))
            if signs.folder is not None:
                with suppress(OSError):
                    (signs.folder / f"{ranks.process}.refused").touch()
            elif ranks.is_first:
                folder.remove(ATTEMPT_FILE)
        raise
    except RunFolderLostError as error:  # saved elsewhere: ranks that torchrun restarts would begin from step 0 at the old path
        signs.is_kept = False
        if ranks.is_first:
            folder.remove(ATTEMPT_FILE)
            give_up(str(error))
        raise
    signs.is_kept = False
    if ranks.is_first:
        folder.remove(ATTEMPT_FILE)
        for line in summary(read_account(folder.path / "events.jsonl")):
            console.print_line(line)
            with suppress(OSError):
                folder.append("log.txt", line)


def was_refused(reports: Iterable[dict[str, Any]], before: dict[str, Any]) -> bool:
    """True if attempt `before` was refused rather than failed: each rank was refused, or died only because a refused rank
    left."""
    ranks = {report["rank"]: report for report in reports}
    others = [report["cause"] for report in ranks.values() if not report["refused"]]
    return len(ranks) == before["world"] > len(others) and all(cause and cause["lost_contact"] for cause in others)


def failure_of(
    reports: Iterable[dict[str, Any]], before: dict[str, Any], folder: RunFolder, *, again: bool = True
) -> dict[str, Any]:
    """The row of events that says how the ranks of `before` ended. `reports`: each node's reports on ranks; `again`: True if
    torchrun restarted them, False if a user did."""
    ranks = {report["rank"]: report for report in reports}
    rank, cause = _blame(ranks, before)
    row = {"event": "failure", "rank": rank, "cause": cause, "again": again}
    if not ranks:
        return {**_last_row(folder), **row, "node": ""}
    last = max(ranks.values(), key=lambda report: report["stamp"]["time"])
    steps = [report["step"] for report in ranks.values() if report["step"] is not None]
    return {**last["stamp"], **row, "node": ranks.get(rank, {}).get("node", ""), "step": max(steps, default=None)}


def _blame(ranks: dict[int, dict[str, Any]], before: dict[str, Any]) -> tuple[int | None, str]:
    """Rank that ended first (None if unknown) and the reason. Unlike a launcher, ranks do not know exit codes."""
    for report in ranks.values():
        if report["hang"] is not None:
            return min(report["hang"]["culprits"], default=None), f"hang: {report['hang']['reason']}"
    for rank, report in sorted(ranks.items(), key=lambda item: item[1]["refused"]):
        if report["cause"] is not None and not report["cause"]["lost_contact"]:
            return rank, f"rank {rank} failed: {report['cause']['text']}"
    if (odd := next((report["odd"] for report in ranks.values() if report["odd"]), None)) is not None:
        return min(odd[0]), f"the ranks do not agree: {odd[1]}"
    missed = [report["cause"]["text"].partition(": ")[2] for report in ranks.values() if report["cause"] is not None]
    gone = [rank for rank in range(before["world"]) if rank not in ranks]
    if not before["nodes"]:
        return None, "the attempt before ended, and nobody watched it (faults.hang_seconds)"
    if gone:
        nodes = sorted({node["node"] for node in before["nodes"]} - {report["node"] for report in ranks.values()})
        where = f" of {', '.join(nodes)}" if nodes else ""
        return None, "; ".join([f"{names(gone)}{where} left no signs of life: gone, or started anew", *missed[:MOST_NAMED]])
    silent = [rank for rank, report in ranks.items() if report["cause"] is None and not report["is_done"]]
    if len(silent) == 1:
        detail = "".join(f"; {text}" for text in missed[:MOST_NAMED]) if missed else ranks[silent[0]]["meanwhile"]
        return silent[0], f"rank {silent[0]} ended without a word at {ranks[silent[0]]['doing']}{detail}"
    if silent:
        return None, f"{names(silent)} ended without a word"
    return None, "; ".join(missed[:MOST_NAMED]) or "the ranks ended without a word"


def _before(folder: RunFolder) -> dict[str, Any] | None:
    """Record of the previous attempt; None if it ended in order. A damaged file gives as much as can be read."""
    if not (folder.path / ATTEMPT_FILE).exists():
        return None
    record = folder.read_json(ATTEMPT_FILE)
    world, nodes = (record.get("world"), record.get("nodes")) if isinstance(record, dict) else (0, [])
    good = [node for node in (nodes if isinstance(nodes, list) else []) if _is_node(node)]
    return {"world": world if isinstance(world, int) else 0, "nodes": good}


def _is_node(node: object) -> bool:
    """True for a plain folder name of the form used here. The folder will be removed, so no other path is accepted."""
    return (
        isinstance(node, dict)
        and isinstance(node.get("node"), str)
        and isinstance(node.get("folder"), str)
        and _FOLDER.fullmatch(node["folder"]) is not None
    )


def _folders(before: dict[str, Any] | None) -> Iterator[Path]:
    for node in [] if before is None else before["nodes"]:
        for place in scratch_places() if node["node"] == socket.gethostname() else ():
            if (path := place / node["folder"]).is_dir() and not path.is_symlink():
                yield path


def _local_reports(before: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Reports on the previous attempt's ranks that ran on this node."""
    return [report for folder in _folders(before) for report in _reports_in(folder)]


def _reports_in(folder: Path) -> Iterator[dict[str, Any]]:
    beats, now = heartbeat.read(folder), stamp()
    odd, hang = disagreement(beats), read_json(folder / HANG_FILE)
    for beat in beats:
        age = now["monotonic"] - beat.time
        if age >= 0:  # else from an earlier boot of this machine
            yield {
                "rank": beat.rank, "node": socket.gethostname(), "doing": beat.doing, "is_done": beat.doing == heartbeat.DONE,
                "step": beat.steps_done if beat.started_at >= 0 else None, "odd": odd, "hang": hang,
                "cause": read_json(folder / f"{beat.rank}.cause"), "refused": (folder / f"{beat.rank}.refused").exists(),
                "meanwhile": meanwhile([other for other in beats if other.rank != beat.rank], beat.rank, []),
                "stamp": now | {"time": now["time"] - age, "monotonic": beat.time},
            }  # fmt: skip


def _remove_signs(before: dict[str, Any] | None, folder: RunFolder) -> None:
    for old in _folders(before):
        if (old / HANG_FILE).exists():
            with suppress(OSError):
                keep_hang(old, folder.path)
        shutil.rmtree(old, ignore_errors=True)


def _last_row(folder: RunFolder) -> dict[str, Any]:
    """Time of the run's last row of metrics, for when no node has reports on it."""
    rows = folder.metric_rows()
    step, when = (rows[-1].get(key) for key in ("step", "time")) if rows else (None, None)
    return {"time": when if isinstance(when, float) else time.time(), "step": step}


def _record(folder: RunFolder, event: dict[str, Any]) -> None:
    with suppress(OSError):
        folder.append("events.jsonl", event_line(event))
