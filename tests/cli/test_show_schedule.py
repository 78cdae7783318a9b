import json
from pathlib import Path

import pytest

from ultrascale.cli.show.show_command import command
from ultrascale.description.problems import SpecError
from ultrascale.description.schedules import SCHEDULES
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def shown(words, capsys):
    assert command(words.split()) == 0
    return capsys.readouterr().out


def test_a_schedule_is_drawn_with_what_each_rank_waits_and_keeps(capsys):
    lines = shown("schedule 1f1b --pp 4 --micro-batches 8", capsys).splitlines()
    assert lines[2].startswith("rank 0 F0F1F2F3············B0──F4B1──")
    rows = [line.split() for line in lines if line.startswith("   ") and line.strip()[:1].isdigit()]
    assert rows[0] == ["0", "0", "24", "9", "27.3%", "4"]
    assert [row[-1] for row in rows] == ["4", "3", "2", "1"]
    assert "A step takes 33; the bubble is 27.3% of it, 37.5% of the time that ranks compute." in lines


def test_all_schedules_are_compared_for_one_rank_s_work(capsys):
    out = shown("schedules --pp 8 --micro-batches 32", capsys)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] and line.split()[0] in SCHEDULES}
    assert rows["afab"] == ["1", "1x", "117", "17.9%", "32", "1.75"]
    assert rows["interleaved"] == ["2", "1x", "106.5", "9.9%", "11.5", "3.75"]
    assert rows["dualpipe"] == ["2", "2x", "102", "5.9%", "9", "1.75"]
    assert set(rows) == set(SCHEDULES)


def test_json_holds_every_action_with_its_times(capsys):
    got = json.loads(shown("schedule zb-v --pp 2 --micro-batches 3 --json", capsys))
    assert (got["schedule"], got["pp"], got["step_seconds"]) == ("zb-v", 2, 9.5)
    assert got["ranks"][0]["actions"][0] == ["0F0", 0.0, 0.5]
    compared = json.loads(shown("schedules --pp 2 --json", capsys))
    assert compared["zb-h1"]["bubble_fraction"] == pytest.approx(1 / 25)


def test_files_are_written(tmp_path, capsys):
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    shown(f"schedule interleaved --virtual-stages 3 --svg {picture} --perfetto {trace}", capsys)
    assert picture.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_file_says_itself_how_many_ranks_it_is_for(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(build_schedule("1f1b", 3, 5)))
    assert f"{path}, 3 ranks, 5 micro-batches" in shown(f"schedule {path}", capsys).replace("\n", " ").replace("  ", " ")
    with pytest.raises(SpecError, match="Leave out --pp"):
        command(["schedule", str(path), "--pp", "4"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_written_as_a_file_is_the_schedule(name, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    out = shown(f"schedule {name} --pp 4 --micro-batches 6 --csv {path}", capsys)
    assert f"wrote {path}" in out.replace("\n", "")
    assert build_schedule(str(path), 4, 6) == build_schedule(name, 4, 6)


@pytest.mark.parametrize(
    ("words", "told"),
    [("schedule", "which schedule is missing"), ("schedule 2f2b", "there is no schedule '2f2b'"),
     ("schedules 1f1b", "takes no name"), ("schedules --csv a.csv", "is of one schedule"),
     ("schedule nosuch.csv", "no such file"), ("schedule 1f1b --cost.send -1", "must be from 0 to"),
     ("schedule 1f1b --cost.forward nan", r"cost.forward: must be from 0 to 1e\+12, is nan"),
     ("schedule 1f1b --cost.send 1e308 --json", r"cost.send: must be from 0 to 1e\+12, is 1e\+308"),
     ("schedule dualpipe --cost.communication 2", "is part of forward"), ("schedule dualpipe --pp 3", "must be even")],
)  # fmt: skip
def test_mistakes_are_told_in_a_sentence(words, told):
    with pytest.raises(SpecError, match=told):
        command(words.split())


def test_the_middle_of_a_long_step_is_left_out(capsys):
    out = shown("schedule 1f1b --pp 2 --micro-batches 400", capsys)
    assert "as long as these; --svg draws all of them" in out
    assert len(out.splitlines()) < 30


@pytest.mark.parametrize("words", ["interleaved", "dualpipe-v --cost.communication 0.25"])
def test_pictures_in_the_documentation_are_what_the_command_draws(words, tmp_path, capsys):
    shown(f"schedule {words} --svg {tmp_path / 'now.svg'}", capsys)
    page = Path(__file__).parents[2] / "docs" / "pictures" / f"{words.split()[0]}.svg"
    assert page.read_text() == (tmp_path / "now.svg").read_text(), f"ultrascale show schedule {words} --svg {page}"


@pytest.mark.parametrize("words", ["--pp 4 --micro-batches 100000", "--pp 1000 --micro-batches 1000", "--pp 513"])
def test_a_step_of_endless_passes_is_refused_in_a_sentence(words):
    for verb in ("schedule 1f1b", "schedules"):
        with pytest.raises(SpecError, match=r"are played|are drawn"):
            command(f"{verb} {words}".split())


def test_a_long_step_is_drawn_and_of_many_ranks_only_the_ends(capsys):
    assert "A step takes 60009;" in shown("schedule 1f1b --pp 4 --micro-batches 20000", capsys)
    assert len(shown("schedule 1f1b --pp 128 --micro-batches 256", capsys).splitlines()) < 500
