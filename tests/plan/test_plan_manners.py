"""`ultrascale plan` as people meet it: short answers, headroom, budgets, two plans side by side, output into a file."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from datetime import datetime

import pytest

import ultrascale as us
from ultrascale.api.planning.plan import answer
from ultrascale.api.planning.run_of import ModelAndMachines, planned_run
from ultrascale.api.schedule import Schedule
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.cli.main import main
from ultrascale.cli.plan.plan_command import request_of
from ultrascale.description.units import UnitError, format_bytes, format_seconds
from ultrascale.measure.step.step_report import WORDS
from ultrascale.page.ranked import ranking
from ultrascale.plan.costs.budget import Budget, budget_problems, parse_budget, tokens_to_train
from ultrascale.plan.view.notes import TIGHT_BYTES, notes, unmasked_seconds
from ultrascale.plan.view.plan_view import TIMES

SMALL = ["--model", "llama-3.2-1b", "--gpus", "8xh100", "--seq-len", "4k", "--tokens-per-batch", "512k"]
RUN = '[model]\npreset = "tiny-llama-4m"\n[layout]\ndp = {dp}\nzero_stage = 1\n[batch]\nsequences_per_batch = 16\n'


@pytest.fixture(scope="module")
def small():
    return us.plan("llama-3.2-1b", "8xh100", seq_len="4k", tokens_per_batch="512k")


def test_a_brief_answer_has_fifteen_lines_with_the_ranking_and_what_is_next(capsys):
    assert main(["plan", *SMALL, "--brief", "--budget", "$10k"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert len(lines) <= 15
    assert lines[-1].startswith("next  ultrascale plan") and "--brief" not in lines[-1]
    assert any(line.startswith(" 1  ") or line.startswith("1  ") for line in lines) and any("fits" in line for line in lines)


@pytest.mark.parametrize("words", [
    ["--model", "deepseek-v3", "--gpus", "2048xh800", "--tokens", "14.8T", "--budget", "$10M"],
    ["--model", "llama-3.1-405b", "--gpus", "16384xh100", "--tokens-per-batch", "16M", "--seq-len", "8k"],
    ["--model", "llama-3-8b", "--gpus", "2048xh100", "--tokens-per-batch", "16M", "--seq-len", "8k", "--budget", "30d"],
], ids=["deepseek-v3", "llama-3.1-405b", "with a note"])  # fmt: skip
def test_a_brief_answer_on_a_large_cluster_has_fifteen_lines_with_failures_in_one(words, capsys):
    assert main(["plan", *words, "--brief"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert len(lines) <= 15
    (failures,) = (line for line in lines if line.startswith("failures"))
    assert all(word in failures for word in ("one in", "apart", "spare", "goodput"))


def test_the_ranking_stands_once_more_at_the_end_and_no_line_ends_in_blanks(capsys):
    assert main(["plan", *SMALL]) == 0
    out = capsys.readouterr().out
    again = out[out.index("the ranking again") :].split("\n")
    assert again[1].split()[:3] == ["step", "MFU", "memory"] and len(out.split("the ranking again")[0].split("\n")) > 40
    assert [line for line in out.split("\n") if line != line.rstrip()] == []


def test_a_file_gets_tables_wider_than_eighty_columns(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["show", "clusters"]) == 0
    assert any("NVIDIA V100 SXM 16 GB" in line for line in capsys.readouterr().out.split("\n"))


def test_little_headroom_is_a_warning(small):
    chosen = small.chosen
    tight = replace(chosen, capacity_bytes=chosen.needed_bytes + chosen.reserve_bytes + 2**20)
    assert notes(tight)[0].startswith("warning: 1 MiB of headroom")
    assert not any("headroom" in note for note in notes(replace(tight, capacity_bytes=tight.capacity_bytes + TIGHT_BYTES)))


def test_headroom_is_one_number_in_python_in_json_in_the_ranking_and_on_the_page(small, capsys):
    plan, memory = small, small.to_dict()["memory"]
    headroom = memory["capacity_bytes"] - memory["reserve_bytes"] - memory["needed_bytes"]
    assert headroom == memory["headroom_bytes"] == plan.headroom_bytes and plan.reserve_bytes == memory["reserve_bytes"]
    (first, *_) = us.search("llama-3.2-1b", "8xh100", seq_len="4k", tokens_per_batch="512k").rows()
    assert first["headroom_bytes"] == pytest.approx(headroom, abs=2)
    ranked = small.to_dict()["search"]["ranked"][0]["memory"]["headroom_bytes"]
    assert ranked == pytest.approx(headroom, abs=2)
    row = ranking(small.searched.result)["rows"][0]["headroom"]
    assert row == {"value": pytest.approx(headroom, abs=2), "text": format_bytes(headroom)}
    assert main(["plan", *SMALL, "--brief"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[1].split()[3] == "headroom" and f" {format_bytes(headroom)} " in lines[2]
    assert any(line.startswith("fits") and line.endswith(f"{format_bytes(headroom)} of headroom") for line in lines)


def test_masks_between_documents_are_named_where_they_cost(small):
    long = us.plan("llama-3.2-1b", "8xh100", seq_len="16k", tokens_per_batch="1Mi", cp=1)
    unmasked = unmasked_seconds(long.chosen)
    assert unmasked is not None and long.step_seconds is not None and unmasked < 0.95 * long.step_seconds
    assert any("--data.document-mask false" in note for note in long.to_dict()["notes"])
    without = us.plan("llama-3.2-1b", "8xh100", seq_len="16k", tokens_per_batch="1Mi", cp=1, **{"data.document_mask": False})
    assert unmasked_seconds(without.chosen) is None and not any("document" in note for note in without.notes)


def test_what_masks_cost_is_told_against_the_layout_that_a_search_without_them_takes():
    """At 65,536 tokens cp with all-gather costs as much with masks as without, and the search without takes another layout."""
    masked = us.plan("llama-3.1-8b", "8xh200", seq_len="64k")
    note = "; ".join(masked.notes)
    changes = {
        "--data.document-mask false": {"data.document_mask": False},
        "--layout.attention flash-3": {"layout.attention": "flash-3"},
    }
    for flag, changed in changes.items():
        other = us.plan("llama-3.1-8b", "8xh200", seq_len="64k", **changed)
        assert other.step_seconds is not None and masked.step_seconds is not None
        assert other.step_seconds < 0.9 * masked.step_seconds
        assert f"{format_seconds(other.step_seconds)} with {flag}" in note
    same = us.plan("llama-3.1-8b", "8xh200", seq_len="64k", layout={"attention": "flash-3"})
    assert not any("--layout.attention" in note for note in same.notes)


def test_the_batch_is_one_that_the_chosen_layout_shares_and_not_all_gpus():
    """DeepSeek-V3's own batch, 15,360 sequences of 4096: a multiple of its dp, not of its 2,048 GPUs."""
    words = {"seq_len": 4096, "tokens_per_batch": "62.9M", "tp": 1, "pp": 16, "ep": 64, "dp": 128}
    found = us.plan("deepseek-v3", "2048xh800", schedule="dualpipe-v", zero_stage=1, micro_batch_size=1, **words)
    assert found.run.batch.sequences_per_batch == 15360


def test_a_batch_rounded_for_all_gpus_is_searched_again_for_the_ranks_of_the_best():
    found = us.plan("llama-3-70b", "96xh100", seq_len=8192, tokens_per_batch="1.1M", tp=8, recompute="full")
    asked, layout, batch = 1_100_000, found.layout, found.run.batch
    shared = layout.dp * layout.micro_batch_size * 8192
    assert batch.sequences_per_batch % (layout.dp * layout.micro_batch_size) == 0
    assert abs(batch.sequences_per_batch * 8192 - asked) <= min(shared / 2, 0.1 * asked)


def test_tokens_of_a_mixture_of_experts_are_told_of_the_active_parameters():
    tokens, why = tokens_to_train(PRESETS["deepseek-v3"], None)
    assert 7e11 < tokens < 8e11 and "active parameters" in why
    assert tokens_to_train(PRESETS["llama-3-8b"], None)[1] == ", 20 a parameter (Hoffmann et al. 2022)"


@pytest.mark.parametrize(
    "text, budget",
    [
        ("$1M", Budget("$1M", dollars=1e6)), ("250k$", Budget("250k$", dollars=2.5e5)), ("30d", Budget("30d", 30 * 86400.0)),
        ("30 days", Budget("30 days", 30 * 86400.0)), ("36h", Budget("36h", 36 * 3600.0)),
        ("2027-01-02", Budget("2027-01-02", 86400.0)),
    ],
)  # fmt: skip
def test_a_budget_is_money_a_time_or_a_date(text, budget):
    assert parse_budget(text, now=datetime(2027, 1, 1)) == budget


@pytest.mark.parametrize("text", ["soon", "$0", "0d", "2020-01-01", "2027-13-01", "$", "1e400d"])
def test_what_is_no_budget_is_told_with_what_to_write(text):
    with pytest.raises((UnitError, ValueError)):
        parse_budget(text, now=datetime(2027, 1, 1))
    assert budget_problems(text)[0].remedy == "Write $1M, 30d or 2027-03-01."


def test_a_budget_of_days_trains_as_many_tokens_as_the_speed_says():
    found = us.plan("llama-3.2-1b", "8xh100", seq_len="4k", tokens_per_batch="512k", budget="30d")
    bought = found.to_dict()["budget"]
    assert found.tokens_per_second is not None
    assert bought["tokens"] == pytest.approx(30 * 86400 * found.tokens_per_second)
    assert 1e9 < bought["optimal_parameters"] < 1e11


def test_parts_of_a_dollar_are_refused_in_words_of_money():
    assert budget_problems("$0.1")[0].rule == "expected whole dollars, found '$0.1'"


@pytest.mark.parametrize("text", ["1M EUR", "€500k", "£1M", "250k euros", "1M€"])
def test_another_currency_is_refused_with_the_one_of_the_prices(text):
    (problem,) = budget_problems(text)
    assert problem.rule.startswith("expected dollars") and text in problem.rule


@pytest.mark.parametrize(
    "model, budget, told",
    [
        ("llama-3.2-1b", "12h", "14 for each parameter;"), ("llama-3.2-1b", "$1", "0.053 for each parameter;"),
        ("llama-3.2-1b", "20s", "less than 0.01 for each parameter;"), ("olmoe-1b-7b", "30d", "for each active parameter;"),
    ],
)  # fmt: skip
def test_tokens_of_a_budget_are_told_of_the_parameters_that_a_token_meets(model, budget, told, capsys):
    words = ["--gpus", "8xh100", "--seq-len", "4k", "--tokens-per-batch", "512k", "--brief", "--budget", budget]
    assert main(["plan", "--model", model, *words]) == 0
    (line,) = (line for line in capsys.readouterr().out.split("\n") if line.startswith("budget"))
    assert told in line, line


def test_money_is_spent_at_the_list_price():
    found = us.plan("llama-3.2-1b", "8xh100", seq_len="4k", tokens_per_batch="512k", budget="$1M")
    price = found.chosen.cluster.accelerator.dollars_per_hour
    assert price is not None and found.bought is not None
    assert found.bought.seconds == pytest.approx(1e6 / (8 * price.value) * 3600)


def test_two_runs_stand_side_by_side(tmp_path, capsys):
    files = []
    for dp in (1, 2):
        files.append(str(tmp_path / f"dp{dp}.toml"))
        (tmp_path / f"dp{dp}.toml").write_text(RUN.format(dp=dp))
    assert main(["plan", files[0], "--compare", files[1]]) == 0
    out = capsys.readouterr().out
    assert ["layout.dp", "1", "2"] in [line.split() for line in out.split("\n")]
    assert main(["plan", "--compare", *files]) == 0
    assert capsys.readouterr().out == out
    assert main(["plan", f"--compare={files[1]}", files[0]]) == 0  # which is B is written
    assert capsys.readouterr().out == out
    assert main(["plan", files[0], "--compare", files[1], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "ultrascale/compare/2" and told["settings"][0]["name"] == "layout.dp"


def test_two_runs_side_by_side_show_quantities_first_and_settings_as_a_file_has_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-run-with-a-name-that-is-as-long-as-the-names-of-runs-are-wont-to-be-in-practice.toml"
    (tmp_path / name).write_text(RUN.format(dp=1) + '[data]\ndocument_mask = false\nsources = ["a"]\n')
    (tmp_path / "b.toml").write_text(RUN.format(dp=1).replace("tiny-llama-4m", "tiny-mixtral"))
    assert main(["plan", str(tmp_path / name), "--compare", str(tmp_path / "b.toml")]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == f"a  {tmp_path / name}" and lines[1] == f"b  {tmp_path / 'b.toml'}"
    names = [line.split("  ")[0] for line in lines]
    assert names.index("memory needed") < names.index("model") < names.index("data.document_mask")
    (model,) = (line.split()[1:] for line in lines if line.startswith("model"))
    assert model == ["tiny-llama-4m", "tiny-mixtral"]
    (mask,) = (line.split()[1:] for line in lines if line.startswith("data.document_mask"))
    assert mask == ["false", "true"]
    (sources,) = (line for line in lines if line.startswith("data.sources"))
    assert '{path = "a"' in sources and not any("..." in line or "\u2026" in line or "None" in line for line in lines)


def test_a_comparison_needs_two_files(capsys):
    assert main(["plan", *SMALL, "--compare", "b.toml"]) == 2
    assert "--compare" in capsys.readouterr().err


def test_a_command_that_takes_more_than_a_second_says_so_on_a_terminal():
    code = "import time; from ultrascale.cli.terminal.screen import waiting\nwith waiting('planning'):\n"
    code += "    end = time.time() + 2.5\n    while time.time() < end: pass\n"
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 1000)
            except OSError:
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    assert process.returncode == 0 and b"ultrascale: planning, " in said and said.endswith(b"\r\x1b[K")


def test_each_phase_of_a_plan_is_named_and_none_says_that_nothing_is_done():
    phases: list[str] = []
    answer(request_of([*SMALL, "--explain", "--tp", "1", "--pp", "1"]), report=phases.append)
    *shares, played, counts, others = phases
    assert all(share.endswith("% of the layouts searched") and share != "100% of the layouts searched" for share in shares)
    assert played == "the fastest layouts played action by action"
    assert (counts, others) == ("searching other numbers of GPUs", "searching other GPUs")


def test_the_schedule_of_the_best_layout_is_played():
    found = us.schedule("1f1b", model="llama-3-8b", gpus="16xh100", seq_len="2k", tokens_per_batch="128k", pp=4)
    assert isinstance(found, Schedule) and (found.name, found.num_ranks) == ("1f1b", 4)


def test_exposed_communication_has_the_name_that_measured_steps_give_it():
    names = {"data_parallel": "dp", "tensor_parallel": "tp", "context_parallel": "cp", "expert_parallel": "ep"}
    assert {axis: TIMES[part][0] for part, axis in names.items()} == {axis: WORDS[axis] for axis in names.values()}


def test_a_layout_without_sequence_parallelism_says_so_in_ranking_and_headline(capsys):
    words = ["plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--tp", "2", "--pp", "1", "--cp", "1"]
    assert main([*words, "--layout.sequence-parallel", "false"]) == 0
    out = capsys.readouterr().out
    assert "dp4 tp2 without sp, ZeRO" in out and "tp 2 without sequence parallelism, bf16" in out
    assert main(words) == 0 and "without s" not in capsys.readouterr().out


@pytest.mark.parametrize("form", [["--layout.recompute=mlp_act"], ["--layout.recompute", "mlp_act"]])
def test_a_value_of_a_searched_flag_keeps_its_underscores(form, capsys):
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--json", *form]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["recompute"] == "mlp_act"


def test_on_processors_dp_is_what_the_other_axes_leave(capsys):
    """`check --model tiny-llama-4m --gpus 2xcpu --tp 2` was 4 ranks that do not fit."""
    described = ModelAndMachines("tiny-llama-4m", "4xcpu", 64, None)
    for axis in ("tp", "cp", "pp"):
        layout = planned_run(described, [f"--layout.{axis}", "2"], run=None, verb="check").layout
        assert (layout.dp, getattr(layout, axis), layout.world_size) == (2, 2, 4)
    words = ["plan", "--model", "tiny-llama-4m", "--gpus", "2xcpu", "--seq-len", "64"]
    assert main([*words, "--layout.tp", "4"]) == 2 and "layout.tp\n    4 ranks do not fit on 2xcpu" in capsys.readouterr().err
    assert main([*words, "--tp", "2"]) == 2 and "Fix it with --layout.tp 2, or" in capsys.readouterr().err
