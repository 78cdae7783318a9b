"""The catalogue of accelerators and machines, from accelerators.toml and machines.toml, every number with its source and date;
and the machine that this runs on."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ultrascale.catalogue.cluster import Accelerator, Link, Node, Sourced
from ultrascale.catalogue.tables import Entry, entries, read_tables, with_aliases
from ultrascale.description.layout import NARROW
from ultrascale.description.problems import Problem, mistake

_ACCELERATORS = "accelerators.toml"
_ACCELERATOR_KEYS = (
    "title", "aliases", "machine", "memory_mib", "memory_gbytes_per_second", "tflops", "tflops_from", "matmul_fraction",
    "multiprocessors", "law", "same_chip", "watts", "dollars_per_hour",
)  # fmt: skip
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")


def read_accelerator(name: str, entry: Entry) -> Accelerator:
    """Accelerator that `entry` describes. Raises SpecError for its first wrong key."""
    return Accelerator(
        name,
        entry.get("title", str),
        entry.sourced("memory_mib", 2**20),
        entry.sourced("memory_gbytes_per_second", 1e9),
        _peaks(entry),
        entry.sourced("matmul_fraction"),
        entry.sourced("watts"),
        entry.sourced("dollars_per_hour"),
        entry.get("multiprocessors", int),
        entry.one_of("law", _MEASURED) if "law" in entry.values else "",
        "law" not in entry.values or entry.flag("same_chip"),
    )


def _peaks(entry: Entry) -> dict[str, Sourced]:
    """Peak FLOPs per second by dtype, the widest first; fp16 is as fast as bf16."""
    table = Entry(f"{entry.where}.tflops", entry.get("tflops", dict))
    table.expect_only(*_DTYPES)
    source, date = entry.get("tflops_from", list)
    tera = {"fp16": table.values["bf16"], **table.values} if "bf16" in table.values else table.values
    return {dtype: Sourced(tera[dtype] * 1e12, source, date) for dtype in _DTYPES if dtype in tera}


_ACCELERATOR_ENTRIES = dict(entries(_ACCELERATORS, read_tables(_ACCELERATORS), *_ACCELERATOR_KEYS))
_MEASURED = {name: name for name, entry in _ACCELERATOR_ENTRIES.items() if "law" not in entry.values}
"""Accelerators with laws of their own, which a `law` may name."""
ACCELERATORS = {name: read_accelerator(name, entry) for name, entry in _ACCELERATOR_ENTRIES.items()}
ACCELERATOR_ALIASES = with_aliases(_ACCELERATOR_ENTRIES)
"""Other names used by people, clouds and tables."""

_FILE = "machines.toml"
_LINK_KEYS = ("name", "gbytes_per_second", "achieved_gbytes_per_second")
_NODE_KEYS = ("title", "aliases", "accelerator", "accelerators", "tray", "inside", "network", "cards", "watts")


def _link(entry: Entry) -> Link:
    reached = entry.maybe_sourced("achieved_gbytes_per_second", 1e9)
    return Link(entry.get("name", str), entry.sourced("gbytes_per_second", 1e9), reached)


def _node(name: str, entry: Entry, links: dict[str, Link]) -> Node:
    return Node(
        name,
        entry.get("title", str),
        entry.one_of("accelerator", ACCELERATORS),
        entry.get("accelerators", int, 8),
        entry.one_of("inside", links),
        entry.one_of("network", links),
        entry.get("cards", int) if "cards" in entry.values else None,
        entry.maybe_sourced("watts"),
        entry.get("tray", int) if "tray" in entry.values else None,
    )


_TABLES = read_tables(_FILE)
_LINKS = {name: _link(entry) for name, entry in entries(f"{_FILE}: links", _TABLES["links"], *_LINK_KEYS)}
_ENTRIES = dict(entries(f"{_FILE}: nodes", _TABLES["nodes"], *_NODE_KEYS))
NODES: dict[str, Node] = {name: _node(name, entry, _LINKS) for name, entry in _ENTRIES.items()}


def usual_node(name: str, entry: Entry) -> str:
    """Node type for a bare number of the accelerators that `entry` describes. Raises SpecError if it holds others."""
    node = entry.one_of("machine", NODES)
    if node.accelerator.name != name:
        rule = f"is {node.name!r}, which holds {node.accelerator.name}"
        raise mistake(f"{entry.where}.machine", rule, f"Name one with accelerator = {name!r} in {_FILE}.")
    return node.name


USUAL_NODE = {name: usual_node(name, entry) for name, entry in _ACCELERATOR_ENTRIES.items()}
ALIASES = ACCELERATOR_ALIASES | with_aliases(_ENTRIES)
"""Other names of accelerators and machines, used by people, clouds and tables."""


def accelerator_in(text: str) -> str | None:
    """Accelerator whose name appears in a text, as in tables (`H100-96GB-HBM2e-500W`, `DGX A100 (40GB)`); None if there is
    none.

    Among names and aliases whose words all appear in the text, the one with most words wins: `a100-pcie-40` before `a100-40`.
    """
    words = _words(text)
    names = [
        (_words(alias), name) for alias, name in (*zip(ACCELERATORS, ACCELERATORS, strict=True), *ACCELERATOR_ALIASES.items())
    ]
    matches = [(len(of), any(word.isdigit() for word in of), len(name), name) for of, name in names if of <= words]
    return max(matches)[-1] if matches else None


def _words(text: str) -> frozenset[str]:
    """Words of a machine's name without vendor and form factor: 80GB is 80, SXM5 sxm, RTX4090 rtx and 4090."""
    words = re.split(r"[^a-z0-9.]+", re.sub(r"\brtx(?=\d)", "rtx-", text.lower()))
    return frozenset(re.sub(r"^(\d+)gb?$|^(sxm)\d$", r"\1\2", word) for word in words if word)


def missing_dtype_problem(accelerator: Accelerator, dtype: str, key: str = "layout.precision") -> Problem:
    """Problem of an accelerator that does not support `dtype`, with the dtypes that it supports, and accelerators that support
    this one."""
    dtypes = ", ".join(name for name in ("fp64", "fp32", "bf16", "fp16", *NARROW) if name in accelerator.peak_flops)
    have = ", ".join(name for name, other in ACCELERATORS.items() if dtype in other.peak_flops)
    rule = f"{accelerator.title} has no {dtype}"
    return Problem(key, rule, f"Choose one of {dtypes}" + (f", or a device that has it: {have}." if have else "."))


def this_machine(num_processes: int) -> Node:
    """This machine's CPU, shared by `num_processes` ranks: memory in bytes and cores as the operating system reports them now.

    Its rates are not in the catalogue; `Accelerator.measured_at_run_time` is then true.
    """
    total, source = machine_memory_bytes()
    memory = Sourced(total // num_processes, f"{source}, an equal share of {num_processes}", "now")
    cpu = Accelerator("cpu", "CPU of this machine", memory, None, cores=usable_cores())
    return Node("cpu", "this machine", cpu, num_processes, None, None)


def machine_memory_bytes() -> tuple[int, str]:
    """Memory in bytes that this process may use, and its source: the machine's, or a container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < total:
            return int(text), limit
    return total, "operating system"


def free_bytes() -> int | None:
    """Memory in bytes still available to this process, on the machine or within a container's limit; None if unknown."""
    try:
        with open("/proc/meminfo") as lines:
            meminfo = dict(line.split(":", 1) for line in lines)
        free = int(meminfo["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        names = os.sysconf_names
        return None if "SC_AVPHYS_PAGES" not in names else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, KeyError, ValueError):  # no container, or its limit is "max"
        return free
    return min(free, max(0, limit - used + int(cached)))


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
