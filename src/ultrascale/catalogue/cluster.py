"""Machines that a run is planned for: accelerators, links, nodes and clusters, and the parser of their names.

The numbers are in `catalogue.machines`, each with its source and date. Bandwidths are of one direction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from ultrascale.description.problems import Problem, SpecError, mistake

_COUNTED = re.compile(r"(?:(\d+)\s*[xX*\u00d7]\s*)?(?:(.+\.(?i:toml))|([A-Za-z0-9][\w. -]*?)(?:\s*/\s*(\d{1,9}))?)", re.DOTALL)
"""A count, then a file or a name; after a name, optionally the number of accelerators used of each machine."""
_UNCROSSED = re.compile(r"(\d+)[ *-]?([a-z].*)")
"""A count and a name without the x between them."""
_MISCOUNTED = re.compile(r"\d[\d.,_]*(e\+?\d+)?\s*x", re.IGNORECASE)
"""An invalid count before a name: 1e6xh100."""
_MAKERS = re.compile(r"^(?:(?:nvidia|amd|geforce|tesla|quadro|instinct|hgx(?=-[a-z]*\d+-)|radeon)-)+")
_FORMS = re.compile(r"-(?:sxm|oam)\d?\b|-hbm\d\w?\b|-tensor-core|-gpu\b|-generation\b")
_SIZE = re.compile(r"-(\d+)gb?\b")
OTHERS: tuple[tuple[str, str], ...] = (
    (r"tpu|v[2-7][ep]?(?:-\d+)?$|trillium|ironwood", "a TPU runs programs of XLA, whose kernels, torus of links and memory"),
    (r"gaudi|hl-\d|hpu", "a Gaudi runs kernels of its own over Ethernet, which"),
    (r"trn\d|trainium|inferentia|inf\d", "a Trainium runs programs of its own compiler, which"),
    (r"(?:apple-)?m[1-5](?:-|$)|metal|mps$", "an Apple GPU has no collectives and no fp32 sums of bf16 in torch, which"),
    (r"cerebras|wse|cs-?\d$|groq|ipu", "this machine runs programs of its own compiler, which"),
)
"""Machines for training that the planner refuses, with the reason: the laws of GEMMs, attention, collectives and the allocator
were all measured on CUDA GPUs."""
MOST = 1_000_000
"""Most devices of a cluster. The search tries every divisor, and its tables grow with their number."""
MACHINE_OVER_ACCELERATORS = 1.8
"""Power of a whole machine over that of its accelerators: DGX H100 10.2 of 5.6 kW, DGX B200 14.3 of 8.0 (datasheets)."""


@dataclass(frozen=True)
class Sourced:
    """A number with its source and date."""

    value: float
    source: str
    """Source of the number: a datasheet, a measurement, a public table; `assumed` if there is none, with the reason."""
    date: str
    """Date of publication or measurement: a year, or year and month."""


@dataclass(frozen=True)
class Accelerator:
    """One device, which runs one rank."""

    name: str
    title: str
    memory_bytes: Sourced
    """Device memory in bytes that a process can see; for `cpu`, the share of one process."""
    memory_bytes_per_second: Sourced | None
    """Memory bandwidth in bytes per second. None: measured at run time."""
    peak_flops: Mapping[str, Sourced] = field(default_factory=dict)
    """Dense peak FLOPs per second by dtype (`fp64 fp32 tf32 bf16 fp16 fp8`); `fp32` is without TF32. Empty: measured at run
    time."""
    matmul_fraction: Sourced | None = None
    """Fraction of the bf16 peak that large GEMMs reach; used for the other dtypes too. None: measured at run time."""
    watts: Sourced | None = None
    """Maximum power (TDP) in watts. None: unknown."""
    dollars_per_hour: Sourced | None = None
    """Rent in dollars per hour of one accelerator, including its share of the machine. None: unknown."""
    multiprocessors: int = 0
    """Streaming multiprocessors or compute units of one device, which run the tiles of a GEMM."""
    law: str = ""
    """Accelerator whose measured laws of computing it uses with its own peaks; empty: its own."""
    same_chip: bool = False
    """True if it is the chip of its law, whose large GEMMs are slowed by the ratio of their power limits."""
    cores: int | None = None
    """CPU cores of the machine, for `cpu`."""
    like: str = ""
    """Accelerator in the catalogue that a user-defined one resembles; empty for those of the catalogue."""

    @property
    def kind(self) -> str:
        """Name in the catalogue, or that of the accelerator it resembles: fitted laws and constants use it."""
        return self.like or self.name

    @property
    def measured_at_run_time(self) -> bool:
        """True if its rates are not in the catalogue and must be measured on the machine."""
        return not self.peak_flops

    def peak_flops_per_second(self, dtype: str) -> float:
        """Dense peak of `dtype` in FLOPs per second. Raises SpecError if the device has none, or if it must be measured."""
        if dtype in self.peak_flops:
            return self.peak_flops[dtype].value
        if self.measured_at_run_time:
            rule, remedy = (
                "has no peak in the catalogue: it is measured at run time",
                "Measure it, or plan for a catalogued device.",
            )
        else:
            rule, remedy = f"has no {dtype} peak in the catalogue", f"It has {', '.join(self.peak_flops)}."
        raise mistake(f"cluster.{self.name}", rule, remedy)


@dataclass(frozen=True)
class Link:
    """A link inside a node or between nodes."""

    name: str
    bytes_per_second: Sourced
    """Nominal bandwidth, one direction: of one accelerator inside a node, of the whole node between nodes."""
    achieved_bytes_per_second: Sourced | None = None
    """Bus bandwidth that large all-gathers over the node reach, if measured."""


@dataclass(frozen=True)
class Node:
    """One machine, or one domain with a fast network inside."""

    name: str
    title: str
    accelerator: Accelerator
    num_accelerators: int
    intra_link: Link | None
    """Link between the accelerators of the node. None: measured at run time."""
    inter_link: Link | None
    """Link from this node to others, all network cards together. None: the node has no network."""
    num_network_cards: int | None = None
    """Number of cards that share the bandwidth of `inter_link`; a single rank uses one. None: as many as accelerators."""
    watts: Sourced | None = None
    """Maximum power of the whole machine in watts: accelerators, processors, cards, fans. None: unknown."""
    tray: int | None = None
    """Accelerators per tray, for a rack whose jobs use any number of its places. None: machines are used whole."""
    places: int | None = None
    """Accelerators of the machine, if jobs use fewer. None: all are used."""

    @property
    def watts_per_accelerator(self) -> float | None:
        """Share of the machine's power per accelerator in watts; if only the accelerator's own is known, with the usual
        overhead of a machine."""
        accelerator_watts = self.accelerator.watts
        if self.watts is not None:
            return self.watts.value / self.num_accelerators
        return None if accelerator_watts is None else accelerator_watts.value * MACHINE_OVER_ACCELERATORS


@dataclass(frozen=True)
class Spine:
    """Spine switches above the leaf switches. Without them every node reaches every other at full speed."""

    nodes_per_leaf: int
    """Nodes per leaf switch: 16 to 32 in the units of NVIDIA and most clouds."""
    oversubscription: float
    """Bandwidth of the nodes of a leaf over that of the leaf's uplinks; 1 is a full fat tree."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes, of which the last may be partly used."""

    name: str
    node: Node
    num_accelerators: int
    spine: Spine | None = None
    """Spine switches, if they carry less than the nodes send. None: full bandwidth."""

    @property
    def accelerator(self) -> Accelerator:
        return self.node.accelerator

    @property
    def num_nodes(self) -> int:
        return -(-self.num_accelerators // self.node.num_accelerators)

    @property
    def places_words(self) -> str:
        """Part of each machine that is used, if not all: `64 of 72 in each`; else empty."""
        node = self.node
        return f"{node.num_accelerators} of {node.places} in each" if node.places else ""


def file_of(text: str) -> Path | None:
    """File that describes the machines of `8xours.toml`; None for a name."""
    match = _COUNTED.fullmatch(text.strip())
    return Path(match[2]).expanduser() if match is not None and match[2] else None


def parse_cluster(text: str) -> Cluster:
    """The cluster named `64xh100`, `8xa100-80`, `2xdgx-h100`, `8x4090`, `cpu` or `8xcpu`; spellings of people and drivers are
    accepted (`normal_name`).

    A count before an accelerator counts accelerators, in nodes of its usual shape; before a node it counts nodes. The number of
    places used of each rack is that of `catalogue.racks`, or that of the name: `256xgb200/64`, `4xgb200-nvl72/64`. `8xcpu` is
    eight processes on this machine; `8xours.toml` eight machines described in a file (`catalogue.machine_file`). Raises
    SpecError with the nearest names.
    """
    from ultrascale.catalogue import machine_file, machines, racks

    match = _COUNTED.fullmatch(text.strip())
    machine = "" if match is None else match[2] or match[3]
    if match is not None and match[1] and not match[1].strip("0"):
        raise mistake("cluster", f"{text!r} has no machine", f"Ask for at least one: 1x{machine}.")
    if match is not None and match[1] and (len(match[1]) > len(str(MOST)) or int(match[1]) > MOST):
        rule = f"{text[:40]!r} has more machines than anybody plans for: at most {MOST:,} are searched"
        raise mistake("cluster", rule, f"Ask for fewer, such as 1024x{machine}.")
    if match is None or (not match[1] and ((machine.isdigit() and len(machine) < 4) or _MISCOUNTED.match(machine))):
        raise SpecError(
            [Problem("cluster", f"{text!r} is not a count and a name", "Write 64xh100, 2xdgx-h100, 2xours.toml or cpu.")]
        )
    if (path := file_of(text)) is not None:
        return machine_file.read_machine(path, int(match[1] or 1), text.strip())
    count, used, name = int(match[1] or 1), match[4], machine.lower()
    for spelling in (name, normal_name(name)):
        name = machines.ALIASES.get(spelling, spelling)
        if name == "cpu" or name in machines.NODES or name in machines.USUAL_NODE:
            break
    if name == "cpu" and not used:
        return Cluster(f"{count}xcpu", machines.this_machine(count), count)
    counts_nodes = name in machines.NODES
    node = machines.NODES.get(name) or machines.NODES.get(machines.USUAL_NODE.get(name, ""))
    if node is None:
        raise SpecError([_unknown(text, name, [*machines.USUAL_NODE, *machines.NODES, *machines.ALIASES, "cpu"])])
    full = f"{count}x{name}" + (f"/{int(used)}" if used else "")
    if used:
        node = _using(node, int(used))
    elif not counts_nodes:
        node = racks.node_for(count, name, node)
    return Cluster(full, node, count * node.num_accelerators if counts_nodes else count)


def normal_name(text: str) -> str:
    """Name of a machine in lower case, without vendor, form factor, and memory as in its title: `h100` for torch's and
    nvidia-smi's `NVIDIA H100 80GB HBM3`, `a100` for `NVIDIA A100-SXM4-80GB`, `rtx-4090` for `4090`."""
    from ultrascale.catalogue.machines import ACCELERATORS, ALIASES

    name = re.sub(r"[\s_/]+", "-", text.strip().lower())
    name = _FORMS.sub("", _MAKERS.sub("", name))
    name = re.sub(r"^rtx-?a(?=\d)", "a", re.sub(r"^rtx(?=\d)", "rtx-", name))
    if re.fullmatch(r"[345]090", name):
        name = f"rtx-{name}"
    size, bare = _SIZE.search(name), _SIZE.sub("", name)
    accelerator = ACCELERATORS.get(ALIASES.get(bare, bare))
    return bare if size is not None and accelerator is not None and f" {size[1]} GB" in accelerator.title else name


def why_not(name: str) -> str | None:
    """Reason why a known machine is not in the catalogue; None if the machine is unknown."""
    for pattern, reason in OTHERS:
        if re.match(pattern, name):
            return f"{reason} follow other laws than the GPUs that plans were measured on"
    return None


def _using(node: Node, used: int) -> Node:
    from ultrascale.catalogue import racks

    if not 1 <= used <= node.num_accelerators:
        rule = f"{node.name} has {node.num_accelerators} accelerators, {used} are to be used of each"
        raise mistake("cluster", rule, f"Write a number from 1 to {node.num_accelerators} behind the /.")
    return racks.using(node, used)


def _unknown(text: str, name: str, known: list[str]) -> Problem:
    if name == "auto":
        rule = "auto means the machine that trains, which a plan does not see"
        return Problem("cluster", rule, "Name one: 8xh100, 2xdgx-h100, cpu.")
    if reason := why_not(name):
        rule = f"{text!r} is not in the catalogue: {reason}"
        return Problem("cluster", rule, "Name GPUs of about its peak to compare with, such as 8xh100.")
    similar = get_close_matches(name, known, n=3, cutoff=0.5)
    if (counted := _UNCROSSED.fullmatch(name)) and counted[2] in known:
        similar = [f"{counted[1]}x{counted[2]}"]
    remedy = f"Did you mean {' or '.join(similar)}? " if similar else ""
    return Problem("cluster", f"there is no machine called {text!r}", f"{remedy}`ultrascale show clusters` lists them all.")
