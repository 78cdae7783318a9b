"""A search as what is drawn: the ranking, the front of time and memory, other numbers of devices, and reasons in sentences."""

from __future__ import annotations

from typing import Any

from ultrascale.config.rules.trainable import untrainable
from ultrascale.description.units import count_of, format_bytes, format_seconds
from ultrascale.plan.report import step_interval
from ultrascale.plan.search.explain import binding, marginals
from ultrascale.plan.search.search import TIE, SearchResult, distinct
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.view.search_view import batch_words, layout_words, no_layout_fits

TOP = 10
"""Layouts that are listed."""
SETTINGS = ("tp", "cp", "pp", "ep", "zero_stage", "micro_batch_size", "recompute", "schedule")
"""Controls that hold the search to one way of cutting the model."""


def ranking(result: SearchResult) -> dict[str, Any]:
    """The fastest layouts, those that nothing beats in both time and memory, and what was searched."""
    priced, ours = result.priced, result.workload.stack.name == "ultrascale"
    rows = [_row(one, result, ours=ours) for one in distinct(result.ranked)[:TOP]]
    tied = result.num_tied if result.ranked else 0
    told = f"{len(priced.fits):,} legal layouts" + (f"; at least {priced.num_unfit:,} do not fit." if priced.num_unfit else ".")
    if tied > 1:
        told += f" {tied} are within {TIE:.0%} of the first: only a measurement can tell them apart."
    if not result.ranked:
        told = no_layout_fits(result)
    return {"rows": rows, "note": told, "front": [_row(one, result, ours=ours) for one in _front(result)]}


def _front(result: SearchResult) -> list[Prediction]:
    """The front, with what is known better of the ranked: those are played action by action, and their memory is replayed."""
    known = {one.layout: one for one in (*result.front, *result.ranked)}.values()
    front, least = [], float("inf")
    for one in sorted(known, key=lambda one: (one.step_seconds, float(one.memory.needed))):
        need = float(one.memory.needed)
        if need < least:
            front, least = [*front, one], need
    return front


def _row(one: Prediction, result: SearchResult, *, ours: bool) -> dict[str, Any]:
    need, memory = float(one.memory.needed), one.memory
    low, high = step_interval(one)
    headroom = float(memory.headroom)
    layout = one.layout
    runs = ours and not untrainable(one.workload.model, layout)
    return {
        "layout": layout_words(layout, one.num_micro_batches),
        "settings": settings_of(one),
        "tied": bool(result.ranked) and one.step_seconds <= result.ranked[0].step_seconds * (1 + TIE),
        "runs": runs,
        "step": {"value": one.step_seconds, "text": format_seconds(one.step_seconds)},
        "interval": f"{format_seconds(low)} to {format_seconds(high)}",
        "mfu": f"{one.mfu():.1%}",
        "memory": {"value": need, "text": format_bytes(need)},
        "headroom": {"value": headroom, "text": format_bytes(headroom)},
    }


def settings_of(one: Prediction) -> dict[str, str]:
    """Settings of the controls that yield this layout."""
    known = {name: str(getattr(one.layout, name)) for name in SETTINGS}
    if one.layout.pp == 1:
        del known["schedule"]
    if one.layout.recompute not in ("none", "selective", "full"):
        del known["recompute"]
    return known


def reasons(result: SearchResult, json: dict[str, Any]) -> list[dict[str, Any]]:
    """Why this layout, in sentences under titles; more of them where the reasons were asked for."""
    best, known = result.best, json["search"].get("explanation")
    if best is None:
        return [{"title": "", "lines": [no_layout_fits(result)]}]
    batch = f"The batch: {batch_words(best)}."
    if known is None:
        return [{"title": "", "lines": [batch]}]
    worth = [one for one in known["worth"] if one["gain"] >= 0.0005]
    told = {
        "": [binding(best, marginals(result)), batch],
        "What makes it fit": [_rung(one) for one in known["fit"]],
        "One choice changed, the rest kept": [_change(one, best) for one in known["changes"]],
        "What other machines would be worth": [
            *(f"{one['name'][0].upper()}{one['name'][1:]}: {one['gain']:+.1%} tokens a second." for one in worth),
            *(_elsewhere(name, one, best) for name, one in known["elsewhere"].items()),
        ],
    }
    return [{"title": title, "lines": lines} for title, lines in told.items() if lines]


def _rung(one: dict[str, Any]) -> str:
    need, name = format_bytes(one["least_bytes"]), one["name"].removeprefix("+ ")
    end = f"the fastest step is {format_seconds(one['fastest_seconds'])}" if one["fits"] else "nothing fits"
    return f"With {name} ({count_of(one['num_layouts'], 'layout')}): {need} at least, {end}."


def _elsewhere(name: str, one: dict[str, Any], best: Prediction) -> str:
    seconds = one["time"]["seconds_per_step"]
    return f"On {name} a step takes {format_seconds(seconds)}: {best.step_seconds / seconds - 1:.0%} faster."


def _change(one: dict[str, Any], best: Prediction) -> str:
    own = getattr(best.layout, one["name"]) or best.layout.shard_size
    slower = one["seconds"] / best.step_seconds - 1
    memory = format_bytes(one["peak_bytes"]) + ("" if one["fits"] else ", which does not fit")
    return f"{one['name']} {one['value']} instead of {own}: step {slower:+.1%}, memory {memory}."


def scaling_rows(json: dict[str, Any]) -> list[dict[str, Any]]:
    """The best layout on an eighth to eight times the devices, where it was asked for."""
    known = json["search"].get("explanation")
    if known is None:
        return []
    rows = []
    for one in known["scaling"]:
        best = one["best"]
        rate = best["time"]["tokens_per_second"] if best else 0.0
        rows.append({
            "gpus": one["num_gpus"], "pays": one["pays"], "value": rate,
            "text": f"{rate:,.0f}" if best else "nothing fits or divides",
            "brings": "" if one["brings"] is None else f"{one['brings']:.0%} of a GPU",
            "mfu": f"{best['time']['mfu']:.1%}" if best else "",
        })  # fmt: skip
    return rows
