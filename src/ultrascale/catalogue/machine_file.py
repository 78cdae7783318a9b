"""A user's own machine, from a TOML file: `8xours.toml` is eight of them.

title = "our servers"
accelerator = "h100-sxm"          # in the catalogue; or a table, see below
accelerators = 4                  # per machine

[inside]                          # default: as in the accelerator's usual machine
name = "NVLink 4"
gbytes_per_second = 450           # per accelerator, one direction

[network]                         # default: no network between machines
name = "RoCE"                     # determines its type: InfiniBand, RoCE, EFA, Slingshot (`catalogue.network`)
gbits_per_second = 400            # all cards of a machine together, one direction
cards = 1                         # default: one per accelerator
achieved_gbytes_per_second = 44   # default: usual for its type

[spine]                           # default: every machine reaches every other at full speed
nodes_per_leaf = 16
oversubscription = 2

[accelerator]                     # in place of the name: one that is not in the catalogue
like = "h100-sxm"                 # source of all other values, and of the GEMM law, scaled to its own peak
name = "h100-capped"
memory_gib = 80
memory_gbytes_per_second = 3350
tflops = { bf16 = 800, fp8 = 1600 }
watts = 500                       # default: as many FLOPs per joule; lowers the clock of large GEMMs
dollars_per_hour = 2.1
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ultrascale.catalogue.cluster import Accelerator, Cluster, Link, Node, Sourced, Spine, file_of
from ultrascale.catalogue.machines import ACCELERATORS, ALIASES, NODES, USUAL_NODE
from ultrascale.description.layout import NARROW
from ultrascale.description.parsing import MOST_TOML, key_lines, parse_toml, read_bounded
from ultrascale.description.problems import MOST_PROBLEMS, Problem, SpecError, mistake

GIB, GIGA, TERA = 2**30, 1e9, 1e12
KEYS = {
    "": ("title", "accelerator", "accelerators", "inside", "network", "spine"),
    "inside": ("name", "gbytes_per_second"),
    "network": ("name", "gbits_per_second", "cards", "achieved_gbytes_per_second"),
    "spine": ("nodes_per_leaf", "oversubscription"),
    "accelerator": (
        "like", "name", "title", "memory_gib", "memory_gbytes_per_second", "tflops", "matmul_fraction", "watts",
        "dollars_per_hour",
    ),
    "accelerator.tflops": ("fp64", "fp32", "tf32", "bf16", "fp16", *NARROW),
}  # fmt: skip
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-9, 1e15
"""Bounds of a number in any unit here: smaller or larger values are typing errors, and overflow results computed from them."""
MOST_ACCELERATORS = 1024
"""Most accelerators of a machine, which has one fast network inside. The largest sold has 72."""


def machine_text(cluster: str) -> str:
    """Text of the file of `8xours.toml`; empty if machines are not from a file, or it cannot be read."""
    path = file_of(cluster)
    try:
        return "" if path is None else read_bounded(path, MOST_TOML)
    except (OSError, UnicodeDecodeError):
        return ""


def read_machine(path: Path, count: int, text: str) -> Cluster:
    """`count` machines as described by the file at `path`; `text` is the cluster's name. Raises SpecError with every mistake in
    it."""
    try:
        written = read_bounded(path, MOST_TOML)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        remedy = "Give the path of a machine's TOML file, or a machine of `ultrascale show clusters`."
        raise mistake(f"cluster {text!r}", f"{path} cannot be read: {why}", remedy) from None
    try:
        values = parse_toml(written)
    except ValueError as error:
        raise mistake(str(path), f"is not TOML: {error}", "Repair this line.") from None
    reader = _Reader(path, key_lines(written), [])
    node, spine = reader.node(values)
    if reader.problems or node is None:
        raise SpecError(reader.problems)
    return Cluster(text, node, count * node.num_accelerators, spine)


def _peak(peaks: Mapping[str, Sourced]) -> float | None:
    """Peak of the dtype that most computing is in."""
    return next((peaks[dtype].value for dtype in ("bf16", "fp16", "fp32") if dtype in peaks), None)


@dataclass
class _Reader:
    """Reads the tables of one file, and collects their problems."""

    path: Path
    lines: Mapping[str, int]
    problems: list[Problem]

    def node(self, values: Mapping[str, Any]) -> tuple[Node | None, Spine | None]:
        tables = {"": values} | {name: self._table(values, name) for name in ("inside", "network", "spine")}
        for name, table in tables.items():
            self._expect_known(name, table)
        accelerator = self._accelerator(values)
        count = self._number(values, "accelerators", whole=True, most=MOST_ACCELERATORS)
        inside, cards = tables["inside"], self._number(tables["network"], "network.cards", needed=False, whole=True)
        inter = self._link(tables["network"], "network", "gbits_per_second", GIGA / 8) if "network" in values else None
        spine = self._spine(values)
        if accelerator is None or count is None:
            return None, None
        usual = NODES[USUAL_NODE[self._relative]]
        intra = self._link(inside, "inside", "gbytes_per_second", GIGA) if inside else usual.intra_link
        title = self._text(values, "title", needed=False) or f"machine of {self.path.name}"
        name = self.path.name
        return Node(name, title, accelerator, int(count), intra, inter, None if cards is None else int(cards)), spine

    _relative: str = ""
    """Accelerator in the catalogue that the file's own is, or resembles."""

    def _accelerator(self, values: Mapping[str, Any]) -> Accelerator | None:
        table = values.get("accelerator")
        if isinstance(table, Mapping):
            self._expect_known("accelerator", table)
            base = self._catalogued(self._text(table, "accelerator.like"), "accelerator.like")
            return None if base is None else self._changed(base, table)
        return self._catalogued(self._text(values, "accelerator"), "accelerator")

    def _catalogued(self, name: str | None, key: str) -> Accelerator | None:
        if name is None:
            return None
        known = ALIASES.get(name.lower(), name.lower())
        if known in ACCELERATORS:
            self._relative = known
            return ACCELERATORS[known]
        similar = get_close_matches(known, [*ACCELERATORS, *ALIASES], n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(similar)}? " if similar else ""
        self._add_problem(key, f"there is no accelerator called {name!r}", f"{hint}`ultrascale show clusters` lists them all.")
        return None

    def _changed(self, base: Accelerator, table: Mapping[str, Any]) -> Accelerator:
        """`base` with the values of the table."""
        name = self._text(table, "accelerator.name") or base.name
        if name in ACCELERATORS or name == "cpu":
            self._add_problem("accelerator.name", f"{name!r} is one of the catalogue", "Give yours a name of its own.")
        peaks = table.get("tflops", {})
        if not isinstance(peaks, Mapping):
            self._add_problem("accelerator.tflops", "must be a table of dense peaks", "Such as { bf16 = 989, fp8 = 1979 }.")
            peaks = {}
        self._expect_known("accelerator.tflops", peaks)
        rates = {dtype: self._number(peaks, f"accelerator.tflops.{dtype}") for dtype in peaks}
        scales = {"memory_gib": GIB, "memory_gbytes_per_second": GIGA, "matmul_fraction": 1, "watts": 1, "dollars_per_hour": 1}
        fields = {"memory_gib": "memory_bytes", "memory_gbytes_per_second": "memory_bytes_per_second"}
        changes: dict[str, Any] = {}
        for key, scale in scales.items():
            value = self._number(table, f"accelerator.{key}", needed=False, most=1 if key == "matmul_fraction" else math.inf)
            if value is not None:
                changes[fields.get(key, key)] = self._sourced(value * scale)
        if rates:
            changes["peak_flops"] = {dtype: self._sourced(rate * TERA) for dtype, rate in rates.items() if rate is not None}
            changes = self._power(base, changes) | changes
        if "matmul_fraction" in changes:  # what large GEMMs reach, at the power that there is
            changes["same_chip"] = False
        title = self._text(table, "accelerator.title", needed=False) or name
        return replace(base, name=name, title=title, like=self._relative, **changes)

    def _power(self, base: Accelerator, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Watts of a device with other peaks: as many FLOPs per joule as `base`."""
        mine, theirs = map(_peak, (changes["peak_flops"], base.peak_flops))
        return {"watts": self._sourced(base.watts.value * mine / theirs)} if base.watts and mine and theirs else {}

    def _link(self, table: Mapping[str, Any], key: str, rate_key: str, scale: float) -> Link | None:
        name = self._text(table, f"{key}.name")
        rate = self._number(table, f"{key}.{rate_key}")
        reached = self._number(table, f"{key}.achieved_gbytes_per_second", needed=False)
        if name is None or rate is None:
            return None
        if reached is not None and reached * GIGA > rate * scale:
            rule = f"is {reached:g}, more than the {rate * scale / GIGA:g} GB/s that {rate_key} says"
            self._add_problem(f"{key}.achieved_gbytes_per_second", rule, "A byte has eight bits: 400 Gb/s are 50 GB/s.")
        return Link(name, self._sourced(rate * scale), None if reached is None else self._sourced(reached * GIGA))

    def _spine(self, values: Mapping[str, Any]) -> Spine | None:
        if "spine" not in values:
            return None
        table = self._table(values, "spine")
        leaf = self._number(table, "spine.nodes_per_leaf", whole=True)
        over = self._number(table, "spine.oversubscription", least=1)
        return None if leaf is None or over is None else Spine(int(leaf), over)

    def _table(self, values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        table = values.get(name, {})
        if isinstance(table, Mapping):
            return table
        self._add_problem(name, f"must be a table, is {table!r}", f"Write [{name}] with {', '.join(KEYS[name])} below it.")
        return {}

    def _text(self, table: Mapping[str, Any], key: str, *, needed: bool = True) -> str | None:
        value = table.get(key.rpartition(".")[2])
        if isinstance(value, str) and value.strip():
            return value.strip()
        if value is not None or needed:
            self._add_problem(key, "is missing" if value is None else f"must be a text, is {value!r}", f'Write {key} = "...".')
        return None

    def _number(
        self, table: Mapping[str, Any], key: str, *,
        needed: bool = True, whole: bool = False, least: float = 0.0, most: float = math.inf,
    ) -> float | None:  # fmt: skip
        value = table.get(key.rpartition(".")[2])
        if value is None and not needed:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER:
            is_enough = value >= (1 if whole or least else SMALLEST_NUMBER)
            if is_enough and value <= most and (not whole or value == int(value)):
                return float(value)
        kind = "a whole number from 1" if whole else "a number from 1" if least else "a positive number"
        too_large = isinstance(value, int | float) and value >= LARGEST_NUMBER
        too_small = isinstance(value, int | float) and 0 < value < SMALLEST_NUMBER
        kind += f" to {most:g}" if math.isfinite(most) else f" below {LARGEST_NUMBER:g}" if too_large else ""
        kind += f" from {SMALLEST_NUMBER:g}" if too_small and not (whole or least) else ""
        rule = "is missing" if value is None else f"must be {kind}, is {value!r}"
        self._add_problem(key, rule, f"Write {key.rpartition('.')[2]} = {kind}.")
        return None

    def _expect_known(self, name: str, table: Mapping[str, Any]) -> None:
        for key in table:
            if key not in KEYS[name]:
                similar = get_close_matches(key, KEYS[name], n=1, cutoff=0.5) if len(self.problems) < MOST_PROBLEMS else []
                hint = f"Did you mean {similar[0]}? " if similar else ""
                place = f"{name}.{key}" if name else key
                self._add_problem(place, "is no key of a machine's file", f"{hint}Here are {', '.join(KEYS[name])}.")

    def _sourced(self, value: float) -> Sourced:
        return Sourced(value, str(self.path), "now")

    def _add_problem(self, key: str, rule: str, remedy: str) -> None:
        parts = key.split(".")
        line = next((self.lines[outer] for n in range(len(parts), 0, -1) if (outer := ".".join(parts[:n])) in self.lines), None)
        self.problems.append(Problem(key, rule, remedy, f"{self.path}:{line}" if line else str(self.path)))
