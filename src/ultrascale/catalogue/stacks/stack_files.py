"""Training frameworks that can be planned for, one file each in `catalogue/stacks`: their behaviour, and the source of each
fact.

title, release      name of the framework, and the release that was read
words, near         values of a run's `framework` that mean this program, or a similar one
extends             the stack that provides settings, defaults and abilities that the file omits
writes              framework whose settings `--print-flags` prints
[settings]          fields of `catalogue.stacks.stack.Stack`: key = { is = VALUE, from = "its source" }; `shared` names a number
                    that several stacks share because it holds for all programs of their kind
[usual]             settings of its runs if none are given: `Usual`
[can]               supported settings: `Abilities`; `all` for every name of `EVERY`
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ultrascale.catalogue.stacks.stack import OPTIMIZERS, Kernels, Overheads, Stack
from ultrascale.catalogue.tables import Entry, entries
from ultrascale.description.layout import CpMethod
from ultrascale.description.problems import Problem, SpecError, did_you_mean, mistake
from ultrascale.description.recomputed import MODULES

FOLDER = Path(__file__).parent
EVERY = {"modules": tuple(MODULES), "optimizers": tuple(OPTIMIZERS)}
"""Abilities that a file may state as `all`: a new one is then this package's too."""


@dataclass(frozen=True)
class Abilities:
    """Abilities of one framework, read from its arguments. `plan.flags` prints them."""

    zero_stages: tuple[int, ...] = (0,)
    zero_stages_with_pipeline: tuple[int, ...] = ()
    hybrid_stages: tuple[int, ...] = ()
    """ZeRO stages whose state can be sharded over a part of the data-parallel ranks and replicated over the rest (HSDP)."""
    tensor: bool = True
    shards_beside_tensor: bool = False
    """Data parallelism beside tensor or context parallelism shards the training state: no ZeRO 0 there."""
    sequence: bool = True
    """Sequence parallelism beside tensor parallelism."""
    cp_methods: tuple[str, ...] = ()
    """Supported methods; empty: no context parallelism."""
    cp_alone: bool = False
    """Context parallelism excludes tensor parallelism and pipelines."""
    schedules: tuple[str, ...] = ()
    """Supported pipeline schedules; empty: no pipeline."""
    experts: bool = False
    expert_tensor: bool = False
    recompute: tuple[str, ...] = ("none", "full")
    modules: tuple[str, ...] = ()
    """Parts of a block that can be recomputed by name (`description.recomputed.MODULES`)."""
    any_micro_batches: bool = False
    """Interleaved pipelines run any number of micro-batches; else it must be a multiple of pp."""
    equal_stages: bool = False
    """All stages but the last hold the same number of layers: the framework takes a number of layers per stage."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    optimizers: tuple[str, ...] = ("adamw",)
    offloads_optimizer: bool = False
    offloads_activations: bool = False
    cp_pieces: int = 1
    """Equal pieces of a sequence that a rank of cp holds: 2 if an early and a late piece must have the same length."""

    def cuts(self, num_layers: int, num_stages: int) -> bool:
        """True if this many layers can be split into this many stages."""
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
    """Default settings of a framework's runs, if the run gives none. Of several values all are predicted, and the fastest that
    fits is chosen."""

    zero_stage: int = 1
    zero_stage_with_pipeline: int | None = None
    """ZeRO stage with a pipeline; None: the same as without."""
    recompute: tuple[str, ...] = ("none", "full")
    sequence_parallel: bool = True
    """Sequence parallelism together with tensor parallelism."""
    expert_tp: Literal["tp", "none"] = "none"
    """tp: experts are sharded like the other weights, but whole beside ep if they are narrower than the model; none: they are
    not."""
    cp_method: CpMethod = "ring"
    virtual_stages: tuple[int, ...] | Literal["any"] = (1,)
    """Virtual pipeline stages per rank, for schedules with several; any: every number that divides the layers."""
    micro_batch_in_pipeline: int | None = None
    """Micro-batch size in a pipeline, in sequences. None: open."""
    micro_batches_in_pipeline: Literal["pp"] | None = None
    """Micro-batches in a pipeline: as many as stages, if that divides the batch."""
    predicts_further: bool = False
    """True if DeepSeek-V3's multi-token prediction is trained."""
    flops: str = "model_full"
    """Convention by which the framework counts FLOPs (`validation.cells.flops_conventions`)."""
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Stack settings that differ between its runs, each with its values; not open where an extending file states them."""
    settings_in: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Settings that apply only to runs in one precision."""

    def open_settings(self, precision: str) -> dict[str, tuple[Any, ...]]:
        """Settings that differ between runs in this precision."""
        options = {key: tuple(values) for key, values in self.settings.items()}
        return options | {key: tuple(values) for key, values in self.settings_in.get(precision, {}).items()}


@dataclass(frozen=True)
class StackFile:
    """One file of `catalogue/stacks`, combined with those that it extends."""

    stack: Stack
    title: str
    release: str
    words: tuple[str, ...]
    near: tuple[str, ...]
    depth: int
    """Number of stacks that it extends, one through the other."""
    writes: str
    judged_by: tuple[str, ...]
    """Sources of measured runs that are all that is known of it: if they are left out, so is the stack."""
    usual: Usual
    can: Abilities
    sources: Mapping[str, str]
    """Source of each setting's value."""
    shared: Mapping[str, str]
    """Name of the shared number, for each setting whose number several stacks share."""


@cache
def stack_file(name: str) -> StackFile:
    """The file with this name. Raises SpecError with the known names."""
    if name not in stack_names():
        program, remedy = program_of(name), f"Choose one of {', '.join(stack_names())}."
        remedy = f"{program[0]} stands for it." if program else did_you_mean(name, stack_names(), remedy, most=2)
        raise mistake("stack", f"there is no trainer called {name!r}", remedy)
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    expect_known_keys(f"{name}.toml", table)
    base = stack_file(table["extends"]) if "extends" in table else None
    leaves = dict(_leaves(table.get("settings", {})))
    stack = with_settings(
        replace(base.stack, name=name) if base else Stack(name), {key: leaf["is"] for key, leaf in leaves.items()}
    )
    inherited = base.usual if base else Usual()
    stated = replace(
        inherited,
        settings=_without(inherited.settings, leaves),
        settings_in={precision: _without(choices, leaves) for precision, choices in inherited.settings_in.items()},
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
        replace(stated, **_tuples(usual)),
        Abilities(**_tuples(can)) if can is not None else base.can if base else Abilities(),
        {**(base.sources if base else {}), **{key: leaf["from"] for key, leaf in leaves.items()}},
        {
            **_without(base.shared if base else {}, leaves),
            **{key: leaf["shared"] for key, leaf in leaves.items() if "shared" in leaf},
        },
    )


def expect_known_keys(file: str, table: Mapping[str, Any]) -> None:
    """Raises SpecError for a key that nothing reads, and a setting without its source."""
    Entry(file, table).expect_only(*_KEYS, *_PARTS, "settings")
    for part, kind in _PARTS.items():
        Entry(f"{file}: {part}", table.get(part, {})).expect_only(*(item.name for item in fields(kind)))
    for _, setting in entries(f"{file}: settings", dict(_leaves(table.get("settings", {}))), "is", "from", "shared"):
        setting.get("from", str)


_KEYS = ("title", "release", "extends", "writes", "words", "near", "judged_by")
_PARTS = {"usual": Usual, "can": Abilities}


def _without(inherited: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a file inherits, without those whose value it states."""
    return {key: value for key, value in inherited.items() if key not in stated}


@cache
def stack_names() -> tuple[str, ...]:
    """All names: this package's, then the others in alphabetical order."""
    names = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return ("ultrascale", *(name for name in names if name != "ultrascale"))


def stack_called(name: str) -> Stack:
    """The stack with this name. Raises SpecError with the known names."""
    return stack_file(name).stack


def abilities(stack: Stack) -> Abilities:
    """Abilities of `stack`; a user's own stack can run everything."""
    return stack_file(stack.name if stack.name in stack_names() else "ultrascale").can


def program_of(framework: str, without: frozenset[str] = frozenset()) -> tuple[str, bool] | None:
    """Stack that the name of a program refers to, and true if it is that program, false if a similar one; None if unknown.

    Of the words that match, the program's own precede those of similar ones, those of a stack that extends another precede the
    other's, and longer ones precede shorter ones. `without`: sources of measured runs that must not be used.
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

    Values have the field's type, or are text as on a command line. Raises SpecError that names each invalid one.
    """
    problems: list[Problem] = []
    changes: dict[str, dict[str, Any]] = {"": {}, "kernels": {}, "overheads": {}}
    for key, value in settings.items():
        kind = setting_types().get(key)
        if kind is None:
            remedy = did_you_mean(key, setting_types(), "`ultrascale show stacks` lists them.", most=2)
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
    """The stack with this name, with some settings changed. Raises SpecError, also for settings of this package's own
    trainer."""
    stack = stack_called(name)
    if settings and name == "ultrascale":
        remedy = "Name another trainer with --stack, or leave it out: ours has its settings in the run's file."
        raise SpecError([Problem(f"stack.{key}", "is a setting of other trainers' stacks", remedy) for key in settings])
    return with_settings(stack, settings)


def in_precision(stack: Stack, precision: str, stated: Collection[str]) -> Stack:
    """The stack with the settings that its file has for runs in this precision, except those `stated` and those still open."""
    ways = stack_file(stack.name).usual.settings_in.get(precision, {})
    return with_settings(stack, {key: way[0] for key, way in ways.items() if len(way) == 1 and key not in stated})


def changed_settings(stack: Stack) -> dict[str, Any]:
    """Settings that differ from its file, except the optimizer, which has a flag of its own."""
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
    """Type of every setting, by its key."""
    types: dict[str, Any] = {}
    for prefix, kind in (("", Stack), ("kernels.", Kernels), ("overheads.", Overheads)):
        hints = get_type_hints(kind)
        types |= {prefix + item.name: hints[item.name] for item in fields(kind) if not is_dataclass(hints[item.name])}
    types["optimizer"] = Literal[tuple(OPTIMIZERS)]
    del types["name"]
    return types


def _converted(kind: Any, value: Any) -> Any:
    """A value converted to this type. Raises ValueError with the expected form."""
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


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in table.items():
        if "is" in value:
            yield prefix + key, value
        else:
            yield from _leaves(value, f"{prefix}{key}.")


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: EVERY[key] if value == "all" else tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
    }


class _Stacks(Mapping[str, Stack]):
    """Every stack by its name, read on first access."""

    def __getitem__(self, name: str) -> Stack:
        if name not in stack_names():
            raise KeyError(name)
        return stack_file(name).stack

    def __iter__(self) -> Iterator[str]:
        return iter(stack_names())

    def __len__(self) -> int:
        return len(stack_names())


STACKS: Mapping[str, Stack] = _Stacks()
