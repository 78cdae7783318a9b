"""Ranks that plain torchrun starts and starts again: what ended an attempt is found by the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launch.families import ended_after, says_what_rank_0_met
from ranks import run_ranks
from torch._C._distributed_c10d import TCPStore
from train.small_runs import curve, make_corpus, same, small_run, state, stop_at, train_ranks, whole_rows

from ultrascale.config.resolve import to_toml
from ultrascale.data.files import DataError
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Batch, Checkpoint, Run
from ultrascale.heartbeat import HeartbeatWriter
from ultrascale.parallel import arrival
from ultrascale.parallel.mesh import Ranks
from ultrascale.storage import MissingError, StorageError
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.start.attempts import ATTEMPT_FILE, _before, _folders, _reports_in, attempt, failure_of, was_refused
from ultrascale.train.watch.signs_of_life import Signs

MOST_SECONDS = 300.0
"""For what takes ten on a machine that has nothing else to do."""


@contextmanager
def torchrun(run: Run, program: tuple[str, ...] = ("-m", "ultrascale")) -> Iterator[subprocess.Popen[bytes]]:
    """`run` on two ranks of `program` under torchrun, its words in `said.log`; whatever is left of it at the end is killed."""
    file = Path(run.folder) / f"{run.name}.toml"
    file.write_text(to_toml(run))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    with open(Path(run.folder) / "said.log", "w") as said:
        process = subprocess.Popen(
            [sys.executable, *words, *program, "train", str(file)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    with ended_after(process):
        yield process


def events(run: Run) -> list[dict[str, Any]]:
    """But for ranks that are slower than others, which on a busy machine are any."""
    return [row for row in whole_rows(run, "events.jsonl") if row["event"] != "straggler"]


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, "ended or too slow"
        time.sleep(0.1)


def rank_of(process: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(rank))


@pytest.mark.catalogue(4)
def test_torchrun_starts_a_killed_rank_again_and_the_next_attempt_tells_what_ended_the_one_before(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="under", steps=100_000, layout=Layout(dp=2, zero_stage=3, micro_batch_size=2))
    run = replace(run, checkpoint=Checkpoint(every_steps=10, keep=3, export=False))
    with torchrun(run) as process:
        wait_until(lambda: len(whole_rows(run, "metrics.jsonl")) >= 12, process)
        killed_at = time.time()
        rank_of(process, 1).kill()
        wait_until(lambda: [row["event"] for row in events(run)].count("stepped") == 2, process)
        process.terminate()
        process.wait(MOST_SECONDS)
    said = (tmp_path / "said.log").read_text()
    failure = events(run)[2]
    assert [row["event"] for row in events(run)] == ["start", "stepped", "failure", "start", "stepped", "stop"], said
    assert (failure["rank"], failure["again"]) == (1, True) and failure["step"] >= 12
    assert failure["cause"].startswith("rank 1 ended without a word at ") and says_what_rank_0_met(failure["cause"])
    assert abs(failure["time"] - killed_at) < events(run)[3]["time"] - killed_at
    assert f"restart 1: rank 1, node {failure['node']}, step {failure['step']}, " in said and "1 restart, " in said
    assert not (RunFolder.of(run).path / ATTEMPT_FILE).exists()
    whole = replace(run, name="undisturbed")
    train_ranks(whole, before_step=stop_at(len(curve(run))))
    assert curve(run) == curve(whole) and same(state(run), state(whole))


@pytest.mark.catalogue(16)
def test_ranks_and_watchdog_stop_in_order_when_torchruns_agent_is_killed_and_the_next_start_goes_on(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="orphaned", steps=100_000, layout=Layout(dp=2, micro_batch_size=2))
    with torchrun(run, (str(Path(__file__).with_name("patient_rank.py")),)) as process:
        wait_until(lambda: len(whole_rows(run, "metrics.jsonl")) >= 2, process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=MOST_SECONDS)
        for one in alive:
            one.kill()
    said = (tmp_path / "said.log").read_text()
    assert len(family) >= 3 and alive == [], family  # ranks and their watchdog, and what they may just be asking the system
    assert f"process {process.pid}, which started this rank, has ended: stopping" in said and "Traceback" not in said, said
    assert [row["event"] for row in events(run)] == ["start", "stepped", "stop"]
    assert not (RunFolder.of(run).path / ATTEMPT_FILE).exists()


@pytest.fixture
def signs(tmp_path, temporary_folder) -> Path:
    """A folder of signs of life where such folders are."""
    temporary_folder(tmp_path)
    folder = tmp_path / "ultrascale-signs-x1"
    folder.mkdir()
    for rank in range(2):
        heart = HeartbeatWriter(folder, rank, hang_seconds=1)
        heart.started_at, heart.steps_done = 5, 9 + rank
        heart.beat("backward")
    return folder


def told(signs: Path, *, world: int = 2) -> dict[str, Any]:
    node = next(_reports_in(signs))["node"]
    before = {"world": world, "nodes": [{"node": node, "folder": signs.name}]}
    assert list(_folders(before)) == [signs]
    return failure_of(_reports_in(signs), before, RunFolder(signs.parent))


def leave_cause(signs: Path, rank: int, text: str, *, lost_contact: bool) -> None:
    (signs / f"{rank}.cause").write_text(json.dumps({"rank": rank, "lost_contact": lost_contact, "text": text}))


def test_of_ranks_that_left_a_word_the_one_that_did_not_is_blamed_then_the_one_that_missed_nobody(signs):
    assert told(signs)["cause"] == "ranks 0, 1 ended without a word" and told(signs)["step"] == 10
    leave_cause(signs, 0, "LostRankError: rank 0 waited for rank 1 in a sum", lost_contact=True)
    assert told(signs)["cause"] == "rank 1 ended without a word at backward; rank 0 waited for rank 1 in a sum"
    assert told(signs, world=3)["cause"].startswith("rank 2 left no signs of life: gone, or started anew; rank 0 waited")
    leave_cause(signs, 1, "ValueError: no", lost_contact=False)
    assert (told(signs)["rank"], told(signs)["cause"]) == (1, "rank 1 failed: ValueError: no")
    (signs / "hang.json").write_text(json.dumps({"culprits": [0], "reason": "no sign of life in step 9"}))
    assert (told(signs)["rank"], told(signs)["cause"]) == (0, "hang: no sign of life in step 9")


def test_where_a_node_has_gone_with_its_signs_the_metrics_tell_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "time": 5.5}\n{"step": 7, "time": 6.5}\n{"ste')
    found = failure_of([], {"world": 2, "nodes": [{"node": "far", "folder": "x"}]}, RunFolder(tmp_path))
    assert (found["time"], found["step"], found["rank"]) == (6.5, 8, None)
    assert found["cause"] == "ranks 0, 1 of far left no signs of life: gone, or started anew"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"nodes": 3}', '{"world": 2, "nodes": [{"node": "here", "folder": "../victim"}, {"folder": 3}, 7]}']
)
def test_a_spoilt_file_of_the_attempt_before_is_read_as_one_of_nobody_and_leads_to_no_other_folder(tmp_path, text):
    (tmp_path / ATTEMPT_FILE).write_text(text)
    before = _before(RunFolder(tmp_path))
    assert before is not None and before["nodes"] == [] and list(_folders(before)) == []
    assert "nobody watched it" in failure_of([], before, RunFolder(tmp_path))["cause"]


def away(error: Exception) -> DataError:
    """What is raised for data whose store answers with `error`."""
    told = DataError("s3://data", f"cannot be read: {error}", "Check the store.")
    told.__cause__ = error
    return told


SPOILT = DataError("tokens", "is 4 tokens, expected 11", "Prepare more text.")


def attempt_and_meet_again(rank: int, folder: Path, error: Exception, has_begun: bool) -> str:
    """What ranks are told that meet after an attempt that ended with `error`, in the store that an agent lends; empty if they
    may train."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), arrival.LENT: "True"}
    meet = partial(arrival.meet, "env://", 0, 1, timedelta(seconds=60))
    meet()
    ranks = Ranks(0, 1, torch.device("cpu"))
    with pytest.raises(type(error)), attempt(RunFolder(folder), ranks, Signs(has_begun=has_begun)):
        raise error
    with attempt(RunFolder(folder), ranks, Signs()):
        pass
    try:
        meet()
    except arrival.GivenUpError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("error, has_begun, told", [
    (SpecError([Problem("seed", "is 4", "Set it back.")]), False, 0), (ValueError("no"), False, 1),
    (SPOILT, False, 0), (SPOILT, True, 1),
    (away(StorageError("the store does not answer")), False, 1), (away(MissingError("is not there")), False, 0),
])  # fmt: skip
def test_a_start_that_was_refused_is_no_attempt_that_failed(tmp_path, error, has_begun, told):
    (refusal,) = run_ranks(1, attempt_and_meet_again, tmp_path, error, has_begun)
    kept = tmp_path / "events.jsonl"
    assert len(kept.read_text().splitlines() if kept.exists() else []) == told
    assert refusal == ("" if told else f"this run: not started again: {error}")


@pytest.mark.parametrize("other, refused", [
    ("refused", True), ("LostRankError: rank 0 has left", True), ("ValueError: no", False), (None, False),
])  # fmt: skip
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_is_refused_hides_no_crash_of_another(signs, first, other, refused):
    ranks = Ranks(first, 2, torch.device("cpu"))
    with pytest.raises(DataError), attempt(RunFolder(signs.parent), ranks, Signs(signs)):
        raise SPOILT
    leave_cause(signs, first, f"DataError: {SPOILT}", lost_contact=False)
    if other == "refused":
        (signs / f"{1 - first}.refused").touch()
    elif other is not None:
        leave_cause(signs, 1 - first, other, lost_contact=other.startswith("Lost"))
    assert was_refused(_reports_in(signs), {"world": 2}) == refused
    assert not was_refused(_reports_in(signs), {"world": 3})
    if other == "ValueError: no":
        assert (told(signs)["rank"], told(signs)["cause"]) == (1 - first, f"rank {1 - first} failed: ValueError: no")


@pytest.mark.nightly
def test_torchrun_begins_no_run_again_whose_data_cannot_be_trained_on(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="short", layout=Layout(dp=2), batch=Batch(100_000, 2))
    run = replace(run, model=replace(run.model, max_position_embeddings=100_000))
    with torchrun(run) as process:
        assert process.wait(MOST_SECONDS) == 1
    said = (tmp_path / "said.log").read_text()
    assert said.count("ultrascale: error on rank 0: ") == 4 and said.count("    not started again: ") == 3, said
    assert events(run) == []
