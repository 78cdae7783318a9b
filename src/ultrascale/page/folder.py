"""The page as a folder that any web server serves, and that plans inside the browser: CPython of Pyodide in a Web Worker.

Nothing is fetched here. The parts are handed in as one folder, all of one release of Pyodide: its runtime (npm package
`pyodide`), its wheel of NumPy, which is in no registry of packages but in Pyodide's own distribution, and plain wheels of this
package and of what it needs (`pip download ultrascale --no-deps`, tyro, rich and theirs). What is missing is named.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ultrascale.description.problems import Problem, SpecError
from ultrascale.page.controls import controls_json
from ultrascale.page.server import static_text

RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Files of npm's pyodide, version 314 and later."""
NUMPY = "numpy-*wasm32.whl"
WHEELS = (
    "ultrascale", "tyro", "rich", "docstring_parser", "typeguard", "typing_extensions", "markdown_it_py", "mdurl", "pygments",
)  # fmt: skip
"""Plain wheels, by the name before the version."""
STATIC = ("page.css", "charts.js", "page.js")


def build(folder: Path, parts: Path | None) -> str:
    """Write the page into `folder` and say what was written. Raises SpecError with all that is missing of `parts`."""
    if folder.exists() and any(folder.iterdir()):
        raise SpecError([Problem("--build", f"{folder} is not empty", "Name a folder that is not there yet.")])
    needed = [*RUNTIME, NUMPY, *(f"{name}-*.whl" for name in WHEELS)]
    found = {pattern: sorted(parts.glob(pattern)) if parts is not None else [] for pattern in needed}
    if lacks := [pattern for pattern, paths in found.items() if not paths]:
        rule = f"lacks {', '.join(lacks)}" if parts is not None else f"is not given; the page needs {', '.join(lacks)}"
        remedy = "Put them into one folder: npm pack pyodide, Pyodide's numpy of the same release, pip download for the rest."
        raise SpecError([Problem("--pyodide", rule, remedy)])
    target = folder / "pyodide"
    target.mkdir(parents=True)
    paths = [paths[-1] for paths in found.values()]
    for path in paths:
        shutil.copy(path, target / path.name)
    for name in STATIC:
        (folder / name).write_text(static_text(name), encoding="utf-8")
    for name in ("browser.js", "worker.mjs"):
        (folder / name).write_text(static_text(name), encoding="utf-8")
    page = static_text("index.html").replace("server.js", "browser.js")
    (folder / "index.html").write_text(page, encoding="utf-8")
    (folder / "controls.json").write_text(json.dumps(controls_json()), encoding="utf-8")
    wheels = [path.name for path in paths if path.suffix == ".whl"]
    (folder / "wheels.json").write_text(json.dumps(wheels), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"wrote {folder}: {size / 1e6:.1f} MB. Serve it with any web server, such as python -m http.server -d {folder}"
