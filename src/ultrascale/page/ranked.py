"""A search as data to draw: the ranking, the front of time and memory, other numbers of devices, and reasons as sentences."""

from __future__ import annotations

from typing import Any

from ultrascale.config.rules.trainable import untrainable
from ultrascale.description.units import count_of, format_bytes, format_seconds
from ultrascale.page.documents import number
from ultrascale.plan.layouts import PLAIN_RECOMPUTE
from ultrascale.plan.report import step_interval
from ultrascale.plan.search.explain import binding, marginals
from ultrascale.plan.search.search import TIE, SearchResult, distinct
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.view.search_view import batch_words, layout_words, no_layout_fits

TOP = 10
"""Number of listed layouts."""
SETTINGS = ("tp", "cp", "pp", "ep", "zero_stage", "micro_batch_size", "recompute", "schedule")
"""Controls that together fix the search to one layout."""


def ranking(result: SearchResult) -> dict[str, Any]:
    """The fastest layouts, the front of time and memory, and the extent of the search."""
    priced, ours = result.priced, result.workload.stack.name == "ultrascale"
    rows = [_row(prediction, result, ours=ours) for prediction in distinct(result.ranked)[:TOP]]
    tied = result.num_tied
    note = f"{len(priced.fits):,} legal layouts" + (f"; at least {priced.num_unfit:,} do not fit." if priced.num_unfit else ".")
    if tied > 1:
        within = f"{tied}, with those that differ only in details, are within {TIE:.0%} of the first (=)"
        note += f" {within}: only a measurement can tell them apart."
    if not result.ranked:
        note = no_layout_fits(result)
    return {"rows": rows, "note": note, "front": [_row(prediction, result, ours=ours) for prediction in result.front]}


def _row(prediction: Prediction, result: SearchResult, *, ours: bool) -> dict[str, Any]:
    low, high = step_interval(prediction)
    layout = prediction.layout
    return {
        "layout": layout_words(layout, prediction.num_micro_batches),
        "settings": settings_of(prediction),
        "tied": result.is_tied(prediction),
        "runs": ours and not untrainable(prediction.workload.model, layout),
        "step": number(prediction.step_seconds, format_seconds),
        "interval": f"{format_seconds(low)} to {format_seconds(high)}",
        "mfu": f"{prediction.mfu():.1%}",
        "memory": number(float(prediction.memory.needed), format_bytes),
        "headroom": number(float(prediction.memory.headroom), format_bytes),
    }


def settings_of(prediction: Prediction) -> dict[str, str]:
    """Settings of the controls that yield this layout."""
    known = {name: str(getattr(prediction.layout, name)) for name in SETTINGS}
    if prediction.layout.pp == 1:
        del known["schedule"]
    if prediction.layout.recompute not in PLAIN_RECOMPUTE:
        del known["recompute"]
    return known


def reasons(result: SearchResult, json: dict[str, Any]) -> list[dict[str, Any]]:
    """Reasons for this layout, as sentences under titles; more of them with `explain`."""
    best, known = result.best, json["search"].get("explanation")
    if best is None:
        return [{"title": "", "lines": [no_layout_fits(result)]}]
    batch = f"The batch: {batch_words(best)}."
    if known is None:
        return [{"title": "", "lines": [batch]}]
    worth = [swap for swap in known["worth"] if swap["gain"] >= 0.0005]
    sections = {
        "": [binding(best, marginals(result)), batch],
        "What makes it fit": [_rung(rung) for rung in known["fit"]],
        "One choice changed, the rest kept": [_change(change, best) for change in known["changes"]],
        "What other machines would be worth": [
            *(f"{swap['name'][0].upper()}{swap['name'][1:]}: {swap['gain']:+.1%} tokens a second." for swap in worth),
            *(_elsewhere(name, plan, best) for name, plan in known["elsewhere"].items()),
        ],
    }
    return [{"title": title, "lines": lines} for title, lines in sections.items() if lines]


def _rung(rung: dict[str, Any]) -> str:
    need, name = format_bytes(rung["least_bytes"]), rung["name"].removeprefix("+ ")
    end = f"the fastest step is {format_seconds(rung['fastest_seconds'])}" if rung["fits"] else "nothing fits"
    return f"With {name} ({count_of(rung['num_layouts'], 'layout')}): {need} at least, {end}."


def _elsewhere(name: str, plan: dict[str, Any], best: Prediction) -> str:
    seconds = plan["time"]["seconds_per_step"]
    return f"On {name} a step takes {format_seconds(seconds)}: {best.step_seconds / seconds - 1:.0%} faster."


def _change(change: dict[str, Any], best: Prediction) -> str:
    chosen = getattr(best.layout, change["name"]) or best.layout.shard_size
    slower = change["seconds"] / best.step_seconds - 1
    memory = format_bytes(change["peak_bytes"]) + ("" if change["fits"] else ", which does not fit")
    also = f", with {change['also']}" if change["also"] else ""
    return f"{change['name']} {change['value']} instead of {chosen}{also}: step {slower:+.1%}, memory {memory}."


def scaling_rows(json: dict[str, Any]) -> list[dict[str, Any]]:
    """The best layout on an eighth to eight times the devices, if requested."""
    known = json["search"].get("explanation")
    if known is None:
        return []
    rows = []
    for point in known["scaling"]:
        best = point["best"]
        rate = best["time"]["tokens_per_second"] if best else 0.0
        rows.append({
            "gpus": point["num_gpus"], "pays": point["pays"], "value": rate,
            "text": f"{rate:,.0f}" if best else "nothing fits or divides",
            "brings": "" if point["brings"] is None else f"{point['brings']:.0%} of a GPU",
            "mfu": f"{best['time']['mfu']:.1%}" if best else "",
        })  # fmt: skip
    return rows
