"""A plan on a terminal: memory by category, whether it fits, step time by component. Prints the results of `plan.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ultrascale.console import plain_table
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.units import format_bytes, format_count, format_flops_per_second, format_hours, format_seconds
from ultrascale.plan.costs.budget import bought, parse_budget, tokens_to_train
from ultrascale.plan.costs.cost import cost
from ultrascale.plan.costs.stops import SPARES_SUFFICE, Stops, stops
from ultrascale.plan.islands import IslandsPlan
from ultrascale.plan.memory.replay import MemoryPlan
from ultrascale.plan.report import DEFAULT_OPTIMIZER, RunPlan, first_that_fits, not_trainable, step_interval, workload_of
from ultrascale.plan.view.notes import notes, warnings
from ultrascale.plan.view.state_words import state_words

if TYPE_CHECKING:
    from ultrascale.plan.search.search import SearchResult
    from ultrascale.plan.time.price import Prediction

PARTS = {
    "parameters": ("parameters", "blue", ""),
    "gathered": ("gathered", "cyan", ""),
    "gradients": ("gradients", "yellow", ""),
    "optimizer": ("optimizer", "magenta", ""),
    "activations": ("activations", "green", "of the forward pass"),
    "temporary": ("temporary", "bright_green", "gradients of activations, work of an operation"),
    "communication": ("communication", "bright_cyan", "buffers of collectives"),
    "other": ("other", "white", "batch"),
}
"""Label, colour and note of each category. Labels are those of a trace, of a run's log and of the JSON."""
KINDS = {
    "matmul": "matrix products",
    "elementwise": "element-wise",
    "norm": "norms",
    "attention": "attention",
    "loss": "loss and head",
    "embedding": "embedding",
    "residual": "residual stream",
    "gather": "gathered parts",
    "exchange": "sent and summed",
    "router": "routing",
    "permute": "rows of experts",
    "messages": "pipeline's messages",
    "scratch": "scratch of one op",
    "gradients of activations": "of activations",
    "gradients of weights": "of weights",
}
BAR_WIDTH = 72
PART_WIDTH = 16
BARS_FROM = 80
"""Columns of a terminal from which a bar stands beside each part: below them the notes need its room."""
WATERFALL_WIDTH = 40
MOST_STAGES = 16
"""Most stages of a pipeline whose numbers of blocks are listed one by one."""
LOST_SHOWN = 0.01
"""Fraction of the time lost to failures from which it is printed."""
LEAST_RATIO = 0.01
"""Lowest number of tokens per parameter that is printed."""
SHOWN_SHARE = 0.0005
"""Fraction of the step below which parts are not drawn."""
FOOTPRINT = {
    "weights": ("parameters", "blue", "and master copies"),
    "gathered": ("gathered", "cyan", "unsharded, while in use"),
    "gradients": ("gradients", "yellow", ""),
    "optimizer": ("optimizer", "magenta", ""),
    "activations": ("activations", "green", "micro-batches in flight"),
    "buffers": ("buffers", "bright_cyan", "collectives, loss, batch"),
    "reserve": ("reserved", "white", "by the allocator, which cannot give it back"),
    "outside": ("outside torch", "bright_black", "driver, NCCL, workspaces"),
}
BESIDE = {name: FOOTPRINT[name] for name in ("reserve", "outside")}
"""Memory held in addition to live tensors."""
TIMES = {
    "compute": ("compute", "green"),
    "recompute": ("recomputation", "bright_green"),
    "tensor_parallel": ("tp, exposed", "yellow"),
    "context_parallel": ("cp, exposed", "bright_yellow"),
    "expert_parallel": ("ep, exposed", "bright_magenta"),
    "data_parallel": ("dp, exposed", "magenta"),
    "pipeline_sends": ("pipeline sends", "cyan"),
    "bubble": ("bubble", "red"),
    "optimizer": ("optimizer", "blue"),
    "offload": ("offload to host", "bright_blue"),
    "rest": ("rest", "bright_black"),
    "data": ("reading data", "white"),
    "checkpoints": ("checkpoints", "bright_red"),
}


def show_plan(
    plan: RunPlan,
    console: Console,
    *,
    tokens: int | None = None,
    budget: str | None = None,
    result: SearchResult | None = None,
    brief: bool = False,
) -> None:
    """Print the plan of one run; `tokens` adds the time to train on this many, `budget` the training that it buys.

    `result`: the search that chose it. `brief`: whether it fits, step and training time, and warnings, in eight lines.
    """
    if brief:
        return _show_briefly(plan, console, tokens, budget, result)
    console.print(_headline(plan))
    for note in notes(plan, result):
        console.print(Text(note, style="yellow"))
    console.print()
    console.print(_memory(plan, console.width))
    console.print()
    if plan.islands is not None:
        console.print(_islands(plan.islands))
        console.print()
    if plan.prediction is not None:
        console.print(waterfall(plan.prediction))
        console.print()
        console.print(_speed(plan, plan.prediction, tokens, budget))
        if plan.run.model.num_experts:
            from ultrascale.plan.view.recomputation import recomputation_statement  # here: plans for CPUs do without

            console.print()
            console.print(Text(recomputation_statement(plan.prediction.workload, plan.run.layout), style="dim"))
    else:
        unknown = "Time: this device's rates are not in the catalogue; a run measures and reports them."
        console.print(Text(unknown, style="dim"))


def _islands(islands: IslandsPlan) -> Text:
    """Text on the traffic between islands, and the host memory that a rank keeps for it."""
    fewer = islands.gradient_bytes / islands.sent_bytes
    words = f"{islands.count} islands, of which this is one: it sends {format_bytes(islands.sent_bytes)} in every"
    words += f" {islands.every_steps:,} steps, {format_bytes(islands.sent_at_once_bytes)} at once at most"
    words += f" ({fewer:,.3g} times less than gradients of every step); a rank keeps {format_bytes(islands.host_bytes)} for it"
    return Text(f"{words} in the host's memory.")


def _show_briefly(plan: RunPlan, console: Console, tokens: int | None, budget: str | None, result: SearchResult | None) -> None:
    console.print(_headline(plan).split("\n")[0])
    console.print(_verdict(plan).split("\n")[0])
    if plan.prediction is not None:
        console.print(_speed(plan, plan.prediction, tokens, budget, brief=True))
    for note in warnings(plan, result):
        console.print(Text(note, style="yellow"))


def _memory(plan: RunPlan, width: int) -> RenderableType:
    """A bar, the verdict, and live memory at the peak, in `width` columns."""
    parts = _device_parts(plan)
    header = [_bar(plan, parts, min(width, BAR_WIDTH)), _verdict(plan), Text()]
    return Group(*header, _parts(plan, plan.memory, parts, bars=width >= BARS_FROM), _per_block(plan.memory))


def _device_parts(plan: RunPlan) -> dict[str, int]:
    """Bytes by category, and those held by the allocator and others in addition."""
    parts = dict(plan.memory.by_category)
    if plan.prediction is None:
        return parts
    outside = round(float(plan.prediction.memory.outside))
    return parts | {"reserve": max(0, plan.needed_bytes - outside - sum(parts.values())), "outside": outside}


def _parts_table(phase: str, label_width: int, *, bars: bool) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(f"peak memory, {phase}", no_wrap=True, min_width=label_width)
    table.add_column("", justify="right", no_wrap=True, min_width=len("1023 MiB"))
    if bars:
        table.add_column("", no_wrap=True, min_width=PART_WIDTH)
    table.add_column("", style="dim")
    return table


def _part_bar(num_bytes: int, largest: int, color: str) -> Text:
    return Text("█" * round(PART_WIDTH * num_bytes / largest) or "▏", style=color)


def waterfall(prediction: Prediction) -> Table:
    """Waterfall of a step's time: bars that end where the next begins."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("time of a step", no_wrap=True, min_width=18)
    table.add_column("", justify="right", no_wrap=True, min_width=len("12.3 ms"))
    table.add_column("", justify="right", no_wrap=True, min_width=len("97.5%"))
    table.add_column("", no_wrap=True, overflow="crop")
    done = 0.0
    for name, seconds in prediction.waterfall.items():
        start, end = (round(edge / prediction.step_seconds * WATERFALL_WIDTH) for edge in (done, done + seconds))
        done += seconds
        if seconds < SHOWN_SHARE * prediction.step_seconds:
            continue
        label, color = TIMES[name]
        bar = Text(" " * min(start, WATERFALL_WIDTH - 1)).append("█" * (end - start) or "▏", style=color)
        table.add_row(label, format_seconds(seconds), f"{seconds / prediction.step_seconds:.1%}", bar)
    return table


def show_alternatives(plans: list[RunPlan], console: Console) -> None:
    """Print ZeRO stages by recomputation modes, with peak memory and step time; the first that fits is marked."""
    best = first_that_fits(plans)
    modes = list(dict.fromkeys(plan.run.layout.recompute for plan in plans))
    columns = ("ZeRO", *(f"recompute {mode}" for mode in modes))
    table = plain_table(*columns, left=("ZeRO",), whole=columns, pad_edge=True, padding=(0, 3, 0, 0))
    for stage in dict.fromkeys(plan.run.layout.zero_stage for plan in plans):
        cells = [_cell(plan, plan is best) for plan in plans if plan.run.layout.zero_stage == stage]
        table.add_row(f"stage {stage}", *cells)
    usable = format_bytes(plans[0].usable_bytes)
    console.print(Text(f"Memory that a rank needs, and time of a step; {usable} can be used", style="bold"))
    console.print(table)
    if best is None:
        console.print(Text("Nothing fits. More GPUs, shorter sequences or a smaller micro-batch would help.", style="bold red"))
    else:
        console.print(Text("Marked: the first that fits, from the least recomputation and traffic on.", style="dim"))
    console.print()


def _cell(plan: RunPlan, is_best: bool) -> Text:
    seconds = "" if plan.prediction is None else f"  {format_seconds(plan.prediction.step_seconds)}"
    text = f"{format_bytes(plan.needed_bytes)}{seconds}"
    if is_best:
        return Text(f"> {text}", style="bold green")
    return Text(text, style="" if plan.fits else "red dim")


def _headline(plan: RunPlan) -> Text:
    run, layout, cluster = plan.run, plan.run.layout, plan.cluster
    nodes = [f"{cluster.num_nodes} nodes" if cluster.num_nodes > 1 else "", cluster.places_words]
    title = Text(run.model.name or run.model.model_type, style="bold")
    title.append(f"  {format_count(num_parameters(run.model))} parameters", style="")
    title.append(f"  on {layout.world_size} x {', '.join([cluster.accelerator.title, *filter(None, nodes)])}\n", style="")
    tokens = run.batch.sequences_per_batch * run.batch.sequence_length
    masked = "intra-document masking" if run.data.document_mask else "attention across documents"
    count = plan.num_micro_batches
    micro_batches = f"{count} micro-batch{'' if count == 1 else 'es'}"
    noun = "rank" if layout.world_size == layout.dp else "replica"
    trainer = "" if plan.stack.name == "ultrascale" else f", trained by {plan.stack.name}"
    trainer += "" if plan.stack.optimizer == DEFAULT_OPTIMIZER else f", {plan.stack.optimizer}"
    title.append(
        f"{_parallelism_words(layout)}{layout.precision}, {_zero_words(layout)}, {_recompute_words(layout)}{trainer}\n"
        f"a step is {format_count(tokens)} tokens: {layout.dp} {noun}{'' if layout.dp == 1 else 's'} "
        f"x {micro_batches} x {layout.micro_batch_size} x {run.batch.sequence_length}, {masked}"
        f"{_stages(plan)}",
        style="dim",
    )
    return title


def _stages(plan: RunPlan) -> str:
    """One line with the number of blocks of each pipeline stage in order, `5 5 5 1`, for many stages the least and the most;
    empty without a pipeline."""
    layout = plan.run.layout
    if layout.pp == 1:
        return ""
    from ultrascale.plan.time.stages import chunk_layers_of  # here: plans for CPUs do without

    workload = workload_of(plan.run, plan.cluster, plan.stack)
    chunks = chunk_layers_of(workload, layout.num_stages, layout.layers_per_stage)
    words = " ".join(map(str, chunks))
    if len(chunks) > MOST_STAGES and len(set(chunks)) == 1:
        words = f"{chunks[0]} in each of {len(chunks)}"
    elif len(chunks) > MOST_STAGES:
        words = f"{min(chunks)} to {max(chunks)}, of the first {chunks[0]}, of the last {chunks[-1]}"
    return f"\nblocks of each stage: {words}"


def _parallelism_words(layout: Layout) -> str:
    """Parallelism of the model as text: `tp 8, pp 4 (interleaved, 2 stages a rank), `; empty for data parallelism alone."""
    words = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep", "expert_tp") if getattr(layout, name) > 1]
    if layout.tp > 1 and not layout.sequence_parallel:
        words[0] += " without sequence parallelism"
    if layout.cp > 1:
        swap = layout.cp_grid[1]
        words.append(f"{layout.cp_method} attention{f' ({swap} ranks swap heads)' if 1 < swap < layout.cp else ''}")
    if layout.pp > 1:
        stages = f", {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
        words.append(f"pp {layout.pp} ({layout.schedule}{stages})")
    return "".join(f"{word}, " for word in words)


def _zero_words(layout: Layout) -> str:
    copies = f", {layout.dp_replicate} replicas of the state" if layout.dp_replicate > 1 else ""
    return f"ZeRO stage {layout.zero_stage}{copies}"


def _recompute_words(layout: Layout) -> str:
    every = f" of {layout.recompute_every}" if layout.recompute == "every-k" else ""
    return f"recompute {', '.join(layout.recompute_blocks) or layout.recompute}{every}"


def _bar(plan: RunPlan, parts: Mapping[str, int], columns: int) -> Text:
    """The device's memory as one line: parts, headroom, and the reserve that must stay free."""
    whole = max(plan.capacity_bytes, sum(parts.values()) + plan.reserve_bytes)
    bar, used = Text(), 0
    for category, num_bytes in parts.items():
        width = round((used + num_bytes) / whole * columns) - round(used / whole * columns)
        used += num_bytes
        bar.append("█" * width, style=(PARTS | FOOTPRINT)[category][1])
    kept_free = round(plan.reserve_bytes / whole * columns)
    bar.append("·" * max(0, columns - len(bar) - kept_free), style="dim")
    bar.append("░" * (columns - len(bar)), style="dim")
    return bar


def _verdict(plan: RunPlan) -> Text:
    headroom = plan.headroom_bytes
    text = Text("fits" if plan.fits else "does not fit", style="bold green" if plan.fits else "bold red")
    margin = f"{format_bytes(headroom)} of headroom" if headroom >= 0 else f"{format_bytes(-headroom)} too much"
    text.append(f"  {format_bytes(plan.needed_bytes)} of {format_bytes(plan.capacity_bytes)}, {margin}\n", style="not bold")
    text.append(_reserve_text(plan), style="not bold dim")
    if plan.stack.name != "ultrascale":
        text.append(f"\nas {plan.stack.name} keeps it", style="not bold dim")
    elif not_trainable(plan.run):
        text.append("\n`ultrascale train` cannot run this", style="not bold dim")
    return text


FLUSHES = (
    "the allocator frees some of its cache in every step, which takes time:\n"
    "PYTORCH_ALLOC_CONF=expandable_segments:True, which `ultrascale launch` sets, avoids that"
)


def _reserve_text(plan: RunPlan) -> str:
    reserve = format_bytes(plan.reserve_bytes)
    if plan.prediction is not None:
        text = f"{reserve} more must stay free: without them the allocator stalls or fails"
        return text + (f"\n{FLUSHES}" if plan.prediction.memory.flushes else "")
    on_cpu, count = plan.cluster.accelerator.name == "cpu", plan.cluster.num_accelerators
    uncounted = "Python and torch" if on_cpu else "allocator, contexts, NCCL"
    shared = f"\n{count} processes share this machine's memory" if on_cpu and count > 1 else ""
    return f"{reserve} must stay free for what a plan cannot count: {uncounted}{shared}"


def _parts(plan: RunPlan, memory: MemoryPlan, parts: Mapping[str, int], *, bars: bool) -> Table:
    """Table of the simulated memory at the peak, the parts of each category, and memory in addition to it."""
    table = _parts_table(memory.peak.phase, max(map(len, KINDS.values())) + 2, bars=bars)
    words = state_words(plan.run.model, plan.run.layout, plan.stack)
    largest = max(parts.values())
    for category, num_bytes in parts.items():
        if not num_bytes:
            continue
        name, color, note = (PARTS | BESIDE)[category]
        inside = _parts_of_category(memory, category)
        if category == "other":
            labels = {label: n for (of, label), n in memory.peak.by_label.items() if of == category}
            note = "" if inside else max(labels, key=labels.__getitem__, default=note)
        words_beside = words.get(category, note)
        drawn = (_part_bar(num_bytes, largest, color),) if bars else ()
        table.add_row(name, format_bytes(num_bytes), *drawn, words_beside)
        for label, part in inside:
            table.add_row(f"  {KINDS.get(label, label)}", format_bytes(part), style="dim")
    table.add_row("total", format_bytes(sum(parts.values())), style="bold")
    return table


def _parts_of_category(memory: MemoryPlan, category: str) -> list[tuple[str, int]]:
    """Parts of a category, largest first, if there are several."""
    if category not in ("activations", "temporary", "communication", "other"):
        return []
    names = {"elementwise": "element-wise, residual"} if category == "activations" else {}
    inside = [(names.get(label, label), n) for (c, label), n in memory.peak.by_label.items() if c == category and n >= 2**10]
    return sorted(inside, key=lambda item: -item[1]) if len(inside) > 1 else []


def _per_block(memory: MemoryPlan) -> RenderableType:
    layers = memory.saved_by_layer
    kinds = ", ".join(f"{KINDS[kind]} {format_bytes(n)}" for kind, n in sorted(layers[-1].items(), key=lambda item: -item[1]))
    title = Text(f"a block keeps {format_bytes(sum(layers[-1].values()))} of a micro-batch:", style="dim")
    return Group(title, Padding(Text(kinds, style="dim"), (0, 0, 0, 2)))


def _speed(plan: RunPlan, prediction: Prediction, tokens: int | None, budget: str | None, *, brief: bool = False) -> Table:
    """Tokens per second, utilisation of the devices, and time and cost of a training run; `brief`: in fewer rows."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style in ("", "bold", "dim"):
        table.add_column(no_wrap=style != "dim", style=style)
    per_gpu = prediction.tokens_per_second_per_gpu
    low, high = (format_seconds(end) for end in step_interval(prediction))
    step = "step" if plan.fits else "step, if it fitted"
    table.add_row(step, format_seconds(prediction.step_seconds), f"80% prediction interval {low} to {high}")
    rate, gpu_rate = f"{prediction.tokens_per_second:,.0f}", f"{per_gpu:,.0f} a GPU"
    if brief:
        table.add_row("tokens/s", rate, f"{gpu_rate}, MFU {prediction.mfu():.1%} with causal attention")
    else:
        full = prediction.mfu(full_attention=True)
        from ultrascale.plan.time.price import half_precision_peak  # here: plans for CPUs do without

        peak = format_flops_per_second(half_precision_peak(plan.cluster.accelerator))
        table.add_row("tokens/s", rate, gpu_rate)
        words = f"of {peak}, causal attention; {full:.1%} if the full square is counted"
        table.add_row("MFU", f"{prediction.mfu():.1%}", words)
        table.add_row("HFU", f"{prediction.hfu():.1%}", "also counts recomputation and masked-out attention")
    if plan.fits:
        goal, why = tokens_to_train(plan.run.model, tokens)
        training = cost(plan.cluster, goal / prediction.tokens_per_second, num_gpus=plan.run.layout.world_size)
        table.add_row(
            "training", format_seconds(training.seconds), f"on {format_count(goal)} tokens{why}, without interruptions"
        )
        table.add_row("", format_hours(training.gpu_hours), f"GPU hours{training.words}")
        failures, measured = stops(prediction.workload), prediction.workload.save_seconds is not None
        for row in _failures(failures, training.seconds, measured=measured, brief=brief):
            table.add_row(*row)
        if budget is not None:
            table.add_row("budget", budget, _bought_words(budget, prediction))
    return table


def _failures(stops: Stops, training: float, *, measured: bool, brief: bool) -> list[tuple[str, str, str]]:
    """Rows on failures during a training run of this many seconds, one if `brief`; none if failures are rare."""
    if stops.goodput > 1 - LOST_SHOWN:
        return []
    if not stops.goodput:
        return [("goodput", "0%", f"{stops.num_nodes:,} nodes stop before a step is saved")]
    whole = training / stops.goodput
    often, took = format_seconds(stops.between_seconds), format_seconds(stops.save_seconds)
    every, total = format_seconds(stops.save_every_seconds), format_seconds(whole)
    count = f"{whole / stops.between_seconds:,.0f}"
    if brief:
        text = f"one in {often}, saves {every} apart, {stops.spare_nodes:,} spare nodes: goodput {stops.goodput:.1%}, {total}"
        return [("failures", count, text)]
    return [
        ("failures", count, f"one in {often}: as often a GPU as Llama 3 405B's"),
        ("saves", every, f"apart (Young, Daly); each holds training up {took} ({'measured' if measured else 'planned'})"),
        ("spares", f"{stops.spare_nodes:,}", f"nodes replace those in repair {SPARES_SUFFICE:.0%} of the time"),
        (
            "goodput",
            f"{stops.goodput:.1%}",
            f"{total} with interruptions, {format_seconds(stops.restart_seconds)} each to restart",
        ),
    ]


def _bought_words(text: str, prediction: Prediction) -> str:
    """Training that a budget buys as text: `14d02h on these GPUs: 1.2T tokens, ...`."""
    purchase = bought(parse_budget(text), prediction)
    if purchase is None:
        return "no list price is known for these accelerators; give a time such as 30d"
    words = f"{format_seconds(purchase.seconds)} on these GPUs: {format_count(purchase.tokens)} tokens, "
    optimal = f"the FLOPs are compute-optimal for a dense {format_count(purchase.optimal_parameters)} (20 tokens per parameter)"
    noun = "active parameter" if prediction.workload.model.num_experts else "parameter"
    return words + f"{_ratio_words(purchase.tokens_per_parameter)} for each {noun}; {optimal}"


def _ratio_words(ratio: float) -> str:
    if ratio < LEAST_RATIO:
        return f"less than {LEAST_RATIO}"
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
