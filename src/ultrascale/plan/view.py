"""A plan on a terminal: what takes the memory, whether it fits, how long a step takes. Draws what `plan.report` says."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ultrascale.plan.report import RunPlan, first_that_fits
from ultrascale.plan.time import NOT_IN_IT
from ultrascale.spec.units import format_bytes, format_count, format_flops_per_second, format_seconds
from ultrascale.spec.weights import num_parameters

PARTS = {
    "parameters": ("parameters", "blue", "{share}, {master}"),
    "gathered": ("gathered copies", "cyan", "whole, while in use, {precision}"),
    "gradients": ("gradients", "yellow", ""),
    "optimizer": ("optimizer state", "magenta", "two moments, {master}"),
    "activations": ("activations", "green", "of the forward pass"),
    "temporary": ("backward work", "bright_green", "gradients of activations"),
    "communication": ("buffers", "bright_cyan", "of collectives"),
    "other": ("batch", "white", ""),
}
KINDS = {
    "matmul": "matrix products",
    "elementwise": "sums, rotary, MLP",
    "norm": "norms",
    "attention": "attention",
    "loss": "loss and head",
    "embedding": "embedding",
    "residual": "residual stream",
    "scratch": "scratch of one op",
    "gradients of activations": "of activations",
    "gradients of weights": "of weights",
}
BAR_WIDTH = 72


def show_plan(plan: RunPlan, console: Console, *, tokens: int | None = None) -> None:
    """Print one run's plan; `tokens` adds the time to train on so many."""
    console.print(_headline(plan))
    console.print()
    console.print(_bar(plan))
    console.print(_verdict(plan))
    console.print()
    console.print(_parts(plan))
    console.print(_per_block(plan))
    console.print()
    console.print(_time(plan, tokens))


def show_alternatives(plans: list[RunPlan], console: Console) -> None:
    """Print ZeRO stages by ways to recompute, with peak memory and step time; the first that fits is marked."""
    best = first_that_fits(plans)
    ways = list(dict.fromkeys(plan.run.layout.recompute for plan in plans))
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("ZeRO", no_wrap=True)
    for way in ways:
        table.add_column(f"recompute {way}", no_wrap=True, justify="right")
    for stage in dict.fromkeys(plan.run.layout.zero_stage for plan in plans):
        cells = [_cell(plan, plan is best) for plan in plans if plan.run.layout.zero_stage == stage]
        table.add_row(f"stage {stage}", *cells)
    usable = format_bytes(plans[0].usable_bytes)
    console.print(Text(f"Peak memory of a rank and time of a step; {usable} can be used", style="bold"))
    console.print(table)
    if best is None:
        console.print(Text("Nothing fits. More GPUs, shorter sequences or a smaller micro-batch would help.", style="bold red"))
    else:
        console.print(Text("Marked: the first that fits, from the least recomputation and traffic on.", style="dim"))
    console.print()


def _cell(plan: RunPlan, is_best: bool) -> Text:
    seconds = "" if plan.time is None else f"  {format_seconds(plan.time.seconds_per_step)}"
    text = f"{format_bytes(plan.memory.peak.total)}{seconds}"
    if is_best:
        return Text(f"> {text}", style="bold green")
    return Text(text, style="" if plan.fits else "red dim")


def _headline(plan: RunPlan) -> Text:
    run, layout, cluster = plan.run, plan.run.layout, plan.cluster
    nodes = f", {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    title = Text(run.model.name or run.model.model_type, style="bold")
    title.append(f"  {format_count(num_parameters(run.model))} parameters", style="")
    title.append(f"  on {layout.dp} x {cluster.accelerator.title}{nodes}\n", style="")
    tokens = run.batch.sequences_per_batch * run.batch.sequence_length
    replicas = f", {layout.dp_replicate} copies of the state" if layout.dp_replicate > 1 else ""
    masked = "masked" if run.data.document_mask else "not masked"
    micro_batches = f"{plan.memory.num_micro_batches} micro-batch{'' if plan.memory.num_micro_batches == 1 else 'es'}"
    title.append(
        f"{layout.precision}, ZeRO stage {layout.zero_stage}{replicas}, recompute {layout.recompute}\n"
        f"a step is {format_count(tokens)} tokens: {layout.dp} ranks x {micro_batches} "
        f"x {layout.micro_batch_size} x {run.batch.sequence_length}, documents {masked}",
        style="dim",
    )
    return title


def _bar(plan: RunPlan) -> Text:
    """The device's memory as one line: parts, what is free, what is kept free."""
    whole = max(plan.capacity_bytes, plan.memory.peak.total + plan.headroom_bytes)
    bar, used = Text(), 0
    for category, (_, color, _) in PARTS.items():
        width = round((used + plan.memory.by_category[category]) / whole * BAR_WIDTH) - round(used / whole * BAR_WIDTH)
        used += plan.memory.by_category[category]
        bar.append("█" * width, style=color)
    kept_free = round(plan.headroom_bytes / whole * BAR_WIDTH)
    bar.append("·" * max(0, BAR_WIDTH - len(bar) - kept_free), style="dim")
    bar.append("░" * (BAR_WIDTH - len(bar)), style="dim")
    return bar


def _verdict(plan: RunPlan) -> Text:
    spare = plan.usable_bytes - plan.memory.peak.total
    text = Text("fits" if spare >= 0 else "does not fit", style="bold green" if spare >= 0 else "bold red")
    rest = f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} too much"
    text.append(
        f"  peak {format_bytes(plan.memory.peak.total)} of {format_bytes(plan.capacity_bytes)}, {rest}\n", style="not bold"
    )
    text.append(_kept_free(plan), style="not bold dim")
    return text


def _kept_free(plan: RunPlan) -> str:
    on_cpu, count = plan.cluster.accelerator.name == "cpu", plan.cluster.num_accelerators
    uncounted = "Python and torch" if on_cpu else "allocator, contexts, NCCL"
    shared = f"\n{count} processes share this machine's memory" if on_cpu and count > 1 else ""
    return f"{format_bytes(plan.headroom_bytes)} stay free for what a plan cannot count: {uncounted}{shared}"


def _parts(plan: RunPlan) -> Table:
    layout, peak = plan.run.layout, plan.memory.peak
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("at the peak", no_wrap=True, min_width=max(map(len, KINDS.values())) + 2)
    table.add_column(peak.phase, justify="right", no_wrap=True, min_width=len("1023 MiB"))
    table.add_column("", no_wrap=True, min_width=20)
    table.add_column("", no_wrap=True, overflow="ellipsis", style="dim")
    share = "whole" if layout.shard_size == 1 else f"1/{layout.shard_size} of them"
    largest = max(peak.by_category.values())
    for category, (name, color, note) in PARTS.items():
        num_bytes = peak.by_category[category]
        if not num_bytes:
            continue
        bar = Text("█" * round(20 * num_bytes / largest) or "▏", style=color)
        table.add_row(
            name, format_bytes(num_bytes), bar, note.format(master=layout.master_dtype, precision=layout.precision, share=share)
        )
        for label, part in _inside(plan, category):
            table.add_row(f"  {KINDS.get(label, label)}", format_bytes(part), style="dim")
    table.add_row("total", format_bytes(peak.total), style="bold")
    return table


def _inside(plan: RunPlan, category: str) -> list[tuple[str, int]]:
    """What a category is made of, largest first, where that tells something."""
    if category not in ("activations", "temporary", "communication"):
        return []
    inside = [(label, n) for (c, label), n in plan.memory.peak.by_label.items() if c == category and n >= 2**10]
    return sorted(inside, key=lambda item: -item[1]) if len(inside) > 1 else []


def _per_block(plan: RunPlan) -> RenderableType:
    layers = plan.memory.saved_by_layer
    kinds = ", ".join(f"{KINDS[kind]} {format_bytes(n)}" for kind, n in sorted(layers[-1].items(), key=lambda item: -item[1]))
    title = Text(f"a block keeps {format_bytes(sum(layers[-1].values()))} of a micro-batch:", style="dim")
    return Group(title, Padding(Text(kinds, style="dim"), (0, 0, 0, 2)))


def _time(plan: RunPlan, tokens: int | None) -> RenderableType:
    time = plan.time
    if time is None:
        return Text("Time: this device's rates are not in the catalogue; a run measures and reports them.", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim")
    rate = format_flops_per_second(time.peak_flops_per_second)
    table.add_row("step, at best", format_seconds(time.seconds_per_step), f"{time.achievable_fraction:.0%} of {rate} a GPU")
    per_gpu = time.tokens_per_second / time.num_devices
    table.add_row("tokens/s", f"{time.tokens_per_second:,.0f}", f"{per_gpu:,.0f} a GPU")
    table.add_row("MFU", f"{time.mfu:.1%}", f"causal attention; {time.mfu_full:.1%} if the full square is counted")
    table.add_row("HFU", f"{time.hfu:.1%}", "with what is computed twice, or only to be masked")
    goal = tokens or 20 * num_parameters(plan.run.model)
    why = "" if tokens else ", 20 a parameter (Hoffmann et al. 2022)"
    table.add_row("training", format_seconds(time.seconds_for(goal)), f"on {format_count(goal)} tokens{why}")
    return Group(table, Text(f"A bound, not a forecast: {NOT_IN_IT} are not in it.", style="dim"))
