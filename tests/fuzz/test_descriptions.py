"""Descriptions of runs, schedules, measured runs and models, as anybody may write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz.confined import JSON, changed, confined, damaged, examples, read_confined, sound
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.config.schema import leaves
from ultrascale.description.architecture.huggingface import from_hf, to_hf
from ultrascale.description.architecture.model import Model
from ultrascale.description.run import Run
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import read_schedule, to_csv
from ultrascale.validation.rows import read_rows

pytestmark = pytest.mark.draws
RUNS = sorted((Path(__file__).parents[2] / "runs").glob("*.toml"))
ODD_VALUES = [
    "1e-4", "no", "010", "1_000", "12:30:45", "nan", "inf", "-1", "0", "true", "none", "", "[]", "{}", "[1, 2]", "9" * 5000,
    "1e999", "[" * 5000, "x" * 10_000, "\0", "\N{CYRILLIC SMALL LETTER A}", "10" * 30, "4M", "0x10", "1e5", "-0.0",
]  # fmt: skip


def resolved(text: bytes, path: Path) -> None:
    """A run, or a SpecError; a run is written and read back as itself."""
    path.write_bytes(text)
    found = sound(lambda: resolve(path))
    if found is not None:
        assert isinstance(found.run, Run)
        path.write_text(to_toml(found.run), encoding="utf-8")
        assert resolve(path).run == found.run


@pytest.mark.catalogue(60)
def test_a_toml_file_is_a_run_or_an_error(tmp_path):
    text = "".join(path.read_text() for path in RUNS[-1:]).encode()

    odd = (b"a = " + b"[" * 50_000, b"a" + b".a" * 50_000 + b" = 1", b"x = " + b"9" * 5000, b"[[a]]\n" * 10_000)
    read_confined(lambda data: resolved(data, tmp_path / "run.toml"), damaged(text), count=400, also=odd)


@pytest.mark.catalogue(60)
def test_flags_of_any_value_are_a_run_or_an_error():
    keys = [*leaves(), "model.preset", "batch.tokens_per_batch", "layout.\u0430", "__class__", "model", ""]

    @examples(500)
    @given(given=st.dictionaries(st.sampled_from(keys), st.sampled_from(ODD_VALUES) | JSON, min_size=1, max_size=3))
    def work(given: dict) -> None:
        start = {"model.preset": "tiny-llama", "batch.sequence_length": 64}
        sound(lambda: resolve(None, start | given))
        sound(lambda: resolve(None, [word for key, value in given.items() for word in (f"--{key}", str(value))]))

    confined(work)


@pytest.mark.catalogue(60)
@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_schedule_file_is_a_schedule_or_an_error(tmp_path, suffix):
    schedule = build_schedule("1f1b", pp=4, num_micro_batches=4)
    cells = [[action.cell for action in row] for row in schedule]
    good = to_csv(schedule).encode() if suffix == "csv" else json.dumps(cells).encode()
    path = tmp_path / f"schedule.{suffix}"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        sound(lambda: read_schedule(path))

    odd = (
        b"0F0," * 300_000, b"x" * 200_000, b"0F" + b"9" * 5000, b"0F0\n999999999F999999999", b'"' + b"a\n" * 100_000,
    )  # fmt: skip
    made = damaged(good) if suffix == "csv" else damaged(good) | changed(cells)
    read_confined(read, made, count=400, also=odd)


@pytest.mark.catalogue(60)
def test_a_csv_of_measured_runs_is_read_or_refused(tmp_path):
    path = tmp_path / "measured.csv"
    good = b"model,n_gpus,dp,tp,pp,mbs,grad_acc,seq_len,mfu,step_time\nllama-3-8b,64,64,1,1,1,8,8192,40.1,8.4\n" * 2

    def read(data: bytes) -> None:
        path.write_bytes(data)
        sound(lambda: read_rows(path))

    odd = (b"model,n_gpus\n" + b"x" * 200_000, good + b"\0\n", good.replace(b"64", b"9" * 5000))
    read_confined(read, damaged(good), count=300, also=odd)


@pytest.mark.catalogue(48)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-deepseek-v3", "tiny-gpt-oss"])
def test_a_config_json_is_a_model_or_an_error(tmp_path, name):
    config = to_hf(PRESETS[name])
    path = tmp_path / "config.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found = sound(lambda: from_hf(path))
        assert found is None or isinstance(found, Model)

    read_confined(read, changed(config) | damaged(json.dumps(config).encode()), count=300)
