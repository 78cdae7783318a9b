"""`ultrascale plan` as people call it."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ultrascale as us
from ultrascale.catalogue.machines import machine_memory_bytes
from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve
from ultrascale.plan.columns.footprint import RETAINED_SHARE
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv

ISSUE = ["plan", "--model", "llama-3-8b", "--gpus", "64xh100", "--seq-len", "8192", "--tokens-per-batch", "4M"]


def answer(capsys, *words: str) -> dict:
    main([*ISSUE, "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_the_fastest_layout_that_fits_is_explained_and_the_next_are_listed(capsys) -> None:
    plan = answer(capsys, "--top", "5")
    ranked = plan["search"]["ranked"]
    expected = [one["time"]["seconds_per_step"] / (1 - one["out_of_memory_risk"]) for one in ranked]
    assert len(ranked) == 5 and expected == sorted(expected) and all(one["fits"] for one in ranked)
    assert plan["layout"] in [one["layout"] for one in ranked]
    assert plan["fits"] and plan["sequences_per_batch"] == 512 and plan["search"]["num_legal"] > 10_000
    size, count, dp = (plan["layout"]["micro_batch_size"], plan["num_micro_batches"], plan["layout"]["dp"])
    assert size * count * dp == 512


def test_the_waterfall_sums_to_the_step(capsys) -> None:
    time = answer(capsys, "--top", "1")["time"]
    assert sum(time["waterfall_seconds"].values()) == pytest.approx(time["seconds_per_step"])
    assert time["tokens_per_step"] == 512 * 8192
    assert time["mfu"] == pytest.approx(
        time["model_flops_per_token"] * time["tokens_per_second"] / 64 / time["peak_flops_per_second"]
    )


def test_a_choice_is_kept_and_only_the_rest_is_searched(capsys) -> None:
    layouts = [one["layout"] for one in answer(capsys, "--zero-stage", "3", "--tp", "2,4")["search"]["ranked"]]
    assert {one["zero_stage"] for one in layouts} == {3} and {one["tp"] for one in layouts} <= {2, 4}
    one = answer(capsys, "--layout.zero-stage=1", "--recompute", "full", "--layout.layers-per-bucket", "4")["layout"]
    assert (one["zero_stage"], one["recompute"], one["layers_per_bucket"]) == (1, "full", 4)


def test_runnable_searches_what_the_trainer_runs(capsys) -> None:
    plan = answer(capsys, "--runnable", "--top", "50")
    assert plan["trainable"] and any(one["layout"]["pp"] > 1 for one in plan["search"]["ranked"])
    over_cp = answer(capsys, "--runnable", "--top", "50", "--cp", "2")
    assert over_cp["trainable"] and {one["layout"]["cp"] for one in over_cp["search"]["ranked"]} == {2}
    fp8 = answer(capsys, "--runnable", "--precision", "fp8", "--top", "50", "--tp", "2")
    assert fp8["trainable"] and {one["layout"]["tp"] for one in fp8["search"]["ranked"]} == {2}


def test_on_processes_of_this_machine_stages_and_recomputation_are_compared(capsys) -> None:
    words = ["plan", "--model", "tiny-llama", "--gpus", "2xcpu", "--seq-len", "128", "--json"]
    main(words)
    plan = json.loads(capsys.readouterr().out)
    fitting = [one for one in plan["compared"] if one["fits"]]
    assert len(plan["compared"]) == 12 and plan["time"] is None
    assert (plan["layout"]["zero_stage"], plan["layout"]["recompute"]) == (fitting[0]["zero_stage"], fitting[0]["recompute"])
    main([*words, "--zero-stage", "3"])
    assert {one["zero_stage"] for one in json.loads(capsys.readouterr().out)["compared"]} == {3}


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ([], 512),
        (["--seq-len", "128"], 128),
        (["--batch.sequence-length", "64"], 64),
        (["--seq-len", "2048", "--model.max-position-embeddings", "4096"], 2048),
        (["--model.max-position-embeddings", "16384"], 8192),
    ],
)
@pytest.mark.parametrize("gpus", ["8xh100", "2xcpu"])
def test_a_model_of_few_positions_is_planned_at_the_length_that_is_asked_or_fits(capsys, gpus, words, length) -> None:
    assert main(["plan", "--model", "tiny-gpt2", "--gpus", gpus, "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["sequence_length"] == length


@pytest.mark.parametrize(
    ("words", "sequences"), [(["--batch.sequences-per-batch", "64"], 64), (["--batch.tokens-per-batch", "1Mi"], 128)]
)
def test_a_batch_as_a_dotted_flag_is_the_batch_of_the_search(capsys, words, sequences) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["sequences_per_batch"] == sequences


def test_a_setting_as_a_short_and_a_dotted_flag_is_refused(capsys) -> None:
    assert main([*ISSUE, "--batch.sequence-length", "128"]) == 2
    assert "batch.sequence_length  (flag)\n    is given twice" in capsys.readouterr().err


def test_parts_add_up_to_the_peak(capsys) -> None:
    memory = answer(capsys, "--runnable")["memory"]
    assert sum(memory["peak_bytes_by_category"].values()) == sum(memory["peak_bytes_by_part"].values()) == memory["peak_bytes"]
    memory = answer(capsys, "--pp", "4")["memory"]
    assert sum(memory["peak_bytes_by_category"].values()) == pytest.approx(memory["peak_bytes"])


@pytest.mark.parametrize("batch", ["tokens_per_batch", "sequences_per_batch"])
def test_a_batch_beyond_all_counts_is_refused_in_the_words_of_its_own_flag(capsys, batch) -> None:
    size = "100T" if batch.startswith("tokens") else str(10**11)
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "8xh100", f"--{batch.replace('_', '-')}", size]) == 2
    out = capsys.readouterr().err
    assert f"batch.{batch}  (flag)\n    all 100 steps must come to at most 2^53 tokens" in out and "\n  steps" not in out


def test_a_batch_whose_tokens_alone_do_not_fit_is_answered_with_a_smaller_one(capsys, tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 4\n[model]\npreset = "tiny-llama-4m"\n[batch]\nsequence_length = 64\ntokens_per_batch = "100T"\n')
    assert main(["plan", str(file), "--brief"]) == 1
    out = capsys.readouterr().out
    assert "with a smaller batch, or more --gpus" in out and "zero-stage" not in out


@pytest.mark.parametrize(("stage", "sequences", "advised"), [(1, 8, True), (0, 8, False), (1, 2**18, False)])
def test_a_larger_batch_is_advised_only_if_more_ranks_could_share_it_and_shard_the_state(
    capsys, stage, sequences, advised
) -> None:
    words = ["--tp", "1", "--pp", "1", "--cp", "1", "--sequences-per-batch", str(sequences), "--brief"]
    assert main(["plan", "--model", "llama-3-70b", "--gpus", "4xl40s", "--zero-stage", str(stage), *words]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("No number of these GPUs would do"))
    might = f"other settings, {'a larger batch, ' * advised}a shorter sequence or larger GPUs might."
    assert line == f"No number of these GPUs would do with zero_stage {stage}, tp 1, cp 1, pp 1; {might}"


@pytest.mark.parametrize("optimizer", ["muon", "adamw-bf16", "adamw-8bit"])
def test_the_optimizer_of_a_plan_is_that_of_the_run_it_writes(capsys, tmp_path, optimizer: str) -> None:
    """A run that was planned with Muon and saved with AdamW would be trained with AdamW, in other memory."""
    words = ["--model", "llama-3.2-1b", "--gpus", "8xh100", "--seq-len", "2048", "--sequences-per-batch", "64"]
    saved = str(tmp_path / "run.toml")
    main(["plan", *words, "--optimizer", optimizer, "--save", saved, "--json"])
    planned = json.loads(capsys.readouterr().out)
    main(["plan", saved, "--json"])
    again = json.loads(capsys.readouterr().out)
    assert tomllib.loads(Path(saved).read_text())["optimizer"]["name"] == optimizer
    assert [again[key] for key in ("layout", "memory", "time")] == [planned[key] for key in ("layout", "memory", "time")]
    main(["plan", *words, "--optimizer", optimizer, "--print-flags"])
    assert tomllib.loads(capsys.readouterr().out)["optimizer"] == {"name": optimizer}
    main(["plan", saved, "--brief"])
    assert "--optimizer.name" not in capsys.readouterr().out.splitlines()[-1]
    main(["plan", saved, "--optimizer", "adamw-bf16" if optimizer == "muon" else "muon", "--brief"])
    assert "--optimizer.name" in capsys.readouterr().out.splitlines()[-1]


def test_an_optimizer_that_is_another_trainers_own_is_said_where_it_differs(capsys, tmp_path) -> None:
    """HAI-LLM's moments are bf16: a run that says adamw, which is the default, does not say that they are not."""
    words = ["--model", "llama-3.2-1b", "--gpus", "8xh800", "--seq-len", "2048", "--sequences-per-batch", "64", "--brief"]
    for optimizer, said in (("adamw", True), ("adamw-bf16", False)):
        saved = str(tmp_path / f"{optimizer}.toml")
        main(["plan", *words, "--stack", "hai-llm", "--optimizer", optimizer, "--save", saved])
        assert (f"--optimizer {optimizer}" in capsys.readouterr().out.splitlines()[-1]) == said


def test_an_optimizer_that_cannot_be_offloaded_is_refused_in_a_search_as_in_a_file(capsys) -> None:
    words = ["--model", "llama-3.2-1b", "--gpus", "8xh100", "--layout.offload-optimizer", "true", "--optimizer", "muon"]
    assert main(["plan", *words]) == 2
    assert "layout.offload_optimizer updates on the host, by adamw alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "length", "helps", "helps_not"),
    [("1xh100", "4096", "more --gpus", "--seq-len"), ("1xa100-40", "128k", "a shorter --seq-len", "offload")],
)
def test_a_shorter_sequence_is_advised_only_if_the_state_alone_fits(
    capsys, gpus: str, length: str, helps: str, helps_not: str
) -> None:
    model = "llama-3-8b" if gpus == "1xh100" else "llama-3.2-1b"
    assert main(["plan", "--model", model, "--gpus", gpus, "--seq-len", length, "--tokens-per-batch", "512k", "--brief"]) == 1
    advice = capsys.readouterr().out.splitlines()[-1].partition("   ")[2]
    assert helps in advice and helps_not not in advice


def test_what_does_not_fit_says_so_and_exits_with_one(capsys) -> None:
    assert main(["plan", "--model", "llama-3.1-405b", "--gpus", "8xh100"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "Nothing fits: the smallest layout" in out and "GPUs would do" in out


def test_a_missing_model_or_machine_is_told(capsys) -> None:
    assert main(["plan"]) == 2
    assert "--model llama-3-8b" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-3-8b"]) == 2
    assert "--gpus 8xh100" in capsys.readouterr().err


def test_a_run_file_is_planned_with_overrides(tmp_path, capsys) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 128\n')
    assert main(["plan", str(file), "--layout.dp", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"]["dp"] == 2 and plan["time"] is None
    assert main(["plan", str(file)]) == 0
    assert "next  ultrascale check" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--zero-stage", "3"]])
def test_the_command_that_is_next_can_be_given_to_a_shell_whatever_the_file_is_called(tmp_path, capsys, words) -> None:
    file = tmp_path / "my run" / "it's mine.toml"
    file.parent.mkdir()
    file.write_text('[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 128\n')
    assert main(["plan", str(file), *words]) == 0
    said = shlex.split(capsys.readouterr().out.partition("next  ")[2])
    assert said[:3] == ["ultrascale", "check", str(file)]
    searched = ["plan", "--model", "tiny-llama", "--gpus", "8xh100", "--save", str(file.with_name("a plan.toml"))]
    assert main(searched) == 0
    assert shlex.split(capsys.readouterr().out.partition("next  ")[2])[2] == searched[-1]


@pytest.mark.parametrize("forbidden", ["torch", "pandas", "scipy"])
def test_planning_imports_nothing_heavy(forbidden: str) -> None:
    code = f"import sys; from ultrascale.cli.main import main; main({ISSUE}); sys.exit({forbidden!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_the_next_command_saves_a_run_that_plans_the_same(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    main([*ISSUE, "--runnable"])
    said = " ".join(capsys.readouterr().out.split("next  ultrascale ")[1].split())
    assert said.endswith("--save run.toml")
    assert main([*said.split(), "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)
    del saved["search"]
    assert main(["plan", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == saved
    assert main(said.split()) == 2
    assert "run.toml is there already" in capsys.readouterr().err


@pytest.mark.parametrize(("length", "power"), [("4096", " (4Mi is 4,194,304 tokens)"), ("8192", "")])
def test_a_rounded_batch_names_the_power_of_two_that_was_perhaps_meant(capsys, length: str, power: str) -> None:
    main(["plan", "--model", "llama-3-8b", "--gpus", "64xh100", "--seq-len", length, "--tokens-per-batch", "4M", "--brief"])
    assert capsys.readouterr().out.splitlines()[0].endswith(f"; 4M rounded so that data-parallel ranks share it{power}")


def test_a_narrow_terminal_has_every_note_and_a_tiny_run_more_than_0_gpu_hours(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    main(["plan", "--model", "tiny-gpt2", "--gpus", "1xh100"])
    out = capsys.readouterr().out
    assert "…" not in out and "fp32 master" in out
    assert re.search(r"\n +0\.0\d+ +GPU hours", out)


@pytest.mark.parametrize(
    ("setting", "said"), [("true", "8192, intra-document masking"), ("false", "8192, attention across documents")]
)
def test_a_plan_says_whether_documents_are_masked_and_counts_it(capsys, setting: str, said: str) -> None:
    main([*ISSUE, "--runnable", "--data.document-mask", setting])
    assert said in " ".join(capsys.readouterr().out.split())
    plan = answer(capsys, "--runnable", "--data.document-mask", setting)
    assert plan["document_mask"] == (setting == "true")
    extra = plan["time"]["hardware_flops_per_token"] / plan["time"]["model_flops_per_token"]
    assert extra < 1.1  # told to the kernel, documents cost nothing
    masked = answer(capsys, "--runnable", "--data.document-mask", setting, "--layout.attention", "sdpa", "--cp", "1")
    extra = masked["time"]["hardware_flops_per_token"] / masked["time"]["model_flops_per_token"]
    assert (extra > 1.1) == plan["document_mask"]


def test_processes_that_overfill_a_machine_have_no_memory_left_rather_than_a_negative_one(capsys) -> None:
    processes = machine_memory_bytes()[0] // 2**28  # one with 512 MiB for each two
    assert main(["plan", "--model", "tiny-llama", "--gpus", f"{processes}xcpu"]) == 1
    out = capsys.readouterr().out
    assert "0 B can be used" in out and "-" not in out.partition("can be used")[0]
    assert f"{processes} processes share this machine's memory" in out


def test_what_a_block_keeps_stays_indented_where_it_wraps(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    main([*ISSUE, "--runnable"])
    lines = capsys.readouterr().out.partition("a block keeps")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(lines) > 1 and all(line.startswith("  ") for line in lines)


def test_dotted_settings_need_no_run_file_beside_them(capsys) -> None:
    plan = answer(capsys, "--runnable", "--layout.zero-stage", "1", "--model.num-hidden-layers=2")
    assert (plan["layout"]["zero_stage"], len(plan["memory"]["saved_bytes_by_layer"])) == (1, 2)
    assert main(["plan", "one.toml", "two.toml"]) == 2
    assert "Plan one at a time" in capsys.readouterr().err


@pytest.mark.parametrize(("micro_batches", "trainable"), [(2**20, False), (2**16, True)])
def test_a_step_of_a_million_micro_batches_is_planned_at_once_and_not_trained(
    capsys, tmp_path, micro_batches, trainable
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npreset = "gpt2-small"\n[batch]\nsequence_length = 1024\nsequences_per_batch = {micro_batches}\n')
    main(["plan", str(file), "--gpus", "1xh100", "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert (planned["num_micro_batches"], planned["trainable"]) == (micro_batches, trainable)


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--dp", "4", "--layout.tp", "2"], 0), (["--layout.pp", "2", "--layout.dp", "2"], 0), (["--layout.tp", "2"], 0),
     (["--layout.pp", "3"], 2)],
)  # fmt: skip
def test_on_processors_dp_is_what_the_other_axes_leave(capsys, words: list[str], code: int) -> None:
    assert main(["plan", "--model", "tiny-llama", "--gpus", "8xcpu", "--seq-len", "128", "--json", *words]) == code
    told = capsys.readouterr()
    if code:
        assert "pp = 3 do not divide 8xcpu" in told.err
    else:
        layout = json.loads(told.out)["layout"]
        assert layout["dp"] == int(words[words.index("--dp") + 1]) if "--dp" in words else layout["dp"] in (2, 4)


def test_a_shard_size_leaves_the_stages_that_cut_something_to_compare(capsys) -> None:
    main(["plan", "--model", "tiny-llama", "--gpus", "8xcpu", "--seq-len", "128", "--dp-shard", "4", "--json"])
    assert {row["zero_stage"] for row in json.loads(capsys.readouterr().out)["compared"]} == {1, 2, 3}
    main(["plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--dp-shard", "4", "--json", "--top", "100"])
    rows = [one["layout"] for one in json.loads(capsys.readouterr().out)["search"]["ranked"]]
    assert {row["dp_shard"] or row["dp"] for row in rows} == {4} and {row["zero_stage"] for row in rows} <= {1, 2, 3}


def test_flags_that_are_none_are_all_told_with_the_nearest(capsys) -> None:
    assert main(["plan", "--modle", "llama-3-8b", "--gpuz", "8xh100"]) == 2
    told = capsys.readouterr().err
    assert "Did you mean --model?" in told and "Did you mean --gpus?" in told


def test_a_plan_fits_the_width_of_the_terminal(monkeypatch, capsys) -> None:
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        main([*ISSUE, "--stack", "megatron", "--explain"])
        out = capsys.readouterr().out.partition("\nnext  ")[0]
        assert max(len(line) for line in out.splitlines()) <= width
        for said in ("What makes it fit", "How the batch is reached", "What makes it fast", "What binds"):
            assert said in out
        assert "each added GPU brings" in out and "20% faster" in out and "Left out" in out


def test_a_memory_table_loses_no_words_at_80_columns(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*ISSUE, "--runnable"])
    assert "\u2026" not in capsys.readouterr().out


def test_a_rounded_batch_costs_no_speed(capsys) -> None:
    """4M tokens are 488 sequences, and 61 micro-batches interleave nothing."""
    question = ["plan", "--model", "llama-3-70b", "--gpus", "256xh100", "--seq-len", "8192", "--stack", "megatron", "--json"]
    plans = {}
    for tokens in ("4M", "4Mi"):
        assert main([*question, "--tokens-per-batch", tokens]) == 0
        plans[tokens] = json.loads(capsys.readouterr().out)
    speed = {tokens: plan["time"]["tokens_per_second"] for tokens, plan in plans.items()}
    assert speed["4M"] >= 0.98 * speed["4Mi"] and plans["4M"]["sequences_per_batch"] == 480
    fixed = ["--gpus", "384xh100", "--tokens-per-batch", "5M", "--schedule", "1f1b", "--pp", "8", "--json"]
    assert main(["plan", "--model", "llama-3-70b", "--seq-len", "8192", *fixed]) == 0
    assert json.loads(capsys.readouterr().out)["sequences_per_batch"] == 612  # 610.4 are asked for, and 1F1B needs no rounds


def test_other_trainers_are_planned_without_document_masks_as_their_printed_settings_train(capsys) -> None:
    question = ["plan", "--model", "llama-3.1-8b", "--gpus", "64xh100", "--seq-len", "32768", "--stack", "megatron", "--json"]
    seconds = []
    for words in ([], ["--data.document-mask", "false"], ["--data.document-mask", "true"]):
        assert main([*question, *words]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["time"]["seconds_per_step"])
    assert seconds[0] == seconds[1] < 0.9 * seconds[2]


def test_a_plan_is_printed_as_the_flags_of_its_trainer(capsys) -> None:
    assert main([*ISSUE, "--stack", "megatron", "--print-flags"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/usr/bin/env bash\n# For Megatron-LM") and "  --global-batch-size 480\n" in out
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0
    assert main([*ISSUE, "--stack", "megatorn"]) == 2
    assert "megatron" in capsys.readouterr().err


def test_the_step_is_drawn_and_traced(tmp_path, capsys) -> None:
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    words = [*ISSUE, "--pp", "4", "--schedule", "1f1b", "--svg", str(svg), "--perfetto", str(trace), "--json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert svg.read_text().startswith("<svg") and "llama-3-8b, 1f1b" in svg.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) >= 2 * 4 * plan["num_micro_batches"]
    waterfall = plan["time"]["waterfall_seconds"]
    after = {
        event["name"]: event["dur"] / 1e6 for event in passes if event["cat"] == "after the pipeline" and event["tid"] == 3
    }
    for part, name in {"data_parallel": "dp, exposed", "optimizer": "optimizer", "rest": "rest"}.items():
        assert after[name] == pytest.approx(waterfall[part]) and f"<title>{name}, " in svg.read_text()
    for rank in range(4):
        ends = [event["ts"] + event["dur"] for event in passes if event["tid"] == rank]
        assert max(ends) / 1e6 == pytest.approx(plan["time"]["seconds_per_step"], rel=1e-3)
    trace.write_text("")
    assert main(words) == 0 and json.loads(trace.read_text())["traceEvents"]  # drawn again
    assert main([*words[:-2], __file__]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "name"), [("--html", "plan.html"), ("--save", "plan.toml")])
def test_a_folder_given_for_a_file_is_called_a_folder(flag, name, tmp_path, capsys) -> None:
    assert main([*ISSUE, flag, str(tmp_path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path} is a folder" in told and f"Name a file, such as {tmp_path / name}." in told


def test_a_file_on_a_full_disk_is_named_and_nothing_of_it_stays(tmp_path, capsys) -> None:
    words = [*ISSUE, "--zero-stage", "3", "--tp", "1", "--pp", "1"]
    files = {"--save": tmp_path / "saved.toml", "--html": tmp_path / "plan.html", "--svg": tmp_path / "step.svg"}
    assert (
        main([*words, *(str(word) for pair in files.items() for word in pair)]) == 0
    )  # modules are compiled without the limit
    for flag, file in files.items():
        file.unlink()
        capsys.readouterr()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a full disk: a write fails after its first bytes
        try:
            assert main([*words, flag, str(file)]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert f"{file} file too large" in " ".join(capsys.readouterr().err.split())
        assert not file.exists()
    assert not any(tmp_path.iterdir())


def test_tokens_are_turned_into_days_energy_and_money(capsys) -> None:
    assert main([*ISSUE, "--tokens", "15T"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "on 15T tokens, without interruptions" in out and "GPU hours" in out and "Wh" in out


def test_a_run_file_with_axes_is_planned_on_the_machines_that_are_named(tmp_path, capsys) -> None:
    file = tmp_path / "run.toml"
    layout = '[layout]\ntp = 4\npp = 2\nprecision = "bf16"\nmicro_batch_size = 1\n'
    file.write_text('[model]\npreset = "llama-3-8b"\n[batch]\nsequence_length = 8192\nsequences_per_batch = 64\n' + layout)
    assert main(["plan", str(file), "--gpus", "32xh100", "--layout.zero-stage", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"]["dp"] == 4 and plan["trainable"] and plan["time"]["waterfall_seconds"]["bubble"] > 0
    assert main(["plan", str(file), "--gpus", "4xh100"]) == 2
    assert "--gpus\n    4 processes are not a multiple of tp = 4 x pp = 2" in capsys.readouterr().err


def test_a_schedule_of_ones_own_is_planned_on_gpus(tmp_path, capsys) -> None:
    schedule, run = tmp_path / "own.csv", tmp_path / "run.toml"
    schedule.write_text(to_csv(build_schedule("1f1b", 2, 4)))
    batch = "[batch]\nsequence_length = 4096\nsequences_per_batch = 16\n"
    layout = f'[layout]\ndp = 4\npp = 2\nschedule = "{schedule}"\nprecision = "bf16"\n'
    run.write_text(f'cluster = "8xh100"\n[model]\npreset = "llama-3.2-1b"\n{batch}{layout}')
    assert main(["plan", str(run), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["plan", str(run), "--layout.schedule", "1f1b", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert own["time"]["seconds_per_step"] == pytest.approx(known["time"]["seconds_per_step"], rel=0.01)
    assert own["memory"]["needed_bytes"] == pytest.approx(known["memory"]["needed_bytes"], rel=0.01)


def test_the_next_command_of_a_file_says_all_that_the_short_flags_changed(tmp_path, capsys) -> None:
    file = tmp_path / "run.toml"
    batch = "[batch]\nsequence_length = 8192\nsequences_per_batch = 64\n"
    file.write_text(f'cluster = "8xh100"\n[model]\npreset = "llama-3-8b"\n{batch}[layout]\ndp = 8\nzero_stage = 3\n')
    flags = ["--gpus", "16xh100", "--tp", "2", "--precision", "bf16", "--seq-len", "4096", "--recompute", "full"]
    assert main(["plan", str(file), *flags, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["layout"]["dp"] * planned["layout"]["tp"] == 16  # twice what the file's own machines have
    assert main(["plan", str(file), *flags]) == 0
    _, _, words = capsys.readouterr().out.rpartition("next  ultrascale check ")[2].rpartition("ultrascale train ")
    assert words.startswith(f"{file} ")
    again = resolve(str(file), words.split()[1:]).run
    assert (again.layout.dp, again.layout.tp, again.layout.recompute, again.layout.precision) == (8, 2, "full", "bf16")
    assert (again.batch.sequence_length, again.cluster) == (4096, "16xh100")
    assert main(["plan", str(file), "--gpus", "8xh100", "--layout.dp", "4", "--precision", "bf16"]) == 0
    words = capsys.readouterr().out.rpartition("ultrascale train ")[2].split()
    assert words.count("--layout.dp") == 1 and resolve(str(file), words[1:]).run.layout.dp == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sequences-per-batch", "509", "--stack", "llm-foundry"], "does not divide the batch of 509 sequences"),
        (["--tp", "3"], "tp = 3 does not divide 64 GPUs"),
        (["--pp", "64"], "more stages than 32 layers, embedding and head"),
        (["--tp", "x"], "layout.tp"),
        (["--layout.layers-per-stage", "4,4"], "is for one layout, not for a search"),
        (["--layout.tensor", "4"], "layout.tensor"),
        (["--schedule", "2f2b"], "layout.schedule"),
        (["--gpus", "0xh100"], "0xh100"),
        (["--top", "0"], "must be at least 1"),
        (["--tokens", "many"], "Write 300B or 1T"),
        (["--precision", "fp8", "--gpus", "8xa100"], "fp8"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence_with_what_would_do(capsys, words: list[str], said: str) -> None:
    asked = dict(zip(ISSUE[1::2], ISSUE[2::2], strict=True)) | dict(zip(words[::2], words[1::2], strict=True))
    if "--sequences-per-batch" in asked:
        del asked["--tokens-per-batch"]
    assert main(["plan", *(word for pair in asked.items() for word in pair)]) == 2
    told = capsys.readouterr().err
    assert said in told and "->" in told


def test_data_centres_far_apart_are_planned(capsys) -> None:
    words = ["plan", "far", "--parameters", "72T", "--kilometres", "4800", "--line-gbits", "400", "--step-seconds", "60"]
    assert main([*words, "--json"]) == 0
    far = json.loads(capsys.readouterr().out)
    assert far["num_bytes"] == 144e12 and far["transfer_seconds"] == pytest.approx(144e12 / 50e9)
    assert main([*words[:3], "many", *words[4:]]) == 2
    assert "Write 405B or 72T" in capsys.readouterr().err


def test_a_batch_that_few_can_share_is_noted_with_the_nearest_that_all_can(capsys) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "64xh100", "--sequences-per-batch", "509", "--top", "1"]) == 0
    assert "At most 1 of 64 GPUs can share 509 sequences; all could share 512." in " ".join(capsys.readouterr().out.split())
    main([*ISSUE, "--top", "1"])
    assert "can share" not in capsys.readouterr().out


def test_what_a_device_must_hold_is_one_number_in_the_ranking_in_the_plan_and_in_the_scan(capsys) -> None:
    plan = answer(capsys, "--explain", "--top", "1")
    (first,) = plan["search"]["ranked"]
    row = next(one["best"] for one in plan["search"]["explanation"]["scaling"] if one["num_gpus"] == 64)
    needed = plan["memory"]["needed_bytes"]
    for one in (first, row):
        assert one["layout"] == plan["layout"]
        assert one["memory"]["needed_bytes"] == pytest.approx(needed, abs=1)
        live, reserved, outside = (
            one["memory"][key] for key in ("peak_allocated_bytes", "peak_reserved_bytes", "outside_torch_bytes")
        )
        assert needed == pytest.approx(live + RETAINED_SHARE * (reserved - live) + outside, abs=2)
        assert one["memory"]["headroom_bytes"] == pytest.approx(one["memory"]["capacity_bytes"] * 0.9 - needed, abs=2)
        assert one["time"]["seconds_per_step"] == pytest.approx(plan["time"]["seconds_per_step"], rel=1e-12)
    assert plan["memory"]["peak_bytes"] < needed <= plan["memory"]["capacity_bytes"] - plan["memory"]["reserve_bytes"]
    assert all(one["gain"] >= 0 for one in plan["search"]["explanation"]["worth"])
    better = plan["search"]["explanation"]["elsewhere"].values()
    assert better and all(one["time"]["seconds_per_step"] < plan["time"]["seconds_per_step"] for one in better)


def test_waiting_for_checkpoints_is_a_part_of_the_step(capsys) -> None:
    words = ("--runnable", "--checkpoint-minutes", "10", "--storage-gbytes", "2")
    time = answer(capsys, *words)["time"]
    parts = time["waterfall_seconds"]
    training = time["seconds_per_step"] - parts["checkpoints"]
    assert parts["checkpoints"] / training == pytest.approx(8.03e9 * 12 / 2e9 / 600, rel=1e-3)  # 12 bytes a parameter
    assert parts["data"] == 0 and sum(parts.values()) == pytest.approx(time["seconds_per_step"])
    slow = answer(capsys, "--runnable", "--storage-gbytes", "0.001")["time"]["waterfall_seconds"]
    assert slow["data"] > 0 and sum(slow.values()) == pytest.approx(512 * 8192 * 4 / 1e6)


def test_another_optimizer_and_uneven_experts_change_memory_and_time(capsys) -> None:
    words = ("--tp", "1", "--pp", "1", "--cp", "1", "--zero-stage", "1", "--layout.dp-shard", "64", "--micro-batch-size", "1")
    plain, muon = (answer(capsys, *words, "--recompute", "full", "--optimizer", name) for name in ("adamw", "muon"))
    fewer = plain["memory"]["needed_bytes"] - muon["memory"]["needed_bytes"]
    hidden = 8.03e9 - 2 * 128256 * 4096  # embedding and head keep both
    assert fewer == pytest.approx(hidden * 4 / 64 * (1 + 0.03 * RETAINED_SHARE), rel=0.02)  # one moment in fp32 less, of a 64th
    assert (plain["trainable"], muon["trainable"], muon["optimizer"]) == (True, True, "muon")
    moe = ("--model", "mixtral-8x7b", "--stack", "megatron", "--ep", "8", "--pp", "1", "--cp", "1", "--tp", "4")
    even, uneven = (answer(capsys, *moe, "--expert-imbalance", value) for value in ("1", "1.5"))
    assert uneven["time"]["seconds_per_step"] > 1.1 * even["time"]["seconds_per_step"]


def test_a_mixture_of_experts_is_told_what_recomputation_saves_and_costs(capsys) -> None:
    main(["plan", "--model", "mixtral-8x7b", "--gpus", "64xh100", "--top", "1"])
    said = " ".join(capsys.readouterr().out.split())
    assert "recomputation here: selective" in said and "full (whole blocks again) saves" in said
    main(["plan", "--model", "mixtral-8x7b", "--gpus", "64xh100", "--top", "1", "--json"])
    ways = json.loads(capsys.readouterr().out)["recomputation"]
    assert set(ways) == {"selective", "full"} and ways["full"]["saved_bytes"] > 2**30 and ways["full"]["added_fraction"] > 0.1


def test_devices_from_before_bf16_are_planned_in_fp16(capsys) -> None:
    assert main(["plan", "--model", "gpt2-xl", "--gpus", "8xv100", "--json", "--top", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"]["precision"] == "fp16" and plan["time"]["peak_flops_per_second"] == 125e12 and plan["trainable"]


def test_the_blocks_of_each_stage_are_told_as_our_trainer_cuts_them(capsys) -> None:
    words = "--model llama-3.2-1b --gpus 8xh100 --seq-len 4096 --sequences-per-batch 32"
    main(["plan", *words.split(), "--pp", "4", "--schedule", "1f1b"])
    assert "blocks of each stage: 5 5 5 1" in capsys.readouterr().out
    main(["plan", *words.split(), "--pp", "1"])
    assert "blocks of each stage" not in capsys.readouterr().out


def test_a_cpu_is_planned_in_fp32_however_it_is_written():
    assert us.plan("tiny-llama", "2xCPU", seq_len=128).layout.precision == "fp32"
