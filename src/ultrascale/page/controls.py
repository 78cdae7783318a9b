"""Controls of the page, and their question as arguments of `ultrascale plan`.

A question is a dictionary: each control's name and content, and a dropped file as {"name": ..., "text": ...}. A question can
never name a file on the server's machine: a browser's request must not read any.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ultrascale.catalogue.cluster import MOST, parse_cluster
from ultrascale.catalogue.machines import USUAL_NODE
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack import OPTIMIZERS
from ultrascale.catalogue.stacks.stack_files import stack_names
from ultrascale.description.layout import RANGES
from ultrascale.description.problems import Problem, SpecError, expect_none, mistake
from ultrascale.description.schedules import SCHEDULES

LARGEST_FILE = 1_000_000
"""Most bytes of a dropped file: config.json of the largest models has 5 thousand."""
LONGEST_VALUE = 200
"""Most characters of a control's content."""


@dataclass(frozen=True)
class Control:
    """A field of the page's form."""

    name: str
    """Name in the question, and in the link."""
    label: str
    unit: str
    range: str
    """Accepted values, as text; the planner checks them."""
    default: str = ""
    """Empty: searched, or the planner's default."""
    choices: tuple[str, ...] = ()
    """All allowed values; with `suggests`, some of them."""
    slider: tuple[int, int] | None = None
    """Lowest and highest exponent of a slider over powers of two."""
    group: str = "Question"


_AXIS = f"1 to {RANGES['tp'][1]:,}, or 4,8; empty: any"
CONTROLS = (
    Control("model", "Model", "preset", "a preset; or drop a config.json below", "llama-3-8b", tuple(sorted(PRESETS))),
    Control("count", "Devices", "accelerators", f"1 to {MOST:,}", "64", slider=(0, 14)),
    Control("machine", "Machine", "accelerator", "of the catalogue", "h100-sxm", tuple(sorted(USUAL_NODE))),
    Control("seq_len", "Sequence length", "tokens", "1 to what the model has positions for", "8192", slider=(9, 17)),
    Control("tokens_per_batch", "Global batch", "tokens", "such as 4M or 512k; empty: a micro-batch a device", "4M"),
    Control("zero_stage", "ZeRO stage", "stage", "0 to 3; empty: any", choices=("0", "1", "2", "3"), group="Layout"),
    Control("tp", "Tensor parallelism", "ranks", _AXIS, group="Layout"),
    Control("cp", "Context parallelism", "ranks", _AXIS, group="Layout"),
    Control("pp", "Pipeline parallelism", "ranks", _AXIS, group="Layout"),
    Control("ep", "Expert parallelism", "ranks", _AXIS, group="Layout"),
    Control("schedule", "Pipeline schedule", "name", "empty: any", choices=tuple(SCHEDULES), group="Layout"),
    Control("micro_batch_size", "Micro-batch", "sequences", f"1 to {RANGES['tp'][1]:,}; empty: any", group="Layout"),
    Control("recompute", "Recomputation", "activations", "empty: any", choices=("none", "selective", "full"), group="Layout"),
    Control("precision", "Precision", "dtype", "empty: bf16 where there is bf16", group="Trainer",
            choices=("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")),
    Control("optimizer", "Optimizer", "name", "empty: adamw", group="Trainer",
            choices=tuple(OPTIMIZERS)),
    Control("stack", "Trainer", "name", "the trainer that is planned for", "ultrascale", stack_names(), group="Trainer"),
    Control("tokens", "Train on", "tokens", "such as 15T; empty: 20 a parameter", group="Trainer"),
)  # fmt: skip
BY_NAME = {control.name: control for control in CONTROLS}
OTHER_KEYS = ("file", "why", "part")
"""Keys of a question that are not controls: a dropped file; a request for reasons, other numbers of devices and other machines;
a request for one part of the answer (`page.plan_data.PARTS`).
"""


def controls_json() -> dict[str, Any]:
    """The form, as the page builds it, and the size limit of a dropped file."""
    return {"controls": [asdict(control) for control in CONTROLS], "largest_file": LARGEST_FILE}


def words_of(question: dict[str, Any], folder: Path) -> list[str]:
    """The question as arguments of `ultrascale plan`; writes a dropped file to `folder`. Raises SpecError."""
    problems = [Problem(str(name), "is no control of the page", f"There are {', '.join(BY_NAME)}.")
                for name in question if name not in (*BY_NAME, *OTHER_KEYS)]  # fmt: skip
    values = {name: str(value).strip() for name, value in question.items() if name in BY_NAME and value is not None}
    values = {name: value for name, value in values.items() if value}
    problems += [problem for name, value in values.items() for problem in _unreadable(name, value)]
    expect_none(problems)
    file = _dropped(question["file"], folder) if question.get("file") else None
    words: list[str] = []
    if file is not None and file.suffix == ".toml":
        words.append(str(file))
        values.pop("model", None)
    elif file is not None:
        values["model"] = str(file)
    if values.get("stack") == BY_NAME["stack"].default:
        del values["stack"]
    count, machine = values.pop("count", None), values.pop("machine", None)
    if file is not None and file.suffix == ".toml" and not (count and machine) and (count or machine):
        own_count, own_machine = _machines_of(question["file"]["text"])
        count, machine = count or own_count, machine or own_machine
    if count or machine:
        values["gpus"] = f"{count or 1}x{machine}" if machine else str(count)
    words += [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return [*words, "--explain"] if question.get("why") and not (file and file.suffix == ".toml") else words


def _unreadable(name: str, value: str) -> list[Problem]:
    """Problems with a value that must not reach the planner: it is, or resembles, the name of a file."""
    if len(value) > LONGEST_VALUE:
        return [Problem(name, f"has {len(value):,} letters, and at most {LONGEST_VALUE} are read", "Drop a file instead.")]
    if name == "model" and value not in PRESETS:
        from ultrascale.config.resolve import resolve

        resolve(None, ["--model.preset", value])  # names the mistake, and the preset that may have been meant
    text = _without_rack_count(value) if name == "machine" else value
    if any(letter in text for letter in "/\\\0\n") or text.lower().endswith((".toml", ".json", ".csv")):
        return [Problem(name, f"{value!r} names a file, and the page reads none", f"Give {BY_NAME[name].range}.")]
    return []


def _without_rack_count(machine: str) -> str:
    """A machine's name without the number of used accelerators per rack, as in `gb200-nvl72/64`."""
    return re.sub(r"/\d+$", "", machine)


def _dropped(file: Any, folder: Path) -> Path:
    """Writes a config.json or run.toml for the planner. For a file that is too large the page sends only the size."""
    size = file.get("size") if isinstance(file, dict) else None
    if isinstance(size, int) and size > LARGEST_FILE:
        raise SpecError([_too_large(size)])
    if not (isinstance(file, dict) and isinstance(file.get("text"), str)):
        raise mistake("file", "is no text", "Drop a config.json or a run.toml.")
    text, is_toml = file["text"], str(file.get("name", "")).lower().endswith(".toml")
    if len(text.encode()) > LARGEST_FILE:
        raise SpecError([_too_large(len(text.encode()))])
    if is_toml:
        _expect_no_paths(text)
    path = folder / "dropped" / ("run.toml" if is_toml else "config.json")  # a model is called by its folder
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _machines_of(text: str) -> tuple[str, str]:
    """Number and name of a run's accelerators, `16xh200`: a control that changes one of them keeps the other."""
    try:
        cluster = str(tomllib.loads(text)["cluster"])
        parsed = parse_cluster(cluster).num_accelerators, parse_cluster(cluster).accelerator.kind
    except (tomllib.TOMLDecodeError, KeyError, SpecError):  # the planner reports the mistake
        return "", ""
    count, counted, machine = cluster.partition("x")
    return (count, machine) if counted and count == str(parsed[0]) else (str(parsed[0]), parsed[1])


def _too_large(num_bytes: int) -> Problem:
    rule = f"has {num_bytes:,} bytes, and at most {LARGEST_FILE:,} are read"
    return Problem("file", rule, "Drop the config.json of a model or a run.toml, and no weights.")


def _expect_no_paths(text: str) -> None:
    """Raises SpecError if a run's file would make the planner read another file."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # the planner reports it, with the line
    model, layout = document.get("model"), document.get("layout")
    problems = []
    if isinstance(model, dict) and "path" in model:
        problems.append(
            Problem("model.path", "names a file, and the page reads none", "Drop that config.json, or name a preset.")
        )
    if isinstance(layout, dict) and str(layout.get("schedule", "")) not in ("", *SCHEDULES):
        problems.append(Problem("layout.schedule", "is no schedule by name", f"Take {', '.join(SCHEDULES)}."))
    if any(mark in _without_rack_count(str(document.get("cluster", ""))) for mark in ("/", "\\", ".toml")):
        problems.append(Problem("cluster", "names a file, and the page reads none", "Name machines such as 64xh100."))
    expect_none(problems)
