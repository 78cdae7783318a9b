"""How fast the page answers, in headless Chromium: from the first byte asked for to what is drawn.

    python benchmarks/page/page_speed.py
    python benchmarks/page/page_speed.py --json
    python benchmarks/page/page_speed.py --built [PARTS]      a folder of `page --build`, which computes in the browser

Needs Chromium (apt-get install chromium) and playwright (pip install playwright). Times are wall clock, beside the seconds that
the server computed: on a machine that does other things too the second is what counts.

cold        `ultrascale page` started, and a browser that has never seen the page: until the first plan is drawn
warm        the same page opened again
one layout  the slider of devices moved, everything else given: until the plan is drawn
search      the slider of the sequence length moved, llama-3-8b on 64 H100, nothing given: until the ranking is drawn
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

BARS = {"cold": 6.0, "warm": 2.0, "one layout": 0.15, "search": 1.5}
"""Seconds."""
ONE_LAYOUT = "?tp=4&pp=2&cp=1&zero_stage=1&micro_batch_size=1&recompute=none&schedule=1f1b"
DONE = "body[data-state=done]"
DRAWN = f"body[data-state=rest], {DONE}"
TOOK = "performance.getEntriesByName('drawn').at(-1).startTime - performance.getEntriesByName('changed').at(-1).startTime"


def main() -> int:
    """Print a line for each, and JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--built", nargs="?", const="", metavar="PARTS", help="the built page; its npm packages, or npm is asked"
    )
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("there is no chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        with tempfile.TemporaryDirectory() as folder:
            found = measured(chromium, None if asked.built is None else site(Path(folder) / "site", asked.built))
        chromium.close()
    if asked.json:
        print(json.dumps(found | {"cores": os.cpu_count(), "load": os.getloadavg()[0]}, indent=1))
        return 0
    print(f"{'':12}{'wall':>10}{'computed':>12}{'bar':>10}   {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, one in found.items():
        print(f"{name:12}{one['wall']:>8.2f} s{one['computed']:>10.2f} s{BARS[name]:>8.2f} s")
    return 0


def site(folder: Path, parts: str) -> Path:
    """A built page."""
    words = [sys.executable, "-m", "ultrascale", "page", "--build", str(folder), *(("--parts", parts) if parts else ())]
    subprocess.run(words, check=True, stdout=sys.stderr)
    return folder


def measured(chromium, built: Path | None) -> dict[str, dict[str, float]]:
    """Seconds of each, wall clock and computed by the server; of sliders the median move. Of a `built` page the server has only
    files, and computes nothing."""
    words = [sys.executable, "-m", "ultrascale", "page", "--no-browser"]
    if built is not None:
        words = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(built)]
    started = time.perf_counter()
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if built else None, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if built is not None:
            url = url[url.index("http://") : url.rindex("/") + 1]
        tab = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
        tab.set_default_timeout(120_000)
        found = {"cold": opened(tab, url, server.pid, started, 0.0)}
        found["warm"] = opened(tab, url, server.pid, time.perf_counter(), computed(server.pid))
        found["search"] = moved(tab, "seq_len", "ArrowLeft", 4, server.pid)
        opened(tab, url + ONE_LAYOUT, server.pid, 0.0, 0.0)
        found["one layout"] = moved(tab, "count", "ArrowRight", 6, server.pid)
        return found
    finally:
        server.terminate()
        server.wait()


def opened(tab, url: str, pid: int, started: float, before: float) -> dict[str, float]:
    tab.goto(url)
    tab.wait_for_selector(DRAWN)
    took = {"wall": time.perf_counter() - started, "computed": computed(pid) - before}
    tab.wait_for_selector(DONE)
    return took


def moved(tab, name: str, key: str, moves: int, pid: int) -> dict[str, float]:
    """A slider in one direction, so that no question is asked twice."""
    slider, walls, spent = tab.locator(f"[data-of={name}]"), [], []
    for _ in range(moves):
        before = computed(pid)
        slider.focus()
        slider.press(key)
        tab.wait_for_selector(DRAWN)
        spent.append(computed(pid) - before)
        walls.append(tab.evaluate(TOOK) / 1e3)
        tab.wait_for_selector(DONE)
    return {"wall": median(walls), "computed": median(spent)}


def computed(pid: int) -> float:
    """Seconds of processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
