import json
import re
from itertools import chain

import pytest

from ultrascale.cli.show.show_command import command
from ultrascale.description.problems import SpecError
from ultrascale.measure.executed import mean_seconds
from ultrascale.plan.pipeline.play import StageSeconds, simulate
from ultrascale.schedules.build import build_schedule


def test_the_actions_that_ran_are_those_of_the_plan_in_its_order_and_none_before_its_input(tmp_path, capsys):
    picture = tmp_path / "both.svg"
    words = f"schedule zb-v --pp 2 --micro-batches 4 --executed --json --svg {picture}"
    assert command(words.split()) == 0
    got = json.loads(capsys.readouterr().out)
    planned, executed = ([rank["actions"] for rank in got[key]["ranks"]] for key in ("planned", "executed"))
    assert [[name for name, *_ in row] for row in executed] == [[name for name, *_ in row] for row in planned]
    ends = {name: end for row in executed for name, _, end in row}
    starts = {name: start for row in executed for name, start, _ in row}
    assert all(starts[f"{stage + 1}F{k}"] > starts[f"{stage}F{k}"] for stage in range(3) for k in range(4))
    assert all(starts[f"{stage - 1}I{k}"] > starts[f"{stage}I{k}"] for stage in (3, 2) for k in range(4))
    step = got["executed"]["step_seconds"]
    assert step == max(ends.values()) and min(starts.values()) == 0
    busy = sum(rank["busy_seconds"] for rank in got["executed"]["ranks"])
    assert got["executed"]["bubble_fraction"] == pytest.approx(1 - busy / (2 * step))
    assert picture.read_text().count("<svg") == 3 and "zb-v, executed" in picture.read_text()


@pytest.mark.parametrize("words", ["1f1b --pipeline-runtime torch", "dualpipe"])
def test_torchs_runtime_runs_the_same_actions_and_two_copies_of_the_weights_run_too(words, capsys):
    assert command(["schedule", *words.split(), "--pp", "2", "--micro-batches", "3", "--executed", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    planned, executed = (
        [[one for name, *_ in rank["actions"] for one in re.findall(r"\d+[FBIW]\d+", name)] for rank in got[key]["ranks"]]
        for key in ("planned", "executed")
    )
    assert executed == planned and len(planned[0]) >= 6


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe-v"])
def test_a_plan_with_the_mean_of_equal_passes_is_the_step_itself(schedule):
    program = build_schedule(schedule, 2, 6)
    stages = 4 if schedule == "dualpipe-v" else 2
    forward = [1.0 + stage for stage in range(stages)]
    seconds = StageSeconds(forward, 2.0, 1.0)
    alone = [[part._replace(overlapped_with=None) for action in row for part in action.parts] for row in program]
    played = simulate(alone, seconds)
    again = simulate(alone, mean_seconds(played, stages))
    assert [*chain(*again.end)] == pytest.approx([*chain(*played.end)])
    assert mean_seconds(played, stages).forward == pytest.approx(forward)


def test_a_person_sees_both_and_what_each_rank_waits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert command(["schedule", "1f1b", "--pp", "2", "--micro-batches", "3", "--executed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1f1b, 2 ranks on ") and lines.index("executed") - lines.index(lines[2]) == 4
    assert [line.split()[0] for line in lines if line.startswith("rank ")] == ["rank"] * 5
    assert any(line.startswith("the bubble is ") and line.endswith("% as executed.") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("schedule 1f1b --pp 32", "more processes"), ("schedule 1f1b --micro-batches 5000", "at most 2,000"),
        ("schedule 1f1b --cost.send 1", "measured"), ("schedule 1f1b --perfetto a.json", "--svg or --json"),
        ("schedules", "one schedule"),
    ],
)  # fmt: skip
def test_what_cannot_be_executed_is_refused(words, said):
    with pytest.raises(SpecError, match=said):
        command([*words.split(), "--executed"])


def test_a_runtime_is_named_only_for_what_is_executed():
    with pytest.raises(SpecError, match="nothing is executed here"):
        command(["schedule", "1f1b", "--pipeline-runtime", "torch"])
