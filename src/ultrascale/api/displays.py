"""Displays of a result: a table in a notebook, a pandas DataFrame, a matplotlib figure. Neither package is imported before it
is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import Any

from ultrascale.api.extras import NotInstalledError, lacks

TableRow = dict[str, Any]
"""A row of a table: columns and values."""
MOST_ROWS = 40
"""Most rows of a table in a notebook; `to_frame` and `to_dict` have all."""
INK, FIRST_COLOUR, SECOND_COLOUR = "#22272e", "#3b6fb6", "#d1603d"


class Rows:
    """A result with rows, shown as a table in a notebook and by pandas."""

    def rows(self) -> list[TableRow]:
        """Rows of the table."""
        raise NotImplementedError

    def to_frame(self) -> Any:
        """`rows` as a pandas DataFrame. Raises NotInstalledError without pandas."""
        return frame(self.rows())

    def _repr_html_(self) -> str:
        return html(repr(self), self.rows())


def frame(rows: Sequence[TableRow], method: str = "rows()") -> Any:
    """A pandas DataFrame of the rows, which the result's `method` returns too. Raises NotInstalledError without pandas."""
    try:
        import pandas  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        remedy = f"pip install pandas; {method} has the same as dictionaries"
        raise NotInstalledError(lacks("to_frame()", "pandas", remedy=remedy)) from None
    return pandas.DataFrame(list(rows))


def html(title: str, rows: Sequence[TableRow]) -> str:
    """An HTML table for a notebook, at most `MOST_ROWS` rows."""
    columns = list(rows[0]) if rows else []
    head = "".join(f"<th style='text-align:left'>{escape(str(name))}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(row[name]))}</td>" for name in columns) + "</tr>"
        for row in rows[:MOST_ROWS]
    )
    more = f"<p>and {len(rows) - MOST_ROWS:,} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<p><b>{escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def figure(title: str, *, width: float = 8.0, height: float = 4.2) -> Any:
    """An empty matplotlib figure. Raises NotInstalledError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NotInstalledError(lacks("plot()", "matplotlib")) from None

    class NotebookFigure(Figure):
        """A figure that a notebook displays without pyplot."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    drawing = NotebookFigure(figsize=(width, height), dpi=110, layout="constrained")
    drawing.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK, wrap=True)
    return drawing


def bars(title: str, values: Sequence[tuple[str, float]], *, label: str = "b / a", linear_to: float | None = None) -> Any:
    """A bar chart, one bar per name, the first on top; if values above `linear_to` differ by orders of magnitude, the axis is
    logarithmic from there."""
    drawing = figure(title, height=1.2 + 0.28 * len(values))
    axes = drawing.add_subplot()
    _bars(axes, [name for name, _ in values], [value for _, value in values], label, FIRST_COLOUR)
    if linear_to is not None:
        axes.set_xscale("symlog", linthresh=linear_to)
    return drawing


def shares(title: str, rows: Sequence[TableRow]) -> Any:
    """Two panels by part: memory in GiB, and step time in milliseconds."""
    panels = [("memory", 2**30, "GiB", FIRST_COLOUR), ("step", 1e-3, "ms", SECOND_COLOUR)]
    shown = [(kind, scale, unit, colour) for kind, scale, unit, colour in panels if any(row["of"] == kind for row in rows)]
    drawing = figure(title, width=5.0 * len(shown) + 1)
    for number, (kind, scale, unit, colour) in enumerate(shown, start=1):
        panel_rows = [row for row in rows if row["of"] == kind]
        axes = drawing.add_subplot(1, len(shown), number)
        _bars(
            axes, [row["part"] for row in panel_rows], [row["value"] / scale for row in panel_rows], f"{kind}, {unit}", colour
        )
    return drawing


def scatter(title: str, rows: Sequence[TableRow], across: str, up: str) -> Any:
    """A scatter plot, one point per row: bytes in GiB on x, seconds on y."""
    drawing = figure(title)
    axes = drawing.add_subplot()
    axes.scatter([row[across] / 2**30 for row in rows], [row[up] for row in rows], color=FIRST_COLOUR, s=18)
    axes.set_xlabel(f"{across.removesuffix('_bytes')} memory, GiB")
    axes.set_ylabel(f"{up.removesuffix('_seconds')}, seconds")
    axes.spines[["top", "right"]].set_visible(False)
    return drawing


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], label: str, colour: str) -> None:
    axes.barh(range(len(names)), values, color=colour)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
