"""Four nodes under elastic torchrun: one dies, the others go on by themselves, it comes back, and no bit tells of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from launch.namespaces import Node, joined
from train.small_runs import curve, make_corpus, same, small_run, state, stop_at, train_ranks, whole_rows

from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Checkpoint, Run
from ultrascale.plan.search.elastic import elastic_layout

BATCH = 12
MOST_SECONDS = 240.0
"""For what takes ten on a machine that has nothing else to do."""
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
"""torchrun waits 30 s for more nodes and 15 s for a sign of life of one."""
ROOT = Path(__file__).parent


def start(node: Node, number: int, first: Node, file: Path) -> None:
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "3:4", "--nproc-per-node", "1", "--max-restarts", "100",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29412", "--rdzv-id", "four",
        "--rdzv-conf", f"is_host={int(node == first)},{QUICK}", "--local-addr", node.address, "--monitor-interval", "0.3",
        str(ROOT / "noting_rank.py"), str(file.with_name(f"notes-{number}")), str(file),
    ]  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    node.start(words, file.with_name(f"node-{number}.log"), environment)


def events(run: Run, *kinds: str) -> list[dict]:
    return [row for row in whole_rows(run, "events.jsonl") if row["event"] in kinds]


def wait_until(holds: Callable[[], bool], run: Run) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "\n".join(
            f"{log.name}\n{log.read_text()[-3000:]}" for log in sorted(Path(run.folder).glob("node-*.log"))
        )
        time.sleep(0.1)


def stretches(run: Run) -> list[tuple[int, int]]:
    """World and first step of each time that ranks got as far as a step."""
    found, starts = [], {}
    for row in events(run, "start", "stepped"):
        if row["event"] == "start":
            starts = row
        else:
            found.append((starts["world"], starts["step"]))
    return found


def last_saved(run: Run) -> int:
    """Step of the newest complete checkpoint; 0 if there is none."""
    complete = Path(run.folder, run.name, "checkpoints").glob("step-*/manifest.json")
    return max((int(manifest.parent.name.removeprefix("step-")) for manifest in complete), default=0)


def steps_done(run: Run) -> int:
    return len(whole_rows(run, "metrics.jsonl"))


@pytest.mark.catalogue(3, 13)
def test_of_four_nodes_one_dies_three_go_on_and_it_comes_back_in_the_same_order_of_data_to_the_same_bits(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(
        tmp_path, name="four", steps=100_000, layout=Layout(dp=4, zero_stage=1), batch=Batch(11, BATCH),
        checkpoint=Checkpoint(every_steps=5, keep=2, export=False),
    )  # fmt: skip
    file = tmp_path / "four.toml"
    file.write_text(to_toml(run))
    with joined(4) as nodes:
        for number, node in enumerate(nodes):
            start(node, number, nodes[0], file)
        wait_until(lambda: bool(stretches(run)) and steps_done(run) >= 7, run)
        nodes[3].kill()
        wait_until(lambda: stretches(run)[-1][0] == 3, run)
        first = stretches(run)[-1][1]
        wait_until(lambda: last_saved(run) > first, run)  # else the four nodes would begin where these three did
        start(nodes[3], 3, nodes[0], file)
        wait_until(lambda: [world for world, _ in stretches(run)][-2:] == [3, 4], run)
        onwards = steps_done(run) + 7
        wait_until(lambda: steps_done(run) >= onwards, run)
        for pid in [pid for node in nodes for pid in node.processes() if is_agent(pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(node.processes() for node in nodes), run)
    done = steps_done(run)
    assert [row[0] for row in curve(run)] == list(range(1, done + 1))
    expect_every_sequence_once_a_step(tmp_path, run, done)
    expect_bits_of_ranks_told_to(run, done)


def is_agent(pid: int) -> bool:
    with suppress(OSError):
        return b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def expect_every_sequence_once_a_step(folder: Path, run: Run, done: int) -> None:
    """The sequences of step s are 12 s to 12 s + 11, shared by its ranks in turn; ranks of an attempt cut off read some
    of theirs."""
    by_attempt: dict[tuple[int, int], dict[int, set[int]]] = {}
    for path in folder.glob("notes-*"):
        for line in path.read_text().splitlines():
            _, world, rank, numbers = json.loads(line)
            by_attempt.setdefault((numbers[0] // BATCH, int(world)), {}).setdefault(int(rank), set()).update(numbers)
    for (step, world), ranks in by_attempt.items():
        for rank, read in ranks.items():
            assert read <= shares(step, world)[rank], (step, world, ranks)
    taken = [[world for world, first in stretches(run) if first <= step][-1] for step in range(done)]
    assert set(taken) == {3, 4}
    for step, world in enumerate(taken):
        assert by_attempt[step, world] == shares(step, world)


def shares(step: int, world: int) -> dict[int, set[int]]:
    return {rank: set(range(BATCH * step + rank, BATCH * (step + 1), world)) for rank in range(world)}


def expect_bits_of_ranks_told_to(run: Run, done: int) -> None:
    """The same worlds from the same steps on, here on forked ranks that nobody disturbs."""
    told = replace(run, name="told")
    parts = stretches(run)
    for (world, first), (_, until) in zip(parts, [*parts[1:], (0, done)], strict=True):
        if first < until:
            outcomes = train_ranks(replace(told, layout=elastic_layout(run, world)), before_step=stop_at(until))
            assert [one.get("steps_done", one) for one in outcomes] == [until] * world
    assert curve(told) == curve(run) and same(state(told), state(run))
