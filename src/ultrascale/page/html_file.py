"""A verb's result as one HTML file: the page's drawing code with the answer embedded, no planner, no network, under 1 MB."""

from __future__ import annotations

import json
import shlex
from html import escape
from pathlib import Path
from typing import Any

from ultrascale.description.problems import mistake
from ultrascale.output_file import write_output
from ultrascale.page.documents import Document

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>ultrascale <span>{verb}</span></h1><p>{command}</p></header>
<div class="columns alone"><main id="view"></main></div>
<script type="application/json" id="found">{content}</script>
<script>{scripts}
const found = JSON.parse(document.getElementById("found").textContent), view = document.getElementById("view");
{draw}(view, found);
let before = innerWidth;
addEventListener("resize", () => {{ if (innerWidth !== before) {{ before = innerWidth; {draw}(view, found); }} }});
</script>
</body>
</html>
"""


def plan_file(answer: dict[str, Any]) -> str:
    """An answer of `page.plan_data` as a self-contained page."""
    title = f"{answer['title']['model']}: {answer['title']['layout']}"
    return _filled(answer, title=title, verb="plan", command=answer["command"], scripts=("charts.js",), draw="draw")


def document_file(document: Document, command: str) -> str:
    """A document of `page.documents` as a self-contained page. `command`: the command line that made it."""
    verb, scripts = document["verb"], ("charts.js", "document.js")
    return _filled(document, title=document["title"], verb=verb, command=command, scripts=scripts, draw="drawDocument")


def expect_writable(path: str | Path | None) -> None:
    """Raises SpecError if a file with this name cannot be written, before hours of work on its content."""
    if path is None:
        return
    if Path(path).is_dir():
        raise mistake("--html", f"{path} is a folder", f"Name a file, such as {Path(path) / 'found.html'}.")
    if not Path(path).parent.is_dir():
        raise mistake("--html", f"there is no folder {Path(path).parent}", "Make it, or name another.")


def write_document(path: Path, document: Document, words: list[str]) -> None:
    """Write `document_file` for the command line `ultrascale` followed by `words`."""
    write_output(path, document_file(document, shlex.join(["ultrascale", *words])))


def _filled(content: dict[str, Any], *, title: str, verb: str, command: str, scripts: tuple[str, ...], draw: str) -> str:
    from ultrascale.page.server import static_text  # imported here: a verb that draws nothing starts without a server

    inside = json.dumps(content).replace("<", "\\u003c")  # so that no name in a plan can end the script
    return _SHELL.format(
        title=escape(title), verb=escape(verb), command=escape(command), style=static_text("page.css"), content=inside,
        scripts="\n".join(map(static_text, scripts)), draw=draw,
    )  # fmt: skip
