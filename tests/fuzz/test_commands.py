"""Whole commands over files that anybody may write: each ends with a result, or with exit code 1 or 2 and a few words.

A few examples of each in CI; hundreds a night, others every night.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from drawn import initial_value
from fuzz.confined import HUGE, LONGEST_REFUSAL, Figures, changed, command, commanded, damaged
from hypothesis import strategies as st
from train.small_runs import make_corpus, small_run

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.checkpoint import save as save_checkpoint
from ultrascale.checkpoint.disk.checksum import checksum_text, crc32
from ultrascale.cli.measure import sweep  # noqa: F401
from ultrascale.cli.plan import plan_command as plan  # noqa: F401
from ultrascale.cli.plan import (
    plan_search,  # noqa: F401
    validate,  # noqa: F401
)
from ultrascale.cli.show import show_command as show  # noqa: F401
from ultrascale.cli.weights import (
    checkpoint,  # noqa: F401
    import_,  # noqa: F401
)
from ultrascale.config.resolve import to_toml
from ultrascale.config.schema import STAND_INS, leaves
from ultrascale.description.architecture.huggingface import to_hf
from ultrascale.description.architecture.weights import weights
from ultrascale.description.run import Batch
from ultrascale.models.files.huggingface import export_folder
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv
from ultrascale.sweep.cells import NEEDED
from ultrascale.train.start import trained  # noqa: F401

NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(7200)]
Ends = Callable[[Figures, Any], None]


@dataclass(frozen=True)
class Target:
    """What is written, and which commands read it."""

    make: Callable[[Path], tuple[st.SearchStrategy[Any], Ends]]
    """In an empty folder: the examples, and what runs the commands over one."""
    here: int
    """Examples in CI."""
    nightly: int


ENDS = (0, 1, 2, 3, 7, 8, 64, 4096, 10_000, 1_000_000, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -1, 10**39, 10**400)
FLOATS = ("5e-324", "1e-300", "1e-9", "1e300", "1.7976931348623157e308", "-0.0", "0.0", "1.0", "nan", "inf", "-inf", "1e999")
TEXTS = (
    '""', '"\\u0000"', '"a\\u0000b"', '"none"', '"auto"', '"all"', '"/"', '"/dev/zero"', '"/dev/null"', '"~"', '"../run.toml"',
    '"run.toml"', '"4M"', '"1e300"', '"9e99T"', '"\U0001f642"', f'"{"x" * 5000}"', '"fp8"', '"8xh100"', '"1000000xb200"',
    '"8xrun.toml"', '"full"', '"zb-v"', '"interleaved"', '"muon"', '"fp16"', '"llama-3-8b"', '"deepseek-v3"',
    '"grok-1"', '"wsd"',
)  # fmt: skip
LISTS = ("[]", "[[]]", "{}", f"[{'1, ' * 5000}]", f"[{'{}, ' * 500}]", "[{until_tokens = 1, tokens_per_batch = 0}]", "true")
SIZES = st.integers(0, 20).map(str) | st.integers(0, 30).map(lambda power: str(2**power))
WHOLE = st.one_of(SIZES, SIZES, SIZES, SIZES, st.sampled_from([*map(str, ENDS), hex(10**5000)]), st.integers().map(str))
POWERS = st.integers(-14, 18).map(lambda power: f"1e{power}")
REAL = st.one_of(POWERS, POWERS, POWERS, st.sampled_from(FLOATS), st.floats().map(repr))
SWITCHES = st.sampled_from(["true", "false"])
WORDS = st.sampled_from([*TEXTS, *LISTS]) | st.text(max_size=6).map(lambda text: json.dumps(text, ensure_ascii=False))


def values(kind: Any) -> st.SearchStrategy[str]:
    """Values in TOML, mostly of this kind; of a `Literal` its own words."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    if all(isinstance(one, str | int) for one in kinds):
        fitting = st.sampled_from([json.dumps(one) for one in kinds])
    else:
        fitting = SWITCHES if bool in kinds else WHOLE if int in kinds else REAL if float in kinds else WORDS
    return st.one_of(fitting, fitting, fitting, fitting, WHOLE | REAL | WORDS)


@st.composite
def toml(draw: st.DrawFn, good: dict[str, str], keys: dict[str, Any]) -> bytes:
    """The settings of `good` in TOML, one or two of `keys` with odd values; some with bytes damaged."""
    names = draw(st.lists(st.sampled_from([*keys]), min_size=1, max_size=2, unique=True))
    chosen = {name: draw(values(keys[name])) for name in names}
    text = "\n".join(f"{key} = {value}" for key, value in (good | chosen).items()).encode("utf-8", "surrogatepass")
    return draw(damaged(text)) if draw(st.integers(0, 9)) == 0 else text


RUN = {"batch.sequence_length": "64", "batch.sequences_per_batch": "64", "cluster": '"8xh100"'}
BASES = [RUN | {"model.preset": f'"{name}"'} for name in ("tiny-llama", "tiny-deepseek-v3", "tiny-gpt-oss")]
BASES += [BASES[0] | {"layout.dp": "2", "layout.pp": "2", "layout.tp": "2"}, BASES[1] | {"layout.dp": "8", "layout.ep": "2"}]
RUN_KEYS = {key: leaf.kind for key, leaf in leaves().items()} | STAND_INS | dict.fromkeys(["extends", "model", "batch"], str)


def of_runs(verb: str) -> Callable[[Path], tuple[st.SearchStrategy[Any], Ends]]:
    def make(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
        def ends(figures: Figures, data: bytes) -> None:
            (folder / "run.toml").write_bytes(data)
            figures.run(verb, "run.toml")

        return st.one_of([toml(base, RUN_KEYS) for base in BASES]), ends

    return make


MACHINE = {
    "accelerator": '"h100"', "accelerators": "8", "network.name": '"RoCE"', "network.gbits_per_second": "400",
    "inside.name": '"NVLink"', "inside.gbytes_per_second": "450",
}  # fmt: skip
OWN = {
    "accelerator.like": '"h100"', "accelerator.name": '"own"', "accelerator.memory_gib": "80", "accelerator.tflops.bf16": "900",
    "accelerators": "8",
}  # fmt: skip
MORE = ("network.cards", "network.achieved_gbytes_per_second", "spine.nodes_per_leaf", "spine.oversubscription")
OWN_MORE = (
    "accelerator.memory_gbytes_per_second", "accelerator.tflops.fp8", "accelerator.matmul_fraction", "accelerator.watts",
    "accelerator.dollars_per_hour",
)  # fmt: skip
MACHINE_KEYS = {key: str if '"' in MACHINE.get(key, "") else float for key in (*MACHINE, *MORE)} | {"title": str}
OWN_KEYS = {key: str if '"' in OWN.get(key, "") else float for key in (*OWN, *OWN_MORE)} | {"accelerator.title": str}


def of_machines(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
    def ends(figures: Figures, data: bytes) -> None:
        (folder / "ours.toml").write_bytes(data)
        figures.run("plan", "--model", "tiny-llama", "--gpus", "2xours.toml", "--top", "1", "--tokens", "1T")

    return toml(MACHINE, MACHINE_KEYS) | toml(OWN, OWN_KEYS), ends


def of_configs(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
    good = [to_hf(PRESETS[name]) for name in ("tiny-llama", "tiny-gpt2", "tiny-deepseek-v3", "tiny-gpt-oss")]

    def ends(figures: Figures, data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        figures.run("plan", "--model", "config.json", "--gpus", "8xh100", "--top", "1")

    texts = [json.dumps(one).encode() for one in good]
    return st.one_of(*map(changed, good), *map(damaged, texts), *map(numbered, good)), ends


@st.composite
def numbered(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """`good` with other numbers."""
    keys = [key for key, value in good.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    chosen = draw(st.dictionaries(st.sampled_from(keys), st.sampled_from(ENDS) | st.integers(0, 300), min_size=1, max_size=2))
    return json.dumps(good | chosen).encode()


def of_weights(file: str) -> Callable[[Path], tuple[st.SearchStrategy[Any], Ends]]:
    def make(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
        model = PRESETS["tiny-llama"]
        state = {weight.name: initial_value(weight, 0) for weight in weights(model)}
        path = export_folder(state, model, folder / "hf", dtype=torch.bfloat16) / file
        make_corpus(folder / "tokens")
        (folder / "run.toml").write_text(
            'model.path = "hf"\ndata.sources = ["tokens"]\nbatch.sequence_length = 64\ndevice = "cpu"\n'
        )
        is_index = file.endswith(".index.json")
        index = {"metadata": {}, "weight_map": dict.fromkeys([weight.name for weight in weights(model)], "model.safetensors")}
        whole = json.dumps(index).encode() if is_index else path.read_bytes()
        end = len(whole) if is_index else 8 + int.from_bytes(whole[:8], "little")
        text = whole[0 if is_index else 8 : end]

        def ends(figures: Figures, data: bytes) -> None:
            path.write_bytes(data if is_index else len(data).to_bytes(8, "little") + data + whole[end:])
            figures.run("import", "hf", "run.toml")
            shutil.rmtree(folder / "runs", ignore_errors=True)

        return changed(json.loads(text)) | damaged(text) | st.sampled_from(HUGE), ends

    return make


def of_manifests(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
    """With checksums that are right, so that what is in them is read."""
    path = save_checkpoint(folder, 1, {"w": torch.arange(12.0).reshape(3, 4)}, {"note": "x"}) / "manifest.json"
    _, _, text = path.read_bytes().partition(b"\n")

    def ends(figures: Figures, data: bytes) -> None:
        data = data[1:] if data[:1] == b"{" else data
        path.write_bytes(f'{{"checksum":"{checksum_text(crc32(data))}",\n'.encode() + data)
        figures.run("checkpoint", "verify" if len(data) % 2 else "list", ".")

    return changed(json.loads(b"{" + text)) | damaged(text), ends


def of_sweeps(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
    make_corpus(folder / "tokens")
    run = replace(small_run(folder), batch=Batch(sequence_length=12, sequences_per_batch=8), cluster="8xh100")
    (folder / "run.toml").write_text(to_toml(run))
    words = ["sweep", "run.toml", "--layout.micro-batch-size", "1,2", "--out", "out", "--list"]
    assert command(words, folder).code == 0
    first, second = sorted((folder / "out" / "cells").iterdir())
    facts = {"device": "cpu", "environment": {"torch": "2", "ultrascale": "0"}}
    speed: dict[str, Any] = dict.fromkeys(NEEDED, 1) | facts | {"step_seconds": [1.0, 2.0]}
    failed = {"outcome": "failed", "text": "why", "exit_code": 1}

    def ends(figures: Figures, data: tuple[bytes, bytes]) -> None:
        for cell, one in ((first, data[0]), (second, json.dumps(speed).encode())):
            (cell / "speed.json").write_bytes(one)
        (first / "failed.json").write_bytes(data[1])
        figures.run(*words, *(["--json"] if len(data[0]) % 2 else []))

    return st.tuples(changed(speed) | damaged(json.dumps(speed).encode()), changed(failed)), ends


def of_tables(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
    header = "model,n_gpus,gpu,dp,tp,pp,micro_batch,grad_accum,seq_len,zero_stage,recompute,precision,layers,step_time_s"
    row = "llama-3-8b,64,H100,64,1,1,1,8,8192,1,none,bf16,,8.4"

    def ends(figures: Figures, data: bytes) -> None:
        (folder / "runs.csv").write_bytes(data)
        figures.run("validate", "runs.csv")

    @st.composite
    def rows(draw: st.DrawFn) -> bytes:
        cells = [*map(str, row.split(","))]
        for at in draw(st.lists(st.integers(0, len(cells) - 1), min_size=1, max_size=3)):
            cells[at] = draw(st.sampled_from([*map(str, ENDS), *FLOATS, "x" * 500, "", "yes", "fp8"]))
        return f"{header}\n{','.join(cells)}\n{row}\n".encode()

    return rows() | damaged(f"{header}\n{row}\n{row}\n".encode()), ends


def of_schedules(folder: Path) -> tuple[st.SearchStrategy[Any], Ends]:
    schedule = build_schedule("1f1b", pp=2, num_micro_batches=4)
    cells = [[action.cell for action in row] for row in schedule]

    def ends(figures: Figures, data: bytes) -> None:
        name = "schedule.json" if data[:1] == b"[" else "schedule.csv"
        (folder / name).write_bytes(data)
        figures.run("show", "schedule", name)

    return damaged(to_csv(schedule).encode()) | changed(cells), ends


TARGETS = {
    "show of a run's TOML": Target(of_runs("show"), 40, 400),
    "plan of a run's TOML": Target(of_runs("plan"), 12, 250),
    "plan for a machine's file": Target(of_machines, 12, 250),
    "plan of a config.json": Target(of_configs, 12, 200),
    "import of safetensors": Target(of_weights("model.safetensors"), 6, 150),
    "import of an index": Target(of_weights("model.safetensors.index.json"), 6, 150),
    "list and verify of manifests": Target(of_manifests, 12, 200),
    "sweep over its own folder": Target(of_sweeps, 5, 100),
    "validate of a table": Target(of_tables, 6, 100),
    "show of a schedule": Target(of_schedules, 6, 100),
}


@pytest.mark.catalogue(60)
@pytest.mark.parametrize("night", [False, pytest.param(True, marks=NIGHTLY)], ids=["few", "night"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_command_over_any_file_ends_with_a_result_or_a_few_words(tmp_path, name, night):
    target = TARGETS[name]
    data, ends = target.make(tmp_path)
    print(f"{name}: {commanded(data, ends, tmp_path, target.nightly if night else target.here)}")


def test_control_a_traceback_a_hang_a_death_and_a_flood_of_a_command_are_seen(tmp_path):
    def ends_by(what: Callable[[], Any]) -> str:
        return command(["show"], tmp_path, run=lambda words: what(), seconds=1).wrong

    def flood() -> int:
        print("x" * (LONGEST_REFUSAL + 1))
        return 2

    def for_good() -> int:
        while True:
            pass

    found = [ends_by(what) for what in (lambda: {}["a"], lambda: bytearray(1 << 34), flood, for_good, lambda: 1, lambda: 0)]
    assert found == ["traceback", "traceback", "flood", "hang", "no word", ""]


TINY = 'model.preset = "tiny-llama"\n'
SHOW, PLAN, VALIDATE = ("show", "run.toml"), ("plan", "--model", "config.json", "--gpus", "8xh100"), ("validate", "runs.csv")
SCHEDULE = ("show", "schedule", "schedule.csv")
HUGE_FILES: dict[str, tuple[tuple[str, ...], Callable[[], str], str]] = {
    "a config of 200,000 keys": (
        PLAN, lambda: json.dumps({"model_type": "llama"} | {f"k{n}": 1 for n in range(200_000)}), "199,901 more keys",
    ),
    "a config of 50 MB": (PLAN, lambda: json.dumps({"a": "x" * 50_000_000}), "Holds more than 16,777,216 letters"),
    "a run of 50,000 keys": (SHOW, lambda: TINY + "".join(f"k{n} = 1\n" for n in range(50_000)), "49,900 more"),
    "a run of a million keys": (SHOW, lambda: TINY + "".join(f"k{n} = 1\n" for n in range(10**6)), "Holds more than 1,048,576"),
    "a ramp of tables with odd keys": (SHOW, lambda: f"{TINY}batch.ramp = [{'{a = 1}, ' * 10_000}]", "more"),
    "a run that extends a device": (SHOW, lambda: 'extends = "/dev/zero"', "Holds more than 1,048,576"),
    "a model that is a device": (SHOW, lambda: 'model.path = "/dev/zero"', "Holds more than 16,777,216"),
    "a rank number beyond counting": (
        SHOW, lambda: f"{TINY}layout.tp = 999983\nlayout.cp = 999979\nlayout.dp = 999961\nlayout.ep = 7", "must divide",
    ),
    "experts that ep does not divide": (
        SHOW, lambda: 'model.preset = "mixtral-8x7b"\nmodel.num_experts = 2147483647\nlayout.dp = 7\nlayout.ep = 7',
        "must divide",
    ),
    "layers beyond any model": (SHOW, lambda: f"{TINY}model.num_hidden_layers = 10000", "must be from 1 to 2048"),
    "a machine of 50,000 keys": (
        ("plan", "--model", "tiny-llama", "--gpus", "2xours.toml"),
        lambda: "".join(f"k{n} = 1\n" for n in range(50_000)), "49,902 more",
    ),
    "a table of 100,000 columns": (VALIDATE, lambda: f"model,n_gpus,{','.join(map(str, range(10**5)))}\n", "at most 1,000"),
    "a table of 100,000 rows": (VALIDATE, lambda: "model,n_gpus,dp,tp,pp\n" + "llama-3-8b,8,8,1,1\n" * 10**5, "20,000 rows"),
    "a table with a cell of 10 MB": (VALIDATE, lambda: f"model,n_gpus,tp\nx,8,{'1' * 10**7}\n", "larger than field limit"),
    "a schedule of a million wrong cells": (SCHEDULE, lambda: "0X0," * 10**6, "is no action"),
    "a schedule of two million actions": (SCHEDULE, lambda: "0F0," * 2_000_000, "more than 4,194,304"),
}  # fmt: skip
QUICK_SECONDS, SMALL_MIB = 30, 400


@pytest.mark.catalogue(60)
@pytest.mark.parametrize("name", HUGE_FILES)
def test_a_huge_file_is_refused_at_once_in_a_few_words(tmp_path, name):
    words, text, said = HUGE_FILES[name]
    file = next(word.removeprefix("2x") for word in words if word.endswith((".json", ".toml", ".csv")))
    (tmp_path / file).write_text(text())
    one = command(words, tmp_path)
    assert (one.wrong, one.code, said in one.said) == ("", 2, True), one
    assert one.seconds < QUICK_SECONDS and one.extra_mib < SMALL_MIB, one
