"""Plans written for a framework, in TOML, YAML and shell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.plan.workload import Workload

TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
UNWRITTEN = (
    "norm_placement", "zero_centered_norm", "scale_embedding", "query_pre_attn_scalar", "rope_scaling", "rope_local_base_freq",
    "sliding_window", "full_attention_interval", "attention_sinks", "qk_norm_whole",
)  # fmt: skip
"""Parts of `Model` that no file written here contains."""
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

    def head(self, release: str, start: str, *, is_registered: bool = False) -> list[str]:
        """Comment lines at the top of a file: the release that reads it, the plan, the start command, and the parts of the
        model without a key in the file, unless the framework has the model by name (`is_registered`)."""
        workload = self.workload
        batch = f"{workload.sequences_per_batch:,} sequences of {workload.sequence_length:,} tokens a step"
        return [
            f"# For {release}. {workload.model.name or 'the model'} on {workload.cluster.name}, {batch}.",
            f"# Start: {start}",
            *([] if is_registered else _unwritten_fields(workload.model)),
        ]


def _unwritten_fields(model: Model) -> list[str]:
    """Comment on the parts of a model without a key in frameworks' files."""
    defaults = {field.name: field.default for field in fields(Model)}
    unsaid = [f"{part} = {getattr(model, part)}" for part in UNWRITTEN if getattr(model, part) != defaults[part]]
    if model.gated_mlp and model.activation != "silu":
        unsaid.append(f"activation = {model.activation}")
    return [f"# Not said below, and of this model: {', '.join(unsaid)}. Set it in the trainer's own model."] if unsaid else []


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
