"""The fast pieces of the demo; the whole of it is `make demo`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ultrascale.check.faults.all_faults import PLANTS
from ultrascale.cli.main import main
from ultrascale.cli.start.demo import command
from ultrascale.config.resolve import resolve
from ultrascale.demo import story
from ultrascale.demo import story as folder
from ultrascale.demo import story as recipe
from ultrascale.demo.claims import Claim, DemoError, judged
from ultrascale.demo.screen import Screen
from ultrascale.demo.stages import exported, interrupted, proof, text
from ultrascale.demo.stages.rehearsal import Rehearsal
from ultrascale.demo.story import Demo, _loss, demo_folder
from ultrascale.description.problems import SpecError

WORKER_LINE = f"import time; time.sleep(60)  # {interrupted.WORKER}"


def screen(width: int = 80) -> Screen:
    return Screen(Console(file=StringIO(), width=width, highlight=False))


def printed(on: Screen) -> str:
    assert isinstance(on.console.file, StringIO)
    return on.console.file.getvalue()


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_goes_to_a_file_has_no_blanks_at_the_ends_of_lines(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for stderr in (False, True):
        Screen.on(stderr=stderr).show("words " * 40)
    for told in capsys.readouterr():
        assert told.count("words") == 40
        assert all(80 < len(line) <= 100 and not line.endswith(" ") for line in told.splitlines()[:-1])


# The folder


def test_a_second_demo_starts_afresh_and_keeps_the_prepared_text(tmp_path):
    root = tmp_path / "demo"
    with demo_folder(root):
        for name in ("data", "run", "plots", "exported"):
            (root / name).mkdir()
            (root / name / "file").touch()
        (root / "run.toml").touch()
    with demo_folder(root):
        assert sorted(path.name for path in root.iterdir()) == [folder.MARK, "data"]
        assert (root / "data" / "file").exists()


def test_a_folder_of_somebody_elses_is_refused_and_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(SpecError, match="holds other files"), demo_folder(tmp_path):
        pass
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_two_demos_do_not_share_a_folder(tmp_path):
    with (
        demo_folder(tmp_path / "demo"),
        pytest.raises(SpecError, match="another demo is using"),
        demo_folder(tmp_path / "demo"),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named_with_the_reason_and_the_remedy(tmp_path, capfd):
    (tmp_path / "file").touch()
    assert command_through_main("--folder", str(tmp_path / "file" / "demo")) == 2
    told = capfd.readouterr().err
    assert f"{tmp_path / 'file' / 'demo'} cannot be written: not a directory" in told
    assert "--folder" in told
    assert "Traceback" not in told


def command_through_main(*words: str) -> int:
    return main(["demo", *words])


# The text


def test_the_library_is_some_megabytes_of_sources_without_tests_and_packages():
    found = text.find_files([text.library_folder()], glob=text.GLOB, exclude=text.EXCLUDED)
    assert 4e6 < sum(file.size for file in found) < 2e7
    assert not [file.name for file in found if {"test", "site-packages"} & set(Path(file.name).parts)]


def test_a_python_without_sources_is_told_so(tmp_path):
    (tmp_path / "os.pyc").touch()
    with pytest.raises(DemoError, match=r"no sources of its standard library.*python3"):
        text.expect_library(tmp_path)


def test_a_library_folder_that_holds_far_more_than_a_library_is_refused(tmp_path):
    (tmp_path / "os.py").touch()
    os.truncate(tmp_path / "os.py", text.LARGEST_BYTES + 1)
    with pytest.raises(DemoError, match="where a standard library has about 10"):
        text.expect_library(tmp_path)


def test_the_printed_command_prepares_the_same(tmp_path):
    (tmp_path / "library" / "tests").mkdir(parents=True)
    for name in ("a.py", "b.py", "tests/c.py"):
        (tmp_path / "library" / name).write_text("def f(x):\n    return x + 1\n" * 400)
    made = text.prepare_library(tmp_path / "library", tmp_path / "one", on_progress=lambda now: None, workers=1)
    assert main([*text.prepare_words(tmp_path / "library", tmp_path / "two"), "--workers", "1"]) == 0
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0] == manifests[1]
    assert made.manifest.tokens > 0


# The run


def test_the_run_is_read_back_as_it_was_written(in_tmp):
    run = recipe.write_run(Path("."), precision="bf16", steps=300)
    assert (run.steps, run.layout.precision, run.layout.dp, run.layout.zero_stage) == (300, "bf16", recipe.PROCESSES, 2)
    assert run.checkpoint.every_steps == run.evaluation.every_steps == 60
    assert run.model.vocab_size == text.VOCABULARY


def test_a_folder_with_quotes_and_spaces_makes_a_readable_run(in_tmp):
    odd = Path('my "odd" folder')
    odd.mkdir()
    assert recipe.write_run(odd).data.sources[0].path == str(odd / "data")


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 640), (0.1, 500), (0.1001, 500), (3.0, 160)])
def test_the_length_of_the_run_follows_the_speed_of_the_machine_within_bounds(seconds, steps):
    assert recipe.fitting_steps(seconds) == steps


def test_training_is_in_the_precision_that_is_faster_here():
    assert Rehearsal({"fp32": 40e9, "bf16": 80e9}).fastest == "bf16"
    assert Rehearsal({"fp32": 40e9, "bf16": 8e9}).fastest == "fp32"


# The kill


def test_workers_are_found_among_the_children_of_the_launcher_and_nowhere_else():
    workers = [subprocess.Popen([sys.executable, "-c", WORKER_LINE]) for _ in range(2)]
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        deadline = time.monotonic() + 50  # the command of a process is its parent's until it has started
        while len(found := found_workers()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == sorted(worker.pid for worker in workers)
    finally:
        for process in (*workers, other):
            process.kill()
            process.wait()
    with pytest.raises(DemoError, match="no worker"):
        interrupted.worker_pids(os.getpid())


def found_workers() -> list[int]:
    try:
        return interrupted.worker_pids(os.getpid())
    except DemoError:
        return []


TRAINS_AND_SURVIVES = """
import json, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def row(step, loss):
    values = {"schema": "ultrascale/metrics/1", "step": step + 1, "time": time.time(), "train/loss": loss}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(values) + "\\n")
def start(step):
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "start", "step": step}) + "\\n")
worker = subprocess.Popen([sys.executable, "-c", WORKER])  # before the rows: at the last one it is looked for
start(0)
for step in range(5):
    row(step, 9.0 - step)
assert worker.wait() == -signal.SIGKILL
while not (folder / "looked at the clock").exists():
    time.sleep(0.01)
(folder / "metrics.jsonl").write_text("".join(line + "\\n" for line in (folder / "metrics.jsonl").read_text().splitlines()[:3]))
start(3)
for step in range(3, 8):
    row(step, LOSS - step)
"""


def survivor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, code: int = 0) -> interrupted.Interruption:
    """What `train_and_kill` tells of a stand-in for the command: killed after 5 steps, it goes on from step 3 to 8."""
    folder, script = tmp_path / "run", tmp_path / "train.py"
    folder.mkdir()
    script.write_text(f"WORKER, LOSS = {WORKER_LINE!r}, {loss}\n{TRAINS_AND_SURVIVES}\nsys.exit({code})")
    start = subprocess.Popen
    monkeypatch.setattr(
        interrupted.subprocess, "Popen", lambda words, **options: start([sys.executable, script, folder], **options)
    )
    calls = iter(range(10**9))

    def watch(rows: list) -> None:
        """The first call that sees five rows is right before the kill, the second after it and its look at the clock."""
        if len(rows) == 5 and next(calls) == 1:
            (folder / "looked at the clock").touch()

    return interrupted.train_and_kill(tmp_path / "run.toml", folder, processes=1, kill_at=5, log=tmp_path / "log", watch=watch)


def test_a_kill_is_told_with_the_steps_it_cost_and_whether_the_losses_came_back(tmp_path, monkeypatch):
    cut = survivor(tmp_path, monkeypatch, 9.0)
    assert (cut.steps_before, cut.resumed_at, cut.steps_redone) == (5, 3, 2)
    assert cut.redone_losses == [(6.0, 6.0), (5.0, 5.0)]
    assert cut.same_losses
    assert 0 < cut.recovery_seconds < 200


def test_losses_that_did_not_come_back_are_noticed(tmp_path, monkeypatch):
    assert not survivor(tmp_path, monkeypatch, 9.0000001).same_losses


def test_training_that_fails_after_the_kill_ends_the_demo_with_its_exit_code(tmp_path, monkeypatch):
    with pytest.raises(DemoError, match=r"exit code 7"):
        survivor(tmp_path, monkeypatch, 9.0, code=7)


def test_training_that_ends_before_the_kill_is_told_with_its_last_words(tmp_path):
    with pytest.raises(DemoError, match=r"(?s)ended too early.*missing\.toml"):
        interrupted.train_and_kill(
            tmp_path / "missing.toml", tmp_path, processes=1, kill_at=1, log=tmp_path / "log", watch=lambda rows: None
        )


def test_leaving_early_ends_the_training_that_was_started(tmp_path):
    def leave(rows: list) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.train_and_kill(
            tmp_path / "missing.toml", tmp_path, processes=1, kill_at=1, log=tmp_path / "log", watch=leave
        )
    assert interrupted_children() == []


def interrupted_children() -> list[str]:
    listed = interrupted._processes_of_proc() if Path("/proc/self/stat").exists() else interrupted._processes_of_ps()
    return [line for _, parent, line in listed if parent == os.getpid() and "missing.toml" in line]


def test_both_ways_to_list_processes_know_this_one_and_its_parent():
    if not Path("/proc/self/stat").exists():
        return
    assert (os.getpid(), os.getppid()) in [(pid, parent) for pid, parent, _ in interrupted._processes_of_proc()]


# Claims


def test_the_proof_of_the_demos_layouts_holds_and_counts_its_cases(in_tmp):
    claim = proof.prove_layouts(recipe.write_run(Path(".")))
    assert claim.verdict == "holds"
    assert len(claim.facts["cases"]) == 16
    assert claim.facts["largest_error"] < claim.facts["tolerance"]


def test_a_planted_fault_that_is_missed_fails_the_claim(in_tmp, monkeypatch):
    run = recipe.write_run(Path("."))
    assert proof.plant_faults(run, ["shifted-batch"]).facts["seen"] == {"shifted-batch": "embed_tokens.weight"}
    monkeypatch.setitem(PLANTS, "shifted-batch", lambda trainer: nullcontext())
    assert proof.plant_faults(run, ["shifted-batch"]).verdict == "fails"


@pytest.mark.parametrize(("loss", "verdict"), [(4.3, "holds"), (5.5, "fails")])
def test_the_loss_must_be_a_nat_below_the_unigram_entropy(loss, verdict):
    demo = Demo(Path("demo"), screen())
    _loss(demo, [{"step": 1, "train/loss": 7.9}, {"step": 2, "train/loss": 5.0, "val/loss": loss}], 6.2)
    assert demo.claims[0].verdict == verdict
    assert "6.20" in printed(demo.screen)


def test_without_transformers_its_claim_is_skipped_and_says_what_to_install(in_tmp, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    claim = exported.compare_with_transformers(Path("."), recipe.write_run(Path(".")))
    assert (claim.verdict, claim.number) == ("skipped", "transformers is not installed: pip install transformers")


def test_without_matplotlib_the_plots_are_skipped_and_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    demo = Demo(Path("demo"), screen())
    story._plots(demo, 6.2)
    assert demo.claims[0].verdict == "skipped"
    assert "pip install matplotlib" in printed(demo.screen)


def test_the_end_names_the_commands_to_go_on_with(in_tmp):
    demo = Demo(Path("."), screen())
    story._close(demo)
    told = printed(demo.screen)
    assert all(
        f"ultrascale {words}" in told for words in ("show run.toml", "report run", "checkpoint list run", "generate run")
    )
    recipe.write_run(Path("."), precision="fp32", steps=300)
    words = told.replace("\\\n", " ").split()
    assert int(words[words.index("--train-tokenizer") + 1]) <= resolve("run.toml").run.model.vocab_size


# The command and the screen


def test_without_torch_nothing_is_made_and_the_extra_is_named(in_tmp, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == 1
    assert "pip install 'ultrascale[train]'" in capsys.readouterr().err
    assert list(in_tmp.iterdir()) == []


@pytest.fixture
def demo_is(monkeypatch) -> Callable[[Callable[[Path, Screen], Demo]], None]:
    """Has the command show what is given in place of the demo."""
    return lambda run: monkeypatch.setattr(story, "run_demo", run)


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_every_claim_holds(demo_is, capsys, holds, code):
    claims = [Claim("a", "not installed", "skipped"), judged("b", "1.0", holds, value=1.0)]
    demo_is(lambda folder, on: Demo(folder, on, claims=claims))
    assert command(["--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert [claim["verdict"] for claim in told["claims"]] == ["skipped", "holds" if holds else "fails"]
    assert told["claims"][1]["facts"] == {"value": 1.0}


def test_sigterm_leaves_as_ctrl_c_does(demo_is):
    def run_demo(folder: Path, on: Screen) -> Demo:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    demo_is(run_demo)
    assert main(["demo"]) == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_long_command_is_broken_where_a_shell_lets_it_be():
    on = screen(40)
    on.command("data", "prepare", "--glob", "*.py", "--exclude", "site packages", "--output", "demo/data")
    lines = printed(on).splitlines()
    assert max(map(len, lines)) <= 40
    assert len(lines) > 1
    words = "".join(lines).replace("\\", "").replace("$", "").split()
    assert " ".join(words) == "ultrascale data prepare --glob '*.py' --exclude 'site packages' --output demo/data"


def test_without_a_terminal_a_bar_is_a_line_each_quarter():
    on = screen()
    with on.bar("training", 8) as advance:
        for done in range(9):
            advance(done, f"{done} steps")
    assert printed(on).split("\n")[:4] == [f"   training  {25 * n}%  {2 * n} steps" for n in (1, 2, 3, 4)]


def test_stages_are_numbered_and_their_time_is_remembered():
    on = screen()
    for title in ("Text", "Plan"):
        with on.stage(title):
            pass
    assert printed(on).split() == ["1", "Text", "2", "Plan"]
    assert list(on.spent) == ["Text", "Plan"]
