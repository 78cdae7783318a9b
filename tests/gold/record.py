"""Trains every curve anew (some minutes on two cores) and says how far each is from fp32's and from the record.

python tests/gold/record.py                 prints the table; exit code 1 if a curve is beyond its tolerance
python tests/gold/record.py --write         also writes curves.json and the picture of docs/precision.md
python tests/gold/record.py --only fp16     some of them, the others as recorded
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch._dynamo
import torch.distributed.fsdp
from gold.curves import CURVES, RECORD, STEPS, Found, furthest, recorded, train, windows

NORMS = 50
"""Of the first steps: what CI compares."""
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "precision-curves.png"


def rows(found: dict[str, Found]) -> list[tuple[str, float, float, float, str]]:
    """Name, last mean, most above, most below, verdict."""
    table = []
    for name, curve in CURVES.items():
        above, below = furthest(found[name].losses, found[curve.against].losses)
        holds = above <= curve.beyond and (curve.below is None or below <= curve.below)
        allowed = f"+{curve.beyond:g}" + ("" if curve.below is None else f" -{curve.below:g}")
        table.append((name, windows(found[name].losses)[-1], above, below, f"{allowed}: {'holds' if holds else 'BEYOND'}"))
    return table


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, 5) for number in numbers]


def draw(found: dict[str, Found]) -> None:
    """Loss curves, and their distance from fp32's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, curve in found.items():
        style = {"color": "black", "linewidth": 2.5, "zorder": 0} if name == "fp32" else {"linewidth": 1.2}
        left.plot(windows(curve.losses), label=name, **style)
        if name not in ("fp32", "muon"):
            beside = windows(found["fp32"].losses[: len(curve.losses)])
            right.plot(windows(curve.losses) - beside, label=name, linewidth=1.2)
    left.set(xlabel="step", ylabel="loss, nats a byte", title="mean over 20 steps")
    right.set(xlabel="step", ylabel="nats above fp32", title="distance from fp32")
    right.axhline(0, color="black", linewidth=1)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CURVES))
    options = parser.parse_args()
    found = recorded() if options.only or RECORD.exists() else {}
    for name in options.only or CURVES:
        found[name] = train(CURVES[name].run, STEPS)
        print(f"{name}: {windows(found[name].losses)[-1]:.4f}", flush=True)
    found = {name: found[name] for name in CURVES}
    table = rows(found)
    for name, last, above, below, verdict in table:
        print(f"{name:<24} last {last:.4f}  above fp32 {above:.4f}  below {below:.4f}  allowed {verdict}")
    if options.write:
        rounded = {
            n: {"losses": [round(x, 5) for x in f.losses], "norms": [round(x, 5) for x in f.norms[:50]]}
            for n, f in found.items()
        }
        facts = {"date": date.today().isoformat(), "torch": torch.__version__, "curves": rounded}
        RECORD.write_text(json.dumps(facts).replace("}, ", "},\n") + "\n")
        draw(found)
    return int(any(row[-1].endswith("BEYOND") for row in table))


if __name__ == "__main__":
    sys.exit(main())
