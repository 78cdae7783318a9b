"""A search on a terminal: the ranking, and the explanation. Prints the results of `plan.search.search`, `plan.search.explain`
and `plan.search.scaling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ultrascale.catalogue.cluster import Cluster
from ultrascale.config.rules.trainable import untrainable
from ultrascale.description.layout import Layout
from ultrascale.description.units import count_of, format_bytes, format_count, format_seconds
from ultrascale.plan.columns.footprint import MARGIN
from ultrascale.plan.costs.stops import stops
from ultrascale.plan.report import step_interval
from ultrascale.plan.search.explain import Change, Marginal, Rung, binding, changes, is_bound, marginals, rungs
from ultrascale.plan.search.scaling import PAYS, ScalingPoint, most_that_pay
from ultrascale.plan.search.search import TIE, SearchResult, distinct, risk
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.view.plan_view import LOST_SHOWN
from ultrascale.plan.workload import Workload

INDENT = (0, 0, 0, 3)
MAX_FRONT = 8
"""Most layouts of the Pareto front of time and memory that are printed."""
MAX_REFUSED = 12
"""Most families left out that are printed one by one; the rest is counted."""


def show_ranking(result: SearchResult, console: Console, *, top: int, legend: bool = True) -> None:
    """Print the fastest layouts, one of each group that differs only in details; with `legend`, also the extent of the
    search."""
    ours = result.workload.stack.name == "ultrascale"
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "step", "MFU", "memory", "headroom", "risk"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("runs" if ours else "", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for number, candidate in enumerate(distinct(result.ranked)[:top], start=1):
        tied = result.is_tied(candidate)
        mark = Text(f"{'=' if tied and number > 1 else ''}{number}", style="bold green" if number == 1 else "")
        need, words = float(candidate.memory.needed), layout_words(candidate.layout, candidate.num_micro_batches)
        runs = ours and not untrainable(candidate.workload.model, candidate.layout)
        table.add_row(
            mark, format_seconds(candidate.step_seconds), f"{candidate.mfu():.1%}", format_bytes(need),
            format_bytes(float(candidate.memory.headroom)), f"{risk(candidate):.0%}", "yes" * runs, words,
            style="bold" if number == 1 else "" if tied else "dim",
        )  # fmt: skip
    console.print(table)
    if legend:
        console.print(Text(_summary(result), style="dim"))


def _summary(result: SearchResult) -> str:
    """Legend of the columns, and extent of the search: lines of at most 80 columns."""
    priced, tied = result.priced, result.num_tied
    cluster = result.workload.cluster
    gpus = f"{cluster.num_accelerators}x{cluster.accelerator.name}"
    capacity = format_bytes(cluster.accelerator.memory_bytes.value)
    slow = int(priced.too_slow.sum())
    lines = [
        f"  = within {TIE:.0%} of the first, {tied} with those that differ only in details: only a" if tied > 1 else "",
        "    measurement can tell them apart." if tied > 1 else "",
        f"  step: 80% prediction interval, {_interval_words(result)} of it.",
        f"  memory: of a GPU's {capacity}, NCCL included; {MARGIN:.0%} must stay free.",
        "  headroom, risk: what is left above that, and the chance that it runs out after",
        "    all; ranked by step / (1 - risk), the time expected.",
        "  runs: `ultrascale train` runs it today; --runnable searches only that."
        if result.workload.stack.name == "ultrascale"
        else "",
        "  2 x 8: micro-batch size x number of them.",
        f"  {cluster.num_nodes} machines, {cluster.places_words}; {gpus}/N takes N of each." if cluster.places_words else "",
        f"  {len(priced.fits):,} legal layouts: {priced.num_unfit:,} do not fit, {slow:,} are slower and larger than others.",
        _stops_note(result.workload),
        _batch_note(result),
    ]
    return "\n".join(line for line in lines if line)


def _interval_words(result: SearchResult) -> str:
    best = result.ranked[0]
    low, high = (end / best.step_seconds for end in step_interval(best))
    return f"{low:.2f} to {high:.2f}"


def _stops_note(workload: Workload) -> str:
    """Note on the time between failures of this many nodes, and its cost; empty if failures are rare."""
    failures = stops(workload)
    if failures.goodput > 1 - LOST_SHOWN:
        return ""
    between, every = format_seconds(failures.between_seconds), format_seconds(failures.save_every_seconds)
    return f"  {failures.num_nodes:,} machines fail once in {between}: a save every {every}, goodput {failures.goodput:.1%}."


def _batch_note(result: SearchResult) -> str:
    """Note on a batch that few ranks can share, with the nearest that all can; empty for other batches."""
    gpus, batch = result.workload.cluster.num_accelerators, result.workload.sequences_per_batch
    shared = gcd(gpus, batch)
    if batch < gpus or shared * 2 > gpus:
        return ""
    nearest = round(batch / gpus) * gpus
    sequences = count_of(batch, "sequence")
    return f"  At most {shared:,} of {count_of(gpus, 'GPU')} can share {sequences}; all could share {nearest:,}."


def layout_words(layout: Layout, num_micro_batches: int) -> str:
    """A layout in one line: `dp16 tp2 pp2 interleaved x4, ZeRO 1, 2 x 8, recompute full`; 2 x 8: micro-batch size, number."""
    words = [layout.axes_words or "one GPU", layout.zero_words, f"{layout.micro_batch_size} x {num_micro_batches}"]
    if layout.recompute != "none":
        every = f"every {layout.recompute_every}" if layout.recompute == "every-k" else layout.recompute
        words.append(" + ".join(layout.recompute_blocks) or every)
    return ", ".join(words)


def show_explanation(
    result: SearchResult, scan: Sequence[ScalingPoint], better_clusters: Sequence[tuple[Cluster, Prediction]], console: Console
) -> None:
    """Print the three steps, the marginal prices, better clusters, and what was left out."""
    console.print(Text("1  What makes it fit, and its cost", style="bold"))
    console.print(_rungs_table(rungs(result), result))
    best = result.best
    if best is not None:
        console.print(Text("\n2  How the batch is reached", style="bold"))
        console.print(Padding(Text(batch_words(best)), INDENT))
        console.print(Text("\n3  What makes it fast: one choice changed, the rest kept", style="bold"))
        console.print(_changes_table(changes(result), best))
        gains = marginals(result)
        console.print(Text("\nWhat binds", style="bold"))
        console.print(Padding(Text(binding(best, gains)), INDENT))
        console.print(_marginals_table(gains))
    console.print(Text("\nMore GPUs, fewer GPUs, the same batch", style="bold"))
    console.print(_scaling_table(scan, result.workload.cluster.num_accelerators))
    if words := paying_words(scan):
        console.print(Padding(Text(words), INDENT))
    if len(result.front) > 1:
        console.print(Text("\nTime against memory: no layout is better in both", style="bold"))
        console.print(_front_table(result.front))
    console.print(Text("\nThe nearest better cluster: as many other GPUs", style="bold"))
    console.print(
        _better_clusters_table(better_clusters, best)
        if better_clusters
        else Padding(Text("No cluster in the catalogue is faster."), INDENT)
    )
    console.print(Text("\nLeft out", style="bold"))
    console.print(_refused_table(result))


def batch_words(prediction: Prediction) -> str:
    """The global batch as a product: `512 sequences = dp 16 x micro-batch 2 x accumulation 16`."""
    layout, workload = prediction.layout, prediction.workload
    product = (
        f"dp {layout.dp} x micro-batch {layout.micro_batch_size} x {count_of(prediction.num_micro_batches, 'micro-batch')}"
    )
    why = ""
    if layout.pp > 1:
        why = f"; {prediction.num_micro_batches} of them keep {layout.pp} stages busy"
    elif prediction.num_micro_batches > 1:
        why = ", gradients summed over them"
    tokens = format_count(workload.tokens_per_step)
    return f"{count_of(workload.sequences_per_batch, 'sequence')} ({tokens} tokens) = {product}{why}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold dim", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0, overflow="fold")
    return table


def _rungs_table(ladder: Sequence[Rung], result: SearchResult) -> Table:
    table = _table("", "layouts", "least memory", "fastest step")
    for rung in ladder:
        fastest = "does not fit" if rung.fastest_seconds is None else format_seconds(rung.fastest_seconds)
        style, least = "" if rung.fits else "red dim", format_bytes(rung.least_bytes)
        table.add_row(
            rung.name, f"{rung.num_layouts:,}", f"over {least}" if is_bound(rung, result) else least, fastest, style=style
        )
    capacity = result.workload.accelerator.memory_bytes.value
    table.add_row(f"a GPU, {MARGIN:.0%} of it free", "", format_bytes(capacity * (1 - MARGIN)), "", style="dim")
    return table


def _changes_table(alternatives: Sequence[Change], best: Prediction) -> Table:
    table = _table("change", "to", "step", "", "memory", "and with it")
    for change in alternatives:
        slower = change.seconds / best.step_seconds - 1
        memory = format_bytes(change.peak_bytes) + ("" if change.fits else ", too much")
        current = str(getattr(best.layout, change.name) or best.layout.shard_size)
        table.add_row(
            f"{change.name} = {current}", change.value, format_seconds(change.seconds), f"{slower:+.1%}", memory, change.also,
            style="" if change.fits else "red dim",
        )  # fmt: skip
    return table


def _marginals_table(gains: Sequence[Marginal]) -> Table:
    table = _table("worth of", "tokens/s")
    for marginal in gains:
        table.add_row(marginal.name, f"{marginal.gain:+.1%}" if abs(marginal.gain) >= 0.0005 else "nothing")
    return table


def _scaling_table(scan: Sequence[ScalingPoint], num_gpus: int) -> Table:
    table = _table("GPUs", "step", "tokens/s", "MFU", "each added GPU brings")
    for scaled in scan:
        style = "bold" if scaled.num_gpus == num_gpus else ""
        if scaled.best is None:
            table.add_row(f"{scaled.num_gpus:,}", "nothing fits or divides", "", "", "", style="red dim")
            continue
        marginal_efficiency = "" if scaled.marginal_efficiency is None else f"{scaled.marginal_efficiency:.0%} of a GPU"
        table.add_row(
            f"{scaled.num_gpus:,}", format_seconds(scaled.best.step_seconds), f"{scaled.best.tokens_per_second:,.0f}",
            f"{scaled.best.mfu():.1%}", marginal_efficiency, style=style,
        )  # fmt: skip
    return table


def paying_words(scan: Sequence[ScalingPoint]) -> str:
    """Number of GPUs up to which an added one pays, or that the scan ended before; empty if nothing fits."""
    most = most_that_pay(scan)
    if most is None:
        return ""
    enough = f"an added GPU brings at least {PAYS:.0%} of what one brings at best"
    if most is scan[-1]:
        return f"Up to {most.num_gpus:,}, where this scan ends, {enough}: more may still pay."
    return f"Up to {most.num_gpus:,} {enough}; beyond, less, or nothing."


def _front_table(front: Sequence[Prediction]) -> Table:
    """Table of the front's ends, and as many between them as fit."""
    table = _table("step", "against the fastest", "memory", "layout")
    rows = min(len(front), MAX_FRONT)
    for prediction in (front[number * (len(front) - 1) // (rows - 1)] for number in range(rows)):
        slower = prediction.step_seconds / front[0].step_seconds - 1
        memory, words = (
            format_bytes(float(prediction.memory.needed)),
            layout_words(prediction.layout, prediction.num_micro_batches),
        )
        table.add_row(format_seconds(prediction.step_seconds), f"{slower:+.0%}" if slower else "", memory, words)
    if rows < len(front):
        table.add_row("", "", "", f"{len(front) - rows} more between them (--json lists them)")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def _better_clusters_table(better_clusters: Sequence[tuple[Cluster, Prediction]], best: Prediction | None) -> Table:
    table = _table("cluster", "step", "against this", "memory", "layout")
    for cluster, prediction in better_clusters:
        against = "" if best is None else f"{best.step_seconds / prediction.step_seconds:.2f} x"
        memory = format_bytes(float(prediction.memory.needed))
        words = layout_words(prediction.layout, prediction.num_micro_batches)
        table.add_row(cluster.name, format_seconds(prediction.step_seconds), against, memory, words)
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def _refused_table(result: SearchResult) -> Table:
    table = _table("", "", "combinations")
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    refused = result.refused
    for refusal in refused[:MAX_REFUSED]:
        table.add_row(refusal.family, refusal.reason, f"{refusal.count:,}")
    if len(refused) > MAX_REFUSED:
        table.add_row("others", "--json lists them", f"{sum(refusal.count for refusal in refused[MAX_REFUSED:]):,}")
    priced = result.priced
    too_large, unfit = int(priced.too_large.sum()), int((~priced.too_large & ~priced.too_slow & ~priced.fits).sum())
    table.add_row("too large", "weights, gradients and optimizer state alone are more than a GPU", f"{too_large:,} layouts")
    table.add_row("does not fit", "with activations and buffers", f"{unfit:,} layouts")
    return table


def no_layout_fits(result: SearchResult) -> str:
    """Sentence that states the missing memory, and a cluster on which a layout would fit."""
    smallest = result.smallest
    assert smallest is not None
    need, have = float(smallest.memory.needed), result.workload.accelerator.memory_bytes.value
    words = layout_words(smallest.layout, smallest.num_micro_batches)
    free = f"{format_bytes(have)} a GPU, of which {MARGIN:.0%} must stay free"
    return f"Nothing fits: the smallest layout ({words}) needs {format_bytes(need)} of {free}."
