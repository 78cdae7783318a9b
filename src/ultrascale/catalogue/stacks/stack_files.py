"""The trainers that are planned for, one file each in `catalogue/stacks`: what they do, and where that was read.

title, release      what it is, and the release that was read
words, near         what a run's `framework` says where it is this program, or one it stands for
extends             the stack whose settings, habits and abilities it has where it says nothing
writes              whose settings `--print-flags` prints
[settings]          fields of `catalogue.stacks.stack.Stack`: key = { is = VALUE, from = "where it was read" }; `shared` names a
                    number that several stacks have because it is of all programs of their kind
[usual]             what its runs do where nobody says: `Usual`
[can]               what it can be asked for: `Abilities`
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ultrascale.catalogue.stacks.stack import OPTIMIZERS, Kernels, Overheads, Stack
from ultrascale.description.layout import CpMethod
from ultrascale.description.problems import Problem, SpecError, mistake

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Abilities:
    """Abilities of one framework. Read off its arguments; `plan.view.flags` prints them."""

    zero_stages: tuple[int, ...] = (0,)
    zero_stages_with_pipeline: tuple[int, ...] = ()
    hybrid_stages: tuple[int, ...] = ()
    """ZeRO stages whose state can be cut over a part of the data-parallel ranks, and repeated by the others."""
    tensor: bool = True
    cp_methods: tuple[str, ...] = ()
    """Empty: no context parallelism."""
    cp_alone: bool = False
    """Context parallelism goes with neither tensor parallelism nor a pipeline."""
    schedules: tuple[str, ...] = ()
    """Empty: no pipeline."""
    experts: bool = False
    expert_tensor: bool = False
    recompute: tuple[str, ...] = ("none", "full")
    modules: tuple[str, ...] = ()
    """Parts of a block that can be recomputed by their names (`description.recomputed.MODULES`)."""
    any_micro_batches: bool = False
    """Interleaved pipelines run any number of micro-batches; else they want a multiple of pp."""
    equal_stages: bool = False
    """All stages but the last hold as many layers: a number of layers a stage is what can be asked for."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    optimizers: tuple[str, ...] = ("adamw",)
    offloads_optimizer: bool = False
    offloads_activations: bool = False
    cp_pieces: int = 1
    """Pieces of equal length that a rank holds of a sequence under cp: 2 where an early and a late one must be as long."""

    def cuts(self, num_layers: int, num_stages: int) -> bool:
        """True if so many layers can be split into so many stages."""
        return not self.equal_stages or -(-num_layers // -(-num_layers // num_stages)) == num_stages

    @property
    def every_zero_stage(self) -> tuple[int, ...]:
        """ZeRO stages, with or without a pipeline."""
        return tuple(sorted({*self.zero_stages, *self.zero_stages_with_pipeline}))

    @property
    def hybrid(self) -> bool:
        return bool(self.hybrid_stages)


@dataclass(frozen=True)
class Usual:
    """Usual settings of a framework's runs, where the run gives none. Of several values all are priced, and the fastest that
    fits is taken."""

    zero_stage: int = 1
    zero_stage_with_pipeline: int | None = None
    """ZeRO stage with a pipeline; None: the same as without."""
    recompute: tuple[str, ...] = ("none", "full")
    sequence_parallel: bool = True
    """Sequence parallelism beside tensor parallelism."""
    expert_tp: Literal["tp", "none"] = "none"
    """Experts are cut as the rest is, or are whole."""
    cp_method: CpMethod = "ring"
    virtual_stages: tuple[int, ...] | Literal["any"] = (1,)
    """Stages a rank, of a pipeline whose schedule has several; any: what divides the layers."""
    micro_batch_in_pipeline: int | None = None
    """Sequences of a pipeline's micro-batch. None: open."""
    micro_batches_in_pipeline: Literal["pp"] | None = None
    """Micro-batches in a pipeline: as many as stages, where that divides the batch."""
    predicts_further: bool = False
    """True if it trains DeepSeek-V3's multi-token prediction."""
    flops: str = "model_full"
    """Convention by which the framework counts FLOPs (`validation.cells.flops_conventions`)."""
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings of the stack that differ between its runs, each with its values."""
    settings_in: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Settings that hold for runs in one precision alone."""

    def open_settings(self, precision: str) -> dict[str, tuple[Any, ...]]:
        """Settings that differ between runs in this precision."""
        options = {key: tuple(values) for key, values in self.settings.items()}
        return options | {key: tuple(values) for key, values in self.settings_in.get(precision, {}).items()}


@dataclass(frozen=True)
class StackFile:
    """One file of `catalogue/stacks`, with what it extends."""

    stack: Stack
    title: str
    release: str
    words: tuple[str, ...]
    near: tuple[str, ...]
    depth: int
    """Number of other stacks it extends, one through the other."""
    writes: str
    judged_by: tuple[str, ...]
    """Sources of measured runs that are all that is known of it: where they are left out, so is this."""
    usual: Usual
    can: Abilities
    sources: Mapping[str, str]
    """Source of each setting's value."""
    shared: Mapping[str, str]
    """Name of the number, for each setting whose number several stacks share."""


@cache
def stack_file(name: str) -> StackFile:
    """The file of this name. Raises SpecError with the names there are."""
    if name not in stack_names():
        remedy = f"Choose one of {', '.join(stack_names())}."
        raise mistake("stack", f"there is no trainer called {name!r}", _nearest(name, stack_names(), remedy))
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    base = stack_file(table["extends"]) if "extends" in table else None
    leaves = dict(_leaves(table.get("settings", {})))
    stack = with_settings(
        replace(base.stack, name=name) if base else Stack(name), {key: leaf["is"] for key, leaf in leaves.items()}
    )
    usual, can = dict(table.get("usual", {})), table.get("can")
    return StackFile(
        stack,
        table["title"],
        table["release"],
        tuple(table.get("words", ())),
        tuple(table.get("near", ())),
        base.depth + 1 if base else 0,
        table.get("writes", base.writes if base else name),
        tuple(table.get("judged_by", ())),
        replace(base.usual if base else Usual(), **_tuples(usual)),
        Abilities(**_tuples(can)) if can is not None else base.can if base else Abilities(),
        {**(base.sources if base else {}), **{key: leaf["from"] for key, leaf in leaves.items()}},
        {**(base.shared if base else {}), **{key: leaf["shared"] for key, leaf in leaves.items() if "shared" in leaf}},
    )


@cache
def stack_names() -> tuple[str, ...]:
    """All there are: ours, then the others by name."""
    names = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return ("ultrascale", *(name for name in names if name != "ultrascale"))


def stack_called(name: str) -> Stack:
    """The stack of this name. Raises SpecError with the names there are."""
    return stack_file(name).stack


def abilities(stack: Stack) -> Abilities:
    """Abilities of `stack`; a stack of one's own can run everything."""
    return stack_file(stack.name if stack.name in stack_names() else "ultrascale").can


def program_of(framework: str, without: frozenset[str] = frozenset()) -> tuple[str, bool] | None:
    """The stack that the name of a program means, and whether it is that program or one like it; None if nobody knows it.

    Of the words that are found the program's own count before those of what it is like, those of a stack that extends another
    before the other's, longer ones before shorter ones. `without`: sources of measured runs of which nothing may be known.
    """
    text, matches = framework.lower(), []
    for name in stack_names():
        file = stack_file(name)
        if file.judged_by and without.issuperset(file.judged_by):
            continue
        for exact, words in ((True, file.words), (False, file.near)):
            matches += [(exact, file.depth, len(word), name) for word in words if word in text]
    if not matches:
        return None
    exact, _, _, name = max(matches)
    return name, exact


def with_settings(stack: Stack, settings: Mapping[str, Any]) -> Stack:
    """The stack with some of its fields changed, such as {"dispatcher": "deepep", "kernels.attention": "math"}.

    Values are of the field's type, or text that says one, as on a command line. Raises SpecError naming each that is wrong.
    """
    problems: list[Problem] = []
    changes: dict[str, dict[str, Any]] = {"": {}, "kernels": {}, "overheads": {}}
    for key, value in settings.items():
        kind = setting_types().get(key)
        if kind is None:
            remedy = _nearest(key, list(setting_types()), "`ultrascale show stacks` lists them.")
            problems.append(Problem(f"stack.{key}", "is no setting of a trainer", remedy))
            continue
        try:
            part, _, name = key.rpartition(".")
            changes[part][name] = _converted(kind, value)
        except ValueError as error:
            problems.append(Problem(f"stack.{key}", f"must be {error}, is {value!r}", "Correct it."))
    if problems:
        raise SpecError(problems)
    if "optimizer" in changes[""] and "moment_bytes" not in changes[""]:
        changes[""]["moment_bytes"] = OPTIMIZERS[changes[""]["optimizer"]]
    return replace(
        stack,
        **changes[""],
        kernels=replace(stack.kernels, **changes["kernels"]),
        overheads=replace(stack.overheads, **changes["overheads"]),
    )


def changed_stack(name: str, settings: Mapping[str, Any]) -> Stack:
    """The stack of this name with some settings changed. Raises SpecError, also where they are of our own trainer."""
    stack = stack_called(name)
    if settings and name == "ultrascale":
        remedy = "Name another trainer with --stack, or leave it out: ours has its settings in the run's file."
        raise SpecError([Problem(f"stack.{key}", "is a setting of other trainers' stacks", remedy) for key in settings])
    return with_settings(stack, settings)


def changed_settings(stack: Stack) -> dict[str, Any]:
    """The settings that are not those of its file; the optimizer, which has a flag of its own, left out."""
    if stack.name not in stack_names():
        return settings_of(stack)
    defaults = settings_of(stack_file(stack.name).stack) | {"optimizer": stack.optimizer, "moment_bytes": stack.moment_bytes}
    return {key: value for key, value in settings_of(stack).items() if value != defaults[key]}


def settings_of(stack: Stack) -> dict[str, Any]:
    """Every setting of a stack by its key."""
    parts = {"kernels": stack.kernels, "overheads": stack.overheads}
    settings = {}
    for key in setting_types():
        part, _, name = key.rpartition(".")
        settings[key] = getattr(parts[part] if part else stack, name)
    return settings


@cache
def setting_types() -> dict[str, Any]:
    """The type of every setting, by its key."""
    types: dict[str, Any] = {}
    for prefix, kind in (("", Stack), ("kernels.", Kernels), ("overheads.", Overheads)):
        hints = get_type_hints(kind)
        types |= {prefix + item.name: hints[item.name] for item in fields(kind) if not is_dataclass(hints[item.name])}
    types["optimizer"] = Literal[tuple(OPTIMIZERS)]
    del types["name"]
    return types


def _converted(kind: Any, value: Any) -> Any:
    """A value of this type. Raises ValueError with what it should have been."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"one of {', '.join(map(str, get_args(kind)))}")
        return value
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise ValueError("true or false")
        return words[str(value).lower()]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError("a number") from None
    if isinstance(value, bool) or not 0 <= number < 1e12:
        raise ValueError("a number from 0 to 1e12")
    if kind is int:
        if number != int(number):
            raise ValueError("a whole number")
        return int(number)
    return number


def _nearest(word: str, known: Sequence[str], otherwise: str) -> str:
    similar = get_close_matches(word, known, n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(similar)}?" if similar else otherwise


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in table.items():
        if "is" in value:
            yield prefix + key, value
        else:
            yield from _leaves(value, f"{prefix}{key}.")


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


class _Stacks(Mapping[str, Stack]):
    """Every stack by its name, each read when it is asked for."""

    def __getitem__(self, name: str) -> Stack:
        if name not in stack_names():
            raise KeyError(name)
        return stack_file(name).stack

    def __iter__(self) -> Iterator[str]:
        return iter(stack_names())

    def __len__(self) -> int:
        return len(stack_names())


STACKS: Mapping[str, Stack] = _Stacks()
