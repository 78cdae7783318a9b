"""A pipeline step as a picture: one row per rank, one box per action, time from left to right. As text and as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from types import MappingProxyType
from typing import NamedTuple

from rich.text import Text

from ultrascale.plan.pipeline.play import Timeline
from ultrascale.schedules.actions import Action, Kind

COLOURS = {
    Kind.FORWARD: "#3d6db5",
    Kind.BACKWARD: "#2e8f66",
    Kind.INPUT_GRADIENT: "#3aa88f",
    Kind.WEIGHT_GRADIENT: "#d9952b",
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
AFTER_COLOURS = ("#b08cc9", "#8e4d8c", "#7fa3d1", "#4a5a9e", "#a9b1ba", "#c2554d", "#6b7580")
"""Colours of the parts after the pipeline, in their order."""
FADE = 0.5
"""Blend towards white of the colour of a rank's last stage: 0 none, 1 white."""
IDLE = "·"
TOO_SHORT = 1e-2
"""Fraction of the longest action: actions this short do not set the scale of the text."""
WIDEST_UNIT = 6
"""Most columns of text for the shortest action."""
LEFT, RIGHT, TOP, ROW, GAP, BOTTOM, WIDTH = 96, 128, 62, 30, 6, 78, 1280
"""Pixels of the SVG: margins, a row, the gap between rows, the whole width."""
DIGIT = 6.4
"""Pixels of a digit at the boxes' font size, 11."""
MOST_TICKS = 12
STAGES_WIDTH = 17
"""Characters of the small font that fit left of the rows."""


Part = tuple[str, float, str]
"""Part of a step after the pipeline: its name, seconds and colour."""


class PassBox(NamedTuple):
    """One pass, as it is drawn."""

    rank: int
    start: float
    end: float
    part: Action
    depth: float
    """0 for the rank's first stage, 1 for its last: lightness of the colour."""
    row: int
    """0 the upper half of the rank's row, 1 the lower half, -1 all of it."""


def boxes(timeline: Timeline) -> Iterator[PassBox]:
    """All boxes, rank by rank in order of time."""
    for rank, row in enumerate(timeline.schedule):
        stages = sorted({part.stage for action in row for part in action.parts})
        depth = {stage: index / max(1, len(stages) - 1) for index, stage in enumerate(stages)}
        for action, start, end in zip(row, timeline.start[rank], timeline.end[rank], strict=True):
            parts = action.parts
            for index, part in enumerate(parts):
                yield PassBox(rank, start, end, part, depth[part.stage], index if len(parts) == 2 else -1)


def draw_text(timeline: Timeline, *, width: int, colour: bool) -> list[list[Text]]:
    """One line per rank, in blocks of `width` columns: `F3` forward of micro-batch 3, `B0──` a longer backward, `·` waiting.

    The shortest action takes one column or more. With `colour`, boxes are coloured, and a number alone is used if there is no
    room for the letter.
    """
    passes = [
        end - start
        for starts, ends in zip(timeline.start, timeline.end, strict=True)
        for start, end in zip(starts, ends, strict=True)
    ]
    counted = TOO_SHORT * max(passes)
    shortest = min(seconds for seconds in passes if seconds > counted)
    scale = max(1, min(int(width * shortest / timeline.step_seconds), WIDEST_UNIT)) / shortest
    lines = [_line(timeline, rank, scale, colour=colour) for rank in range(len(timeline.schedule))]
    longest = max(map(len, lines))
    blocks = [line.divide(range(width, longest, width)) for line in lines]
    return [list(block) for block in zip(*blocks, strict=True)]


def draw_beside(timelines: dict[str, Timeline], *, width: int, colour: bool) -> dict[str, list[Text]]:
    """One line per rank of each timeline, all on one scale, the longest `width` columns long."""
    scale = width / max(timeline.step_seconds for timeline in timelines.values())
    return {
        name: [_line(timeline, rank, scale, colour=colour) for rank in range(len(timeline.schedule))]
        for name, timeline in timelines.items()
    }


def svg_beside(timelines: dict[str, Timeline]) -> str:
    """One SVG of several timelines by title, one below the other on one scale."""
    span = max(timeline.step_seconds for timeline in timelines.values())
    height, pictures = 0, []
    for title, timeline in timelines.items():
        pictures.append(f'<g transform="translate(0 {height})">{draw_svg(timeline, title=title, span=span)}</g>')
        height += _height(timeline)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *pictures, "</svg>", ""])


def _height(timeline: Timeline) -> int:
    return TOP + len(timeline.schedule) * (ROW + GAP) + BOTTOM


def _line(timeline: Timeline, rank: int, scale: float, *, colour: bool) -> Text:
    line, column = Text(no_wrap=True, end=""), 0
    for action, start, end in zip(timeline.schedule[rank], timeline.start[rank], timeline.end[rank], strict=True):
        first, beyond = round(start * scale), round(end * scale)
        line.append(IDLE * (first - column), style="dim")
        line.append(_cell(action, beyond - first, colour=colour), style=_style(action) if colour else "")
        column = beyond
    return line.append(IDLE * (round(timeline.step_seconds * scale) - column), style="dim")


def _cell(action: Action, width: int, *, colour: bool) -> str:
    """The longest label that fits, padded to `width`."""
    if action.overlapped_with is None:
        kind, number = action.kind.value, str(action.micro_batch)
        labels = [kind + number, number if colour else kind, kind, ""]
    else:
        labels = [
            f"F{action.micro_batch}&B{action.overlapped_with.micro_batch}",
            f"{action.micro_batch}&{action.overlapped_with.micro_batch}",
            "&",
            "",
        ]
    label = next(label for label in labels if len(label) <= width)
    return label.ljust(width, " " if colour else "─")


def _style(action: Action) -> str:
    """White text on the colour of the kind of action; odd micro-batches are slightly lighter to distinguish neighbours."""
    colour = "#6a5a9e" if action.overlapped_with is not None else COLOURS[action.kind]
    return f"white on {_lighter(colour, 0.2 * (action.micro_batch % 2))}"


def draw_svg(
    timeline: Timeline,
    *,
    title: str,
    unit: str = "",
    span: float | None = None,
    after: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """A self-contained SVG: boxes with numbers of micro-batches, hatched waiting, the bubble and activations beside each rank.

    `unit`: unit of time, if it is not seconds. `span`: seconds of the whole width, if more than the step. `after`: names and
    seconds of work on all ranks after the pipeline.
    """
    ranks, height = len(timeline.schedule), _height(timeline)
    whole = timeline.step_seconds + sum(after.values())
    scale = (WIDTH - LEFT - RIGHT) / (span or whole)
    colours = AFTER_COLOURS[len(AFTER_COLOURS) - len(after) :]
    tail = [(name, seconds, colour) for (name, seconds), colour in zip(after.items(), colours, strict=True)]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#f4f5f7"/><rect width="1.5" height="6" fill="#d5d9df"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="17" font-weight="bold" fill="#1f2933">{escape(title)}</text>',
        f'<text x="{LEFT}" y="48" font-size="12" fill="#6b7580">{escape(_subtitle(timeline, unit, after))}</text>',
    ]
    for rank in range(ranks):
        out += _row_frame(timeline, rank, scale)
    drawn = [*boxes(timeline)]
    for box in drawn:
        out += _svg_box(box, scale)
    out += _svg_after(timeline, tail, scale)
    out += _axis(whole, scale, TOP + ranks * (ROW + GAP))
    out += _legend(timeline, height - 26, has_numbers=any(_has_room(box, scale) for box in drawn))
    out += _swatches([(colour, f"{name} {seconds:.3g} s") for name, seconds, colour in tail], height - 8)[0]
    return "\n".join([*out, "</svg>", ""])


def _subtitle(timeline: Timeline, unit: str, after: Mapping[str, float]) -> str:
    waiting = f"{timeline.step_seconds:.4g} {unit or 's'}, the bubble is {timeline.bubble_fraction:.1%} of it"
    return f"pipeline {waiting}; {sum(after.values()):.3g} s after it" if after else f"step {waiting}"


def _row_frame(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    """Name and stages of the rank, its row as waiting time, and on the right its waiting time and activations."""
    top = TOP + rank * (ROW + GAP)
    held_stages = sorted(timeline.in_flight[rank].by_stage)
    stages = f"stage{'s' * (len(held_stages) > 1)} {', '.join(map(str, held_stages))}"
    if len(stages) > STAGES_WIDTH:
        stages = f"{len(held_stages)} stages from {held_stages[0]}"
    num_held = timeline.in_flight[rank].total
    idle = timeline.bubble_seconds[rank] / timeline.step_seconds
    yield f'<text x="{LEFT - 10}" y="{top + 13}" font-size="12" text-anchor="end" fill="#1f2933">rank {rank}</text>'
    yield f'<text x="{LEFT - 10}" y="{top + 26}" font-size="9.5" text-anchor="end" fill="#8a939c">{stages}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{timeline.step_seconds * scale:.2f}" height="{ROW}" fill="url(#idle)"/>'
    yield f'<text x="{WIDTH - RIGHT + 12}" y="{top + 13}" font-size="12" fill="#1f2933">{idle:.1%} bubble</text>'
    yield f'<text x="{WIDTH - RIGHT + 12}" y="{top + 26}" font-size="9.5" fill="#8a939c">{num_held} activations at most</text>'


def _svg_box(box: PassBox, scale: float) -> Iterator[str]:
    """Box of a pass and, if there is room, the number of its micro-batch."""
    x, width = LEFT + box.start * scale, (box.end - box.start) * scale
    y, height = TOP + box.rank * (ROW + GAP), float(ROW)
    if box.row >= 0:
        y, height = y + box.row * ROW / 2, ROW / 2
    colour = _lighter(COLOURS[box.part.kind], FADE * box.depth)
    name = f"{NAMES[box.part.kind]} of micro-batch {box.part.micro_batch}, stage {box.part.stage}"
    yield (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="2" fill="{colour}" stroke="#ffffff" '
        f'stroke-width="{min(1.0, width / 8):.2f}"><title>{name}, {box.start:g} to {box.end:g}</title></rect>'
    )
    if _has_room(box, scale):
        ink = "#ffffff" if box.depth < 0.75 else "#14202b"
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4:.2f}" font-size="11" text-anchor="middle" '
            f'fill="{ink}" pointer-events="none">{box.part.micro_batch}</text>'
        )


def _has_room(box: PassBox, scale: float) -> bool:
    """True if there is room for the number of the micro-batch."""
    return len(str(box.part.micro_batch)) * DIGIT + 2 <= (box.end - box.start) * scale


def _svg_after(timeline: Timeline, tail: list[Part], scale: float) -> Iterator[str]:
    """Rectangles of the parts after the pipeline, on every rank's row."""
    done = timeline.step_seconds
    for name, seconds, colour in tail:
        x, width = LEFT + done * scale, seconds * scale
        for rank in range(len(timeline.schedule)):
            yield (
                f'<rect x="{x:.2f}" y="{TOP + rank * (ROW + GAP)}" width="{width:.2f}" height="{ROW}" fill="{colour}">'
                f"<title>{escape(name)}, {seconds:.3g} s</title></rect>"
            )
        done += seconds


def _swatches(entries: Iterable[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Squares of these colours with their texts, side by side, and where the next would begin."""
    x, out = float(LEFT), []
    for fill, text in entries:
        out.append(f'<rect x="{x}" y="{y - 10}" width="13" height="13" rx="2" fill="{fill}"/>')
        out.append(f'<text x="{x + 19}" y="{y + 1}" font-size="12" fill="#1f2933">{escape(text)}</text>')
        x += 19 + 6.6 * len(text) + 26
    return out, x


def _axis(seconds: float, scale: float, y: float) -> Iterator[str]:
    step = _round_step(seconds / MOST_TICKS)
    ticks = int(seconds / step + 1e-9)
    for number in range(ticks + 1):
        x = LEFT + number * step * scale
        yield f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}" stroke="#8a939c"/>'
        yield f'<text x="{x:.2f}" y="{y + 18}" font-size="10" text-anchor="middle" fill="#6b7580">{number * step:g}</text>'


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** int(f"{least:e}".partition("e")[2])
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(timeline: Timeline, y: float, *, has_numbers: bool) -> list[str]:
    """Legend of the kinds of action that occur."""
    parts = [part for row in timeline.schedule for action in row for part in action.parts]
    entries = [(COLOURS[kind], name) for kind, name in NAMES.items() if any(part.kind is kind for part in parts)]
    swatches, x = _swatches([*entries, ("url(#idle)", "bubble")], y)
    notes = ["numbers: micro-batches"] if has_numbers else []
    if any(len({p.stage for a in row for p in a.parts}) > 1 for row in timeline.schedule):
        notes.append("lighter: a rank's later stages")
    if any(action.overlapped_with is not None for row in timeline.schedule for action in row):
        notes.append("one above the other: at the same time")
    return [*swatches, f'<text x="{x}" y="{y + 1}" font-size="12" fill="#6b7580">{"; ".join(notes)}</text>']


def _lighter(colour: str, share: float) -> str:
    """`#rrggbb` moved towards white by `share` of the way."""
    channels = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)
