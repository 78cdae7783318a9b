"""A plan's charts as PNGs, for slides and papers: `plan --png DIR`. The numbers are those of the page's answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ultrascale.output_file import write_output

GIB = 2**30
INK = "#1a1d21"
COLOURS = {
    "weights": "#0072b2", "gathered": "#56b4e9", "gradients": "#e69f00", "optimizer": "#cc79a7", "activations": "#009e73",
    "buffers": "#e8d838", "reserve": "#9aa2ab", "outside": "#5b646e", "compute": "#009e73", "recompute": "#66c5ab",
    "tensor_parallel": "#e69f00", "context_parallel": "#e8d838", "expert_parallel": "#8a4f7d", "data_parallel": "#cc79a7",
    "pipeline_sends": "#56b4e9", "bubble": "#d55e00", "rest": "#9aa2ab",
}  # fmt: skip
"""Colours as in page.css: Okabe and Ito's palette, distinguishable with every kind of colour vision."""
KINDS = {"matrix products": ("#009e73", "o"), "attention": ("#0072b2", "s")}

PASSES = {
    "F": ("forward", "#0072b2"), "I": ("input gradient", "#5b4a9e"), "W": ("weight gradient", "#b25c00"),
    "B": ("backward", "#00805d"),
}  # fmt: skip
OFFSETS = (-20, 14, 26, -32, 38, -44)
"""Points from a spot of the roofline to its name, tried in this order."""
PASS = re.compile(r"\d+([FIWB])\d+")


def write_pictures(answer: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the available charts of memory, ranks, time, schedule, sent, roofline, front and scaling as NAME.png into `folder`.

    Raises ModuleNotFoundError without matplotlib (extra `plot`).
    """
    import matplotlib.figure  # before anything is written  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    memory, roofline, ranking = answer["memory"], answer.get("roofline"), answer.get("ranking")
    drawn: dict[str, Any] = {}
    if memory["bars"]:
        drawn["memory"] = _memory(answer, memory["bars"], "Memory at the peak")
    if memory["ranks"]:
        drawn["ranks"] = _memory(answer, memory["ranks"], "Live tensors at the peak, by pipeline rank")
    if answer["waterfall"]:
        drawn["time"] = _waterfall(answer)
    if answer["schedule"]:
        drawn["schedule"] = _schedule(answer, answer["schedule"])
    if answer.get("sent", {}).get("rows"):
        drawn["sent"] = _sent(answer)
    if roofline:
        drawn["roofline"] = _roofline(answer, roofline)
    if ranking and len(ranking["front"]) > 1:
        drawn["front"] = _front(answer, ranking)
    if answer.get("scaling"):
        drawn["scaling"] = _scaling(answer)
    paths = []
    for name, figure in drawn.items():
        picture = BytesIO()
        figure.savefig(picture, format="png")
        paths.append(folder / f"{name}.png")
        write_output(paths[-1], picture.getvalue())
    return paths


def _axes(answer: Mapping[str, Any], title: str, height: float, across: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heading = answer["title"]
    axes.set_title(f"{title}\n{heading['model']}; {heading['machine']}\n{heading['layout']}", loc="left", fontsize=8, color=INK)
    axes.set_xlabel(across)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_formatter(NullFormatter())


def _bars(axes: Any, rows: Sequence[tuple[str, float, float, str, str]], space: float) -> None:
    """A bar of each row, of its name, left end, width, colour and text, with `space` times their width for all of them."""
    for position, (_, left, wide, colour, text) in enumerate(rows):
        axes.barh(position, wide, left=left, color=colour, height=0.7)
        axes.text(left + wide, position, f" {text}", va="center", fontsize=8)
    axes.set_xlim(0, max(left + wide for _, left, wide, _, _ in rows) * space or 1)
    _rows(axes, [row[0] for row in rows])


def _rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()


def _memory(answer: Mapping[str, Any], bars: Sequence[Mapping[str, Any]], title: str) -> Any:
    figure, axes = _axes(answer, title, 1.9 + 0.34 * len(bars), "GiB")
    for position, bar in enumerate(bars):
        left = 0.0
        for part in bar["parts"]:
            wide = part["value"] / GIB
            axes.barh(position, wide, left=left, color=COLOURS[part["name"]], height=0.7, edgecolor="white", linewidth=0.5)
            left += wide
        axes.text(left, position, f" {bar['text']}", va="center", fontsize=8)
    memory = answer["memory"]
    axes.axvline(memory["capacity"]["value"] / GIB, color=INK, linewidth=1.4)
    axes.axvline(memory["usable"]["value"] / GIB, color=INK, linewidth=1, linestyle="--")
    _rows(axes, [bar["label"] for bar in bars])
    used = {part["name"] for bar in bars for part in bar["parts"]}
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=COLOURS[entry["name"]], label=entry["label"]) for entry in memory["legend"] if entry["name"] in used
    ]
    handles.append(Line2D([], [], color=INK, label=f"a device, {memory['capacity']['text']}"))
    handles.append(Line2D([], [], color=INK, linestyle="--", label=f"to be used, {memory['usable']['text']}"))
    figure.legend(handles=handles, ncols=5, frameon=False, fontsize=7, loc="outside lower center")
    return figure


def _waterfall(answer: Mapping[str, Any]) -> Any:
    parts = answer["waterfall"]
    figure, axes = _axes(answer, "Time of a step", 1.4 + 0.3 * len(parts), "seconds")
    rows, left = [], 0.0
    for part in parts:
        colour, text = COLOURS.get(part["name"], "#5b646e"), f"{part['text']}, {part['share']}"
        rows.append((part["label"], left, part["value"], colour, text))
        left += part["value"]
    _bars(axes, rows, 1.25)
    return figure


def _schedule(answer: Mapping[str, Any], schedule: Mapping[str, Any]) -> Any:
    ranks = schedule["ranks"]
    figure, axes = _axes(answer, schedule["title"], 1.6 + 0.3 * len(ranks), "seconds")
    boxes: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in PASSES}
    for row, rank in enumerate(ranks):
        for name, start, end in rank["actions"]:
            kinds = PASS.findall(name)  # in some schedules two run at once, drawn one above the other
            for half, kind in enumerate(kinds):
                boxes[kind].append((row - 0.4 + 0.8 * (half + 0.5) / len(kinds), end - start, start, 0.8 / len(kinds)))
    for kind, (label, colour) in PASSES.items():
        if boxes[kind]:
            rows, widths, starts, heights = zip(*boxes[kind], strict=True)
            axes.barh(rows, widths, heights, starts, color=colour, edgecolor="white", linewidth=0.3, label=label)
    _rows(axes, [f"rank {rank['rank']}" for rank in ranks])
    figure.legend(loc="outside lower center", ncols=len(PASSES), fontsize=7, frameon=False)
    return figure


def _sent(answer: Mapping[str, Any]) -> Any:
    rows = answer["sent"]["rows"]
    figure, axes = _axes(answer, f"Sent in a step by rank {answer['sent']['rank']:,}", 1.4 + 0.3 * len(rows), "GiB")
    colours = {"network": "#56b4e9", "node": "#0072b2"}
    bars = [(f"{row['axis']}, {row['kind']}", 0.0, row["value"] / GIB, colours[row["over"]], f"{row['text']}, {row['over']}")
            for row in rows]  # fmt: skip
    _bars(axes, bars, 1.3)
    return figure


def _roofline(answer: Mapping[str, Any], roofline: Mapping[str, Any]) -> Any:
    figure, axes = _axes(answer, f"Roofline of {roofline['device']}", 4.4, "FLOPs per byte of memory traffic")
    shown = [row for row in roofline["rows"] if row["rate"]]
    peak, bandwidth = roofline["peak"]["value"], roofline["bandwidth"]["value"]
    low = min(peak / bandwidth, *(row["intensity"] for row in shown)) / 3
    high = max(peak / bandwidth, *(row["intensity"] for row in shown)) * 2
    axes.plot([low, peak / bandwidth, high], [low * bandwidth / 1e12, peak / 1e12, peak / 1e12], color=INK, linewidth=1.4)
    total = sum(row["seconds"] for row in roofline["rows"])
    for kind, (colour, marker) in KINDS.items():
        of_kind = [row for row in shown if row["kind"] == kind]
        sizes = [20 + 1200 * row["seconds"] / total for row in of_kind]
        points = [row["intensity"] for row in of_kind], [row["rate"] / 1e12 for row in of_kind]
        axes.scatter(*points, s=sizes, color=colour, marker=marker, alpha=0.7, label=kind)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.set_ylim(min(row["rate"] for row in shown) / 1.5e12, peak * 1.3 / 1e12)
    _name_spots(figure, axes, shown)
    axes.set_ylabel(f"TFLOP/s; at most {roofline['peak']['text']}, {roofline['bandwidth']['text']} of memory")
    axes.legend(frameon=False, fontsize=8, loc="upper left", markerscale=0.4)
    return figure


def _name_spots(figure: Any, axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the operations of each spot of the roofline below or above it, the further off the more names are in the way."""
    placed: list[Any] = []
    last = Counter(row["name"].rpartition(".")[2] for row in rows)
    for spot in sorted({(row["intensity"], row["rate"]) for row in rows}):
        parts = [row["name"].split(".") for row in rows if (row["intensity"], row["rate"]) == spot]
        names = [
            ".".join(part[-2 if last[part[-1]] > 1 else -1 :]) for part in parts
        ]  # shared_experts.up_proj, experts.up_proj
        text = axes.annotate(
            ", ".join(names), (spot[0], spot[1] / 1e12), xytext=(0, 0), textcoords="offset points", fontsize=6, ha="center"
        )
        for offset in OFFSETS:
            text.xyann = (0, offset)
            figure.draw_without_rendering()
            if not any(text.get_window_extent().overlaps(other.get_window_extent()) for other in placed):
                break
        placed.append(text)


def _front(answer: Mapping[str, Any], ranking: Mapping[str, Any]) -> Any:
    figure, axes = _axes(answer, "Time against memory: no layout beats the circles in both", 4.2, "seconds a step")
    for rows, colour, marker, name in (
        (ranking["rows"], "#d55e00", "s", "ranking"),
        (ranking["front"], "#0072b2", "o", "front"),
    ):
        points = sorted((row["step"]["value"], row["memory"]["value"] / GIB) for row in rows)
        axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=22, label=name)
        if name == "front":
            axes.step(*zip(*points, strict=True), where="post", color="#56b4e9", linewidth=1.2, zorder=0)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_ylabel("GiB")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _scaling(answer: Mapping[str, Any]) -> Any:
    rows = answer["scaling"]
    figure, axes = _axes(
        answer, "The best layout on other numbers of devices, the batch unchanged", 1.4 + 0.3 * len(rows), "tokens a second"
    )
    colours = {True: "#009e73", False: "#9aa2ab"}
    _bars(axes, [(f"{row['gpus']:,}", 0.0, row["value"], colours[row["pays"]], row["text"]) for row in rows], 1.2)
    return figure
