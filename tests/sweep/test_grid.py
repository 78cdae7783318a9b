"""Settings with several values, and the runs they make."""

from __future__ import annotations

import pytest
from train.small_runs import make_corpus, small_run

from ultrascale.config.resolve import to_toml
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch
from ultrascale.sweep.grid import Axis, cells, names_of, split_axes


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("grid")
    make_corpus(folder / "tokens")
    run = small_run(folder, batch=Batch(sequence_length=12, sequences_per_batch=8))
    (folder / "run.toml").write_text(to_toml(run))
    return str(folder / "run.toml")


@pytest.mark.parametrize(
    ("words", "axes", "others"),
    [
        (["run.toml", "--layout.dp", "1,2"], [Axis("layout.dp", ("1", "2"))], ["run.toml"]),
        (["--layout.zero-stage=0,3", "r", "--steps", "4"], [Axis("layout.zero_stage", ("0", "3"))], ["r", "--steps", "4"]),
        (["--compile", "true,false"], [Axis("compile", ("true", "false"))], []),
        (["--batch.tokens-per-batch", "1k,2k"], [Axis("batch.tokens_per_batch", ("1k", "2k"))], []),
        (["--layout.dp", "2", "--compile"], [], ["--layout.dp", "2", "--compile"]),
        (["--layout.recompute-blocks", "0,1"], [], ["--layout.recompute-blocks", "0,1"]),  # one value, which is a list
        (["--out", "a,b"], [], ["--out", "a,b"]),  # the verb's own
    ],
)  # fmt: skip
def test_commas_make_axes_of_settings_that_have_one_value(words, axes, others):
    assert split_axes(words) == (axes, others)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--layout.dp", "1,,2"], "empty value"),
        (["--layout.dp", "1,"], "empty value"),
        (["--layout.dp", "2,2"], "twice"),
        (["--layout.tp", "1,x"], "must be a whole number, is x"),
        (["--batch.tokens-per-batch", "4,096"], "commas are between values here, not between thousands"),
        (["--name", "a,b"], "cannot be swept"),
        (["--layout.dp", "1,2", "--layout.dp=4,8"], "given twice"),
    ],
)
def test_values_that_are_none_are_refused(words, rule):
    with pytest.raises(SpecError, match=rule):
        split_axes(words)


def test_every_combination_is_a_cell_and_says_why_it_is_refused(run_file):
    axes = [Axis("layout.tp", ("1", "2")), Axis("layout.pp", ("1", "2", "4"))]
    found, same = cells(run_file, axes, processes=2)
    assert same == 0
    shapes = {(c.values["layout.tp"], c.values["layout.pp"]): c.run and c.run.layout.dp for c in found}
    assert shapes == {("1", "1"): 2, ("1", "2"): 1, ("1", "4"): None, ("2", "1"): 1, ("2", "2"): None, ("2", "4"): None}
    assert all(cell.problems for cell in found if cell.run is None)


def test_runs_that_are_the_same_are_measured_once(run_file):
    found, same = cells(run_file, [Axis("batch.tokens_per_batch", ("96", "0.096k"))])
    assert (len(found), same) == (1, 1)


def test_a_mistake_in_all_cells_is_told_as_train_tells_it(run_file):
    with pytest.raises(SpecError, match=r"layout\.zero_stage"):
        cells(run_file, [Axis("layout.zero_stage", ("7", "8"))])
    with pytest.raises(SpecError, match="nowhere"):
        cells("nowhere.toml", [Axis("layout.dp", ("1", "2"))])


def test_more_cells_than_anybody_waits_for_are_refused_before_they_are_resolved(run_file):
    many = tuple(map(str, range(1, 101)))
    with pytest.raises(SpecError, match="10,000 cells"):
        cells(run_file, [Axis("layout.dp", many), Axis("layout.tp", many)])


def test_settings_that_end_in_the_same_word_are_told_apart():
    axes = [Axis("log.every_steps", ("1", "2")), Axis("checkpoint.every_steps", ("5", "none")), Axis("layout.dp", ("1", "2"))]
    assert names_of(axes) == ["log.every_steps", "checkpoint.every_steps", "dp"]
    assert names_of(axes[1:]) == ["every_steps", "dp"]
