"""Reads files of measured runs, and separates measured results from the inputs of predictions.

Two forms are read, selected by the header: the columns of published runs (`n_gpus`, `hidden`, `tp`, ... one row per run), and
those of the playbook's scan (`model`, `nodes`, `mbs`, `ga`, ...). Every cell is assigned either to `RunConfig`, the only input
of a prediction, or to `RunResult`, which only scores read: the column's name decides here, before anything is predicted. Blank
cells are None; a missing column is blank in every row; unknown columns are ignored, and reported if they resemble a missing
one.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ultrascale.catalogue.stacks.stack_files import setting_types
from ultrascale.description.parsing import read_bounded
from ultrascale.description.problems import Problem, SpecError, mistake

BLANK = frozenset(("", "nan", "na", "n/a", "null", "-", "?"))
"""Words for an empty cell used by people and tools, in lower case; also `none`, unless it is a value (recompute)."""
MOST_TEXT, MOST_COLUMNS, MOST_ROWS = 64 << 20, 1000, 20_000
"""Most characters, columns, and runs of one file; each run is predicted. Published tables have thousands of runs."""
MOST_PROBLEMS = 20
"""Most invalid cells reported at once; a file of another kind has thousands."""
LONGEST_SHOWN = 40
NEARLY = 0.85
"""Similarity of two column names, at most 1, from which one is probably the other misspelt: `seqlen` is 0.92 of `seq_len`."""
PLAYBOOK_NAMES = {
    "nodes": "nodes", "mbs": "micro_batch", "ga": "grad_accum", "gbs": "global_batch", "zero": "zero_stage",
    "tok_s_gpu": "tokens_per_s_per_gpu", "mfu_pct": "mfu_percent", "mem_gb": "peak_mem_gib", "status": "outcome",
}  # fmt: skip
PLAYBOOK_FIXED = {
    "gpu": "H100-80GB-SXM", "gpu_family": "H100, playbook", "gpus_per_node": "8", "framework": "nanotron", "precision": "bf16",
}  # fmt: skip
"""Cells that are the same for all runs of the playbook."""
Columns = TypeVar("Columns", "RunConfig", "RunResult")


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run: everything that a prediction may read. Names are the file's columns."""

    id: str = ""
    """Name of the row, by which its source refers to it (`validation/stated.toml`)."""
    model: str = ""
    source: str = ""
    source_key: str = ""
    year: int | None = None
    framework: str = ""
    gpu: str = ""
    gpu_family: str = ""
    interconnect: str = ""
    machine: str = ""
    """Node in the catalogue (`catalogue.machines.NODES`), such as aws-p5."""
    network: str = ""
    """Type of network (`catalogue.network.KINDS`), such as EFA v2 under load: its achieved bandwidth."""
    n_gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    head_dim: int | None = None
    gated_mlp: bool | None = None
    tied_embeddings: bool | None = None
    attn_kind: str = ""
    experts: int | None = None
    topk: int | None = None
    expert_ffn: int | None = None
    shared_expert_ffn: int | None = None
    dense_layers: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    dp: int | None = None
    zero_stage: str = ""
    tp: int | None = None
    sp: bool | None = None
    cp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    pp_schedule: str = ""
    ep: int | None = None
    etp: int | None = None
    recompute: str = ""
    recompute_detail: str = ""
    offload: str = ""
    precision: str = ""
    compile: bool | None = None
    flash_attention: bool | None = None
    flops_def: str = ""
    """Convention by which the source counts FLOPs: affects its MFU, not its speed."""
    stack: str = ""
    """Name of a stack; blank: derived from `framework`."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings of the stack, from columns named `stack.KEY`."""
    is_playbook: bool = False


@dataclass(frozen=True)
class RunResult:
    """Measured results, and how they were measured: for scores only."""

    tokens_per_s_per_gpu: float | None = None
    step_time_s: float | None = None
    tflops_per_gpu: float | None = None
    mfu_reported: float | None = None
    mfu_percent: float | None = None
    mfu_peak_tflops: float | None = None
    peak_mem_gib: float | None = None
    mem_kind: str = ""
    mem_scope: str = ""
    reported: str = ""
    tier: str = ""
    outcome: str = ""
    n_obs: int | None = None


MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_reported", "peak_mem_gib")
"""Columns of published runs with which predictions are compared."""


@dataclass(frozen=True)
class MeasuredRow:
    """One run with its results."""

    identity: str
    """Identity of the row: its `id`, or its number counted from one."""
    line: int
    """Line of the file, counted from one."""
    config: RunConfig
    measured: RunResult


def read_rows(path: str | Path) -> list[MeasuredRow]:
    """Every row of a CSV file of measured runs, in order.

    Raises SpecError that names file, line and column of every cell that cannot be read, or the missing columns.
    """
    file = Path(path)
    try:
        text = read_bounded(file, MOST_TEXT, encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise mistake(str(file), "is not text in UTF-8", "Give a CSV file of measured runs.") from None
    except OSError as error:
        rule = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise mistake(str(file), rule, "Name a CSV file of measured runs.") from None
    blank = len(text) - len(text.lstrip())
    reader = csv.DictReader(io.StringIO(text[blank:], newline=""))
    try:
        header = [name.strip() for name in reader.fieldnames or []]
        if len(header) > MOST_COLUMNS:
            rule = f"has {len(header):,} columns; at most {MOST_COLUMNS:,} are read"
            raise mistake(f"{file}:1", rule, "Give a CSV file of measured runs.")
        is_playbook = _is_playbook(file, header)
        _expect_once(file, header)
        _expect_settings(file, header)
        above = text[:blank].count("\n")
        cells = [(reader.line_num + above, row) for row in islice(reader, MOST_ROWS + 1)]
    except csv.Error as error:
        raise mistake(f"{file}:{reader.line_num}", f"is not CSV: {error}", "Repair the line.") from None
    if len(cells) > MOST_ROWS:
        raise mistake(str(file), f"has more than {MOST_ROWS:,} rows", "Cut it into several files.")
    problems: list[Problem] = []
    rows = [_row(file, number, line, row, is_playbook, problems) for number, (line, row) in enumerate(cells, 1)]
    if problems:
        raise SpecError(_first(file, problems))
    if not rows:
        raise mistake(str(file), "has a header but no rows", "Give a file with at least one run.")
    return rows


def misspelt_columns(path: str | Path) -> list[tuple[str, str]]:
    """Ignored columns of a file that `read_rows` accepted, each with the missing one whose name is nearly the same."""
    header = _header(path)
    known = {field.name for kind in (RunConfig, RunResult) for field in fields(kind)} | {"id", *PLAYBOOK_NAMES}
    missing = sorted(known - {*header})
    unknown = [name for name in header if name not in known and not name.startswith("stack.")]
    matches = ((name, get_close_matches(name.lower(), missing, n=1, cutoff=NEARLY)) for name in unknown)
    return [(name, close[0]) for name, close in matches if close]


def is_unmeasured(rows: Iterable[MeasuredRow]) -> bool:
    """True if no row has one of the `MEASURED` cells, nor the playbook's outcome."""
    names = ("outcome", "mfu_percent", *MEASURED)
    return not any(getattr(row.measured, name) for row in rows for name in names)


def _header(path: str | Path) -> list[str]:
    text = read_bounded(Path(path), MOST_TEXT, encoding="utf-8-sig").lstrip()
    return [name.strip() for name in next(csv.reader(io.StringIO(text, newline="")))]


def _expect_once(file: Path, header: list[str]) -> None:
    """Raises SpecError for duplicate columns: the last would be used unnoticed."""
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        remedy = "Keep one of them."
        raise SpecError([Problem(f"{file}:1", f"has the column {name} {header.count(name)} times", remedy) for name in twice])


def _expect_settings(file: Path, header: list[str]) -> None:
    """Raises SpecError for columns `stack.KEY` of settings that no stack has."""
    wrong = [name for name in header if name.startswith("stack.") and name.removeprefix("stack.") not in setting_types()]
    if wrong:
        remedy = "`ultrascale show stacks megatron` lists the settings."
        raise SpecError(
            [Problem(f"{file}:1", f"has the column {name}, which is no setting of a trainer", remedy) for name in wrong]
        )


def _is_playbook(file: Path, header: list[str]) -> bool:
    """True if a header has the playbook's form. Raises SpecError if it has neither form."""
    if {"model", "nodes", "mbs", "tp"} <= set(header):
        return True
    if {"n_gpus", "dp", "tp", "pp"} & set(header):
        return False
    whole = "".join(header)
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and whole.count(separator) > 1:
            raise mistake(str(file), f"is separated by {name}", "Save it separated by commas.")
    shown = ", ".join(name[:LONGEST_SHOWN] for name in header[:6] if name) or "empty"
    rule = f"its first line ({shown}) has the columns of no known form"
    remedy = "It needs model, n_gpus, tp, pp, dp, ... (published runs), or model, nodes, mbs, tp, ... (the playbook's scan)."
    raise mistake(f"{file}:1", rule, remedy)


def _row(file: Path, number: int, line: int, row: dict[Any, Any], is_playbook: bool, problems: list[Problem]) -> MeasuredRow:
    surplus, missing = row.pop(None, None), [name for name, cell in row.items() if cell is None]
    if surplus or missing:
        num_cells = len(row) - len(missing) + len(surplus or [])
        rule = f"has {num_cells} cells, the header has {len(row)} columns"
        problems.append(Problem(f"{file}:{line}", rule, "Quote cells that hold commas."))
    cells: dict[str, str] = {str(name).strip(): (cell or "").strip() for name, cell in row.items()}
    identity = cells.get("id") or str(number)
    names: dict[str, str] = {name: name for name in cells}
    if is_playbook:
        names = {PLAYBOOK_NAMES.get(name, name): name for name in cells}
        cells = PLAYBOOK_FIXED | {new: cells[old] for new, old in names.items()}
    config = _read(RunConfig, cells, names, f"{file}:{line}", problems)
    stack_cells = ((name.removeprefix("stack."), cell) for name, cell in cells.items() if name.startswith("stack."))
    settings = tuple(sorted((key, cell) for key, cell in stack_cells if cell.lower() not in BLANK))
    return MeasuredRow(
        identity, line, replace(config, settings=settings, is_playbook=is_playbook),
        _read(RunResult, cells, names, f"{file}:{line}", problems),
    )  # fmt: skip


def _read(kind: type[Columns], cells: dict[str, str], names: dict[str, str], where: str, problems: list[Problem]) -> Columns:
    values: dict[str, Any] = {}
    for field in fields(kind):
        if (known := _VALUES.get(str(field.type))) is None:
            continue
        read, expected = known
        cell = cells.get(field.name, "")
        if cell.lower() in BLANK or (cell.lower() == "none" and field.name != "recompute"):
            continue
        try:
            values[field.name] = read(cell)
        except ValueError:
            rule = f"column {names.get(field.name, field.name)} holds {cell!r} where {expected} belongs"
            problems.append(Problem(where, rule, "Correct it, or leave it blank."))
    return kind(**values)


def _whole(cell: str) -> int:
    number = _number(cell)
    if number != int(number) or number < 0:
        raise ValueError(cell)
    return int(number)


def _number(cell: str) -> float:
    number = float(cell.replace(",", "").replace("_", ""))
    if not math.isfinite(number):
        raise ValueError(cell)
    return number


def _not_negative(cell: str) -> float:
    number = _number(cell)
    if number < 0:
        raise ValueError(cell)
    return number


def _truth(cell: str) -> bool:
    word = cell.lower()
    if word in ("true", "yes"):
        return True
    if word in ("false", "no"):
        return False
    if _number(cell) not in (0, 1):
        raise ValueError(cell)
    return _number(cell) == 1


def _first(file: Path, problems: list[Problem]) -> list[Problem]:
    """The first of many problems, and the number of the others."""
    if len(problems) <= MOST_PROBLEMS:
        return problems
    rule = f"{len(problems) - MOST_PROBLEMS} more cells cannot be read"
    return [*problems[:MOST_PROBLEMS], Problem(str(file), rule, "Correct those above first.")]


_VALUES: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "text"), "int | None": (_whole, "a whole number"), "bool | None": (_truth, "0 or 1"),
    "bool": (_truth, "0 or 1"), "float | None": (_not_negative, "a number that is not negative"),
}  # fmt: skip
"""By type of a column: what reads its cells, and what they hold."""
