"""Resolution of files, presets and flags into a `Run`: every value with its source, all mistakes reported at once.

    default  <  preset or config.json  <  file that is extended  <  file  <  flag

A preset (or path) names a whole model, so it replaces the model of lower layers; fields beside it or above it change it.
`batch.tokens_per_batch` stands for `sequences_per_batch`. Paths of corpora and models are relative to the current folder;
`extends` is relative to its file.

The run folder keeps a resolved run as TOML (`to_toml`), which the workers read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ultrascale.catalogue.models.model_presets import PRESETS, preset
from ultrascale.config.layers import SettingsLayer, WrittenValue, read_files, read_flags, read_text
from ultrascale.config.ranges import MOST, range_problem
from ultrascale.config.rules.run_rules import run_problems
from ultrascale.config.schema import INVALID, ValueContext, convert, leaves
from ultrascale.description.architecture.families import FAMILIES
from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.problems import Problem, SpecError, expect_none
from ultrascale.description.run import RampStage, Run
from ultrascale.description.sections.launch import Launch
from ultrascale.description.sections.trackers import sinks_named
from ultrascale.description.units import UnitError, parse_tokens

Section = TypeVar("Section")
__all__ = ["Resolved", "resolve", "run_from_toml", "sequences_for_tokens", "to_toml"]

OF_CONFIG = "config.json of "
"""Beginning of the origin of a value that a model's folder gives."""
_WRITE_TOKENS = "Write 4M, 4Mi or 4194304."
_BATCH_TOLERANCE = 0.1
"""Largest fraction by which a batch of "4M" tokens is rounded to a size that divides over the ranks."""


@dataclass(frozen=True)
class Resolved:
    """A run, its launch section, and the source of each value."""

    run: Run
    provenance: dict[str, str]
    """Source by dotted key: `default`, `runs/a.toml:12`, `preset llama-3-8b`, `flag`, `derived ...`."""
    launch: Launch = field(default_factory=Launch)


def resolve(
    path: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    require_data: bool = False,
    processes: int | None = None,
    processes_flag: str = "--processes",
) -> Resolved:
    """Run of a TOML file (or a run folder, or nothing) and overrides.

    `overrides` are command-line words (`["--layout.dp", "4", "--compile"]`) or a mapping from dotted keys to values; `defaults`
    replace the fields' own, and rank below file and overrides. `require_data` requires a corpus, and a run that the trainer
    supports. `processes`: of the whole run; dp is what the other axes leave; `processes_flag`: the flag that set it. Raises
    SpecError with every mistake found.
    """
    problems: list[Problem] = []
    layers = [] if path is None else read_files(Path(path), problems)
    if path is not None and not layers:
        raise SpecError(problems)  # without its file, all further messages would be noise
    requested = None if processes is None else (processes, processes_flag)
    layers = [SettingsLayer({key: WrittenValue(value, "default") for key, value in (defaults or {}).items()}), *layers]
    return _resolve([*layers, read_flags(overrides, problems)], problems, require_data=require_data, processes=requested)


def run_from_toml(text: str, *, where: str = "run.toml") -> Run:
    """Run of a TOML text, such as `to_toml` writes. Raises SpecError that points at lines of `where`."""
    problems: list[Problem] = []
    layers = read_text(text, Path(where), problems)
    if not layers:
        raise SpecError(problems)
    return _resolve(layers, problems).run


class UnfitBatchError(UnitError):
    """The tokens of the batch are not a whole number of sequences; the message names the nearest that are."""


def sequences_for_tokens(tokens: str | int, sequence_length: int, *, multiple: int = 1) -> int:
    """Sequences of a batch of `tokens`: a multiple of `multiple` (data-parallel ranks x micro-batch size).

    A number must fit exactly. One with a suffix, such as "4M", is approximate and rounded to the nearest multiple, at most a
    tenth away. Raises UnfitBatchError that names the nearest sizes that fit, and UnitError if `tokens` is not a quantity.
    """
    unit = sequence_length * multiple
    count = parse_tokens(tokens) if isinstance(tokens, str) else tokens
    if count > MOST:
        raise UnitError(f"must be at most 2^53 tokens, is {tokens}")
    nearest = max(1, round(count / unit))
    exact = isinstance(tokens, int) or tokens.replace("_", "").replace(",", "").strip().isdigit()
    if count == nearest * unit or (not exact and abs(nearest * unit - count) <= _BATCH_TOLERANCE * count):
        return nearest * multiple
    options = sorted({max(1, count // unit) * unit, (count // unit + 1) * unit})
    raise UnfitBatchError(
        f"{tokens} tokens are not a whole number of sequences of {sequence_length} on every rank and micro-batch"
        f" ({multiple} at a time); nearest: {' or '.join(map(str, options))} tokens"
    )


def _resolve(
    layers: list[SettingsLayer],
    problems: list[Problem],
    *,
    require_data: bool = False,
    processes: tuple[int, str] | None = None,
) -> Resolved:
    entries = _model_entries(layers, problems) | _other_entries(layers, problems)
    values, bad = _convert_all(entries, problems)
    provenance = {key: entries[key].origin if key in entries else "default" for key in leaves()}
    if processes is not None:
        _derive_dp(*processes, entries, values, provenance, bad, problems)
    _fit_default_length(values, provenance)
    _batch_from_tokens(entries, values, provenance, bad, problems)
    if "log.sinks" not in entries and (sinks := sinks_named([*entries, *(key for layer in layers for key in layer.tables)])):
        values["log.sinks"], provenance["log.sinks"] = sinks, f"derived from [log.{sinks[0]}]"
    good = {
        key: value for key, value in values.items() if key not in bad
    }  # the others have their defaults, and no rule checks them
    run = _built(Run, good | {"model": _build_model(good, bad, problems, entries)})
    launch = _built(Launch, good, "launch.")
    rule_problems = _section_problems(run, bad)
    bad |= {problem.key for problem in rule_problems}
    rule_problems += [*run_problems(run, require_data=require_data, unreadable_keys=frozenset(bad)), *launch.problems()]
    problems += [_with_origin(_of_given_batch(problem, entries), provenance) for problem in rule_problems]
    expect_none(problems)
    return Resolved(run, provenance, launch)


def _other_entries(layers: list[SettingsLayer], problems: list[Problem]) -> dict[str, WrittenValue]:
    """Final value of every key outside the model. If the batch is given in two ways, the later layer wins."""
    entries: dict[str, WrittenValue] = {}
    rivals = ("batch.tokens_per_batch", "batch.sequences_per_batch")
    for layer in layers:
        _refuse_both(layer, rivals, problems)
        if any(key in layer.entries for key in rivals):
            entries = {key: entry for key, entry in entries.items() if key not in rivals}
        entries |= {key: entry for key, entry in layer.entries.items() if not key.startswith("model.")}
    return entries


def _model_entries(layers: list[SettingsLayer], problems: list[Problem]) -> dict[str, WrittenValue]:
    """Final value of every key of the model; fields of a chosen preset or folder rank below its own layer."""
    entries: dict[str, WrittenValue] = {}
    rivals = ("model.preset", "model.path")
    for layer in layers:
        _refuse_both(layer, rivals, problems)
        if chosen := next((key for key in rivals if key in layer.entries), None):
            entries = _entries_of_model(chosen, layer.entries[chosen], problems)
        if "model.rope_scaling" in layer.entries:
            entries = {key: entry for key, entry in entries.items() if not key.startswith("model.rope_scaling.")}
        scope = entries.get("model.router_aux_loss_scope")
        if "model.router_aux_loss_coef" in layer.entries and scope is not None and scope.value == "none":
            del entries["model.router_aux_loss_scope"]  # a coefficient that overrides a file or a preset is meant to be applied
        entries |= {k: e for k, e in layer.entries.items() if k.startswith("model.") and k not in rivals}
    return _with_derived_fields(entries) if "model" not in entries else entries


def _refuse_both(layer: SettingsLayer, rivals: tuple[str, str], problems: list[Problem]) -> None:
    if all(key in layer.entries for key in rivals):
        rule = f"is given beside {rivals[1]}: they say the same thing twice"
        problems.append(Problem(rivals[0], rule, "Keep one of the two.", layer.entries[rivals[0]].origin))


def _entries_of_model(key: str, entry: WrittenValue, problems: list[Problem]) -> dict[str, WrittenValue]:
    """Fields of the model that a `preset` or `path` names. If it cannot be read, the entry `model` remains as a mark."""
    unknown = {"model": WrittenValue(None, entry.origin)}
    value = convert(entry.value, str, ValueContext(key, entry.origin, entry.text, problems))
    if value is INVALID:
        return unknown
    try:
        if key == "model.preset":
            model = preset(value)
        else:
            from ultrascale.description.architecture.huggingface import from_hf  # here: most runs start from a preset

            model = from_hf(value)
    except SpecError as error:
        problems += [replace(p, where=p.where or entry.origin) for p in error.problems]
        return unknown
    origin = f"preset {model.name}" if key == "model.preset" else f"{OF_CONFIG}{value}"
    fields = asdict(model)
    scaling = fields.pop("rope_scaling") or {}
    entries = {f"model.{name}": WrittenValue(field, origin) for name, field in fields.items()}
    return entries | {f"model.rope_scaling.{name}": WrittenValue(field, origin) for name, field in scaling.items()}


def _with_derived_fields(entries: dict[str, WrittenValue]) -> dict[str, WrittenValue]:
    """Fill fields that a model written field by field omits: its family's fixed choices, one key/value head per query head, E =
    D / H."""
    if not entries:
        return entries
    kind = entries["model.model_type"].value if "model.model_type" in entries else "llama"
    derived: dict[str, WrittenValue] = {}
    for name, value in (FAMILIES[kind].fixed if isinstance(kind, str) and kind in FAMILIES else {}).items():
        if value != leaves()[f"model.{name}"].default:
            derived[f"model.{name}"] = WrittenValue(value, f"derived from model_type {kind}")
    hidden, heads = (entries.get(f"model.{name}") for name in ("hidden_size", "num_attention_heads"))
    if heads is not None:
        derived["model.num_key_value_heads"] = replace(heads, origin="derived from num_attention_heads")
    try:
        if hidden is not None and heads is not None:
            width = WrittenValue(int(hidden.value) // int(heads.value), "derived from hidden_size / num_attention_heads")
            derived["model.head_dim"] = width
    except (ValueError, TypeError, ArithmeticError):
        derived["model.head_dim"] = WrittenValue(1, "derived")  # hidden_size or heads are wrong, which is reported for them
    return derived | entries


def _convert_all(entries: dict[str, WrittenValue], problems: list[Problem]) -> tuple[dict[str, Any], set[str]]:
    """Values by key, and the keys that could not be read or are out of range."""
    values: dict[str, Any] = {}
    bad: set[str] = {"model"} if "model" in entries else set()
    for key, entry in entries.items():
        if key not in leaves():
            continue
        value = convert(entry.value, leaves()[key].kind, ValueContext(key, entry.origin, entry.text, problems))
        problem = None if value is INVALID else range_problem(key, value)
        if problem is not None:
            problems.append(replace(problem, where=entry.origin))
        if value is INVALID or problem is not None:
            bad.add(key)
        else:
            values[key] = value
    return values, bad


def _fit_default_length(values: dict[str, Any], provenance: dict[str, str]) -> None:
    """Shorten the default sequence length to the number of positions of the model."""
    key, positions = "batch.sequence_length", values.get("model.max_position_embeddings")
    if provenance[key] == "default" and positions is not None and positions < values.get(key, leaves()[key].default):
        values[key], provenance[key] = positions, "derived from model.max_position_embeddings"


def _derive_dp(
    processes: int,
    flag: str,
    entries: dict[str, WrittenValue],
    values: dict[str, Any],
    provenance: dict[str, str],
    bad: set[str],
    problems: list[Problem],
) -> None:
    """Set dp to what tp, cp and pp leave of `processes`."""
    axes = {key: values.get(f"layout.{key}", 1) for key in ("tp", "cp", "pp")}
    degrees = values.get("islands.dp") or ()
    axes |= {"the sum of islands.dp": sum(degrees)} if degrees else {"islands.count": values.get("islands.count", 1)}
    divisor, dp_entry = prod(axes.values()), entries.get("layout.dp")
    formula = " x ".join(f"{key} = {size}" for key, size in axes.items() if size > 1) or "1"
    if processes < 1:
        remedy = "Leave it out to start as many as the layout needs."
        problems.append(Problem(flag, f"must be at least 1, is {processes}", remedy))
    elif processes % divisor:
        nearest = max(1, round(processes / divisor)) * divisor
        are = "1 process is" if processes == 1 else f"{processes:,} processes are"
        rule = f"{are} not a multiple of {formula}, which the layout cuts each replica over"
        problems.append(Problem(flag, rule, f"Take {nearest}, or change an axis."))
    elif degrees:
        if processes != divisor:
            problems.append(Problem(flag, f"is {processes:,}, and {formula} is {divisor:,}", "Leave it out."))
        return
    elif dp_entry is not None and dp_entry.origin == "flag" and values.get("layout.dp") not in (None, processes // divisor):
        rule = f"{processes} processes leave dp = {processes // divisor} beside {formula}, but the flag says {dp_entry.value}"
        problems.append(Problem("layout.dp", rule, "Leave out one of the two."))
    else:
        values["layout.dp"], provenance["layout.dp"] = processes // divisor, f"{flag} {processes}"
        bad.discard("layout.dp")
        return
    bad.add("layout.dp")


def _batch_from_tokens(
    entries: dict[str, WrittenValue], values: dict[str, Any], provenance: dict[str, str], bad: set[str], problems: list[Problem]
) -> None:
    """Convert `tokens_per_batch`, of the batch and of the ramp's stages, to sequences."""
    keys = ("batch.sequence_length", "layout.dp", "layout.micro_batch_size", "islands.count", "islands.dp")
    length, dp, micro, islands, degrees = (values.get(key, leaves()[key].default) for key in keys)
    known = not bad & {*keys} and dp > 0 and micro > 0

    def sequences(key: str, tokens: Any, origin: str) -> int | None:
        if not isinstance(tokens, str | int) or isinstance(tokens, bool) or (isinstance(tokens, int) and tokens < 1):
            problems.append(Problem(key, f"must be a number of tokens, is {tokens!r}", _WRITE_TOKENS, origin))
        elif known:
            try:
                return sequences_for_tokens(tokens, length, multiple=(sum(degrees) or dp * islands) * micro)
            except UnfitBatchError as error:
                problems.append(Problem(key, str(error), "Choose one of these, or another layout.", origin))
            except UnitError as error:
                problems.append(Problem(key, str(error), _WRITE_TOKENS, origin))
        return None

    if (entry := entries.get("batch.tokens_per_batch")) is not None:
        count = sequences("batch.tokens_per_batch", entry.value, entry.origin)
        values["batch.sequences_per_batch"] = count
        source = f"tokens_per_batch {entry.value} ({entry.origin})"
        provenance["batch.sequences_per_batch"] = f"derived from {source}: {(count or 0) * length:,} tokens"
        if count is None:
            bad.add("batch.sequences_per_batch")
    stages = []
    for index, stage in enumerate(values.get("batch.ramp", ())):
        if isinstance(stage, dict):
            key, origin = f"batch.ramp[{index}]", provenance["batch.ramp"]
            if "sequences_per_batch" in stage:
                rule = "is given beside sequences_per_batch: they say the same thing twice"
                problems.append(Problem(f"{key}.tokens_per_batch", rule, "Keep one of the two.", origin))
            count = sequences(f"{key}.tokens_per_batch", stage["tokens_per_batch"], origin)
            bad |= {"batch.ramp"} if count is None else set()
            stage = RampStage(stage["until_tokens"], count or 1)
        stages.append(stage)
    values["batch.ramp"] = tuple(stages)


def _built(kind: type[Section], values: Mapping[str, Any], prefix: str = "") -> Section:
    """A section, and the sections inside it, of `values` by dotted key; what is missing has its default."""
    hints, given = get_type_hints(kind), {}
    for name, hint in hints.items():
        if prefix + name in values:
            given[name] = values[prefix + name]
        elif is_dataclass(hint):
            given[name] = _built(hint, values, f"{prefix}{name}.")  # type: ignore[arg-type]
    return kind(**given)


def _build_model(good: dict[str, Any], bad: set[str], problems: list[Problem], entries: dict[str, WrittenValue]) -> Model:
    placeholder = PRESETS["tiny-llama"]
    if not any(key.startswith("model") for key in entries):
        rule = "is missing: nothing says which model"
        problems.append(Problem("model", rule, 'Write [model] preset = "llama-3-8b", path = "FOLDER", or its fields.'))
        bad.add("model")
    if "model" in bad:
        return placeholder
    required_keys = [key for key, leaf in leaves().items() if key.startswith("model.") and leaf.default is MISSING]
    derived = [] if "model.num_attention_heads" in entries else ["model.num_key_value_heads", "model.head_dim"]
    for key in required_keys:
        needed = not key.startswith("model.rope_scaling.") or any(k.startswith("model.rope_scaling.") for k in entries)
        if needed and key not in (*good, *bad, *derived):
            problems.append(Problem(key, "is missing", "Give it, or start from model.preset or model.path."))
            bad.add(key)
    if any(key.startswith("model.") for key in bad):
        bad.add("model")
        return placeholder
    if any(key.startswith("model.rope_scaling.") for key in good):
        good = good | {"model.rope_scaling": _built(RopeScaling, good, "model.rope_scaling.")}
    return _built(Model, good, "model.")


def _section_problems(run: Run, bad: set[str]) -> list[Problem]:
    problems = [] if "model" in bad else run.model.problems()
    return problems if any(key.startswith("layout.") for key in bad) else problems + run.layout.problems()


def _of_given_batch(problem: Problem, entries: dict[str, WrittenValue]) -> Problem:
    """`problem` of the number of steps under the batch's key, if that was given and the steps were not."""
    if problem.key != "steps" or "steps" in entries:
        return problem
    given = [key for key in ("batch.tokens_per_batch", "batch.sequences_per_batch") if key in entries]
    return replace(problem, key=given[0], where=entries[given[0]].origin) if given else problem


def _with_origin(problem: Problem, provenance: dict[str, str]) -> Problem:
    """`problem` with the source of its key, or of the list that contains its key."""
    key = problem.key.partition("[")[0]
    return problem if problem.where else replace(problem, where=provenance.get(key, ""))


_HEAD = "# A resolved run: every value that decides what it computes. Read again, it gives the same run.\n"


def to_toml(run: Run) -> str:
    """TOML of every field of `run`, including defaults; `resolve` returns `run` from it. None is written as "none"."""
    return _HEAD + "\n".join(_section(run, "")) + "\n"


def _section(item: Any, name: str) -> list[str]:
    plain = [f"[{name}]"] if name else []
    tables: list[str] = []
    for setting in fields(item):
        value = getattr(item, setting.name)
        if is_dataclass(value):
            tables += ["", *_section(value, f"{name}.{setting.name}" if name else setting.name)]
        else:
            plain.append(f"{setting.name} = {toml_value(value)}")
    return plain + tables


def toml_value(value: Any) -> str:
    """A setting as a TOML value."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, except for DEL, which TOML also requires to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {toml_value(item)}" for name, item in value.items()) + "}"
    return toml_value(str(value)) if isinstance(value, PathLike) else repr(value)
