"""`ultrascale measure network`: speed of collectives between the ranks of this machine or cluster, compared with the plan."""

from __future__ import annotations

import json as jsonlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.cli.measure.measure_speed import launched_once
from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.console import plain_table
from ultrascale.description.problems import mistake
from ultrascale.description.rank_environment import env_rank, expect_rank_environment
from ultrascale.description.units import format_bytes, format_seconds
from ultrascale.launch.scratch import scratch_folder
from ultrascale.plan.laws.nccl import KINDS

if TYPE_CHECKING:
    from rich.table import Table

    from ultrascale.measure.machine.timed import Timed

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
LEAST, MOST = 2**12, 2**36


def network(
    processes: int | None = None,
    groups: str | None = None,
    kinds: str | None = None,
    largest: str | None = None,
    machine: str | None = None,
    device: str = "auto",
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Time collectives between ranks, by kind, size and group, as nccl-tests does, compared with the plan. Every result is
    checked.

    For example, two processes here; or, on each of two nodes, under torchrun:

        ultrascale measure network --processes 2
        torchrun --nnodes 2 --nproc-per-node 8 ... -m ultrascale measure network --machine 2xours.toml

    Args:
        processes: Number of processes to start here.
        groups: SIZE:STRIDE of groups of ranks, such as 8:1,2:8. Default: all ranks, those of each node, one of each node.
        kinds: Collectives, such as all_reduce,all_gather; send is to the next rank of a group. Default: all six.
        largest: Size of the largest message, such as 64MiB. Default: 1GiB on GPUs, 16MiB on CPUs.
        machine: Machines of the plan. Default: as many of this GPU as there are ranks, in nodes of its usual size.
        device: auto, cpu or cuda.
        out: Write the result to this JSON file.
        json: Print the result as one JSON object.
    """
    request: dict[str, Any] = {
        "groups": None if groups is None else parse_groups(groups), "kinds": _kinds(kinds), "device": device,
        "largest": None if largest is None else parse_size(largest), "machine": machine,
    }  # fmt: skip
    if device not in ("auto", "cpu", "cuda"):
        raise mistake("--device", f"must be auto, cpu or cuda, is {device!r}", "Leave it out, mostly.")
    if machine is not None:
        parse_cluster(machine)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise mistake("--out", f"{out} is no file that can be written", "Name a file in a folder that is there.")
    expect_rank_environment()
    with scratch_folder("network") as folder:
        request["out"] = str((out or folder / "network.json").absolute())
        code = _measured(request, processes)
        if code == 0 and env_rank() == 0:
            result = jsonlib.loads(Path(request["out"]).read_text())
            if json:
                print_json(result, "measure-network", indent=1)
            else:
                _show(result)
    return code


command = partial(parse, network, "measure network")
"""Run the verb; returns 0 if measured, 1 if it failed, 2 if the configuration is invalid."""


def parse_groups(text: str) -> list[tuple[int, int]]:
    """`8:1,2:8` as sizes and strides. Raises SpecError."""
    matches = [re.fullmatch(r"(\d+):(\d+)", word.strip()) for word in text.split(",")]
    if not all(matches):
        raise mistake("--groups", f"must be SIZE:STRIDE, with commas between, is {text!r}", "Such as 8:1,2:8.")
    return [(int(match[1]), int(match[2])) for match in matches if match]


def parse_size(text: str) -> int:
    """Bytes of `64MiB`, `1GiB`, `1048576`. Raises SpecError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper().removesuffix("B") + "B" if match[2].upper() not in ("", "B") else "") if match else None
    num_bytes = int(float(match[1]) * unit) if match and unit else 0
    if not LEAST <= num_bytes <= MOST:
        rule = f"must be a size from {format_bytes(LEAST)} to {format_bytes(MOST)}, is {text!r}"
        raise mistake("--largest", rule, "Such as 64MiB.")
    return num_bytes


def _kinds(text: str | None) -> list[str]:
    if text is None:
        return [*KINDS]
    kinds = [word.strip().replace("-", "_") for word in text.split(",")]
    if wrong := [word for word in kinds if word not in KINDS]:
        raise mistake("--kinds", f"knows no {', '.join(map(repr, wrong))}", f"Choose of {', '.join(KINDS)}.")
    return kinds


def _measured(request: dict[str, Any], processes: int | None) -> int:
    if "WORLD_SIZE" in os.environ:
        from ultrascale.measure.machine.network_rank import measure

        measure(request)
        return 0
    if processes is None or processes < 2:
        rule = "is missing" if processes is None else f"must be at least 2, is {processes}"
        raise mistake("--processes", rule, "A network has two ends: --processes 2, or start it under torchrun.")
    words = ("--asked", jsonlib.dumps(request))
    return launched_once("", processes, words, worker="ultrascale.measure.machine.network_rank")


def _show(result: dict[str, Any]) -> None:
    from ultrascale.measure.machine.network import network_bytes_per_second
    from ultrascale.measure.machine.timed import Timed

    console = console_for_people()
    timed = [Timed(**fields) for fields in result["timed"]]
    planned = f"; planned for {result['planned_for']}" if result["planned_for"] else ""
    missing = "; not planned: say which machine with --machine" if result["backend"] == "nccl" and not planned else ""
    facts = f"{result['ranks']} ranks, {result['per_node']} a node, {result['device']}, {result['backend']}{planned}{missing}"
    console.print(facts, soft_wrap=True)
    for size, stride in dict.fromkeys((timing.size, timing.stride) for timing in timed):
        in_group = [timing for timing in timed if (timing.size, timing.stride) == (size, stride)]
        name = f"groups of {size} ranks" + (f", {stride} apart" if stride > 1 else "")
        for what, cell in ((f"time{' (planned)' if planned else ''}", _time), ("GB/s of bus", _rate)):
            console.print(f"\n[bold]{name}: {what}[/bold]", soft_wrap=True)
            console.print(_table(in_group, cell))
    console.print("\nGB/s of bus: what a rank must send, whatever the algorithm, over the time", soft_wrap=True)
    bandwidth = network_bytes_per_second(timed, result["per_node"])
    if bandwidth is not None:
        console.print(
            f"for a machine's file, below \\[network]:  achieved_gbytes_per_second = {bandwidth / 1e9:.3g}", soft_wrap=True
        )


def _table(timed: list[Timed], cell: Callable[[Timed], str]) -> Table:
    kinds = [*dict.fromkeys(timing.kind for timing in timed)]
    names = (kind.replace("_", "-") for kind in kinds)
    table = plain_table("", *names, left=(), whole=("",), header_style="dim", pad_edge=True, padding=(0, 1, 0, 0))
    for num_bytes in dict.fromkeys(timing.num_bytes for timing in timed):
        row = {timing.kind: timing for timing in timed if timing.num_bytes == num_bytes}
        table.add_row(format_bytes(num_bytes), *(cell(row[kind]) for kind in kinds))
    return table


def _time(timing: Timed) -> str:
    planned = "" if timing.planned_seconds is None else f" ({format_seconds(timing.planned_seconds)})"
    return f"{format_seconds(timing.seconds)}{planned}"


def _rate(timing: Timed) -> str:
    return f"{timing.bus_bytes_per_second / 1e9:.3g}"
