"""Choice of a run's kernels: measured once at its start, logged in one line each, stored in its folder, and reused when the run
resumes, so that the bits are the same.

All ranks measure at the same time, and decide from the times of all. A stored choice is valid for the same model, shapes,
layout, device and torch; otherwise kernels are measured again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from ultrascale import heartbeat
from ultrascale.description.attention_cores import core_requirements, unsupported_reason
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.kernels.attention.attention_contest import AttentionShape, contest
from ultrascale.kernels.attention.flash_packages import not_importable
from ultrascale.kernels.choice.contest import ContestResult, Outcomes, decide
from ultrascale.kernels.choice.fused_contest import UPDATES, fused_shape, kernels_of, outside_graphs
from ultrascale.kernels.choice.fused_contest import contest as fused_contest
from ultrascale.kernels.choice.implementation import FORMS, Kernel, choose
from ultrascale.kernels.fp8.fp8_matrices import multiplies_fp8
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE
from ultrascale.train.folder.differences import differences, with_defaults
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.work.fp8_slots import products_line

FILE = "chosen_kernels.json"
SLOW_COMPILER_SECONDS = 600.0
"""Compiling kernels at their first call may take this long before the watchdog reports a hang."""


@dataclass(frozen=True)
class Chosen:
    """A run with every kernel choice resolved."""

    run: Run
    forms: dict[str, str]
    """Implementation of each kernel: norm, rotary positions, SwiGLU and loss (`kernels.choice.implementation`)."""
    lines: tuple[str, ...]
    """Log lines: each choice and its reason."""


def choose_kernels(run: Run, ranks: Ranks, folder: RunFolder) -> Chosen:
    """Choose the run's attention core, if the run leaves it open, and the implementations of its other kernels. Collective.

    Raises SpecError if a requested kernel does not support the run on its device.
    """
    question = _question(run, ranks.device)
    previous = _previous_verdicts(ranks, folder, question, asdict(with_defaults(run.model)))
    attention = _attention(run, ranks, previous.get("attention"))
    verdicts = {"attention": attention} | _fused(run, ranks, previous)
    if ranks.is_first and any(verdict.seconds for verdict in verdicts.values()):
        folder.write_json(FILE, {"asked": question, "verdicts": {name: asdict(verdict) for name, verdict in verdicts.items()}})
    lines = [verdict.line() + (", as before" if verdict is previous.get(name) else "") for name, verdict in verdicts.items()]
    if run.layout.precision == "fp8":
        lines.append(f"fp8: {products_line(run.model, run.layout)}")
        if not multiplies_fp8(ranks.device):
            lines.append("fp8: emulated, since this device has no products of it: its rounding, but slower than bf16")
    core: Any = attention.chosen if attention.seconds else run.layout.attention
    forms = {name: verdict.chosen for name, verdict in verdicts.items() if name in FORMS}
    return Chosen(replace(run, layout=replace(run.layout, attention=core)), forms, tuple(lines))


def _attention(run: Run, ranks: Ranks, previous: ContestResult | None) -> ContestResult:
    wanted = core_requirements(run, ranks.device.type)
    core = run.layout.attention
    if core == "auto" and ranks.device.type == "cpu":
        core_name = "PyTorch's flash attention for CPUs" + ", masked" * wanted.is_masked
        return ContestResult("attention", "sdpa", f'{core_name}; layout.attention = "fastest" times it against others')
    if core not in ("auto", "fastest"):
        if reason := unsupported_reason(core, wanted) or not_importable(core):
            raise mistake("layout.attention", f'"{core}" {reason}', "Leave it out.")
        return ContestResult("attention", core, "as layout.attention says")
    if previous is not None:
        _expect_importable(previous.chosen, ranks)
        return previous
    shape = attention_shape(run)
    hold = partial(contest, shape, wanted, ranks.device, compiled=run.compile, bitwise=run.deterministic)
    return decide_together("attention", ranks, hold)


def _expect_importable(core: str, ranks: Ranks) -> None:
    """Raise SpecError, on every rank, if a rank lacks the package that the run started with. Collective."""
    reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(ranks.gather_text(not_importable(core))) if reason]
    if reasons:
        rule = f"this run began with {core}, but {reasons[0]}"
        remedy = f"Install it, or name another core, or remove {FILE} of the run's folder to choose anew: bits will differ."
        raise mistake("layout.attention", rule, remedy)


def _fused(run: Run, ranks: Ranks, previous: dict[str, ContestResult]) -> dict[str, ContestResult]:
    """Verdicts by kernel, for kernels that no compiler fuses; one verdict on all kernels together if nothing is timed."""
    if run.kernels != "auto":
        choose(run.kernels, ranks.device)  # raises for packages that are missing
        return {"kernels": ContestResult("kernels", run.kernels, "as the key kernels says")}
    kernels = tuple(kernels_of(run.model, run.layout)) if not run.compile else outside_graphs(run.model)
    kernels = (*kernels, *update_of(run))
    reason = "the compiler fuses them" if run.compile and not kernels else ""
    if ranks.device.type == "cpu":
        reason = "PyTorch's own operations, the only choice on a CPU"
    elif run.layout.precision == "fp64":
        reason = "the only ones in fp64"
    if reason:
        return {"kernels": ContestResult("kernels", "torch", reason)}
    shape = fused_shape(run.model, run.layout, run.batch.sequence_length, TORCH_DTYPE[run.layout.precision])
    hold = partial(fused_contest, model=run.model, shape=shape, device=ranks.device, bitwise=run.deterministic)
    return {kernel: previous.get(kernel) or decide_together(kernel, ranks, partial(hold, kernel)) for kernel in kernels}


def update_of(run: Run) -> tuple[Kernel, ...]:
    """The optimizer's update kernel, if it has several implementations."""
    return tuple(name for name in UPDATES if name == run.optimizer.name)


def decide_together(what: str, ranks: Ranks, hold: Callable[[], Outcomes]) -> ContestResult:
    """The verdict from the measurements of all ranks, the same on every rank. Collective."""
    heartbeat.beat(f"timing kernels: {what}", extra_seconds=SLOW_COMPILER_SECONDS)
    of_ranks = ranks.gather_json(hold())
    heartbeat.beat("choosing kernels")
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return decide(what, of_ranks)


def attention_shape(run: Run) -> AttentionShape:
    """Shape of attention on the first rank; under cp, of a rank's queries with its local keys."""
    model, layout = run.model, run.layout
    places, heads_swapped = layout.cp_grid
    head_ranks = layout.tp * heads_swapped
    key_heads = model.num_attention_heads if model.latent_attention else model.num_key_value_heads
    return AttentionShape(
        layout.micro_batch_size, run.batch.sequence_length // places, model.num_attention_heads // head_ranks,
        max(1, key_heads // head_ranks), model.head_dim, model.value_head_dim, TORCH_DTYPE[layout.precision],
    )  # fmt: skip


def _previous_verdicts(
    ranks: Ranks, folder: RunFolder, question: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, ContestResult]:
    """The verdicts that rank 0 reads from the run's folder, if they answer the same question."""
    before = folder.read_json(FILE) if ranks.is_first else None
    known = ranks.gather_json(before)[0]
    if not isinstance(known, dict) or differences(known.get("asked"), question, {"model": defaults}):
        return {}
    return {name: ContestResult(**verdict) for name, verdict in known["verdicts"].items() if verdict["seconds"]}


def _question(run: Run, device: torch.device) -> dict[str, Any]:
    """Facts that a choice depends on, as plain data."""
    parts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, "torch": torch.__version__,
        "attention": core_requirements(run, device.type)._asdict(), "shape": str(attention_shape(run)), "compile": run.compile,
        "model": asdict(run.model), "tp": run.layout.tp, "sequence_parallel": run.layout.sequence_parallel,
    }  # fmt: skip
    return json.loads(json.dumps(parts))
