"""Two nodes that are network namespaces joined by a cable, under torchrun: a rank dies, and the run goes on by itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from train.small_runs import curve, make_corpus, same, small_run, state, stop_at, train_ranks, whole_rows

from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Faults, Run

PORT = 29411
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun 2.13 tells no new agent where the ranks meet."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, 10.77.0.1 and 10.77.0.2."""
    names = (f"ua{os.getpid()}", f"ub{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "ue0", "netns", names[0], "type", "veth", "peer", "name", "ue1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"ue{number}")
            for device in ("lo", f"ue{number}"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield names
    for name in names:
        for pid in processes(name):
            os.kill(pid, signal.SIGKILL)
        ip("netns", "del", name)


def processes(node: str) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", node], check=True, capture_output=True, text=True).stdout
    return [int(pid) for pid in told.split()]


def start(node: str, number: int, file: Path, more: dict[str, str]) -> None:
    words = [
        "ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.1:{PORT}", "--rdzv-id", "two", "--max-restarts", "100",
        "--rdzv-conf", f"is_host={1 - number}", "--local-addr", f"10.77.0.{number + 1}",
        "-m", "ultrascale", "train", str(file),
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": f"ue{number}", "OMP_NUM_THREADS": "1"} | more
    with open(file.parent / f"node-{number}.log", "w") as log:
        subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.3)


def count(run: Run, kind: str) -> int:
    return sum(row["event"] == kind for row in whole_rows(run, "events.jsonl"))


@pytest.fixture
def two(tmp_path, nodes, request) -> Run:
    """A run on both nodes that has begun."""
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="two", steps=100_000, layout=Layout(dp=2, zero_stage=3))
    run = replace(run, checkpoint=Checkpoint(every_steps=10, export=False), faults=Faults(hang_seconds=8.0))
    file = tmp_path / "two.toml"
    file.write_text(to_toml(run))
    for number, node in enumerate(nodes):
        start(node, number, file, getattr(request, "param", {}))
    wait_until(lambda: count(run, "stepped") == 1)
    return run


@pytest.mark.nightly
@pytest.mark.catalogue(4)
def test_two_nodes_go_on_by_themselves_after_a_rank_of_one_was_killed(two, nodes):
    os.kill(rank_on(nodes[1]), signal.SIGKILL)
    wait_until(lambda: count(two, "stepped") == 2)


def rank_on(node: str) -> int:
    """The process of the rank of a node."""
    words = b"\0-u\0-m\0ultrascale\0train"
    return max(pid for pid in processes(node) if words in Path(f"/proc/{pid}/cmdline").read_bytes())


def agent_on(node: str) -> int:
    """The process of torchrun there."""
    return min(pid for pid in processes(node) if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes())


def stop(run: Run, nodes: tuple[str, str]) -> None:
    """End the run in order."""
    for node in nodes:
        os.kill(agent_on(node), signal.SIGTERM)
    wait_until(lambda: count(run, "stop") == 1 and not any(processes(node) for node in nodes))


def expect_calm_bits(run: Run) -> None:
    """What an undisturbed run has after as many steps, here on forked ranks."""
    whole = replace(run, name="undisturbed")
    train_ranks(whole, before_step=stop_at(len(curve(run))))
    assert curve(run) == curve(whole) and same(state(run), state(whole))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.catalogue(4)
def test_two_nodes_go_on_by_themselves_after_every_kill_on_either_to_the_same_bits(two, nodes):
    """20 kills of the rank of one node or the other; ULTRASCALE_NODE_KILLS says another number."""
    chance, kills = random.Random(0), int(os.environ.get("ULTRASCALE_NODE_KILLS", "20"))
    for number in range(kills):
        wait_until(lambda: len(whole_rows(two, "metrics.jsonl")) >= 7 * (number + 1))  # noqa: B023 (called before the next)
        time.sleep(chance.uniform(0.0, 1.0))
        os.kill(rank_on(chance.choice(nodes)), signal.SIGKILL)
        wait_until(lambda: count(two, "stepped") == number + 2)  # noqa: B023 (called before the next)
    stop(two, nodes)
    assert count(two, "failure") == kills
    expect_calm_bits(two)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.catalogue(3)
@pytest.mark.parametrize("two", [OWN_STORE], indirect=True)
def test_a_node_that_dies_is_waited_for_and_with_that_of_the_store_the_run_ends_until_it_is_started_again(two, nodes):
    file = Path(two.folder) / "two.toml"
    for pid in sorted(processes(nodes[1])):
        os.kill(pid, signal.SIGKILL)
    start(nodes[1], 1, file, OWN_STORE)
    wait_until(lambda: count(two, "stepped") == 2)
    for pid in sorted(processes(nodes[0])):  # the node that holds the store
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes(nodes[1]))
    for number, node in enumerate(nodes):
        start(node, number, file, OWN_STORE)
    wait_until(lambda: count(two, "stepped") == 3)
    stop(two, nodes)
    expect_calm_bits(two)


@pytest.mark.nightly
@pytest.mark.catalogue(24)
def test_a_cable_that_is_cut_is_told_on_both_nodes_and_the_run_goes_on_once_it_is_mended(two, nodes):
    logs = [Path(two.folder) / f"node-{number}.log" for number in (0, 1)]
    ip("-n", nodes[1], "link", "set", "ue1", "down")
    wait_until(lambda: all("ultrascale: hang: no sign of life in step" in log.read_text() for log in logs))
    assert all(f"rank {rank} waited in " in log.read_text() for rank, log in enumerate(logs))
    assert all("Others of ranks 0 to 1 (2) are on other nodes: look at the network" in log.read_text() for log in logs)
    ip("-n", nodes[1], "link", "set", "ue1", "up")
    wait_until(lambda: count(two, "stepped") == 2)
