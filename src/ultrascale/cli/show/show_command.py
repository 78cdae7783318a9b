"""`ultrascale show`: a run with the source of every value, and the catalogues of models and machines."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table

from ultrascale.api.stamp import stamped
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.config.resolve import Resolved, resolve
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.config.schema import leaves, setting_at
from ultrascale.config.train_defaults import train_defaults
from ultrascale.console import plain_table
from ultrascale.description.problems import did_you_mean, mistake
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes, format_bytes_per_second, format_count, format_flops_per_second

SHOWN = ("models", "clusters", "stacks", "keys", "rules", "schema", "schedule", "schedules")
TITLES_FROM = 120
"""Columns of a terminal from which the full name of an accelerator stands beside its short one."""
SYNONYMS = {
    "presets": "models", "preset": "models", "gpus": "clusters", "machines": "clusters", "accelerators": "clusters",
    "trainers": "stacks", "frameworks": "stacks", "settings": "keys", "config": "keys",
}  # fmt: skip
"""Synonyms of the words for catalogues."""


@dataclass(frozen=True)
class ShowOptions:
    """Show a run as it would be trained, with the source of every value; or a catalogue of models or machines.

    Any setting can follow as a dotted flag (`ultrascale show keys` lists them):

        ultrascale show runs/tiny-llama-cpu.toml --resolved --layout.dp 2

    The catalogues:

        ultrascale show models

        ultrascale show models qwen3

        ultrascale show clusters --resolved

        ultrascale show stacks megatron

    All configuration keys, the rules across them, and the JSON Schemas of run.toml and of the output of verbs:

        ultrascale show keys recompute

        ultrascale show rules compile

        ultrascale show schema run.toml

    Pipeline schedules, drawn and compared (see `show schedule --help`):

        ultrascale show schedule 1f1b --pp 4 --micro-batches 8

        ultrascale show schedules --pp 8 --micro-batches 32
    """

    what: str
    """TOML file or folder of a run, or `models`, `clusters`, or `stacks`: the frameworks that can be planned for."""
    resolved: bool = False
    """Show every value, including defaults; for clusters, the source of each number."""
    json: bool = False
    """Print one JSON object."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0, or raises SpecError with every mistake in the configuration."""
    if arguments[:1] in (["schedule"], ["schedules"]):
        from ultrascale.cli.show import show_schedule

        return show_schedule.command(arguments)
    if arguments and arguments[0] in ("keys", "rules", "schema", "stacks"):
        return import_module(f"ultrascale.cli.show.show_{arguments[0]}").command(arguments[1:])
    options, overrides = parse_with_overrides(ShowOptions, "show", arguments, positional={"what": None})
    what, every, as_json = options.what, options.resolved, options.json
    if what in ("models", "clusters"):
        if len(overrides) > 1 or any(word.startswith("-") for word in overrides):
            rule = f"takes no settings and at most one name, but {' '.join(overrides)} is given"
            raise mistake(f"show {what}", rule, "Leave it out.")
        name = overrides[0].lower() if overrides else ""
        if what == "models":
            models_catalogue(name, as_json=as_json)
        else:
            clusters_catalogue(name, as_json=as_json, sources=every)
    else:
        _expect_known(what)
        resolved, _ = train_defaults(resolve(what, overrides))
        _expect_schedule(resolved.run)
        show_run(resolved, every=every, as_json=as_json)
    return 0


def _expect_known(what: str) -> None:
    """Raises SpecError for a word that is neither a file nor something that can be shown, with the most similar one."""
    if Path(what).exists() or what.endswith(".toml") or "/" in what:
        return
    closest = [SYNONYMS[what]] if what in SYNONYMS else get_close_matches(what, SHOWN, n=1)
    remedy = (
        f"Did you mean `ultrascale show {closest[0]}`?" if closest else f"Give a run's TOML file, or one of {', '.join(SHOWN)}."
    )
    raise mistake("show", f"`{what}` is neither a file nor something that can be shown", remedy)


def _expect_schedule(run: Run) -> None:
    """Raises SpecError if the run's schedule is a file that does not exist, or does not suit the run."""
    from ultrascale.plan.memory.replay import num_micro_batches
    from ultrascale.schedules.build import is_file
    from ultrascale.schedules.for_layout import schedule_of

    if run.layout.pp > 1 and is_file(run.layout.schedule):
        schedule_of(run.layout, num_micro_batches(run.layout, run.batch.sequences_per_batch))


def show_run(resolved: Resolved, *, every: bool, as_json: bool) -> None:
    """Print the values of a run with their sources; without `every`, only those that are not defaults."""
    if as_json:
        document = {"run": asdict(resolved.run), "launch": asdict(resolved.launch), "provenance": resolved.provenance}
        print_json(document | {"notes": run_notes(resolved.run)}, "run", indent=2)
        return
    table = plain_table("key", "value", "from", whole=("key", "from"), folds=True)  # a file and its line in one piece
    for key, value, origin in run_rows(resolved, every=every):
        table.add_row(key, value, origin, style="dim" if origin == "default" else "")
    console = console_for_people()
    console.print(table)
    for note in run_notes(resolved.run):
        console.print(f"note: {note}")


def run_rows(resolved: Resolved, *, every: bool) -> list[tuple[str, str, str]]:
    """(key, value, source) as text. The fields of a preset are one row unless `every`."""
    from ultrascale.description.architecture.weights import num_parameters

    model = resolved.run.model
    size = f"{model.name or model.model_type}, {format_count(num_parameters(model))} parameters"
    rows = [("model", size, "")]
    for key in leaves():
        origin = resolved.provenance[key]
        value = setting_at(resolved if key.startswith("launch.") else resolved.run, key)
        hidden = origin == "default" or origin.startswith(("preset ", "config.json "))
        if key.startswith("model.rope_scaling.") and model.rope_scaling is None:
            continue
        if every or not hidden:
            rows.append((key, _text(value), origin))
    if not every:
        origins = {origin for key, origin in resolved.provenance.items() if key.startswith("model.") and origin != "default"}
        rows[0] = ("model", size, ", ".join(sorted(o for o in origins if o.startswith(("preset ", "config.json ")))))
    return rows


def _expect_any(names: Collection[str], word: str, known: Iterable[str], what: str) -> None:
    """Raises SpecError if no name of a catalogue contains `word`."""
    if not names:
        remedy = did_you_mean(word, known, f"`ultrascale show {what}` has all.")
        raise mistake(f"show {what}", f"no name contains {word!r}", remedy)


def models_catalogue(word: str, *, as_json: bool) -> None:
    """Print every preset whose name, or other name, contains `word`: its shape and its number of parameters."""
    from ultrascale.catalogue.models.model_presets import ALIASES, PRESETS
    from ultrascale.config.rules.trainable import untrainable_model
    from ultrascale.description.architecture.weights import num_active_parameters, num_parameters

    aliases = {alias: name for alias, name in ALIASES.items() if word in alias or word in name}
    presets = {name: model for name, model in PRESETS.items() if word in name or name in aliases.values()}
    _expect_any(presets, word, (*PRESETS, *ALIASES), "models")
    if as_json:
        print_json({name: stamped("model", asdict(m) | _counts(m)) for name, m in presets.items()}, indent=2)
        return
    columns = ("model", "size", "active", "layers", "hidden", "ffn", "heads/kv", "experts", "positions")
    table = plain_table(*columns, left=("model",), whole=columns, padding=(0, 1, 0, 0))
    for name, m in presets.items():
        heads = "mla" if m.latent_attention else str(m.num_key_value_heads)
        experts = f"{m.num_experts_per_tok}/{m.num_experts}" if m.num_experts else ""
        width = m.moe_intermediate_size or m.intermediate_size
        table.add_row(
            name + ("" if not untrainable_model(m) else " *"), format_count(num_parameters(m)),
            format_count(num_active_parameters(m)) if m.num_experts else "", str(m.num_hidden_layers), str(m.hidden_size),
            str(width), f"{m.num_attention_heads}/{heads}", experts, str(m.max_position_embeddings),
        )  # fmt: skip
    console = console_for_people()
    console.print(table)
    planned = "*: can be planned, not yet trained. " if any(map(untrainable_model, presets.values())) else ""
    console.print(f"\n{planned}active: parameters per token; ffn: of one expert. --json has more.")
    if aliases:
        console.print(f"other names: {', '.join(f'{alias} is {name}' for alias, name in aliases.items())}")


def _counts(model: Any) -> dict[str, int | bool]:
    from ultrascale.config.rules.trainable import untrainable_model
    from ultrascale.description.architecture.weights import num_active_parameters, num_parameters

    return {
        "num_parameters": num_parameters(model), "num_active_parameters": num_active_parameters(model),
        "trainable": not untrainable_model(model),
    }  # fmt: skip


def clusters_catalogue(word: str, *, as_json: bool, sources: bool) -> None:
    """Print every accelerator and node whose name contains `word`, and the nodes of those accelerators; with `sources`, the
    source of each number."""
    from ultrascale.catalogue.machines import ACCELERATORS, NODES, USUAL_NODE, this_machine

    cpu = this_machine(1)
    nodes = {name: item for name, item in NODES.items() if word in name or word in item.accelerator.name}
    used = {item.accelerator.name for item in nodes.values()}
    accelerators = {name: item for name, item in ACCELERATORS.items() if word in name or name in used}
    if word in "cpu":
        accelerators["cpu"] = cpu.accelerator
    _expect_any((*accelerators, *nodes), word, (*ACCELERATORS, *NODES, "cpu"), "clusters")
    if as_json:
        all_nodes = nodes | ({"cpu": cpu} if "cpu" in accelerators else {})
        catalogue = {
            "accelerators": {name: asdict(item) for name, item in accelerators.items()},
            "nodes": {name: asdict(item) | {"accelerator": item.accelerator.name} for name, item in all_nodes.items()},
            "usual_node": {name: node for name, node in USUAL_NODE.items() if node in all_nodes},
        }
        print_json(catalogue, "clusters", indent=2)
        return
    console = console_for_people()
    console.print(_accelerators_table([*accelerators.values()], with_titles=console.width >= TITLES_FROM))
    if nodes:
        console.print()
        console.print(_nodes_table(nodes))
    if sources:
        console.print()
        console.print(_sources_table([*accelerators.values()], nodes))
    console.print(
        "\nPeaks are dense (V100: fp16 only); `reached` is the fraction that large GEMMs achieve. Bandwidths are of one "
        "direction. Watts and rent are per accelerator; --resolved prints the source of each number.\n"
        "Write 64xh100 for accelerators in their usual nodes, 2xaws-p5 for nodes, 4xcpu for processes on this machine."
    )


def _accelerators_table(accelerators: list[Any], *, with_titles: bool) -> Table:
    names = ("accelerator", "") if with_titles else ("accelerator",)
    columns = (*names, "memory", "bandwidth", "16-bit peak", "reached", "watts", "$/h")
    table = plain_table(*columns, left=columns[:-2], whole=("accelerator",))
    for item in accelerators:
        rate, fraction, peaks = item.memory_bytes_per_second, item.matmul_fraction, item.peak_flops
        table.add_row(
            item.name, *[item.title] * with_titles, format_bytes(item.memory_bytes.value),
            format_bytes_per_second(rate.value) if rate else "measured",
            format_flops_per_second(peaks["fp16"].value) if peaks else "measured",
            f"{fraction.value:.0%}" if fraction else "measured",
            f"{item.watts.value:.0f}" if item.watts else "",
            f"{item.dollars_per_hour.value:.2f}" if item.dollars_per_hour else "",
        )  # fmt: skip
    return table


def _nodes_table(nodes: dict[str, Any]) -> Table:
    table = plain_table("node", "accelerators", "inside, per accelerator", "network, per node", whole=("node",))
    for item in nodes.values():
        links = (
            f"{format_bytes_per_second(link.bytes_per_second.value)}, {link.name}"
            for link in (item.intra_link, item.inter_link)
        )
        table.add_row(item.name, f"{item.num_accelerators} x {item.accelerator.name}", *links)
    return table


def _sources_table(accelerators: list[Any], nodes: dict[str, Any]) -> Table:
    table = plain_table("number", "value", "source", "date", folds=True)

    def add(name: str, number: Any) -> None:
        if number is not None:
            table.add_row(name, f"{number.value:.6g}", number.source, number.date)

    for item in accelerators:
        add(f"{item.name} memory_bytes", item.memory_bytes)
        add(f"{item.name} memory_bytes_per_second", item.memory_bytes_per_second)
        for dtype, peak in item.peak_flops.items():
            add(f"{item.name} peak {dtype}", peak)
        add(f"{item.name} matmul_fraction", item.matmul_fraction)
        add(f"{item.name} watts", item.watts)
        add(f"{item.name} dollars_per_hour", item.dollars_per_hour)
    for item in nodes.values():
        for link in (item.intra_link, item.inter_link):
            add(f"{item.name} {link.name}", link.bytes_per_second)
            add(f"{item.name} {link.name}, achieved", link.achieved_bytes_per_second)
        add(f"{item.name} watts", item.watts)
    return table


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value) or "none"
    if hasattr(value, "__dataclass_fields__"):
        return " ".join(f"{name}={item}" for name, item in asdict(value).items())
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
