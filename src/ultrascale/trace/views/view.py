"""A trace on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

from rich.console import Console
from rich.table import Table

from ultrascale.console import plain_table
from ultrascale.description.units import count_of, format_bytes, format_count, format_percent
from ultrascale.trace.recording.record import RankTrace
from ultrascale.trace.stages import StagePeak
from ultrascale.trace.views.compare import Row, StepComparison
from ultrascale.trace.views.explain import Edit, Part

BY_MESSAGES = (
    "on a CPU gathers and scatters go as messages between pairs of ranks, traced as `send`; planned are collectives, with the "
    "bytes of whole buffers (--device cuda traces those)"
)
SQUARES = "attention as torch counts it: whole squares of scores, masked or not; MFU counts the causal half"
LINES = 12
"""Number of rows of messages to show: those with most bytes."""

_table = partial(plain_table, folds=True, padding=(0, 2, 0, 0))


def show_trace(
    trace: RankTrace, comparison: StepComparison, reserved: int, console: Console, *, step: int, tier: dict[str, str]
) -> None:
    """Print one rank's memory, messages and FLOPs; `show_parts` prints the storages at the peak."""
    layout = trace.layout
    traced, count = trace.micro_batches
    console.print(
        f"[bold]{trace.model.name or trace.model.model_type}[/bold], rank {trace.rank} of {layout.world_size}, as if on "
        f"{trace.device}: step {step + 1}, {count_of(count, 'micro-batch')}"
        + ("" if traced == count else f"; {traced} are traced, the others repeat one of them")
        + ("; experts are chosen equally often" if trace.model.num_experts else "")
        + (f"; {trace.documents} in each sequence" if trace.documents else ""),
        soft_wrap=True,
    )
    mark = next((m for m in reversed(trace.marks) if m.tick <= trace.changes[trace.peak_at(step)][0]), None)
    where = "" if mark is None else f" in {mark.action or mark.phase}"
    live = format_bytes(trace.peak_bytes(step))
    console.print(f"peak: {live} live{where}; torch's CUDA allocator would reserve {format_bytes(reserved)}\n")
    if comparison.memory[-1].planned is None:
        console.print("of one step alone there is no plan to compare with: a step differs from the first one\n")
    by_messages = any(row.planned and row.planned.count and not row.traced.count for row in comparison.traffic)
    tables = (
        _rows_table("memory at the peak", comparison.memory), _traffic_table(comparison, tier), _lines_table(trace, step),
        _flops_table(trace, comparison, step), *[_rows_table("between islands", comparison.islands)] * bool(comparison.islands),
    )  # fmt: skip
    for table in tables:
        console.print(table)
        console.print()
    if any(row.name == "attention" and row.traced for row in comparison.flops):
        console.print(f"{SQUARES}\n", soft_wrap=True)
    if trace.device == "cpu" and by_messages:
        console.print(f"{BY_MESSAGES}\n", soft_wrap=True)
    actions = trace.actions(step)
    shown = " ".join(actions[:24]) + (f" ... {len(actions) - 24} more" if len(actions) > 24 else "")
    console.print(f"[bold]actions[/bold]  {shown}", soft_wrap=True)


def show_stages(peaks: list[StagePeak], console: Console) -> None:
    """Print a line for each pipeline stage."""
    table = _table("stage", "rank", "traced peak", "planned", "difference", "reserved", left=("stage",))
    for peak in peaks:
        table.add_row(
            str(peak.pp), str(peak.rank), format_bytes(peak.traced_bytes), _bytes(peak.planned_bytes),
            format_percent(peak.percent), format_bytes(peak.reserved_bytes),
        )  # fmt: skip
    console.print(table)


def show_parts(parts: list[Part], edits: list[Edit], total: int, console: Console) -> None:
    """Prints the largest parts at the peak, and the changes that would help."""
    table = _table("live at the peak", "of", "storages", "bytes", "share", left=("live at the peak", "of"))
    for part in parts:
        what = part.what if not part.line else f"{part.what}  {part.line}"
        table.add_row(
            what, part.category, str(part.count), format_bytes(part.num_bytes), f"{100 * part.num_bytes / total:.1f}%"
        )
    console.print()
    console.print(table)
    console.print()
    if not edits:
        console.print("no single change of the layout saves memory: take more devices, or shorter sequences")
        return
    if (together := edits[0].at_once) > 1:
        does = f"no single change makes it fit: the first line is the best of {together} at once"
        console.print(does if edits[0].fits else f"{does}, and does not either: take more devices, or shorter sequences")
    table = _table("change", "the fullest rank then needs", "saves", "fits", "step", left=("change", "fits"))
    for edit in edits:
        slower, fits = "" if edit.slower is None else f"{100 * edit.slower:+.0f}%", "yes" if edit.fits else "no"
        table.add_row(edit.setting, format_bytes(edit.needed_bytes), format_bytes(edit.saved_bytes), fits, slower)
    console.print(table)


def _rows_table(what: str, rows: Iterable[Row]) -> Table:
    table = _table(what, "traced", "planned", "difference", left=(what,))
    for row in rows:
        style = "bold" if row.name == "peak" else ""
        table.add_row(row.name, format_bytes(row.traced), _bytes(row.planned), format_percent(row.percent), style=style)
    return table


def _traffic_table(comparison: StepComparison, tier: dict[str, str]) -> Table:
    table = _table(
        "messages of a step", "axis", "ranks", "tier", "traced", "", "planned", "", left=("messages of a step", "axis", "tier")
    )
    for row in comparison.traffic:
        planned = ("", "") if row.planned is None else (str(row.planned.count), format_bytes(row.planned.num_bytes))
        ranks = f"{row.key.size}" + (f" / {row.key.stride}" if row.key.stride > 1 else "")
        place = tier.get(f"{row.key.size}/{row.key.stride}", "")
        table.add_row(row.key.kind, row.axis, ranks, place, str(row.traced.count), format_bytes(row.traced.num_bytes), *planned)
    return table


def _lines_table(trace: RankTrace, step: int) -> Table:
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for sent in trace.sent:
        if sent.step == step and sent.kind != "receive":
            key = (sent.line, sent.kind, "hosts" if sent.is_host else sent.axis)
            counts[key] += sent.times
            sizes[key] += sent.num_bytes * sent.times
    table = _table("issued by", "what", "axis", "times", "bytes", left=("issued by", "what", "axis"))
    for key, size in sizes.most_common(LINES):
        table.add_row(*key, str(counts[key]), format_bytes(size))
    return table


def _flops_table(trace: RankTrace, comparison: StepComparison, step: int) -> Table:
    table = _table("FLOPs of a step", "forward", "recompute", "backward", "sum", "planned", left=("FLOPs of a step",))
    names = sorted({op for of_step, op, _ in trace.flops if of_step == step}, key=lambda op: (-sum(_of(trace, step, op)), op))
    for op in names:
        row = _of(trace, step, op)
        table.add_row(op, *map(format_count, row), format_count(sum(row)), "")
    for row in comparison.flops:
        name = "matrix products" if row.name == "products" else row.name
        table.add_row(name, "", "", "", format_count(row.traced), _count(row), style="bold")
    return table


def _of(trace: RankTrace, step: int, op: str) -> list[int]:
    return [trace.flops[step, op, when] for when in ("forward", "recomputed", "backward")]


def _count(row: Row) -> str:
    return "" if row.planned is None else f"{format_count(row.planned)} {format_percent(row.percent)}".strip()


def _bytes(number: int | None) -> str:
    return "" if number is None else format_bytes(number)
