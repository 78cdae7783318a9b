"""Plans written for a framework, in TOML, YAML and shell."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.rope_scaling import RopeScaling
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.plan.workload import Workload

TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
UNCOMPUTED = ("name", "model_type")
"""Fields of `Model` that change nothing of what it computes."""
YOURS = "yours: not the plan's"
"""Comment beside values that a plan does not decide."""
STEPS = 1000
LEARNING_RATE, LEAST_RATE = 3e-4, 3e-5


class Yours(NamedTuple):
    """A value that a plan does not decide, but the framework requires."""

    value: Any


@dataclass(frozen=True)
class TrainerPlan:
    """Plan to write out: a workload and its layout."""

    workload: Workload
    layout: Layout

    @property
    def accumulation(self) -> int:
        """Gradient accumulation: micro-batches per step on one rank."""
        return num_micro_batches(self.layout, self.workload.sequences_per_batch)

    @property
    def ranks_per_node(self) -> int:
        return min(self.workload.cluster.node.num_accelerators, self.layout.world_size)

    @property
    def nodes(self) -> int:
        return -(-self.layout.world_size // self.ranks_per_node)

    def head(self, release: str, start: str, unwritten: Sequence[str]) -> list[str]:
        """Comment lines at the top of a file: the release that reads it, the plan, the start command, and the parts of the
        model that the file does not contain (`unwritten_fields`)."""
        workload = self.workload
        batch = f"{workload.sequences_per_batch:,} sequences of {workload.sequence_length:,} tokens a step"
        named = f"# Not said below, and of this model: {', '.join(unwritten)}. Set it in the trainer's own model."
        return [
            f"# For {release}. {workload.model.name or 'the model'} on {workload.cluster.name}, {batch}.",
            f"# Start: {start}",
            *([named] if unwritten else []),
        ]


def unwritten_fields(
    model: Model, written: Collection[str], notes: Mapping[str, str] | None = None, registered: Model | None = None
) -> list[str]:
    """Parts of `model` that a file does not contain, as `field = value`: every field that is not in `written`, and differs
    from that of the model which the trainer has by name (`registered`), or else from its default; sizes have none. Fields in
    `notes` are named whatever their value, with what the trainer has instead."""
    usual, notes = _computed(registered) if registered else _defaults(), notes or {}
    return [
        f"{name} = {_value(value)}" + (f" ({notes[name]})" if notes.get(name) else "")
        for name, value in _computed(model).items()
        if name in notes or (name not in written and value != usual.get(name))
    ]


def _computed(model: Model) -> dict[str, Any]:
    """Fields that change what the model computes: those that are not read have their defaults."""
    values = {f.name: getattr(model, f.name) for f in fields(Model) if f.name not in UNCOMPUTED}
    values["hidden_act"] = model.activation
    if not model.balance_loss_coef:
        values |= {name: Model.__dataclass_fields__[name].default for name in ("router_aux_loss_coef", "router_aux_loss_scope")}
    return values


def _defaults() -> dict[str, Any]:
    return {f.name: f.default for f in fields(Model) if f.default is not MISSING} | {"hidden_act": "silu"}


def _value(value: Any) -> str:
    if isinstance(value, RopeScaling):
        set_ = [f.name for f in fields(RopeScaling) if getattr(value, f.name) != f.default]
        return "{" + ", ".join(f"{name} = {getattr(value, name)}" for name in set_) + "}"
    return str(value)


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of keys; numbers, strings, booleans and lists of them as values."""
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(plain(value))}{_mark(value)}" for name, value in values.items()), ""]
    return "\n".join(lines).rstrip()


def yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Nested keys; numbers, strings, booleans, None, lists of mappings."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", yaml(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [f"{indent}{name}:"]
            for item in value:
                first, *further = yaml(item, indent + "    ").splitlines()
                lines += [f"{indent}  - {first.strip()}", *further]
        else:
            scalar = plain(value)
            text = json.dumps(scalar) if scalar is None or isinstance(scalar, bool) else scalar
            text = re.sub(r"^(-?\d+)e", r"\1.0e", str(text))  # YAML reads 1e-05 as text
            lines.append(f"{indent}{name}: {text}{_mark(value)}")
    return "\n".join(lines)


def shell_array(name: str, words: Mapping[str, Any]) -> list[str]:
    """Lines of a bash array of arguments. True is an argument without a value; empty or false values are omitted."""
    arguments = [f"  --{key}" if value is True else f"  --{key} {value}" for key, value in words.items() if value]
    return [f"{name}=(", *arguments, ")"]


def plain(value: Any) -> Any:
    """The plain value, whether the plan or the user decides it."""
    return value.value if isinstance(value, Yours) else value


def _mark(value: Any) -> str:
    return f"  # {YOURS}" if isinstance(value, Yours) else ""
