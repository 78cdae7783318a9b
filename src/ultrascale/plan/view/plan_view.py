"""A plan on a terminal: what takes the memory, whether it fits, where a step's time goes. Draws what `plan.report` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ultrascale.plan.memory.replay import MemoryPlan
from ultrascale.plan.report import DEFAULT_OPTIMIZER, RunPlan, first_that_fits, not_trainable, step_interval, workload_of
from ultrascale.plan.view.cost import cost
from ultrascale.spec.layout import Layout
from ultrascale.spec.units import format_bytes, format_count, format_flops_per_second, format_seconds
from ultrascale.spec.weights import num_parameters

if TYPE_CHECKING:
    from ultrascale.plan.time.price import Prediction

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
    "gather": "gathered parts",
    "exchange": "sent and summed",
    "router": "choice of experts",
    "permute": "rows of experts",
    "messages": "pipeline's messages",
    "scratch": "scratch of one op",
    "gradients of activations": "of activations",
    "gradients of weights": "of weights",
}
BAR_WIDTH = 72
PART_WIDTH = 16
MEMORY_LABEL_WIDTH = 18
WATERFALL_WIDTH = 40
MOST_STAGES = 16
"""Of a pipeline, whose blocks are listed one by one."""
SHOWN_SHARE = 0.0005
"""Parts of a step below this share are not drawn."""
FOOTPRINT = {
    "weights": ("weights", "blue", "and master copies"),
    "gathered": ("gathered copies", "cyan", "whole, while in use"),
    "gradients": ("gradients", "yellow", ""),
    "optimizer": ("optimizer state", "magenta", ""),
    "activations": ("activations", "green", "micro-batches in flight"),
    "buffers": ("buffers", "bright_cyan", "collectives, loss, batch"),
    "reserve": ("reserved", "white", "by the allocator, unused"),
    "outside": ("outside torch", "bright_black", "CUDA, NCCL, workspaces"),
}
BESIDE = {name: FOOTPRINT[name] for name in ("reserve", "outside")}
"""What is held beside live tensors."""
TIMES = {
    "compute": ("compute", "green"),
    "recompute": ("recomputation", "bright_green"),
    "tensor_parallel": ("tp traffic", "yellow"),
    "context_parallel": ("cp traffic", "bright_yellow"),
    "expert_parallel": ("ep traffic", "bright_magenta"),
    "data_parallel": ("dp traffic", "magenta"),
    "pipeline_sends": ("pipeline sends", "cyan"),
    "bubble": ("bubble", "red"),
    "optimizer": ("optimizer", "blue"),
    "offload": ("offload to host", "bright_blue"),
    "rest": ("rest", "bright_black"),
    "data": ("reading data", "white"),
    "checkpoints": ("checkpoints", "bright_red"),
}


def show_plan(plan: RunPlan, console: Console, *, tokens: int | None = None) -> None:
    """Print one run's plan; `tokens` adds the time to train on so many."""
    console.print(_headline(plan))
    console.print()
    console.print(_memory(plan))
    console.print()
    if plan.prediction is not None:
        console.print(waterfall(plan.prediction))
        console.print()
        console.print(_speed(plan, plan.prediction, tokens))
        if plan.run.model.num_experts:
            from ultrascale.plan.view.recomputation import recomputation_statement  # here: a CPU is planned without NumPy

            console.print()
            console.print(Text(recomputation_statement(plan.prediction.workload, plan.run.layout), style="dim"))
    else:
        unknown = "Time: this device's rates are not in the catalogue; a run measures and reports them."
        console.print(Text(unknown, style="dim"))


def _memory(plan: RunPlan) -> RenderableType:
    """A bar, the verdict, and what is alive at the peak."""
    parts = _device_parts(plan)
    told = [_bar(plan, parts), _verdict(plan), Text()]
    if plan.memory is not None:
        return Group(*told, _parts(plan, plan.memory, parts), _per_block(plan.memory))
    return Group(*told, _footprint(plan, parts))


def _device_parts(plan: RunPlan) -> dict[str, int]:
    """Bytes by category, from the replay where there is one, and what the allocator and others hold beside it."""
    prediction = plan.prediction
    if plan.memory is not None and prediction is None:
        return dict(plan.memory.by_category)
    assert prediction is not None
    memory = prediction.memory
    parts = plan.memory.by_category if plan.memory is not None else memory.categories
    found = {name: round(float(value)) for name, value in parts.items()}
    outside = round(float(memory.outside))
    return found | {"reserve": max(0, plan.needed_bytes - outside - sum(found.values())), "outside": outside}


def _footprint(plan: RunPlan, parts: Mapping[str, int]) -> Table:
    """Memory that was put together from parts."""
    assert plan.prediction is not None
    table = _parts_table(plan.prediction.memory.phase, MEMORY_LABEL_WIDTH)
    largest = max(parts.values())
    for name, num_bytes in parts.items():
        if num_bytes:
            label, color, note = FOOTPRINT[name]
            table.add_row(label, format_bytes(num_bytes), _part_bar(num_bytes, largest, color), note)
    table.add_row("total", format_bytes(sum(parts.values())), style="bold")
    return table


def _parts_table(phase: str, label_width: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("at the peak", no_wrap=True, min_width=label_width)
    table.add_column(phase, justify="right", no_wrap=True, min_width=len("1023 MiB"))
    table.add_column("", no_wrap=True, min_width=PART_WIDTH)
    table.add_column("", style="dim")
    return table


def _part_bar(num_bytes: int, largest: int, color: str) -> Text:
    return Text("█" * round(PART_WIDTH * num_bytes / largest) or "▏", style=color)


def waterfall(prediction: Prediction) -> Table:
    """Where the time of a step goes, as bars that end where the next begins."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("of a step", no_wrap=True, min_width=18)
    table.add_column("", justify="right", no_wrap=True, min_width=len("12.3 ms"))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=WATERFALL_WIDTH)
    done = 0.0
    for name, seconds in prediction.waterfall.items():
        start, end = (round(at / prediction.step_seconds * WATERFALL_WIDTH) for at in (done, done + seconds))
        done += seconds
        if seconds < SHOWN_SHARE * prediction.step_seconds:
            continue
        label, color = TIMES[name]
        bar = Text(" " * min(start, WATERFALL_WIDTH - 1)).append("█" * (end - start) or "▏", style=color)
        table.add_row(label, format_seconds(seconds), f"{seconds / prediction.step_seconds:.1%}", bar)
    return table


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
    seconds = "" if plan.prediction is None else f"  {format_seconds(plan.prediction.step_seconds)}"
    text = f"{format_bytes(plan.peak_bytes)}{seconds}"
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
    masked = "masked" if run.data.document_mask else "not masked"
    count = plan.num_micro_batches
    micro_batches = f"{count} micro-batch{'' if count == 1 else 'es'}"
    who = "rank" if layout.world_size == layout.dp else "replica"
    trainer = "" if plan.stack.name == "ultrascale" else f", trained by {plan.stack.name}"
    trainer += "" if plan.stack.optimizer == DEFAULT_OPTIMIZER else f", {plan.stack.optimizer}"
    title.append(
        f"{_cut(layout)}{layout.precision}, {_state(layout)}, {_again(layout)}{trainer}\n"
        f"a step is {format_count(tokens)} tokens: {layout.dp} {who}{'' if layout.dp == 1 else 's'} "
        f"x {micro_batches} x {layout.micro_batch_size} x {run.batch.sequence_length}, documents {masked}"
        f"{_stages(plan)}",
        style="dim",
    )
    return title


def _stages(plan: RunPlan) -> str:
    """A line with the blocks of each pipeline stage in order, `5 5 5 1`, of many the least and the most; empty without one."""
    layout = plan.run.layout
    if layout.pp == 1:
        return ""
    from ultrascale.plan.time.stages import chunk_layers_of  # here, so that a CPU is planned without NumPy

    workload = workload_of(plan.run, plan.cluster, plan.stack)
    chunks = chunk_layers_of(workload, layout.num_stages, layout.layers_per_stage)
    words = " ".join(map(str, chunks))
    if len(chunks) > MOST_STAGES:
        words = f"{min(chunks)} to {max(chunks)}, of the first {chunks[0]}, of the last {chunks[-1]}"
    return f"\nblocks of each stage: {words}"


def _cut(layout: Layout) -> str:
    """How the model is cut: `tp 8, pp 4 (interleaved, 2 stages a rank), `; empty for data parallelism alone."""
    words = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep", "expert_tp") if getattr(layout, name) > 1]
    if layout.cp > 1:
        swap = layout.cp_grid[1]
        words.append(f"{layout.cp_method} attention{f' ({swap} ranks swap heads)' if 1 < swap < layout.cp else ''}")
    if layout.pp > 1:
        stages = f", {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
        words.append(f"pp {layout.pp} ({layout.schedule}{stages})")
    return "".join(f"{word}, " for word in words)


def _state(layout: Layout) -> str:
    copies = f", {layout.dp_replicate} copies of the state" if layout.dp_replicate > 1 else ""
    return f"ZeRO stage {layout.zero_stage}{copies}"


def _again(layout: Layout) -> str:
    every = f" of {layout.recompute_every}" if layout.recompute == "every-k" else ""
    return f"recompute {', '.join(layout.recompute_blocks) or layout.recompute}{every}"


def _bar(plan: RunPlan, parts: Mapping[str, int]) -> Text:
    """The device's memory as one line: parts, what is free, what is kept free."""
    whole = max(plan.capacity_bytes, sum(parts.values()) + plan.headroom_bytes)
    bar, used = Text(), 0
    for category, num_bytes in parts.items():
        width = round((used + num_bytes) / whole * BAR_WIDTH) - round(used / whole * BAR_WIDTH)
        used += num_bytes
        bar.append("█" * width, style=(PARTS | FOOTPRINT)[category][1])
    kept_free = round(plan.headroom_bytes / whole * BAR_WIDTH)
    bar.append("·" * max(0, BAR_WIDTH - len(bar) - kept_free), style="dim")
    bar.append("░" * (BAR_WIDTH - len(bar)), style="dim")
    return bar


def _verdict(plan: RunPlan) -> Text:
    spare = plan.usable_bytes - plan.needed_bytes
    text = Text("fits" if plan.fits else "does not fit", style="bold green" if plan.fits else "bold red")
    rest = f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} too much"
    text.append(f"  {format_bytes(plan.needed_bytes)} of {format_bytes(plan.capacity_bytes)}, {rest}\n", style="not bold")
    text.append(_kept_free(plan), style="not bold dim")
    if plan.memory is None:
        never = plan.stack.name == "ultrascale" and not_trainable(plan.run)
        how = ": our trainer does not run this yet" if never else f", as {plan.stack.name} keeps them"
        text.append(f"\nput together from parts{how}", style="not bold dim")
    return text


def _kept_free(plan: RunPlan) -> str:
    free = format_bytes(plan.headroom_bytes)
    if plan.prediction is not None:
        return f"{free} more stay free: a fuller device stalls in its allocator, or fails"
    on_cpu, count = plan.cluster.accelerator.name == "cpu", plan.cluster.num_accelerators
    uncounted = "Python and torch" if on_cpu else "allocator, contexts, NCCL"
    shared = f"\n{count} processes share this machine's memory" if on_cpu and count > 1 else ""
    return f"{free} stay free for what a plan cannot count: {uncounted}{shared}"


def _parts(plan: RunPlan, memory: MemoryPlan, parts: Mapping[str, int]) -> Table:
    """What the replay found alive at the peak, what each category is made of, and what is held beside it."""
    layout, peak = plan.run.layout, memory.peak
    table = _parts_table(peak.phase, max(map(len, KINDS.values())) + 2)
    share = "whole" if layout.shard_size == 1 else f"1/{layout.shard_size} of them"
    largest = max(parts.values())
    for category, num_bytes in parts.items():
        if not num_bytes:
            continue
        name, color, note = (PARTS | BESIDE)[category]
        words = note.format(master=layout.master_dtype, precision=layout.precision, share=share)
        table.add_row(name, format_bytes(num_bytes), _part_bar(num_bytes, largest, color), words)
        for label, part in _inside(memory, category):
            table.add_row(f"  {KINDS.get(label, label)}", format_bytes(part), style="dim")
    table.add_row("total", format_bytes(sum(parts.values())), style="bold")
    return table


def _inside(memory: MemoryPlan, category: str) -> list[tuple[str, int]]:
    """What a category is made of, largest first, where that tells something."""
    if category not in ("activations", "temporary", "communication"):
        return []
    inside = [(label, n) for (c, label), n in memory.peak.by_label.items() if c == category and n >= 2**10]
    return sorted(inside, key=lambda item: -item[1]) if len(inside) > 1 else []


def _per_block(memory: MemoryPlan) -> RenderableType:
    layers = memory.saved_by_layer
    kinds = ", ".join(f"{KINDS[kind]} {format_bytes(n)}" for kind, n in sorted(layers[-1].items(), key=lambda item: -item[1]))
    title = Text(f"a block keeps {format_bytes(sum(layers[-1].values()))} of a micro-batch:", style="dim")
    return Group(title, Padding(Text(kinds, style="dim"), (0, 0, 0, 2)))


def _speed(plan: RunPlan, prediction: Prediction, tokens: int | None) -> Table:
    """Tokens per second, how well the devices are used, and what a training takes and costs."""
    table = _rows()
    per_gpu = prediction.tokens_per_second_per_gpu
    low, high = (format_seconds(at) for at in step_interval(prediction))
    step = "step" if plan.fits else "step, if it fitted"
    table.add_row(step, format_seconds(prediction.step_seconds), f"{low} to {high} for four runs in five")
    table.add_row("tokens/s", f"{prediction.tokens_per_second:,.0f}", f"{per_gpu:,.0f} a GPU")
    full = prediction.mfu(full_attention=True)
    from ultrascale.plan.time.price import half_precision_peak  # here: a CPU is planned without NumPy

    rate = format_flops_per_second(half_precision_peak(plan.cluster.accelerator))
    table.add_row("MFU", f"{prediction.mfu():.1%}", f"of {rate}, causal attention; {full:.1%} if the full square is counted")
    table.add_row("HFU", f"{prediction.hfu():.1%}", "with what is computed twice, or only to be masked")
    if plan.fits:
        goal, why = _goal(plan, tokens)
        taken = cost(plan.cluster, goal / prediction.tokens_per_second, num_gpus=plan.run.layout.world_size)
        table.add_row("training", format_seconds(taken.seconds), f"on {format_count(goal)} tokens{why}, without interruptions")
        table.add_row("", f"{taken.gpu_hours:,.0f}", f"GPU hours{taken.words}")
    return table


def _goal(plan: RunPlan, tokens: int | None) -> tuple[int, str]:
    """Tokens to train on, and why so many."""
    return (tokens, "") if tokens else (20 * num_parameters(plan.run.model), ", 20 a parameter (Hoffmann et al. 2022)")


def _rows() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim")
    return table
