"""Words of the command line: units, wrong flags and their hints, and what is refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ultrascale
from ultrascale.api.planning.plan_request import PlanOptions
from ultrascale.cli.main import main
from ultrascale.cli.terminal.parse import read_words
from ultrascale.cli.weights.checkpoint import List, Verify
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.early import expect_ready, sees_gpu
from ultrascale.data.indexed import ShardWriter
from ultrascale.data.manifest import CorpusManifest, ShardRecord, TokenizerFacts, save_manifest
from ultrascale.description.problems import SpecError

MODEL = ["--model", "llama-3-8b", "--gpus", "64xh100"]


def read(*words: str):
    return read_words(PlanOptions, "plan", [*words], positional={"run": "[RUN.TOML]"}, settings=True)


@pytest.mark.parametrize("text, tokens", [("128k", 131072), ("8k", 8192), ("1M", 2**20), ("8192", 8192), ("8_192", 8192)])
def test_the_length_of_a_sequence_takes_a_unit(text, tokens):
    assert read("--seq-len", text)[0].seq_len == tokens
    found = resolve(None, ["--model.preset", "tiny-llama", "--batch.sequence-length", "1k"])
    assert found.run.batch.sequence_length == 1024


def test_whole_numbers_and_times_take_a_unit_on_the_command_line():
    words = ["--steps", "10k", "--layout.micro-batch-size", "1k", "--faults.hang-seconds", "1h30m", "--seed", str(2**63 - 1)]
    run = resolve(None, ["--model.preset", "tiny-llama", *words, "--batch.sequences-per-batch", "1,000k"]).run
    assert (run.steps, run.layout.micro_batch_size, run.batch.sequences_per_batch) == (10_000, 1000, 1_000_000)
    assert (run.faults.hang_seconds, run.seed) == (5400.0, 2**63 - 1)
    assert read("--checkpoint-minutes", "90s", "--sequences-per-batch", "1.5k")[0] == PlanOptions(
        checkpoint_minutes=1.5, sequences_per_batch=1500
    )


def test_flags_are_read_with_equals_underscores_and_after_the_file():
    options, rest = read("--zero_stage=3", "run.toml", "--json", "--top", "3")
    assert (options.zero_stage, options.run, options.json, options.top, rest) == ("3", ("run.toml",), True, 3, [])


def test_a_choice_of_verbs_is_read_by_its_first_word():
    found, _ = read_words(List | Verify, "checkpoint", ["verify", "out", "--json"], positional={})
    assert found == Verify(Path("out"), json=True)


@pytest.mark.parametrize(
    "words, told",
    [
        (["plan", *MODEL, "--seqlen", "8192"], "Did you mean --seq-len?"),
        (["plan", "--model", "llama-3-8b", "--gpu", "64xh100"], "Did you mean --gpus?"),
        (["plan", *MODEL, "--seq-len", "8192.5"], "Write 8192, 8k or 128k."),
        (["plan", *MODEL, "--seq-len", "0"], "must be at least 1, is 0"),
        (["plan", *MODEL, "--seq-len", "128k"], "--model.max-position-embeddings 131072"),
        (["plan", *MODEL, "--top"], "is given without a value"),
        (["plan", *MODEL, "--tp", "banana"], "is banana -> Write digits"),
        (["plan", *MODEL, "--top", "1.5"], "is 1.5 -> Write it without a decimal point"),
        (["train", "run.toml", "--layout.pp", "1,2"], "must be a whole number, is 1,2 -> Write digits"),
        (["plan", *MODEL, "--save-seconds", "soon"], "is soon -> Write it as 90, or with a unit, such as 30m"),
        (["plan", *MODEL, "--seed", "-1"], "must be at least 0, is -1 -> Give 0 or more."),
        (["plan", *MODEL, "--model.hidden-size", "0"], "must be at least 1, is 0 -> Give 1 or more."),
        (["plan", *MODEL, "--zero", "3"], "Did you mean --zero-stage?"),
        (["plan", *MODEL, "--lr", "3e-4"], "Did you mean --optimizer.learning-rate?"),
        (["plan", *MODEL, "--batch-size", "512"], "Did you mean --sequences-per-batch?"),
        (["plan", *MODEL, "--seq", "8192"], "Did you mean --seq-len?"),
        (["train", "run.toml", "--seq-len", "8192"], "Did you mean --batch.sequence-length?"),
        (["train", "run.toml", "--global-batch-size", "8"], "Did you mean --batch.sequences-per-batch?"),
        (["plan", *MODEL, "--tensor-parallel", "2"], "Did you mean --tp?"),
        (["plan", *MODEL, "--use-distributed-optimizer"], "Did you mean --zero-stage?"),
        (["plan", *MODEL, "--bf16"], "Did you mean --precision?"),
        (["plan", *MODEL, "--num-virtual-stages-per-pipeline-rank", "2"], "Did you mean --layout.virtual-stages?"),
        (["plan", *MODEL, "--parallelism.tensor_parallel_degree", "8"], "Did you mean --tp?"),
        (["plan", *MODEL, "--training.local-batch-size", "2"], "Did you mean --micro-batch-size?"),
        (["train", "run.toml", "--zero", "3"], "Did you mean --layout.zero-stage?"),
        (["train", "run.toml", "--training.steps", "3"], "Did you mean --steps?"),
        (["sweep", "run.toml", "--output", "there"], "Did you mean --out?"),
        (["train", "run.toml", "--resume"], "the same command resumes"),
        (["data", "prepare", "text", "--out", "there"], "Did you mean --output?"),
        (["show", "run.toml", "--data.document-mask", "maybe"], "must be true or false"),
        (["measure", "stp"], "Did you mean step?"),
        (["measure", "stp", "run.toml"], "Did you mean step?"),
        (["show", "schedule", "--pp", "0"], "--pp must be at least 1, is 0"),
        (["show", "presets"], "Did you mean `ultrascale show models`?"),
        (["data", "prepar"], "Did you mean prepare?"),
        (["checkpoint", "lst"], "Did you mean list?"),
        (["check", "--matrix", "--plant", "nosuch"], "--matrix"),
        (["check", "run.toml", "--plant", "cp-ordr"], "Did you mean cp-order"),
        (["generate", ".", "--max-new-tokens", "-1"], "holds neither config.json"),
        (["checkpoint", "list", "nowhere"], "there is no such folder"),
        (["report", "nowhere"], "there is no such folder"),
        (["launch", "slurm", "run.toml", "--nodes", "2", "--cluster", "16xh100", "--print"], "Set layout.dp = 16, or name as"),
        (["sweep", "run.toml", "--procesess", "2"], "Did you mean --processes?"),
    ],
)
def test_what_is_wrong_is_told_with_the_right_word(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in " ".join(error.split())
    assert error.startswith(("ultrascale: error: invalid configuration", "ultrascale: error: invalid arguments"))


@pytest.mark.parametrize(
    "words, head",
    [
        (["plam"], "invalid arguments:\n\n  VERB\n    there is no verb `plam`\n    -> Did you mean `plan`? The verbs are demo"),
        (["model"], "invalid arguments:\n\n  VERB\n    there is no verb `model`\n"),
        (["data.x"], "invalid arguments:\n\n  VERB\n    there is no verb `data.x`\n"),
        (["5"], "invalid arguments:\n\n  VERB\n    there is no verb `5`\n"),
        (["generate", "5"], "invalid arguments:\n\n  5\n    is no folder\n"),
        (["data", "model"], "invalid arguments:\n\n  VERB\n    there is no verb `data model`\n"),
        (["checkpoint", "data"], "invalid arguments:\n\n  VERB\n    there is no verb `checkpoint data`\n"),
        (["show", "optimizer"], "invalid arguments:\n\n  show\n    `optimizer` is neither a file nor something"),
        (["generate", "nowhere"], "invalid arguments:\n\n  nowhere\n    is no folder\n    -> "),
        (["plan", "nowhere.toml"], "invalid arguments:\n\n  nowhere.toml\n"),
        (["train", "run.toml", "--max-restarts", "-1"], "invalid arguments:\n\n  --max-restarts\n"),
        (["train", "run.toml"], "invalid configuration:\n\n  data.sources\n"),
        (["plan", "torn.toml"], "invalid configuration:\n\n  torn.toml:1\n"),
        (
            ["plan", "run.toml", "--layout.tp", "x", "--seed", "y"],
            "invalid configuration, 2 mistakes:\n\n  layout.tp  (flag)\n",
        ),
    ],
)
def test_what_is_no_setting_of_a_run_is_not_called_its_configuration(words, head, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "torn.toml").write_text("[model")
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"ultrascale: error: {head}")


@pytest.mark.parametrize("words", [["--zero-stage", "4"], ["--precision", "int8"]])
def test_who_wrote_no_quotes_is_told_of_none(words, capsys):
    assert main(["plan", *MODEL, *words]) == 2
    assert "quotes" not in capsys.readouterr().err


def test_axes_that_plan_names_are_kept_by_who_else_takes_a_model():
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for home in ("trace", "check", "show.show_schedule"):
            module = import_module(f"ultrascale.cli.{home}")
            patch.setattr(module, "answer", lambda *asked, **told: found.append(asked) or stop())
        for verb in ("trace", "check", "show schedule"):
            with suppress(StopIteration):
                main([*verb.split(), *MODEL, "--tp", "8", "--zero-stage=3", "--layout.cp", "2"])
    words = ["--layout.tp", "8", "--layout.zero_stage=3", "--layout.cp", "2"]
    assert [list(asked[1] if len(asked) > 1 else asked[0].settings) for asked in found] == [words] * 3


@pytest.mark.parametrize("verb", ["train run.toml", "measure speed run.toml", "sweep run.toml", "soak"])
def test_more_processes_than_a_machine_starts_are_refused_and_leave_nothing(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path / "enough", 20_000)
    small = "[batch]\nsequence_length = 8\nsequences_per_batch = 1000\n[layout]\nmicro_batch_size = 1\n"
    (tmp_path / "run.toml").write_text(RUN.replace("nowhere", "enough") + small)
    assert main([*verb.split(), "--processes", "1k"]) == 2
    assert "--processes\n    must be at most 124 on one machine, is 1,000\n" in capsys.readouterr().err
    assert not list(tmp_path.rglob("events.jsonl"))


def stop() -> None:
    raise StopIteration


def test_the_schedule_of_a_plan_keeps_its_axes_and_one_without_a_model_has_none():
    schedule: Any = ultrascale.schedule
    found = schedule(model="llama-3-8b", gpus="64xh100", tp=8, **{"layout.pp": 4})
    assert (found.num_ranks, found.num_micro_batches) == (4, 16)
    with pytest.raises(SpecError, match=r"--layout.pp: is a setting of a run.* or say --pp"):
        ultrascale.schedule("1f1b", layout={"pp": 4})


@pytest.mark.parametrize("words", ["schedule", "schedule 1f1b", "schedule --pp 4", "schedules"])
@pytest.mark.parametrize("flag", ["--schedule zb-v", "--layout.schedule=zb-v"])
def test_a_schedule_given_as_a_setting_is_told_where_its_name_stands(words, flag, capsys):
    assert main(["show", *words.split(), *flag.split()]) == 2
    assert "Give --model and --gpus too, or give it as NAME of `show schedule`." in capsys.readouterr().err


def test_functions_name_what_they_were_given():
    with pytest.raises(SpecError, match=r"is 8192\.5\. Write it without a decimal point"):
        ultrascale.plan("llama-3-8b", "8xh100", sequences_per_batch=8192.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match=r"layout\.tp .*must be a whole number, is empty\. Write digits"):
        ultrascale.plan("llama-3-8b", "8xh100", tp=[])  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="b: must be a plan or the file of a run, is 3"):
        ultrascale.compare("run.toml", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError) as told:
        ultrascale.report("out", lr=3)  # pyright: ignore[reportCallIssue]
    assert "learning" not in str(told.value)  # a report has no settings of a run


@pytest.mark.parametrize(
    "theirs, ours",
    [("gpipe", "afab"), ("1f1b-interleaved", "interleaved"), ("Interleaved1F1B", "interleaved"), ("ZBVZeroBubble", "zb-v")],
)
def test_a_schedule_has_the_names_of_papers_and_other_trainers_too(theirs, ours):
    found = resolve(None, ["--model.preset", "tiny-llama", "--layout.schedule", theirs])
    assert found.run.layout.schedule == ours


RUN = """
[model]
preset = "tiny-llama"
[data]
sources = ["nowhere"]
"""


@pytest.mark.parametrize(
    "words, told",
    [
        (["checkpoint", "list", "nowhere"], "no such folder"),
        (["generate", "full", "--temperature", "inf"], "--temperature\n    must be finite and at least 0, is inf"),
        (["generate", "nowhere", "--top-p", "7"], "--top-p\n    must be above 0 and at most 1, is 7.0"),
        (["generate", "nowhere", "--max-new-tokens", "0"], "nowhere\n    is no folder"),
        (["generate", "empty"], "holds neither"),
        (["export", "empty", "out"], "holds neither"),
        (["train", "run.toml"], "no prepared text at nowhere"),
        (["train", "run.toml", "--device", "cuda"], "no prepared text at nowhere"),
        (["check", "run.toml", "--plant", "nosuch"], "knows no fault"),
        (["check", "run.toml", "--plant", "cp-order", "--processes", "1"], "these are faults between processes"),
        (["check", "run.toml", "--plant", "cp-order", "--processes", "2"], "cp-order needs cp > 1"),
        (["check", "--matrix", "--markdown", "nowhere/tables.md"], "is in no folder that there is"),
        (["generate", "full"], "None is not supported"),
        (["generate", "gpt2"], "holds no safetensors weights"),
        (["export", "full", "out"], "None is not supported"),
        (["export", "gpt2", "out"], "holds no safetensors weights"),
        (["export", "gpt2", "out", "--tokenizer", "nowhere"], "nowhere"),
        (["convert", "nowhere", "out"], "is not there"),
        (["soak", "--faults", "earthquake"], "'earthquake' is no fault"),
        (["demo", "--folder", "run.toml"], "run.toml cannot be written: file exists"),
        (["export", "full", "gpt2"], "exists already"),
        (["import", "empty", "run.toml"], "there is no empty/config.json"),
        (["import", "full", "run.toml"], "model_type"),
        (["import", "gpt2", "run.toml"], "holds no safetensors weights"),
    ],
)
def test_what_is_not_there_is_told_before_torch_is_imported(words, told, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    code = f"import sys; from ultrascale.cli.main import main; print(main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, told in done.stderr) == ("2 False\n", True), done.stderr


@pytest.mark.parametrize(
    "verb, words, told, code",
    [
        ("train", ["--data.sources", "empty"], "is not a folder of prepared text", 2),
        ("train", ["--data.sources", "run.toml"], "ultrascale data prepare run.toml --output PREPARED", 2),
        ("train --processes=2", ["--data.sources", "little"], "holds 9 tokens, a sequence needs 65", 1),
        ("train", ["--data.validation", "little", "--evaluation.every-steps", "2"], "holds 9 tokens", 1),
        ("measure step", ["--device", "cuda"], "asks for CUDA", 2),
        ("measure speed", ["--data.sources", "nowhere"], "no prepared text at nowhere", 2),
        ("measure speed", ["--data.sources", "little"], "holds 9 tokens", 1),
        ("sweep", ["--device", "cuda"], "asks for CUDA", 2),
        ("sweep", ["--data.sources", "empty", "--layout.zero-stage", "0,1"], "is not a folder of prepared text", 2),
    ],
)
def test_what_cannot_start_is_told_before_torch_is_imported_and_no_rank_is_at_fault(verb, words, told, code, tmp_path):
    if words[0] == "--device" and sees_gpu():
        pytest.skip("there is a GPU")
    prepared(tmp_path / "enough", 900)
    prepared(tmp_path / "little", 9)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.toml").write_text(RUN.replace("nowhere", "enough") + "[batch]\nsequence_length = 64\n")
    script = "import sys; from ultrascale.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    said = [sys.executable, "-c", script, *verb.split(), "run.toml", *words]
    done = subprocess.run(said, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1:], told in done.stderr) == ([f"{code} False"], True), done.stderr
    assert "rank" not in done.stderr and not list(tmp_path.rglob("events.jsonl"))


def test_a_source_in_a_store_is_for_the_ranks_to_look_for(tmp_path):
    found = resolve(None, ["--model.preset", "tiny-llama", "--data.sources", f"file://{tmp_path}/none,s3://bucket/none"])
    expect_ready(found.run)


def test_a_folder_whose_preparation_failed_is_called_unfinished_and_its_validation_is_not_blamed(tmp_path):
    folder = tmp_path / "py"
    (folder / "validation").mkdir(parents=True)
    for name in ("tokenizer.json", "unfinished.json"):
        (folder / name).write_text("{}")
    words = ["--model.preset", "tiny-llama", "--data.sources", str(folder), "--data.validation", str(folder / "validation")]
    run = resolve(None, [*words, "--evaluation.every-steps", "2"]).run
    with pytest.raises(SpecError) as error:
        expect_ready(run)
    (problem,) = error.value.problems
    assert problem.key == "data.sources" and f"{folder} is unfinished" in problem.rule


def prepared(folder: Path, tokens: int) -> None:
    """A prepared folder of one document."""
    folder.mkdir()
    writer = ShardWriter(folder / "shard", "uint16")
    writer.add_documents(range(tokens), [tokens])
    written = writer.finish()
    record = ShardRecord("shard", 1, tokens, written.bin_sha256, written.idx_sha256)
    save_manifest(CorpusManifest("uint16", TokenizerFacts("0" * 64, 900, "end", 0), (record,), {}), folder)


def test_a_plan_starts_without_the_parser_library_and_its_type_checker(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    heavy = "{'tyro', 'typeguard', 'torch'}"
    code = f"import sys; from ultrascale.cli.main import main; main(['plan', 'run.toml']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_a_gpu_is_what_a_driver_shows(tmp_path):
    (tmp_path / "null").touch()
    assert not sees_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert sees_gpu(tmp_path)


def test_all_mistakes_of_a_command_are_told_at_once():
    with pytest.raises(SpecError) as caught:
        read("--seqlen", "8", "--top", "x", "--gpus")
    assert [problem.key for problem in caught.value.problems] == ["--seqlen", "--gpus", "--top"]


@pytest.mark.parametrize("verb", ["train", "sweep", "show", "measure speed", "measure step"])
def test_help_of_a_verb_that_takes_settings_says_where_they_are_listed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main([*verb.split(), "--help"])
    assert "`ultrascale show keys` lists" in capsys.readouterr().out
