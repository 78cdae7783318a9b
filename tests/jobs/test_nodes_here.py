"""What nodes run without a batch system, on two that are this machine: over a stand-in for ssh, and as pods are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jobs.slurm_here import wait_until
from s3_server import BUCKET, reached_at, s3_server
from train.small_runs import curve, make_corpus, same, small_run, state, train_ranks, whole_rows

from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Run
from ultrascale.jobs.job import job_of
from ultrascale.jobs.kubernetes import node_script

STEPS = 140

SSH = """#!/bin/sh
# Takes options, a host and a command, as ssh does, and runs the command here. Says that host `gone` cannot be reached.
while [ "${1#-}" != "$1" ]; do shift 2; done
[ "$1" = gone ] && exit 255
shift
exec bash -c "$*"
"""


@pytest.fixture
def two(tmp_path, monkeypatch) -> Run:
    """A run on two nodes of one rank, in the current folder as two.toml."""
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="two", steps=STEPS, layout=Layout(dp=2, zero_stage=3, micro_batch_size=2))
    run = replace(run, checkpoint=Checkpoint(every_steps=20, keep=2, export=False))
    section = '[launch]\nnodes = 2\ngpus_per_node = 1\nenvironment = ["GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"]\n'
    (tmp_path / "two.toml").write_text(to_toml(run) + section)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return run


def rows(run: Run) -> int:
    return len(whole_rows(run, "metrics.jsonl"))


def expect_calm_bits(run: Run) -> None:
    calm = replace(run, name="calm")
    train_ranks(calm)
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_hosts_over_ssh_train_one_run_and_a_stop_reaches_both(two):
    assert main(["launch", "ssh", "two.toml", "--launch.hosts", "localhost,user@127.0.0.1"]) == 0
    with open("said.txt", "w") as said:
        started = subprocess.Popen(["bash", "two.ssh.sh"], stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: rows(two) >= 10 or started.poll() is not None, "ten steps")
    started.send_signal(signal.SIGTERM)
    code = started.wait(120)
    said = Path("said.txt").read_text()
    assert code == 0 and said.rstrip().endswith("all have left: stopped"), said
    assert 10 <= rows(two) < STEPS
    done = subprocess.run(["bash", "two.ssh.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all have left: complete"), done.stdout
    expect_calm_bits(two)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_islands_with_a_quorum_are_jobs_that_find_each_other(two):
    words = ["--layout.dp", "1", "--islands.count", "2", "--islands.quorum", "2", "--islands.every-steps", "4", "--steps", "20"]
    assert main(["launch", "ssh", "two.toml", "--nodes", "1", "--launch.hosts", "localhost,user@127.0.0.1", *words]) == 0
    started = [subprocess.Popen(["bash", f"two-island-{n}.ssh.sh"], stdout=subprocess.PIPE, text=True) for n in (0, 1)]
    for number, one in enumerate(started):
        said, _ = one.communicate(timeout=400)
        assert one.returncode == 0 and said.rstrip().endswith("all have left: complete"), (number, said)
    other = replace(two, folder=f"{two.folder}/two/islands", name="1")
    both = [{name: kept for name, kept in state(one).items() if name.startswith("model.")} for one in (two, other)]
    assert same(*both) and rows(two) == rows(other) == 20


@pytest.mark.timeout(300)
def test_a_host_that_cannot_be_reached_ends_the_others_with_exit_code_1(two):
    assert main(["launch", "ssh", "two.toml", "--launch.hosts", "localhost,gone"]) == 0
    started = time.monotonic()
    done = subprocess.run(["bash", "two.ssh.sh"], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "all have left: failed"), done.stdout + done.stderr
    assert time.monotonic() - started < 120 and rows(two) == 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_pod_that_is_asked_to_leave_saves_and_does_not_end_like_one_whose_run_is_complete(two):
    found = resolve("two.toml")
    job = job_of(found.run, found.launch, file=Path("two.toml"), nodes=2, command="")
    script = node_script(job, first="127.0.0.1", number="JOB_COMPLETION_INDEX")
    pods = start_pods(script)
    wait_until(lambda: rows(two) >= 10 or any(pod.poll() is not None for pod in pods), "ten steps")
    for pod in pods:
        pod.terminate()
    assert [pod.wait(120) for pod in pods] == [75, 75], [Path(f"pod-{number}.txt").read_text() for number in (0, 1)]
    assert 10 <= rows(two) < STEPS
    assert [pod.wait(200) for pod in start_pods(script)] == [0, 0]
    events = [json.loads(row)["event"] for row in (Path("two") / "events.jsonl").read_text().splitlines()]
    assert (events.count("stop"), events.count("end"), events.count("failure")) == (1, 1, 0)
    expect_calm_bits(two)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_pods_with_disks_of_their_own_keep_the_run_in_a_store_and_go_on_on_empty_disks(two):
    """Each pod's shell in a folder of its own: told to leave, both end with 75; on new disks both end with 0, all done."""

    def where_first(disks: list[str]) -> Run:
        """The run on the disk of rank 0, which torchrun puts where it likes."""
        return next((one for disk in disks if rows(one := replace(run, folder=f"{disk}/out"))), run)

    found = resolve("two.toml")
    with s3_server() as address, reached_at(address):
        run = replace(found.run, folder="out", checkpoint=replace(found.run.checkpoint, store=f"s3://{BUCKET}/runs"))
        Path("two.toml").write_text(to_toml(run))
        job = job_of(run, found.launch, file=Path("../two.toml"), nodes=2, command="")
        script = node_script(job, first="127.0.0.1", number="JOB_COMPLETION_INDEX")
        first, second = ["disk-0", "disk-1"], ["disk-2", "disk-3"]
        pods = start_pods(script, disks=first)
        wait_until(lambda: rows(where_first(first)) >= 30 or any(pod.poll() is not None for pod in pods), "thirty steps")
        for pod in pods:
            pod.terminate()
        assert [pod.wait(120) for pod in pods] == [75, 75], [Path(f"pod-{number}.txt").read_text() for number in (0, 1)]
        assert 30 <= rows(where_first(first)) < STEPS
        shards = [sorted(path.name for path in Path(disk).rglob("step-*/*.safetensors")) for disk in first]
        assert sorted(map(set, shards), key=str) == [{"rank-00000.safetensors"}, {"rank-00001.safetensors"}]
        assert [pod.wait(200) for pod in start_pods(script, disks=second)] == [0, 0]
        words = ["-m", "ultrascale", "export", f"s3://{BUCKET}/runs/two", "exported"]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
    calm = replace(two, name="calm", checkpoint=replace(two.checkpoint, export=True))
    train_ranks(calm)
    assert curve(where_first(second)) == curve(calm)
    weights = "model.safetensors"
    assert Path("exported", weights).read_bytes() == Path(two.folder, "calm/export", weights).read_bytes()


def start_pods(script: str, disks: Sequence[str] = (".", ".")) -> list[subprocess.Popen[bytes]]:
    given = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
    pods = []
    for number, disk in enumerate(disks):
        Path(disk).mkdir(exist_ok=True)
        with open(f"pod-{number}.txt", "a") as said:
            words, own = ["bash", "-c", script], given | {"JOB_COMPLETION_INDEX": str(number)}
            options = {"cwd": disk, "env": own, "stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True}
            pods.append(subprocess.Popen(words, **options))
    return pods
