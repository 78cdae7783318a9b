"""What the figures must show (issue "Fast"), held to the records of `step_speed.py` and `kernel_speed.py`: a line a claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MFU, FP8_GAIN, KERNEL_SHARE, LOSS_SHARE = 0.60, 1.25, 0.85, 0.15
"""Of the bf16 peak, attention causal; of bf16 tokens/s at 8B shapes; of bandwidth or of the best
other form; of the unfused peak."""
PEERS = ("transformers", "transformers, layers compiled", "transformers, bf16 weights", "plain", "plain, graphs", "liger")
OURS = ("triton", "ours")


def step_claims(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Of `step_speed.py`."""
    speeds = {(row["shape"], row["contestant"]): row["tokens_per_second"] for row in rows if "failed" not in row}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = [row for row in rows if (row["shape"], row["contestant"]) == (shape, "ours") and "failed" not in row]
        ours = found[0] if found else None
        if ours is None:
            yield f"not measured  {shape}: MFU, faster than each peer"
            continue
        told = f"{shape}: MFU {ours['mfu_causal']:.1%} causal, {ours['mfu_full']:.1%} full, of {MFU:.0%}"
        yield _line(ours["mfu_causal"] >= MFU, told)
        for peer in PEERS:
            if (theirs := speeds.get((shape, peer))) is not None:
                yield _line(speeds[shape, "ours"] > theirs, f"{shape}: {speeds[shape, 'ours'] / theirs:.2f}x {peer}")
            elif any((row["shape"], row["contestant"]) == (shape, peer) for row in rows):
                yield f"not measured  {shape}: faster than {peer}"
    both = speeds.get(("8b", "ours, fp8")), speeds.get(("8b", "ours"))
    if both[0] is None or both[1] is None:
        yield f"not measured  8b: fp8 at least {FP8_GAIN}x bf16"
    else:
        yield _line(both[0] >= FP8_GAIN * both[1], f"8b: fp8 {both[0] / both[1]:.2f}x bf16, of {FP8_GAIN}x")


def kernel_claims(rows: list[dict[str, Any]], peaks: dict[str, int]) -> Iterator[str]:
    """Of `kernel_speed.py`: of what a run would choose, the fastest form."""
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        timed = [row for row in rows if row["kernel"] == kernel and row["seconds"] is not None]
        ours = [row for row in timed if row["form"] in OURS]
        if not timed:
            yield f"not measured  {kernel}"
        elif ours:
            best, theirs = min(ours, key=_seconds), [row for row in timed if row["form"] not in OURS]
            against = min(map(_seconds, theirs), default=float("inf")) / best["seconds"]
            told = f"{kernel}: {best['form']} at {best['share']:.0%} of the rate, {against:.2f}x the best other form"
            yield _line(best["share"] >= KERNEL_SHARE or against >= KERNEL_SHARE, told)
    widths = [name.removeprefix("ours, ") for name in peaks if name.startswith("ours, ")]
    for width in widths:
        share = peaks[f"ours, {width}"] / peaks[f"unfused, {width}"]
        yield _line(share < LOSS_SHARE, f"head and loss, {width}: {share:.1%} of the unfused peak, of {LOSS_SHARE:.0%}")
    if not widths:
        yield "not measured  peak of head and loss"


def _seconds(row: dict[str, Any]) -> float:
    return row["seconds"]


def _line(holds: bool, told: str) -> str:
    return f"{'holds' if holds else 'FAILS':<12}  {told}"
