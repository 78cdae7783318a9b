"""The walk through one training step in docs/architecture.md is what a training step does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from stand_ins import made_up_peak
from tidy.sources import PACKAGE, ROOT
from train.small_runs import make_corpus, small_run

from ultrascale.cli.main import main
from ultrascale.config.resolve import to_toml
from ultrascale.description.run import Checkpoint, Optimizer

STATION = re.compile(r"^\d+\. `([\w.]+)`", re.MULTILINE)


def stations() -> list[str]:
    """The functions that the walk's numbered lines begin with."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return STATION.findall(page.partition("## One training step")[2].partition("\n## ")[0])


def calls_of(run_file: Path) -> list[str]:
    """Every call of a function of ours while `ultrascale train` runs here, in order."""
    found: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            module = frame.f_globals["__name__"].removeprefix("ultrascale.")
            found.append(f"{module}.{code.co_qualname}")

    sys.setprofile(see)
    try:
        assert main(["train", str(run_file)]) == 0
    finally:
        sys.setprofile(None)
    return found


def first_not_reached(walk: list[str], calls: list[str]) -> str:
    """The first station that is not called after the one before it; empty if there is none."""
    rest = iter(calls)
    return next((station for station in walk if station not in rest), "")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("walk")
    make_corpus(folder / "tokens")
    file = folder / "run.toml"
    once = {"steps": 1, "optimizer": Optimizer(warmup_steps=0), "checkpoint": Checkpoint(every_steps=1, export=False)}
    file.write_text(to_toml(small_run(folder, **once)))  # of two steps the second would lend its order to the first
    with made_up_peak():  # or a large product would be timed
        return calls_of(file)


def test_a_step_calls_every_station_of_the_walk_in_its_order(calls: list[str]) -> None:
    assert len(stations()) > 20
    assert first_not_reached(stations(), calls) == ""


@pytest.mark.parametrize("change", ["order", "name"])
def test_a_walk_that_is_not_so_is_seen(calls: list[str], change: str) -> None:
    walk = stations()
    place = walk.index("train.step.update")
    if change == "order":
        walk[place - 1], walk[place] = walk[place], walk[place - 1]
    else:
        walk[place] = "train.step.step"
    assert first_not_reached(walk, calls) in walk[place - 1 : place + 1]


READ_FIRST = re.compile(r"^\| `(src/[\w/]+\.py)` \|", re.MULTILINE)


def first_read() -> list[Path]:
    """The files of the first read, in order."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return [ROOT / name for name in READ_FIRST.findall(page.partition("## First read")[2].partition("\n## ")[0])]


def test_the_first_read_is_an_evening():
    files = first_read()
    assert len(files) >= 12 and sum(len(file.read_text().splitlines()) for file in files) <= 1500


def test_the_plain_forms_need_nothing_but_torch_and_what_is_read_before_them():
    read = {".".join(file.relative_to(ROOT / "src").with_suffix("").parts) for file in first_read()}
    for file in (PACKAGE / "parallel" / "plain").glob("*.py"):
        used = set(re.findall(r"^from (ultrascale[\w.]+) import", file.read_text(), re.MULTILINE))
        assert used <= read, file.name
