"""Results of other verbs as sections that a page draws: a trace, a sweep, a profiled step, a run.

Each is made from the verb's --json output, so that page and JSON agree. A section has a title, a sentence, and parts:

facts    names and values
table    columns and rows of text
bars     rows of adjacent parts, each with its colour
areas    stacked layers, over operations in order
lines    values by step, and marks at steps
points   one quantity against another, on the diagonal if they agree
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from ultrascale.description.units import format_bytes, format_count, format_percent, format_seconds, format_share

if TYPE_CHECKING:
    from ultrascale.measure.run_marks import RunMark

COLOURS = {
    "parameters": 0, "gathered": 1, "gradients": 2, "optimizer": 3, "activations": 4, "temporary": 5, "communication": 6,
    "other": 7, "matrix products": 4, "attention": 0, "element-wise": 1, "recomputation": 5, "dp": 3, "tp": 2, "cp": 6, "pp": 8,
    "ep": 5, "all ranks": 6, "launch gaps": 7, "data wait": 8, "idle": 7,
}  # fmt: skip
"""Indices into the page's palette, by category of memory and of time."""
COMPARED = ["", "traced", "planned", "planned over traced"]
MOST_ROWS = 200
"""Most rows of a table in a self-contained file."""
MOST_POINTS = 1000
"""Most points of a line."""
SMOOTHED = ("train/loss", "perf/tokens_per_s")
"""Series that are drawn faint, with a smoothed curve on top, as in the plots of a run."""
Document = dict[str, Any]


def trace_document(trace: Mapping[str, Any]) -> Document:
    """The page of `ultrascale trace --json` of one rank."""
    compared, timeline = trace["comparison"], trace["timeline"]
    names = [name for name in COLOURS if any(row["bytes"].get(name) for row in timeline)]
    marks = [{"at": 0, "text": f"step {timeline[0]['step']}"}] if timeline else []
    marks += [
        {"at": index, "text": f"step {row['step']}"}
        for index, (before, row) in enumerate(pairwise(timeline), start=1)
        if before["step"] != row["step"]
    ]
    facts = [
        ("Live at the peak", format_bytes(trace["peak_bytes"]), f"step {trace['step']}"),
        ("Reserved by the allocator", format_bytes(trace["reserved_bytes"]), trace["device"]),
        ("Rank", f"{trace['rank']:,} of {trace['world']:,}", ""),
        ("Micro-batches", f"{trace['micro_batches']:,}", f"{trace['micro_batches_traced']:,} traced"),
    ]
    alive = [
        [group["category"], group["what"], group["line"], f"{group['count']:,}", format_bytes(group["num_bytes"])]
        for group in trace["alive_at_peak"][:MOST_ROWS]
    ]
    sections = [
        _section("Live memory by category", "Operation after operation; each moment is the highest of its stretch.", {
            "kind": "areas", "names": names, "colours": [COLOURS[name] for name in names], "marks": marks,
            "rows": [[row["bytes"].get(name, 0) for name in names] for row in timeline],
            "top": number(max((sum(row["bytes"].values()) for row in timeline), default=0), format_bytes),
        }),
        _section("Memory, traced and planned", "Each category at its own peak.",
                 _table(COMPARED, [_compared(row, format_bytes) for row in compared["memory"]])),
        _section("Messages of the step", "By axis and kind.", _table(
            ["axis", "kind", "ranks", "messages", "bytes", "planned messages", "planned bytes"],
            [[row["axis"], row["kind"].replace("_", "-"), f"{row['size']:,}", *_sent(row["traced"]), *_sent(row["planned"])]
             for row in compared["traffic"]])),
        _section("FLOPs of the step", "", _table(COMPARED, [_compared(row, format_count) for row in compared["flops"]])),
        _section("Live at the peak", "What takes most.", _table(["category", "what", "line", "how many", "bytes"], alive)),
    ]  # fmt: skip
    if trace["edits"]:
        edits = [
            [edit["setting"], format_bytes(edit["needed_bytes"]), format_bytes(edit["saved_bytes"]),
             "yes" if edit["fits"] else "no", "" if edit["slower"] is None else f"{edit['slower']:+.1%}"]
            for edit in trace["edits"]
        ]  # fmt: skip
        columns = ["setting", "needs", "saves", "fits", "step"]
        sections.append(_section("Changes that would help", "", _table(columns, edits)))
    return _document("trace", f"{trace['model'] or 'model'}, rank {trace['rank']:,} of {trace['world']:,}", facts, sections)


def stages_document(stages: Sequence[Mapping[str, Any]]) -> Document:
    """The page of `ultrascale trace --all-stages --json`."""
    bars = [
        _bar(f"stage {stage['pp']}, rank {stage['rank']:,}", [("activations", "live", stage["traced_bytes"])], format_bytes,
             "" if stage["planned_bytes"] is None else f"{format_bytes(stage['planned_bytes'])} planned")
        for stage in stages
    ]  # fmt: skip
    most = max(stages, key=lambda stage: stage["traced_bytes"])
    facts = [("Most", format_bytes(most["traced_bytes"]), f"stage {most['pp']}"), ("Stages", f"{len(stages):,}", "")]
    sections = [_section("Live memory at the peak", "The first rank of every pipeline stage.", {"kind": "bars", "rows": bars})]
    return _document("trace", "Every pipeline stage", facts, sections)


def sweep_document(sweep: Mapping[str, Any]) -> Document:
    """The page of `ultrascale sweep --json`."""
    measured, scores = sweep["measured"], sweep["held"]
    rows, memory, time = [], [], []
    for cell in measured:
        seconds, words = (
            median(cell["step_seconds"]),
            ", ".join(f"{key.rpartition('.')[2]} {v}" for key, v in cell["values"].items()),
        )
        rate = cell["tokens_per_step"] / seconds / cell["ranks"]
        planned = cell["planned_step_seconds"]
        rows.append([
            words or "the run itself", format_seconds(seconds), "" if planned is None else format_seconds(planned),
            f"{rate:,.0f}", format_share(cell["mfu"]),
            "" if cell["measured_peak_bytes"] is None else format_bytes(cell["measured_peak_bytes"]),
            format_bytes(cell["planned_peak_bytes"]),
        ])  # fmt: skip
        if cell["measured_peak_bytes"] is not None:
            memory.append(_point(words, cell["planned_peak_bytes"], cell["measured_peak_bytes"], format_bytes))
        if planned is not None:
            time.append(_point(words, planned, seconds, format_seconds))
    facts = [("Cells measured", f"{len(measured):,}", f"{len(sweep['failed']):,} failed, {len(sweep['refused']):,} refused")]
    if rows:
        facts.append(("Fastest", rows[0][1], rows[0][0]))
    for name, key in (("Planned memory", "memory"), ("Planned step time", "time")):
        if scores[key] is not None:
            facts.append((name, f"{scores[key]['median_absolute']:.1%} off", f"median of {scores[key]['count']}"))
    if scores["tau"] is not None:
        facts.append(("Planned order", f"{scores['tau']:.2f}", "Kendall's tau; 1: as measured"))
    sections = [
        _section("Cells, the fastest first", "", _table(
            ["", "step", "planned", "tokens/s a rank", "MFU", "memory", "planned"], rows)),
        _section("Memory, planned and measured", "On the diagonal the plan is right.", _points(memory)),
        _section("Step time, planned and measured", "On the diagonal the plan is right.", _points(time)),
        _section("Failed", "", _table(["", "outcome", "why"], [
            [", ".join(f"{key} {value}" for key, value in cell["values"].items()), cell["outcome"], cell["text"]]
            for cell in sweep["failed"]])),
        _section("Refused", "", _table(["", "why"], [
            [", ".join(f"{key} {value}" for key, value in cell["values"].items()),
             "; ".join(f"{problem['key']}: {problem['rule']}" for problem in cell["problems"])] for cell in sweep["refused"]])),
    ]  # fmt: skip
    return _document("sweep", "Layouts measured beside the plan", facts, sections)


def step_document(profile: Mapping[str, Any]) -> Document:
    """The page of `ultrascale measure step --json`."""
    planned, ranks = profile["planned"], profile["ranks"]
    measured = [(f"rank {rank['rank']:,}", rank["mean"]) for rank in ranks]
    bars = [
        _bar(name, [(key, key, seconds) for key, seconds in parts.items() if seconds], format_seconds)
        for name, parts in ([("planned", planned)] if planned else []) + measured
    ]
    facts = [
        ("Step", format_seconds(profile["step_seconds"]), "profiled, the mean of steps and ranks"),
        ("Without the profiler", format_seconds(profile["unprofiled_step_seconds"]), "median"),
        ("Ranks", f"{len(ranks):,}", f"steps {profile['steps'][0]} to {profile['steps'][-1]}"),
    ]
    both = [
        [name, "" if name not in planned else format_seconds(planned[name]), format_seconds(seconds)]
        for name, seconds in profile["by_category"].items() if seconds or planned.get(name)
    ]  # fmt: skip
    count = len(profile["steps"])
    top = [
        [name, category, format_seconds(seconds / count), f"{times / count:,.0f}"]
        for name, category, seconds, times in ranks[0]["top"][:MOST_ROWS]
    ]
    sections = [
        _section("Where the time of a step goes", profile["planned_origin"], {"kind": "bars", "rows": bars}),
        _section("Planned and measured", "The mean of all ranks.", _table(["", "planned", "measured"], both)),
        _section(f"Operations and kernels of rank {ranks[0]['rank']:,}", "By their own time.", _table(
            ["", "is", "a step", "times"], top)),
    ]  # fmt: skip
    return _document("measure step", "A profiled step", facts, sections)


def run_document(
    lines: Iterable[tuple[str, str]], metrics: Sequence[Mapping[str, Any]], folder: str, marks: Sequence[RunMark] = ()
) -> Document:
    """The page of a run: the lines printed by `ultrascale report`, and rows of metrics.jsonl; `marks` are the steps at which
    the run was killed, resumed, or changed its layout."""
    charts = (
        ("Loss", "Nats per token, by step.", r"train/loss|val/loss(/.*)?", "{:.4f}"),
        ("Tokens per second", "All ranks together, by step.", r"perf/tokens_per_s", "{:,.0f}"),
        ("Gradient norm", "Before clipping, by step.", r"train/grad_norm", "{:.3g}"),
        ("Learning rate", "By step.", r"train/lr", "{:.3g}"),
    )
    keys = list(dict.fromkeys(key for row in metrics for key in row))
    sections = []
    for title, about, wanted, text in charts:
        curves = [curve for key in keys if re.fullmatch(wanted, key) for curve in _series(metrics, key, text)]
        series = [curve for curve in curves if len(curve["points"]) > 1]
        marked_steps = [{"at": mark.step, "text": mark.text} for mark in marks]
        sections.append(_section(title, about, {"kind": "lines", "series": series, "marks": marked_steps} if series else None))
    facts = [(name, text, "") for name, text in lines]
    return _document("report", folder, facts, sections)


def _document(verb: str, title: str, facts: Iterable[tuple[str, str, str]], sections: Iterable[Any]) -> Document:
    named = [dict(zip(("name", "text", "note"), fact, strict=True)) for fact in facts]
    return {"verb": verb, "title": title, "facts": named, "sections": [section for section in sections if section is not None]}


def _section(title: str, about: str, part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A section; None if there is nothing to draw."""
    return None if part is None or part.get("rows") == [] else {"title": title, "about": about, "part": part}


def number(value: float, text: Callable[[float], str]) -> dict[str, Any]:
    """A number and its text."""
    return {"value": value, "text": text(value)}


def _table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"kind": "table", "columns": columns, "rows": rows[:MOST_ROWS], "left_out": max(0, len(rows) - MOST_ROWS)}


def _bar(label: str, parts: Iterable[tuple[str, str, float]], text: Any, note: str = "") -> dict[str, Any]:
    """A bar; `parts`: category, name and value of each part."""
    segments = [{"colour": COLOURS.get(key, 7), "label": name, **number(value, text)} for key, name, value in parts]
    total = text(sum(segment["value"] for segment in segments))
    return {"label": label, "parts": segments, "text": f"{total}, {note}" if note else total}


def _compared(row: Mapping[str, Any], text: Any) -> list[str]:
    planned, percent = row["planned"], row["percent"]
    return [
        row["name"],
        text(row["traced"]),
        "" if planned is None else text(planned),
        format_percent(percent),
    ]


def _sent(messages: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("", "") if messages is None else (f"{messages['count']:,}", format_bytes(messages["num_bytes"]))


def _points(points: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {"kind": "points", "points": points, "across": "planned", "up": "measured"} if len(points) > 1 else None


def _point(words: str, x: float, y: float, text: Any) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "text": f"{words or 'the run itself'}: {text(x)} planned, {text(y)} measured",
        "x_text": text(x),
        "y_text": text(y),
    }


def _series(metrics: Sequence[Mapping[str, Any]], key: str, text: str) -> Iterator[dict[str, Any]]:
    """A series of points, and its smoothed version if the plots have one. For a step that was run twice the later run counts; a
    long line is thinned evenly."""
    from ultrascale.measure.plots import smoothed  # imported here: the page in a browser's Python lacks `measure`

    known = {int(row["step"]): float(row[key]) for row in metrics if isinstance(row.get(key), int | float)}
    steps = sorted(step for step, value in known.items() if abs(value) < float("inf"))
    values = [known[step] for step in steps]
    stride = -(-len(steps) // MOST_POINTS) or 1
    lines = {key: values} | ({f"{key}, smoothed": smoothed(values)} if key in SMOOTHED else {})
    for name, line in lines.items():
        points = [[step, value, text.format(value)] for step, value in zip(steps, line, strict=True)]
        yield {"name": name, "points": points[::stride], "faint": name in SMOOTHED}
