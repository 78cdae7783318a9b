import json

import pytest

from ultrascale.description.problems import SpecError
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import parse_schedule, read_schedule, to_csv


def problems(rows):
    with pytest.raises(SpecError) as caught:
        parse_schedule([row.split() for row in rows])
    return [(problem.key, problem.rule) for problem in caught.value.problems]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "dualpipe-v"])
def test_a_schedule_written_to_a_file_is_read_back(tmp_path, name):
    schedule = build_schedule(name, 4, 9)
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    assert read_schedule(path) == schedule
    assert build_schedule(str(path), 4, 9) == schedule


def test_what_is_written_is_what_torch_reads():
    actions = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    schedule = build_schedule("dualpipe-v", 2, 6)
    for line, row in zip(to_csv(schedule).splitlines(), schedule, strict=True):
        assert [str(actions.from_str(cell)) for cell in line.split(",")] == [action.cell for action in row]


def test_json_holds_the_same_cells_and_empty_ones_are_pauses(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([["0F0", "", "0B0"], ["", "1F0", "1I0", "1W0"]]))
    assert [[action.cell for action in row] for row in read_schedule(path)] == [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]


def test_a_file_for_other_numbers_is_told_its_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(build_schedule("1f1b", 2, 3)))
    with pytest.raises(SpecError, match=r"(?s)has 2 ranks, not 4.*has 3 micro-batches, not 8"):
        build_schedule(str(path), 4, 8)
    with pytest.raises(SpecError, match="has 3 micro-batches, not 2"):
        build_schedule(str(path), 2, 2)


def test_a_cell_that_is_no_action_is_told_with_its_line():
    assert problems(["0F0 0B0", "1F0 1X0"]) == [("schedule:2", "cell 2 is no action: '1X0'")]


def test_broken_json_is_told_with_its_line(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('[["0F0",\n "0B0"')
    with pytest.raises(SpecError, match=r"mine\.json:2: is not JSON"):
        read_schedule(path)


@pytest.mark.parametrize("name", ["nosuch.csv", "nosuch.json"])
def test_a_file_that_is_not_there_is_told(tmp_path, name):
    with pytest.raises(SpecError, match=r"(?s)there is no such file.*show schedule 1f1b --csv"):
        read_schedule(tmp_path / name)


def test_a_deadlock_names_every_rank_that_waits_and_for_what():
    found = problems(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])
    assert [key for key, _ in found] == ["rank 0, action 1 (0B0)", "rank 1, action 0 (1F1)"]
    assert "it waits for 1B0 (rank 1, action 3)" in found[0][1] and "it waits for 0F1 (rank 0, action 2)" in found[1][1]


@pytest.mark.parametrize(
    ("rows", "key", "rule"),
    [(["0F0 0F0 0B0"], "rank 0, action 1 (0F0)", "has been done before"),
     (["0F0 0I0 0B0"], "rank 0, action 2 (0B0)", "has been done before"),
     (["0B0 0F0"], "rank 0, action 0 (0B0)", "0F0 (rank 0, action 1)"),
     (["0F0 0W0 0I0"], "rank 0, action 1 (0W0)", "0I0 (rank 0, action 2)"),
     (["0F0 1F0 1B0", "0B0"], "rank 1, action 0 (0B0)", "0F0 (rank 0, action 0)"),
     (["0F0 0B0 0F1"], "0B1", "B, or I and W, is on no rank"),
     (["0F0 0I0"], "0W0", "W is on no rank"),
     (["0F0 0B0 2F0 2B0"], "1F0", "does not pass stage 1")],
)  # fmt: skip
def test_what_cannot_be_executed_names_rank_and_action(rows, key, rule):
    found = problems(rows)
    assert (found[0][0], rule in found[0][1]) == (key, True), found


@pytest.mark.parametrize("text", ["0F0,0B0\n1F0,1B0\n\n", "\ufeff0F0,0B0\r\n1F0,1B0\r\n", "0F0,0B0\n1F0,1B0"])
def test_what_editors_add_is_no_rank_and_no_action(tmp_path, text):
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8", newline="")
    assert [len(actions) for actions in read_schedule(tmp_path / "mine.csv")] == [2, 2]


@pytest.mark.parametrize("rows, rank", [([["0F0", "0B0"], [], ["1F0", "1B0"]], 1), ([["0F0", "0B0"], ["", ""]], 1)])
def test_a_rank_that_would_do_nothing_is_told(rows, rank):
    with pytest.raises(SpecError, match=f"schedule:{rank + 1}: rank {rank} has no action"):
        parse_schedule(rows)


def test_a_file_without_actions_is_told(tmp_path):
    (tmp_path / "mine.csv").write_text("\n,,\n")
    with pytest.raises(SpecError, match="holds no action"):
        read_schedule(tmp_path / "mine.csv")
