"""One plan as one HTML file: the page's own drawing with the answer inside, no planner, no network, under 1 MB."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from ultrascale.page.server import static_text

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
<header><h1>ultrascale <span>plan</span></h1><p>{command}</p></header>
<div class="columns alone"><main id="view"></main></div>
<script type="application/json" id="plan">{answer}</script>
<script>{charts}
const plan = JSON.parse(document.getElementById("plan").textContent), view = document.getElementById("view");
draw(view, plan);
let before = innerWidth;
addEventListener("resize", () => {{ if (innerWidth !== before) {{ before = innerWidth; draw(view, plan); }} }});
</script>
</body>
</html>
"""


def one_file(answer: dict[str, Any]) -> str:
    """An answer of `page.shown`, drawn wherever it is opened."""
    title = f"{answer['title']['model']}: {answer['title']['layout']}"
    inside = json.dumps(answer).replace("<", "\\u003c")  # no name in a plan ends the script
    return _SHELL.format(
        title=escape(title), command=escape(answer["command"]), style=static_text("page.css"), charts=static_text("charts.js"),
        answer=inside,
    )  # fmt: skip
