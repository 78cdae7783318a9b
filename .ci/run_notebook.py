"""Runs the cells of a notebook in order, as Jupyter would, in one process and without Jupyter.

    python .ci/run_notebook.py docs/planning.ipynb            writes their outputs into it
    python .ci/run_notebook.py --check docs/planning.ipynb    says which outputs are no longer true; exit code 1 if one is

An output is what the cell prints and what its last expression is: its `repr`, its `_repr_html_`, or a figure. As with samples
in the pages (.ci/paste_printed.py), an output is still true if its words are the same and its numbers are near; of a figure
only that there is one.
"""

from __future__ import annotations

import argparse
import ast
import base64
import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

same = runpy.run_path(str(Path(__file__).parent / "paste_printed.py"))["same"]


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What a cell prints and shows, in the notebook's format."""
    body, printed = ast.parse(source), io.StringIO()
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    with redirect_stdout(printed):
        exec(compile(body, f"<cell {number}>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names) if last is not None else None
    text = printed.getvalue()
    found: list[dict[str, Any]] = [{"name": "stdout", "output_type": "stream", "text": _lines(text)}] if text else []
    if value is not None:
        shown = {"data": shown_as(value), "metadata": {}, "execution_count": number, "output_type": "execute_result"}
        found.append(shown)
    return found


def shown_as(value: Any) -> dict[str, Any]:
    """A value as notebooks keep it, by media type."""
    found: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", metadata={"Software": None})
        found = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
    elif hasattr(value, "_repr_html_"):
        found["text/html"] = _lines(value._repr_html_())
    return dict(sorted(found.items()))


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [outputs_of("".join(cell["source"]), names, number) for number, cell in enumerate(cells, start=1)]


def stale(kept: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether the outputs of a cell say something else now."""
    if [_kinds(one) for one in kept] != [_kinds(one) for one in now]:
        return True
    return not all(same(_text(old), _text(new)) for old, new in zip(kept, now, strict=True))


def _kinds(output: dict[str, Any]) -> tuple[str, ...]:
    return (output["output_type"], *sorted(output.get("data", ())))


def _text(output: dict[str, Any]) -> str:
    return "".join(output.get("text", output.get("data", {}).get("text/plain", [])))


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    notebook = json.loads(options.file.read_text())
    cells, wrong = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"], 0
    for number, (cell, outputs) in enumerate(zip(cells, run(notebook), strict=True), start=1):
        if options.check and stale(cell["outputs"], outputs):
            print(f"{options.file}: cell {number} shows something else now: python .ci/run_notebook.py {options.file}")
            wrong = 1
        cell["outputs"], cell["execution_count"] = outputs, number
    if not options.check:
        options.file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
