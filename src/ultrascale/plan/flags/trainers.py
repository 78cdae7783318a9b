"""Frameworks that plans are written for, and the choices for which they have no setting."""

from __future__ import annotations

from collections.abc import Callable

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import abilities, stack_file, stack_names
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.description.recomputed import is_modules, modules_named
from ultrascale.plan.flags import accelerate, deepspeed, llm_foundry, megatron, nanotron, ours, torchtitan
from ultrascale.plan.flags.written import TrainerPlan
from ultrascale.plan.workload import Workload

WRITERS: dict[str, Callable[[TrainerPlan], str]] = {
    "ultrascale": ours.write, "megatron": megatron.write, "torchtitan": torchtitan.write,
    "torchtitan-python": torchtitan.write_python, "nanotron": nanotron.write, "llm-foundry": llm_foundry.write,
    "deepspeed": deepspeed.write, "transformers": accelerate.write,
}  # fmt: skip
"""Writers by the `writes` of a stack file."""


def has_settings(stack: str) -> bool:
    """True if `trainer_flags` can write plans for this framework."""
    return stack_file(stack).writes in WRITERS


def trainer_flags(workload: Workload, layout: Layout) -> str:
    """`layout` as settings of the workload's stack. Raises SpecError if that framework has no setting for a part of it."""
    name = workload.stack.name
    if not has_settings(name):
        available = ", ".join(stack for stack in stack_names() if has_settings(stack))
        raise mistake("stack", f"{name} has no settings that could be printed", f"There are those of {available}.")
    problems = cannot_express(workload, layout)
    if problems:
        raise SpecError(problems)
    return WRITERS[stack_file(workload.stack.name).writes](TrainerPlan(workload, layout))


def cannot_express(workload: Workload, layout: Layout) -> list[Problem]:
    """Problems of `layout`: one for each choice that the workload's framework has no setting for."""
    can, name = abilities(workload.stack), workload.stack.name
    stages = can.zero_stages_with_pipeline if layout.pp > 1 else can.zero_stages
    checks = [
        ("zero_stage", layout.zero_stage in stages, f"ZeRO stages {', '.join(map(str, stages))}"),
        (
            "zero_stage",
            layout.zero_stage > 0 or layout.dp == 1 or layout.tp * layout.cp == 1 or not can.shards_beside_tensor,
            "data parallelism beside tp or cp only if it shards the state",
        ),
        ("tp", layout.tp == 1 or can.tensor, "no tensor parallelism"),
        ("sequence_parallel", not layout.sequence_parallel or layout.tp == 1 or can.sequence, "no sequence parallelism"),
        (
            "cp_method",
            layout.cp == 1 or layout.cp_method in can.cp_methods,
            f"{', '.join(can.cp_methods) or 'no context parallelism'}",
        ),
        ("schedule", layout.pp == 1 or layout.schedule in can.schedules, f"{', '.join(can.schedules) or 'no pipeline'}"),
        ("ep", layout.ep == 1 or can.experts, "no expert parallelism"),
        ("expert_tp", layout.expert_tp == 1 or can.expert_tensor, "no tensor parallelism of experts"),
        (
            "recompute",
            layout.recompute in can.recompute
            or (is_modules(layout.recompute) and modules_named(layout.recompute) <= {*can.modules}),
            f"recompute {', '.join([*can.recompute, *sorted(can.modules)])}",
        ),
        ("dp_shard", layout.dp_replicate in (1, layout.dp) or can.hybrid, "no hybrid sharding"),
    ]
    problems = [
        Problem(
            f"layout.{key}", f"{name} has {offer}, the plan wants {getattr(layout, key)}", f"Search for it: --stack {name}."
        )
        for key, holds, offer in checks
        if not holds
    ]
    return problems + not_searched(workload.stack, layout) + _uneven_stages(workload, layout)


def not_searched(stack: Stack, layout: Layout) -> list[Problem]:
    """Problems of choices that a search takes as given (dtype, optimizer, offload) and that `stack` has no setting for."""
    can, name, problems = abilities(stack), stack.name, []
    if layout.precision not in can.precisions:
        rule = f"{name} trains in {', '.join(can.precisions)}, the plan wants {layout.precision}"
        problems.append(Problem("layout.precision", rule, f"Use --precision {can.precisions[-1]}, or another --stack."))
    if stack.optimizer not in can.optimizers:
        rule = f"{name} has {', '.join(can.optimizers)}, the plan wants {stack.optimizer}"
        problems.append(Problem("--optimizer", rule, "Leave it out, or use another --stack."))
    for key, able in (("offload_optimizer", can.offloads_optimizer), ("offload_activations", can.offloads_activations)):
        if getattr(layout, key) and not able:
            what = key.removeprefix("offload_")
            problems.append(Problem(f"layout.{key}", f"{name} has no offload of {what} that is planned", "Leave it out."))
    return problems


def _uneven_stages(workload: Workload, layout: Layout) -> list[Problem]:
    """Stages that a fixed number of layers per stage cannot produce."""
    layers, stages = workload.model.num_hidden_layers, layout.num_stages
    if layout.pp == 1 or abilities(workload.stack).cuts(layers, stages):
        return []
    per_stage = -(-layers // stages)
    division = f"{layers} layers, {per_stage} a stage, into {-(-layers // per_stage)} stages"
    rule = f"{workload.stack.name} cuts {division}, the plan wants {stages}"
    return [Problem("layout.pp", rule, "Choose pp x virtual stages that divide the layers.")]
