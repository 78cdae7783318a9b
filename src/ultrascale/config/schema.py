"""Keys of a configuration, derived from the dataclasses of `description.run`, and conversion of values to their types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ultrascale.config.choices import choice_problem, is_choice, without_none
from ultrascale.description.parsing import parse_toml
from ultrascale.description.problems import MOST_PROBLEMS, Problem, one_of
from ultrascale.description.run import RampStage, Run
from ultrascale.description.schedules import SCHEDULE_ALIASES
from ultrascale.description.sections.launch import Launch
from ultrascale.description.units import UnitError, parse_bytes, parse_count, parse_length, parse_seconds, parse_tokens

# Keys that stand for others; `resolve` turns them into fields.
STAND_INS = {"model.preset": str, "model.path": str, "batch.tokens_per_batch": int}
TOKEN_KEYS = ("tokens_per_batch", "until_tokens")
LENGTH_KEYS = ("sequence_length", "seq_len", "max_position_embeddings", "original_max_position_embeddings", "sliding_window")
BYTE_KEYS = ("recompute_budget", "shard_bytes", "memory_bytes")
UNITS: dict[str, tuple[Callable[[str], int], str]] = {
    **dict.fromkeys(TOKEN_KEYS, (parse_tokens, "Write 4M, 4Mi or 4194304.")),
    **dict.fromkeys(LENGTH_KEYS, (parse_length, "Write 8192, 8k or 128k.")),
    **dict.fromkeys(BYTE_KEYS, (parse_bytes, 'Write "20GiB", "16GB" or 16000000000.')),
}
"""Last words of keys that are whole numbers with a unit, with their parser and the advice."""
TIME_KEYS = ("launch.time_limit",)
TIMES = {"seconds": 1, "minutes": 60}
"""Last words of names of times, which a command line may give as 30m or 1h30m, with the seconds of their unit."""
# Names in other frameworks for fields of this package.
ELSEWHERE = {
    "zero": "layout.zero_stage", "zero_level": "layout.zero_stage",
    "sp": "layout.sequence_parallel", "tensor_parallel": "layout.tp", "tensor_parallel_size": "layout.tp",
    "pipeline_parallel": "layout.pp", "pipeline_parallel_size": "layout.pp", "context_parallel": "layout.cp",
    "expert_parallel": "layout.ep", "data_parallel": "layout.dp", "vpp": "layout.virtual_stages", "etp": "layout.expert_tp",
    "num_local_experts": "model.num_experts", "n_routed_experts": "model.num_experts",
    "activation_checkpointing": "layout.recompute", "gradient_checkpointing": "layout.recompute",
    "tensor_model_parallel_size": "layout.tp", "pipeline_model_parallel_size": "layout.pp",
    "lr": "optimizer.learning_rate", "warmup": "optimizer.warmup_steps", "wd": "optimizer.weight_decay",
    "batch_size": "batch.sequences_per_batch", "global_batch_size": "batch.sequences_per_batch",
    "mbs": "layout.micro_batch_size", "micro_batch": "layout.micro_batch_size", "train_iters": "steps",
    "seq": "batch.sequence_length", "seq_len": "batch.sequence_length", "seq_length": "batch.sequence_length",
    "max_seq_len": "batch.sequence_length", "dataset": "data.sources",
    "tensor_parallel_degree": "layout.tp", "pipeline_parallel_degree": "layout.pp", "context_parallel_degree": "layout.cp",
    "context_parallel_size": "layout.cp", "expert_parallel_degree": "layout.ep", "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_degree": "layout.expert_tp", "expert_tensor_parallel_size": "layout.expert_tp",
    "data_parallel_shard_degree": "layout.dp_shard", "use_distributed_optimizer": "layout.zero_stage",
    "pipeline_parallel_schedule": "layout.schedule", "num_virtual_stages_per_pipeline_rank": "layout.virtual_stages",
    "num_layers_per_virtual_pipeline_stage": "layout.virtual_stages", "local_batch_size": "layout.micro_batch_size",
    "per_device_train_batch_size": "layout.micro_batch_size", "recompute_activations": "layout.recompute",
    "recompute_granularity": "layout.recompute", **dict.fromkeys(("bf16", "fp16", "fp8"), "layout.precision"),
    "pipeline": "layout.pp", "output_dir": "folder", "fsdp": "layout.zero_stage",
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), "optimizer.clip_grad_norm"),
}  # fmt: skip
_COMMAS = re.compile(r"[^,]*|\d{1,3}(,\d{3})+[^,]*")
"""Texts of numbers in which commas, if any, separate thousands: 1,2 is not 12."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_NEVER_IN_TEXT = re.compile("[\0\ud800-\udfff]")


class _Invalid:
    """Placeholder for a value that could not be read; its problem has been recorded."""


INVALID = _Invalid()


@dataclass(frozen=True)
class Leaf:
    """One key that has a value: dotted name, type and default."""

    key: str
    kind: Any
    default: Any
    """`dataclasses.MISSING` if the key is required."""


@dataclass(frozen=True)
class ValueContext:
    """A position in a configuration; collects the problems there."""

    key: str
    where: str
    text: bool
    """True if the value is text from a command line, to be parsed as the field's type."""
    problems: list[Problem]

    def wrong(self, rule: str, remedy: str) -> _Invalid:
        self.problems.append(Problem(self.key, rule, remedy, self.where))
        return INVALID

    def child(self, suffix: str) -> ValueContext:
        return replace(self, key=self.key + suffix, text=False)


@cache
def leaves() -> dict[str, Leaf]:
    """Every key of a run by its dotted name, in the order of the dataclasses; those of its launch come last."""
    return {leaf.key: leaf for leaf in (*_leaves(Run, ""), *_leaves(Launch, "launch."))}


@cache
def sections() -> frozenset[str]:
    """Names of the tables: `model`, `model.rope_scaling`, `layout`, ..."""
    return frozenset(key.rpartition(".")[0] for key in leaves()) - {""}


def unknown_key(key: str, where: str, *, hints: bool = True) -> Problem:
    """Problem of an unknown key, with the nearest known keys if `hints`."""
    section, _, last = key.rpartition(".")
    nearest = _nearest(section, last) if hints else []
    remedy = (
        f"Did you mean {one_of(nearest)}?"
        if nearest
        else f"Keys of {f'[{section}]' if section else 'a run'} are {_names(section)}."
    )
    return Problem(key, "is not a key of a run", remedy, where)


def convert(value: Any, kind: Any, at: ValueContext) -> Any:
    """`value` converted to `kind`; `INVALID`, with a problem recorded in `at`, if that is impossible."""
    origin = get_origin(kind)
    if (inner := without_none(kind)) is not kind:
        return None if value is None or value in ("none", "None") else convert(value, inner, at)
    if origin is Literal:
        return _literal(value, get_args(kind), at)
    if origin is tuple:
        return _tuple(value, get_args(kind)[0], at)
    if is_dataclass(kind):
        return _dataclass(value, kind, at)
    return _CONVERT[kind](value, at)


def _leaves(cls: Any, prefix: str) -> list[Leaf]:
    hints, flat = get_type_hints(cls), []
    for field in fields(cls):
        kind, key = hints[field.name], prefix + field.name
        inner = next((k for k in (kind, *get_args(kind)) if is_dataclass(k)), None)
        if inner is not None and get_origin(kind) is not tuple:
            flat += _leaves(inner, f"{key}.")
        else:
            flat.append(Leaf(key, kind, default_of(field)))
    return flat


def default_of(field: Field) -> Any:
    """Default of a field, `MISSING` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def may_be_meant(known: str, written: str) -> bool:
    """True unless `known` is a key of the launch and `written` is not: the launch's `size` is of a disk."""
    return written.partition(".")[0] == "launch" or not known.startswith("launch.")


def _nearest(section: str, last: str) -> list[str]:
    """Keys that were probably meant: names in this section that hold the word, the same name elsewhere, a similar name in this
    section, a similar name elsewhere."""
    known = [key for key in (*leaves(), *STAND_INS, *sections()) if may_be_meant(key, section)]
    by_name: dict[str, list[str]] = {}
    for key in known:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    in_section = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    in_table = [key for key in by_name.get(last, ()) if section and key.startswith(f"{section.partition('.')[0]}.")]
    if last in ELSEWHERE and not in_table:
        return [ELSEWHERE[last]]
    if section and (holding := [key for name, key in in_section.items() if last in name.split("_") or name.startswith(last)]):
        return holding[:3]
    if last in by_name:
        return by_name[last]
    if close := get_close_matches(last, in_section, n=2, cutoff=0.6):
        return [in_section[name] for name in close]
    return [key for name in get_close_matches(last, by_name, n=1, cutoff=0.9) for key in by_name[name]]


def _names(section: str) -> str:
    known = (key.rpartition(".") for key in (*leaves(), *STAND_INS, *sections()))
    return ", ".join(dict.fromkeys(last for place, _, last in known if place == section)) or "of no such section"


def _described(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    words = {str: "the text ", list: "the list ", dict: "the table "}
    return f"{words.get(type(value), '')}{value!r}"


def _as_typed(value: Any, at: ValueContext) -> Any:
    """A value as typed on the command line, or as in a file."""
    return (value if value != "" else "empty") if at.text else _described(value)


def _literal(value: Any, options: tuple[Any, ...], at: ValueContext) -> Any:
    for option in options:
        if (str(option) == value and (at.text or isinstance(option, str))) or is_choice(value, option):
            return option
    quoted = not at.text and isinstance(value, str) and value in map(str, options)
    hint = "Choose one of them" + (", without the quotes." if quoted else ".")
    problem = choice_problem(at.key, value, options, hint=hint)
    return at.wrong(problem.rule, problem.remedy)


def _bool(value: Any, at: ValueContext) -> Any:
    if at.text and value in ("true", "false"):
        return value == "true"
    return (
        value if isinstance(value, bool) else at.wrong(f"must be true or false, is {_described(value)}", "Write true or false.")
    )


def _int(value: Any, at: ValueContext) -> Any:
    name = _name_of(at)
    if isinstance(value, str) and name in UNITS:
        parse, remedy = UNITS[name]
        try:
            return parse(value)
        except UnitError as error:
            return at.wrong(str(error), remedy)
    if isinstance(value, str) and (at.text or value[-1:].isalpha()):
        for parse in (int, parse_count):  # the first is exact
            with suppress(ValueError):
                if _COMMAS.fullmatch(value):
                    return parse(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return at.wrong(f"must be a whole number, is {_as_typed(value, at)}", _whole_remedy(value, at))


def _whole_remedy(value: Any, at: ValueContext) -> str:
    if not _NUMBER.fullmatch(str(value)):
        return "Write digits, such as 8 or 10k." if at.text else 'Write digits, such as 8 or "10k".'
    if (number := float(value)).is_integer() and abs(number) < 1e15:
        return f"Write {int(number)}."
    quoted = isinstance(value, str) and not at.text
    return "Write it without quotes and without a decimal point." if quoted else "Write it without a decimal point."


def _name_of(at: ValueContext) -> str:
    """Last word of a key or a flag: `seq_len` of `--seq-len`."""
    return at.key.rpartition(".")[2].lstrip("-").replace("-", "_")


def _float(value: Any, at: ValueContext) -> Any:
    unit = TIMES.get(_name_of(at).rpartition("_")[2])
    try:
        number = float(value) if (at.text or not isinstance(value, str)) and not isinstance(value, bool) else None
    except (ValueError, TypeError, OverflowError):
        number = None
    if number is None and unit and isinstance(value, str):
        with suppress(UnitError):
            number = parse_seconds(str(value)) / unit
    if number is None:
        remedy = "Write it as 0.1 or 3e-4." if at.text else "Write it without quotes, such as 3e-4."
        if unit:
            remedy = "Write it as 90, or with a unit, such as 30m." if at.text else 'Write it as 90, or as "30m".'
        return at.wrong(f"must be a number, is {_as_typed(value, at)}", remedy)
    return number if math.isfinite(number) else at.wrong(f"must be finite, is {number}", "Give an ordinary number.")


def _str(value: Any, at: ValueContext) -> Any:
    if at.key in TIME_KEYS and not isinstance(value, bool) and isinstance(value, str | int | float):
        try:
            parse_seconds(str(value))
        except UnitError as error:
            return at.wrong(str(error), 'Write "24h", "1d12h" or "90m".')
    if not isinstance(value, str):
        return at.wrong(f"must be text, is {_described(value)}", "Put it in quotes.")
    if _NEVER_IN_TEXT.search(value):  # a path cannot contain the first, nor a UTF-8 file the others
        return at.wrong(f"must be text without NUL and halves of characters, is {value!r}", "Leave them out.")
    return SCHEDULE_ALIASES.get(value.lower(), value) if at.key == "layout.schedule" else value


def _tuple(value: Any, kind: Any, at: ValueContext) -> Any:
    words = at.text and isinstance(value, str) and not value.lstrip().startswith("[")
    if at.text and isinstance(value, str):
        if words:
            value = [part.strip() for part in value.split(",") if part.strip()]
        else:
            try:
                value = parse_toml(f"v = {value}")["v"]
            except ValueError as error:
                return at.wrong(f"is not a list in TOML: {error}", 'Write [{path = "x", weight = 2.0}], or x,y.')
    if not isinstance(value, list | tuple):
        return at.wrong(f"must be a list, is {_described(value)}", "Put it in [brackets].")
    items = [convert(item, kind, replace(at.child(f"[{index}]"), text=words)) for index, item in enumerate(value)]
    return INVALID if any(item is INVALID for item in items) else tuple(items)


def _dataclass(value: Any, cls: Any, at: ValueContext) -> Any:
    """A table of a list, such as a source or a stage of the ramp; a plain text stands for its first field."""
    if isinstance(value, cls):
        return value
    hints, known = get_type_hints(cls), {field.name: field for field in fields(cls)}
    if isinstance(value, str) and hints[next(iter(known))] is str:
        value = {next(iter(known)): value}
    if not isinstance(value, dict):
        return at.wrong(
            f"must be a table with {', '.join(known)}, is {_described(value)}", "Write {" + next(iter(known)) + " = ...}."
        )
    values = {}
    for name, raw in value.items():
        if name in known:
            values[name] = convert(raw, hints[name], at.child(f".{name}"))
        elif cls is RampStage and name == "tokens_per_batch":
            values[name] = raw
        else:
            closest = get_close_matches(name, known, n=1) if len(at.problems) < MOST_PROBLEMS else []
            at.child(f".{name}").wrong(
                "is not a key here", f"Did you mean {closest[0]}?" if closest else f"Known: {', '.join(known)}."
            )
            values[name] = INVALID
    stands_for = {"sequences_per_batch"} if "tokens_per_batch" in values else set()
    for name in known.keys() - values.keys() - stands_for:
        if default_of(known[name]) is MISSING:
            values[name] = at.child(f".{name}").wrong("is missing", "Give it.")
    if any(v is INVALID for v in values.values()):
        return INVALID
    return values if stands_for else cls(**values)


_CONVERT = {bool: _bool, int: _int, float: _float, str: _str}


def setting_at(run: Any, key: str) -> Any:
    """Value of a dotted key; None below a section that is None."""
    for name in key.split("."):
        run = None if run is None else getattr(run, name)
    return run
