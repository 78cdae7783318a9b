"""Requested values that no legal layout has: the reason for each, and the nearest value that works.

The search enumerates only values that divide, so it gives no reason for most others. Here each requested value missing from
the table is checked against the trainer, the number of devices, the model, the batch and the other requested settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ultrascale.catalogue.stacks.stack_files import abilities
from ultrascale.config.rules.run_rules import parallelism_problems
from ultrascale.description.layout import EMBEDDING_AND_HEAD, Layout
from ultrascale.description.problems import Problem
from ultrascale.description.recomputed import is_modules, modules_name, modules_named
from ultrascale.description.schedules import SCHEDULES, schedule_for
from ultrascale.description.units import count_of, divisors
from ultrascale.plan.layouts import CHOICES, RECOMPUTE, Bools, LayoutTable
from ultrascale.plan.search.space import Constraints, Space, modules_of_constraints, nearest_batches
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import is_file

AXES = ("tp", "cp", "pp", "dp")
LACKING = {
    "tp": "tensor parallelism", "cp": "context parallelism", "pp": "pipeline", "ep": "expert parallelism",
    "expert_tp": "tensor parallelism of experts",
}  # fmt: skip
Reason = tuple[str, str]
"""The broken rule, and its remedy."""


@dataclass(frozen=True)
class _Question:
    """A requested value of a field that is in no layout, to be explained."""

    workload: Workload
    constraints: Constraints
    name: str
    value: Any

    @property
    def num_gpus(self) -> int:
        return self.workload.cluster.num_accelerators

    @property
    def dps(self) -> list[int]:
        """Degrees of dp that the other requested axes leave."""
        combinations = product(*(self.constraints.get(axis, divisors(self.num_gpus)) for axis in ("tp", "cp", "pp")))
        degrees = {self.num_gpus // prod(axes) for axes in combinations if self.num_gpus % prod(axes) == 0}
        return sorted(degrees & set(self.constraints.get("dp", degrees)))

    def only_ones(self, axis: str) -> bool:
        return set(self.constraints.get(axis, ())) == {1}

    def never_one(self, axis: str) -> bool:
        return axis in self.constraints and 1 not in self.constraints[axis]


def unmet(workload: Workload, constraints: Constraints, space: Space) -> list[Problem]:
    """A problem for every requested value that is in no layout of `space`; if that is empty, for values with a known reason."""
    problems: dict[str, Problem] = {}
    for name, values in constraints.items():
        for value in values:
            if _appears(space.table, name, value):
                continue
            question = _Question(workload, constraints, name, value)
            reason = next(filter(None, (judge(question) for judge in _JUDGES)), None) or _refusal(question, space)
            if reason is None and len(space.table):
                others = " ".join(
                    f"{other} {other_value}" for other, few in constraints.items() if other != name for other_value in few
                )
                reason = (f"{value} is in no legal layout{f' beside {others}' if others else ''}", "Leave it out.")
            if reason is not None:
                problems.setdefault(reason[0], Problem(f"layout.{name}", *reason))
    return list(problems.values())


def _appears(table: LayoutTable, name: str, value: Any) -> bool:
    """True if some row has this value, and the setting has an effect there."""
    if not len(table):
        return False
    if name == "recompute" and is_modules(value):
        return table.modes == (modules_name(modules_named(value)),)
    if name == "dp_shard":
        return bool(((table.dp_shard == (table.dp if value is None else value)) & _in_use(table, name)).any())
    choices = CHOICES.get(name)
    number = choices.index(value) if choices and value in choices else -1 if choices else int(value)
    return bool(((getattr(table, name) == number) & (_in_use(table, name) | (number == 1 and choices is None))).any())


def _in_use(table: LayoutTable, name: str) -> Bools:
    masks = {
        "schedule": table.pp > 1, "virtual_stages": table.pp > 1, "cp_method": table.cp > 1,
        "cp_heads": table.cp > 1, "dp_shard": table.zero_stage > 0,
        "recompute_every": table.recompute == RECOMPUTE.index("every-k"),
    }  # fmt: skip
    return masks.get(name, np.ones(len(table), dtype=bool))


def _of_axis(question: _Question) -> Reason | None:
    """Reason for a setting without effect because its axis is 1."""
    axis = {"schedule": "pp", "virtual_stages": "pp", "cp_method": "cp", "cp_heads": "cp"}.get(question.name)
    if axis is None or not question.only_ones(axis):
        return None
    return f"{question.value} is read only if {axis} > 1, and {axis} is 1", f"Leave it out, or search {axis} > 1."


def _of_trainer(question: _Question) -> Reason | None:
    """Reason if the trainer does not support the value."""
    stack, name, value = question.workload.stack, question.name, question.value
    can = abilities(stack)
    supported = {
        "tp": can.tensor, "cp": bool(can.cp_methods), "pp": bool(can.schedules), "ep": can.experts,
        "expert_tp": can.expert_tensor,
    }  # fmt: skip
    if name in supported and value > 1 and not supported[name]:
        return f"{stack.name} has no {LACKING[name]}", "Use 1, or another --stack."
    if name == "cp" and value > 1 and can.cp_alone and (question.never_one("tp") or question.never_one("pp")):
        return f"{stack.name} has context parallelism without tp and pp only", "Drop the others, or use another --stack."
    if name == "sequence_parallel" and value and not can.sequence:
        return f"{stack.name} has no sequence parallelism", "Leave it out, or use another --stack."
    offered: dict[str, tuple[Any, ...]] = {
        "zero_stage": can.every_zero_stage, "recompute": can.recompute, "schedule": can.schedules, "cp_method": can.cp_methods,
    }  # fmt: skip
    if name == "recompute" and modules_of_constraints(question.workload, question.constraints):
        return None
    if name == "recompute" and is_modules(value) and (missing := sorted(modules_named(value) - {*can.modules})):
        known = ", ".join(can.recompute) + (f", or of {', '.join(can.modules)}, joined by +" if can.modules else "")
        return f"{stack.name} does not recompute {', '.join(missing)} by name", f"Choose one of {known}, or another --stack."
    if name in offered and value not in offered[name]:
        return _choices(f"{stack.name} has", name, offered[name], value)
    if name == "zero_stage" and question.never_one("pp") and value not in can.zero_stages_with_pipeline:
        return _choices(f"with a pipeline {stack.name} has", name, can.zero_stages_with_pipeline, value)
    return None


def _choices(subject: str, name: str, offered: tuple[Any, ...], value: Any) -> Reason:
    if not offered:
        missing = "pipeline" if name == "schedule" else "context parallelism"
        return f"{subject} no {missing}", "Leave it out, or use another --stack."
    if name == "schedule" and is_file(str(value)):
        rule = f"{value} is made for one number of ranks and micro-batches, and a search has many"
        return rule, "Name the whole layout in a run.toml, with layout.schedule there, and plan that."
    if name == "recompute" and (value in ("auto", "blocks") or is_modules(value)):
        if is_modules(value):
            alone = f"{value} names modules, which hold for a whole search: alone, and where the --stack recomputes by module"
            return alone, f"Give it alone, to such a --stack (ultrascale, megatron), or choose one of {', '.join(offered)}."
        rule = f"{value} is said of one layout's blocks, and a search has many layouts"
        return rule, 'Search without it (--save RUN.TOML), then set layout.recompute = "auto" there and plan that.'
    kind = {"zero_stage": "ZeRO ", "recompute": "recompute "}.get(name, "")
    words = ", ".join(map(str, offered))
    return f"{subject} {kind}{words}, not {value}", f"Choose one of {words}, or another --stack."


def _of_count(question: _Question) -> Reason | None:
    """Reason if an axis, alone or with others, does not divide the number of devices."""
    name, value, gpus = question.name, question.value, question.num_gpus
    if name not in AXES:
        return None
    if gpus % value:
        return f"{name} = {value} does not divide {count_of(gpus, 'GPU')}", nearest(value, divisors(gpus))
    others = [axis for axis in AXES if axis in question.constraints and axis != name]
    whole = len(others) == len(AXES) - 1
    products = [prod(degrees) * value for degrees in product(*(question.constraints[axis] for axis in others))]
    if any(gpus == total if whole else gpus % total == 0 for total in products):
        return None
    sizes = {axis: value if axis == name else min(question.constraints[axis]) for axis in AXES if axis in (*others, name)}
    words = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or f"{name} 1"
    count = prod(sizes.values())
    if count > gpus:
        relation = f"are more than {gpus}"
    elif whole and gpus % count == 0:
        relation = f"{'leaves' if count == 1 else 'leave'} {gpus - count} of {gpus} idle"
    else:
        relation = f"do not divide {gpus}"
    return f"{words} = {count_of(count, 'GPU')} {relation}", "Change one of them, or leave it out."


def _of_model(question: _Question) -> Reason | None:
    """Reason if heads, widths, layers or experts do not divide."""
    name, value, model = question.name, question.value, question.workload.model
    most = model.num_hidden_layers + EMBEDDING_AND_HEAD
    if name == "pp" and value > most:
        rule = f"pp = {value} makes more stages than {count_of(model.num_hidden_layers, 'layer')}, embedding and head"
        return rule, f"Use pp = {most} or less."
    if name not in ("tp", "cp", "ep", "expert_tp"):
        return None
    layout = Layout(**{"dp": question.num_gpus, name: value})  # type: ignore[arg-type]
    problems = parallelism_problems(model, layout, sequence_length=question.workload.sequence_length)
    if problems:
        return problems[0].rule, problems[0].remedy
    ranks = [question.num_gpus // pp for pp in question.constraints.get("pp", (1,)) if question.num_gpus % pp == 0]
    if name in ("ep", "expert_tp") and ranks and all(count % value for count in ranks):
        return f"{name} = {value} does not divide the {ranks[0]} GPUs of a stage", nearest(value, divisors(ranks[0]))
    return None


def _of_batch(question: _Question) -> Reason | None:
    """Reason if the batch does not divide."""
    name, value, batch = question.name, question.value, question.workload.sequences_per_batch
    if name == "dp" and batch % value:
        return f"dp = {value} does not divide the batch of {count_of(batch, 'sequence')}", nearest_batches(batch, value)
    if name != "micro_batch_size":
        return None
    if value > batch:
        return f"{value} is more than the batch of {count_of(batch, 'sequence')}", f"Use {batch} or less, or a larger batch."
    sizes = {size for dp in question.dps if batch % dp == 0 for size in divisors(batch // dp)}
    if value not in sizes and sizes:
        return f"no dp x {value} divides the batch of {count_of(batch, 'sequence')}", nearest(value, sizes)
    return None


def _of_pipeline(question: _Question) -> Reason | None:
    """Reason if the virtual stages per rank do not suit the schedules or the layers."""
    if question.name != "virtual_stages":
        return None
    value, layers = question.value, question.workload.model.num_hidden_layers
    schedules = question.constraints.get("schedule", abilities(question.workload.stack).schedules)
    allowed = [SCHEDULES[schedule].virtual_stages if schedule in SCHEDULES else None for schedule in schedules]
    if value not in allowed and (value == 1 or None not in allowed):
        rule = f"{value} stages a rank are not what {', '.join(schedules)} is made for"
        return rule, f"Use --schedule {schedule_for(2)}."
    pp = min(question.constraints.get("pp", (2,)))
    most = layers + EMBEDDING_AND_HEAD
    if pp * value <= most:
        return None
    return (
        f"pp {pp} x {value} = {pp * value} stages are more than {count_of(layers, 'layer')}, embedding and head",
        f"Use {most // pp} or less.",
    )


def _of_shard(question: _Question) -> Reason | None:
    """Reason if the requested shard size does not suit the layout."""
    if question.name != "dp_shard":
        return None
    value, dps, can = question.value, question.dps, abilities(question.workload.stack)
    stages = set(question.constraints.get("zero_stage", can.zero_stages))
    if stages == {0}:
        return "ZeRO 0 cuts nothing over ranks", "Leave it out, or use --zero-stage 1, 2 or 3."
    if value is None:
        return None
    if question.num_gpus % value:
        return f"dp_shard = {value} does not divide {count_of(question.num_gpus, 'GPU')}", nearest(
            value, divisors(question.num_gpus)
        )
    if dps and all(dp % value for dp in dps):
        return f"dp_shard = {value} does not divide dp = {' or '.join(map(str, dps))}", nearest(value, divisors(dps[-1]))
    if not stages & set(can.hybrid_stages):
        having = f"hybrid sharding with ZeRO {', '.join(map(str, can.hybrid_stages))} only"
        rule = f"{question.workload.stack.name} has {having if can.hybrid else 'no hybrid sharding'}"
        return rule, "Leave it out, or use another --stack."
    return None


def _of_swap(question: _Question) -> Reason | None:
    """Reason if the requested `cp_heads` (cp ranks that swap heads, joined by rings) does not suit."""
    if question.name != "cp_heads":
        return None
    value, method = question.value, "ring+all-to-all"
    if method not in question.constraints.get("cp_method", (method,)):
        return f'{value} is read with cp_method = "{method}" only', f"Leave it out, or add --layout.cp-method {method}."
    if method not in abilities(question.workload.stack).cp_methods:
        return f"{question.workload.stack.name} has no cp_method {method}", "Leave it out, or use another --stack."
    if value == 1:
        return f"1 is a ring, not {method}", "Leave it out."
    sizes = [cp for cp in question.constraints.get("cp", divisors(question.num_gpus)) if cp > value and cp % value == 0]
    if not sizes:
        cps = " or ".join(map(str, question.constraints.get("cp", divisors(question.num_gpus)[-1:])))
        return f"{value} must divide cp = {cps}, and be less", "Choose a divisor of cp, or a larger cp."
    heads, tps = question.workload.model.num_attention_heads, question.constraints.get("tp", (1,))
    if all(heads % (tp * value) for tp in tps):
        return f"{value} does not divide the {heads} heads (over tp {min(tps)})", nearest(value, divisors(heads // min(tps)))
    return None


_JUDGES: tuple[Callable[[_Question], Reason | None], ...] = (
    _of_axis, _of_trainer, _of_swap, _of_count, _of_model, _of_batch, _of_pipeline, _of_shard,
)  # fmt: skip


def _refusal(question: _Question, space: Space) -> Reason | None:
    """Reason that the search recorded when it refused this schedule or size."""
    value = str(question.value)
    families = {value, f"schedule {value}", f"{question.name} = {value}", f"{question.name} {value}"}
    for refusal in space.refused:
        if refusal.family in families:
            return f"{refusal.family}: {refusal.reason}", refusal.remedy or "Leave it out, or change the other settings."
    return None


def nearest(value: int, options: Iterable[int]) -> str:
    """Remedy that names the nearest of `options` below and above `value`."""
    options = list(options)
    neighbours = [*sorted(n for n in options if n < value)[-1:], *sorted(n for n in options if n > value)[:1]]
    return f"Nearest: {' or '.join(map(str, neighbours))}."
