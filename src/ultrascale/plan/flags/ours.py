"""A plan as a part of a run's TOML."""

from __future__ import annotations

from dataclasses import fields

from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.plan.flags.written import TrainerPlan, toml


def write(plan: TrainerPlan) -> str:
    """[layout], [batch] and [optimizer], without defaults."""
    usual = Layout()
    chosen = {f.name: getattr(plan.layout, f.name) for f in fields(Layout)}
    settings = {name: value for name, value in chosen.items() if name == "dp" or value != getattr(usual, name)}
    batch = {"sequence_length": plan.workload.sequence_length, "sequences_per_batch": plan.workload.sequences_per_batch}
    name = plan.workload.stack.optimizer
    optimizer = {} if name == Optimizer().name else {"optimizer": {"name": name}}
    return toml({"layout": settings, "batch": batch} | optimizer)
