"""Slurm's text on a real Slurm: three slurmd on this machine, runs of two nodes over gloo."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
from jobs.slurm_here import PATH, NoSlurm, Slurm, slurm, start_node, wait_until
from train.small_runs import curve, make_corpus, same, small_run, state, train_ranks, whole_rows

from ultrascale.cli.main import main
from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Run

STEPS = 400
SLOW_RANK = Path(__file__).with_name("slow_rank.py")


@pytest.fixture(scope="module")
def here() -> Iterator[Slurm]:
    try:
        with slurm() as one:
            yield one
    except NoSlurm as error:
        pytest.skip(f"no Slurm here: {error}")


@pytest.fixture
def two(tmp_path, here, monkeypatch) -> Iterator[Run]:
    """A run on two nodes of one rank, as two.toml in a folder whose name has a blank; its jobs are gone at the end."""
    tmp_path = tmp_path / "a folder"
    tmp_path.mkdir()
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="two", steps=STEPS, layout=Layout(dp=2, zero_stage=3, micro_batch_size=2))
    run = replace(run, checkpoint=Checkpoint(every_steps=20, keep=2, export=False))
    (tmp_path / "two.toml").write_text(to_toml(run) + launch_section())
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("SLURM_CONF", str(here.folder / "slurm.conf"))
    with chdir(tmp_path):
        yield run
    for job in here.says("squeue", "-h", "-o", "%A").split():
        here.says("scancel", job)
    wait_until(lambda: here.says("squeue", "-h", "-o", "%A") == "", "the jobs are gone")


def launch_section() -> str:
    python = Path(sys.executable).parent
    return f"""
[launch]
gpus_per_node = 1
time_limit = "30m"
setup = ["export PATH={python}:$PATH"]
environment = ["GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"]
"""


def submitted(capsys, *words: str) -> str:
    """The number of the job that the command hands in."""
    assert main(["launch", "slurm", "two.toml", *words, "--submit"]) == 0
    return capsys.readouterr().out.split()[-1]


def handed_in(file: str) -> str:
    return subprocess.run(["sbatch", "--parsable", file], check=True, capture_output=True, text=True).stdout.strip()


def events(run: Run, kind: str) -> int:
    return sum(row["event"] == kind for row in whole_rows(run, "events.jsonl"))


def rows(run: Run) -> int:
    return len(whole_rows(run, "metrics.jsonl"))


def log(job: str) -> str:
    path = Path(f"two-{job}.log")
    return path.read_text() if path.exists() else ""


def expect_calm_bits(run: Run) -> None:
    """Losses, weights and moments are those of a run that nobody disturbed, here on forked ranks."""
    calm = replace(run, name="calm")
    train_ranks(calm)
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_saves_when_slurm_says_so_and_when_it_is_preempted_and_ends_with_the_bits_of_a_calm_one(
    two, here, capsys
):
    job = submitted(capsys, "--nodes", "2")
    wait_until(lambda: rows(two) >= 10, "ten steps")
    here.says("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1 does before the time is over
    wait_until(lambda: "back into the queue: its time is nearly over" in log(job), "it queues itself again")
    here.start_now(job, 1)
    done = rows(two)
    assert (events(two, "stop"), events(two, "failure")) == (1, 0) and 10 <= done < STEPS
    wait_until(lambda: events(two, "stepped") == 2 and rows(two) > done, "it goes on")
    here.says("scontrol", "requeue", job)
    here.start_now(job, 2)
    assert events(two, "stop") == 2
    wait_until(lambda: here.state(job) == "COMPLETED", "it is complete")
    assert (here.field(job, "Restarts"), events(two, "failure"), events(two, "end")) == ("2", 0, 1), log(job)
    assert log(job).rstrip().endswith("the ranks have left: exit code 0, complete")
    expect_calm_bits(two)


@pytest.mark.timeout(900)
def test_the_trainer_leaves_before_the_time_limit_and_the_job_queues_itself_again(two, here, capsys):
    main(["launch", "slurm", "two.toml", "--nodes", "2", "--steps", "100000"])
    text = Path("two.sbatch").read_text()
    assert "#SBATCH --time=0-00:30:00\n" in text and "#SBATCH --signal=B:USR1@180\n" in text
    # Without Slurm's own signal, which may come a minute before it was asked for. Its steps mostly sleep.
    text = text.replace("--time=0-00:30:00", "--time=2").replace("#SBATCH --signal=B:USR1@180", "")
    assert text.count("-m ultrascale train ") == 1
    Path("two.sbatch").write_text(text.replace("-m ultrascale train ", f"{shlex.quote(str(SLOW_RANK))} train "))
    job = handed_in("two.sbatch")
    wait_until(lambda: "back into the queue: the time is nearly over" in log(job), "it leaves by itself", seconds=480.0)
    assert re.search(r"(saving and leaving|left) after step \d+: the job's time is over in ", log(job)), log(job)
    here.start_now(job, 1)
    wait_until(lambda: events(two, "stepped") == 2, "it goes on")
    assert (events(two, "stop"), events(two, "failure")) == (1, 0)


@pytest.mark.timeout(900)
def test_a_job_that_loses_a_node_is_queued_again_and_goes_on_elsewhere_to_the_same_bits(two, here, capsys):
    job = submitted(capsys, "--nodes", "2")
    wait_until(lambda: rows(two) >= 30, "thirty steps")
    lost = here.says("scontrol", "show", "hostnames", here.field(job, "NodeList")).split()[1]
    here.kill_node(lost)
    start_node(here, lost)
    here.start_now(job, 1)
    wait_until(lambda: here.state(job) == "COMPLETED", "it is complete")
    assert lost not in log(job).partition("start 2, on ")[2].split(",")[0]
    expect_calm_bits(two)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_node_that_the_doctor_stops_is_left_out(two, here, capsys):
    main(["launch", "slurm", "two.toml", "--nodes", "2"])
    text = Path("two.sbatch").read_text()
    doctor = "timeout 300 python -m ultrascale doctor"
    assert doctor in text
    Path("two.sbatch").write_text(text.replace(doctor, f"[[ $SLURMD_NODENAME != n1 ]] && {doctor}"))
    job = handed_in("two.sbatch")
    wait_until(lambda: "back into the queue without n1" in log(job), "it is left out")
    here.start_now(job, 1)
    wait_until(lambda: here.state(job) == "COMPLETED", "it is complete")
    assert here.field(job, "NodeList") == "n[2-3]" and here.field(job, "ExcNodeList") == "n1"


@pytest.mark.timeout(900)
def test_an_array_measures_every_cell_and_a_task_that_is_queued_again_begins_its_cell_anew(two, here, capsys):
    words = ["--layout.zero-stage", "0,3", "--warm", "2"]
    job = submitted(capsys, "--nodes", "1", "--launch.gpus-per-node", "1", "--measure", *words, "--timed", "3")
    cells = Path("sweeps/two/cells.txt").read_text().splitlines()
    begun = ("RUNNING", "COMPLETING", "COMPLETED")  # a quick task may have ended between two looks
    wait_until(lambda: here.state(f"{job}_1") in begun, "the second task begins")
    here.says("scontrol", "requeue", f"{job}_1")
    here.start_now(f"{job}_1", 1)
    wait_until(lambda: all(Path(cell, "speed.json").exists() for cell in cells), "both are measured")
    assert main(["sweep", "two.toml", "--processes", "1", *words, "--steps", "3", "--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (len(told["measured"]), told["failed"]) == (len(cells), [])
