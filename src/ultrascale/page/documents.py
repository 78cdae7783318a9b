"""Results of other verbs as sections that a page draws: a trace, a sweep, a profiled step, a run.

Each is made of the JSON that the verb prints with --json, so that a file says what the JSON says. A section has a title, a
sentence, and parts:

facts    names and values
table    columns and rows of text
bars     rows of parts one after another, each with its colour
areas    layers one above the other, over operations in order
lines    values by step, and marks at steps
points   one quantity against another, on a diagonal where they agree
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from ultrascale.description.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from ultrascale.measure.run_marks import Mark

COLOURS = {
    "parameters": 0, "gathered": 1, "gradients": 2, "optimizer": 3, "activations": 4, "temporary": 5, "communication": 6,
    "other": 7, "matrix products": 4, "attention": 0, "element-wise": 1, "recomputation": 5, "dp": 3, "tp": 2, "cp": 6, "pp": 8,
    "ep": 5, "all ranks": 6, "launch gaps": 7, "data wait": 8, "idle": 7,
}  # fmt: skip
"""Numbers of the page's palette, by category of memory and of time."""
COMPARED = ["", "traced", "planned", "planned over traced"]
MOST_ROWS = 200
"""Most rows of a table in a file that is mailed."""
MOST_POINTS = 1000
"""Most points of a line."""
SMOOTHED = ("train/loss", "perf/tokens_per_s")
"""Series that are drawn faint, and smoothed over that, as the pictures of a run are."""
Document = dict[str, Any]


def trace_document(found: Mapping[str, Any]) -> Document:
    """The page of `ultrascale trace --json` of one rank."""
    compared, timeline = found["comparison"], found["timeline"]
    names = [name for name in COLOURS if any(row["bytes"].get(name) for row in timeline)]
    marks = [{"at": 0, "text": f"step {timeline[0]['step']}"}] if timeline else []
    marks += [
        {"at": at, "text": f"step {row['step']}"}
        for at, (before, row) in enumerate(pairwise(timeline), start=1)
        if before["step"] != row["step"]
    ]
    facts = [
        ("Live at the peak", format_bytes(found["peak_bytes"]), f"step {found['step']}"),
        ("Reserved by the allocator", format_bytes(found["reserved_bytes"]), found["device"]),
        ("Rank", f"{found['rank']:,} of {found['world']:,}", ""),
        ("Micro-batches", f"{found['micro_batches']:,}", f"{found['micro_batches_traced']:,} traced"),
    ]
    alive = [
        [one["category"], one["what"], one["line"], f"{one['count']:,}", format_bytes(one["num_bytes"])]
        for one in found["alive_at_peak"][:MOST_ROWS]
    ]
    sections = [
        _section("Live memory by category", "Operation after operation; each moment is the highest of its stretch.", {
            "kind": "areas", "names": names, "colours": [COLOURS[name] for name in names], "marks": marks,
            "rows": [[row["bytes"].get(name, 0) for name in names] for row in timeline],
            "top": _number(max((sum(row["bytes"].values()) for row in timeline), default=0), format_bytes),
        }),
        _section("Memory, traced and planned", "Each category at its own peak.",
                 _table(COMPARED, [_compared(row, format_bytes) for row in compared["memory"]])),
        _section("Messages of the step", "By axis and kind.", _table(
            ["axis", "kind", "ranks", "messages", "bytes", "planned messages", "planned bytes"],
            [[row["axis"], row["kind"].replace("_", "-"), f"{row['size']:,}", *_sent(row["traced"]), *_sent(row["planned"])]
             for row in compared["traffic"]])),
        _section("FLOPs of the step", "", _table(COMPARED, [_compared(row, format_count) for row in compared["flops"]])),
        _section("Alive at the peak", "What takes most.", _table(["category", "what", "line", "how many", "bytes"], alive)),
    ]  # fmt: skip
    if found["edits"]:
        edits = [
            [one["setting"], format_bytes(one["needed_bytes"]), format_bytes(one["saved_bytes"]),
             "yes" if one["fits"] else "no", "" if one["slower"] is None else f"{one['slower']:+.1%}"]
            for one in found["edits"]
        ]  # fmt: skip
        columns = ["setting", "needs", "saves", "fits", "step"]
        sections.append(_section("Changes that would help", "", _table(columns, edits)))
    return _document("trace", f"{found['model'] or 'model'}, rank {found['rank']:,} of {found['world']:,}", facts, sections)


def stages_document(found: Sequence[Mapping[str, Any]]) -> Document:
    """The page of `ultrascale trace --all-stages --json`."""
    bars = [
        _bar(f"stage {one['pp']}, rank {one['rank']:,}", [("activations", "live", one["traced_bytes"])], format_bytes,
             "" if one["planned_bytes"] is None else f"{format_bytes(one['planned_bytes'])} planned")
        for one in found
    ]  # fmt: skip
    most = max(found, key=lambda one: one["traced_bytes"])
    facts = [("Most", format_bytes(most["traced_bytes"]), f"stage {most['pp']}"), ("Stages", f"{len(found):,}", "")]
    sections = [_section("Live memory at the peak", "The first rank of every pipeline stage.", {"kind": "bars", "rows": bars})]
    return _document("trace", "Every pipeline stage", facts, sections)


def sweep_document(found: Mapping[str, Any]) -> Document:
    """The page of `ultrascale sweep --json`."""
    measured, held = found["measured"], found["held"]
    rows, memory, time = [], [], []
    for one in measured:
        seconds, words = (
            median(one["step_seconds"]),
            ", ".join(f"{key.rpartition('.')[2]} {v}" for key, v in one["values"].items()),
        )
        rate = one["tokens_per_step"] / seconds / one["ranks"]
        planned = one["planned_step_seconds"]
        rows.append([
            words or "the run itself", format_seconds(seconds), "" if planned is None else format_seconds(planned),
            f"{rate:,.0f}", format_share(one["mfu"]),
            "" if one["measured_peak_bytes"] is None else format_bytes(one["measured_peak_bytes"]),
            format_bytes(one["planned_peak_bytes"]),
        ])  # fmt: skip
        if one["measured_peak_bytes"] is not None:
            memory.append(_point(words, one["planned_peak_bytes"], one["measured_peak_bytes"], format_bytes))
        if planned is not None:
            time.append(_point(words, planned, seconds, format_seconds))
    facts = [("Cells measured", f"{len(measured):,}", f"{len(found['failed']):,} failed, {len(found['refused']):,} refused")]
    if rows:
        facts.append(("Fastest", rows[0][1], rows[0][0]))
    for name, key in (("Planned memory", "memory"), ("Planned step time", "time")):
        if held[key] is not None:
            facts.append((name, f"{held[key]['median_absolute']:.1%} off", f"median of {held[key]['count']}"))
    if held["tau"] is not None:
        facts.append(("Planned order", f"{held['tau']:.2f}", "Kendall's tau; 1: as measured"))
    sections = [
        _section("Cells, the fastest first", "", _table(
            ["", "step", "planned", "tokens/s a rank", "MFU", "memory", "planned"], rows)),
        _section("Memory, planned and measured", "On the diagonal the plan is right.", _points(memory, "planned", "measured")),
        _section("Step time, planned and measured", "On the diagonal the plan is right.", _points(time, "planned", "measured")),
        _section("Failed", "", _table(["", "outcome", "why"], [
            [", ".join(f"{key} {value}" for key, value in one["values"].items()), one["outcome"], one["text"]]
            for one in found["failed"]])),
        _section("Refused", "", _table(["", "why"], [
            [", ".join(f"{key} {value}" for key, value in one["values"].items()),
             "; ".join(f"{problem['key']}: {problem['rule']}" for problem in one["problems"])] for one in found["refused"]])),
    ]  # fmt: skip
    return _document("sweep", "Layouts measured beside the plan", facts, sections)


def step_document(found: Mapping[str, Any]) -> Document:
    """The page of `ultrascale measure step --json`."""
    planned, ranks = found["planned"], found["ranks"]
    shown = [(f"rank {one['rank']:,}", one["mean"]) for one in ranks]
    bars = [
        _bar(name, [(key, key, seconds) for key, seconds in parts.items() if seconds], format_seconds)
        for name, parts in ([("planned", planned)] if planned else []) + shown
    ]
    facts = [
        ("Step", format_seconds(found["step_seconds"]), "profiled, the mean of steps and ranks"),
        ("Without the profiler", format_seconds(found["unprofiled_step_seconds"]), "median"),
        ("Ranks", f"{len(ranks):,}", f"steps {found['steps'][0]} to {found['steps'][-1]}"),
    ]
    both = [
        [name, "" if name not in planned else format_seconds(planned[name]), format_seconds(seconds)]
        for name, seconds in found["by_category"].items() if seconds or planned.get(name)
    ]  # fmt: skip
    count = len(found["steps"])
    top = [
        [name, category, format_seconds(seconds / count), f"{times / count:,.0f}"]
        for name, category, seconds, times in ranks[0]["top"][:MOST_ROWS]
    ]
    sections = [
        _section("Where the time of a step goes", found["planned_origin"], {"kind": "bars", "rows": bars}),
        _section("Planned and measured", "The mean of all ranks.", _table(["", "planned", "measured"], both)),
        _section(f"Operations and kernels of rank {ranks[0]['rank']:,}", "By their own time.", _table(
            ["", "is", "a step", "times"], top)),
    ]  # fmt: skip
    return _document("measure step", "A profiled step", facts, sections)


def run_document(
    lines: Iterable[tuple[str, str]], metrics: Sequence[Mapping[str, Any]], folder: str, marks: Sequence[Mark] = ()
) -> Document:
    """The lines that `ultrascale report` prints, and rows of metrics.jsonl; `marks` say where the run was killed, went on, or
    changed its layout."""
    charts = (
        ("Loss", "Nats per token, by step.", r"train/loss|val/.*loss", "{:.4f}"),
        ("Tokens per second", "All ranks together, by step.", r"perf/tokens_per_s", "{:,.0f}"),
        ("Gradient norm", "Before clipping, by step.", r"train/grad_norm", "{:.3g}"),
        ("Learning rate", "By step.", r"train/lr", "{:.3g}"),
    )
    keys = list(dict.fromkeys(key for row in metrics for key in row))
    sections = []
    for title, about, wanted, text in charts:
        found = [one for key in keys if re.fullmatch(wanted, key) for one in _series(metrics, key, text)]
        series = [one for one in found if len(one["points"]) > 1]
        told = [{"at": mark.step, "text": mark.text} for mark in marks]
        sections.append(_section(title, about, {"kind": "lines", "series": series, "marks": told} if series else None))
    facts = [(name, text, "") for name, text in lines]
    return _document("report", folder, facts, sections)


def _document(verb: str, title: str, facts: Iterable[tuple[str, str, str]], sections: Iterable[Any]) -> Document:
    told = [dict(zip(("name", "text", "note"), fact, strict=True)) for fact in facts]
    return {"verb": verb, "title": title, "facts": told, "sections": [one for one in sections if one is not None]}


def _section(title: str, about: str, part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A section; None where there is nothing to draw."""
    return None if part is None or part.get("rows") == [] else {"title": title, "about": about, "part": part}


def _number(value: float, text: Any) -> dict[str, Any]:
    return {"value": value, "text": text(value)}


def _table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"kind": "table", "columns": columns, "rows": rows[:MOST_ROWS], "left_out": max(0, len(rows) - MOST_ROWS)}


def _bar(label: str, parts: Iterable[tuple[str, str, float]], text: Any, note: str = "") -> dict[str, Any]:
    """`parts`: category, name and value of each."""
    found = [{"colour": COLOURS.get(key, 7), "label": name, **_number(value, text)} for key, name, value in parts]
    whole = text(sum(one["value"] for one in found))
    return {"label": label, "parts": found, "text": f"{whole}, {note}" if note else whole}


def _compared(row: Mapping[str, Any], text: Any) -> list[str]:
    planned, percent = row["planned"], row["percent"]
    return [
        row["name"],
        text(row["traced"]),
        "" if planned is None else text(planned),
        "" if percent is None else f"{percent:+.2f} %",
    ]


def _sent(one: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("", "") if one is None else (f"{one['count']:,}", format_bytes(one["num_bytes"]))


def _points(points: list[dict[str, Any]], across: str, up: str) -> dict[str, Any] | None:
    return {"kind": "points", "points": points, "across": across, "up": up} if len(points) > 1 else None


def _point(words: str, x: float, y: float, text: Any) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "text": f"{words or 'the run itself'}: {text(x)} planned, {text(y)} measured",
        "x_text": text(x),
        "y_text": text(y),
    }


def _series(metrics: Sequence[Mapping[str, Any]], key: str, text: str) -> Iterator[dict[str, Any]]:
    """A series of points, and of what the pictures smooth that series too: of a step that was run twice the later run; a long
    line is thinned evenly."""
    from ultrascale.measure.plots import smoothed  # here: the page in a browser's Python has nothing of `measure`

    known = {int(row["step"]): float(row[key]) for row in metrics if isinstance(row.get(key), int | float)}
    steps = sorted(step for step, value in known.items() if abs(value) < float("inf"))
    values = [known[step] for step in steps]
    stride = -(-len(steps) // MOST_POINTS) or 1
    lines = {key: values} | ({f"{key}, smoothed": smoothed(values)} if key in SMOOTHED else {})
    for name, line in lines.items():
        points = [[step, value, text.format(value)] for step, value in zip(steps, line, strict=True)]
        yield {"name": name, "points": points[::stride], "faint": name in SMOOTHED}
