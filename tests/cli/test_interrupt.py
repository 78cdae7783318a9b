"""Ctrl-C while a command starts: one line, exit code 130, and no traceback from whichever process was importing."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launch.families import ended_after
from train.small_runs import make_corpus, small_run

import ultrascale
from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout

FIRST = re.compile(rb"import time:.*\| *ultrascale\n")
"""The import before the front's own. A Ctrl-C before ends Python's own start, in its own way."""
TORN = ("Traceback", "KeyboardInterrupt", "Exception ignored")
STOPPED = ("ultrascale: error: stopped.\n", "Stopped. Finished shards are kept; the same command goes on.\n")
MOST_SECONDS = 200.0
STARTS = {
    "plan": (["plan", "{run}"], 300),
    "trace": (["trace", "{run}"], 900),
    "check": (["check", "{run}"], 1500),
    "show": (["show", "{run}"], 300),
    "doctor": (["doctor"], 900),
    "train": (["train", "{run}", "--layout.dp", "1"], 1500),
    "sweep": (["sweep", "{run}", "--folder", "{folder}/sweep"], 330),
    "demo": (["demo", "--folder", "{folder}/demo"], 900),
    "soak": (["soak", "--folder", "{folder}/soak"], 900),
    "measure": (["measure", "network", "--processes", "2"], 900),
    "data": (["data", "prepare", "{run}", "--output", "{folder}/data", "--train-tokenizer", "300"], 300),
}
"""Words of commands, and about how many modules each imports before it has something to do."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    make_corpus(folder / "tokens")
    (folder / "run.toml").write_text(to_toml(small_run(folder, steps=100_000, layout=Layout(dp=2, micro_batch_size=2))))
    return folder / "run.toml"


def told(command: list[str], number: int, folder: Path) -> tuple[int, str]:
    """Exit code and words of a command that meets Ctrl-C after import `number` of ours. Python tells each on stderr, of which
    a page fits into the pipe: the command is never far ahead of the reader."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPROFILEIMPORTTIME": "1", "TMPDIR": str(folder)},
        start_new_session=True, preexec_fn=heed_interrupts, pipesize=4096, bufsize=0,
    )  # fmt: skip
    assert process.stderr is not None
    said, ours = [], -1
    for line in process.stderr:
        ours += ours >= 0 or FIRST.match(line) is not None
        if ours == number:
            os.killpg(process.pid, signal.SIGINT)
        if not line.startswith(b"import time:"):
            said.append(line.decode())
    return process.wait(MOST_SECONDS), "".join(said)


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in its background


@pytest.mark.parametrize("verb", STARTS)
def test_ctrl_c_during_an_import_of_any_verb_is_one_line_and_130(verb, run_file, tmp_path, moments=1):
    words, modules = STARTS[verb]
    command = [sys.executable, "-m", "ultrascale", *(word.format(run=run_file, folder=tmp_path) for word in words)]
    for number in random.Random(verb).sample(range(1, modules), moments):
        code, said = told(command, number, tmp_path)
        assert code == 130 and said in STOPPED, (number, code, said)


@pytest.mark.nightly
@pytest.mark.parametrize("verb", STARTS)
def test_ctrl_c_during_forty_imports_of_any_verb_is_one_line_and_130(verb, run_file, tmp_path):
    test_ctrl_c_during_an_import_of_any_verb_is_one_line_and_130(verb, run_file, tmp_path, moments=40)


@pytest.mark.parametrize("number", range(1, 4))
def test_ctrl_c_during_the_first_imports_of_the_installed_command_is_one_line_and_130(tmp_path, number):
    script = shutil.which("ultrascale", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed")
    assert told([script, "plan", "--help"], number, tmp_path) == (130, STOPPED[0])


def test_little_is_imported_before_ctrl_c_is_met():
    script = "import sys; before = {*sys.modules}; import ultrascale.__main__; print(*sorted({*sys.modules} - before))"
    source = os.environ | {"PYTHONPATH": str(Path(ultrascale.__file__).parents[1])}  # -S leaves out what is installed
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True, env=source)
    assert {"typing", "types", "importlib", "re", "enum", "signal", "contextlib"}.isdisjoint(done.stdout.split())


def test_ctrl_c_while_python_itself_ends_changes_nothing(tmp_path):
    """Modules are cleared after handlers of signals: what is left then dies by the signal, without a word."""
    script = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 2)
sys.modules["last"] = Last()
import ultrascale.__main__ as front
sys.argv = ["ultrascale", "--version"]
sys.exit(front.main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    torn = subprocess.run([sys.executable, "-c", script.replace("front.main()", "0")], capture_output=True)
    assert torn.returncode == -signal.SIGINT  # without it


@pytest.mark.catalogue(12)
@pytest.mark.parametrize("moment", range(3))
def test_ctrl_c_while_ranks_start_is_130_without_a_traceback(run_file, tmp_path, moment):
    """From the moment that the fork server begins to import on, counted by what it and the ranks have computed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ultrascale", "train", str(run_file), "--name", f"at-{moment}"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed_interrupts,
    )  # fmt: skip
    with ended_after(process):
        server = wait_for_fork_server(process)
        events, work = run_file.parent / f"at-{moment}" / "events.jsonl", random.Random(moment).uniform(0, 6)
        while seconds_computed(server) < work and not events.exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=MOST_SECONDS)[0]
    assert process.returncode in ((0, 130) if "saved" in said else (130,)), said
    assert not any(word in said for word in TORN), said
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("ultrascale", "torchelastic"))] == []


@pytest.mark.nightly
def test_ctrl_c_at_forty_moments_while_ranks_start_is_130_without_a_traceback(run_file, tmp_path):
    for moment in range(100, 140):
        test_ctrl_c_while_ranks_start_is_130_without_a_traceback(run_file, tmp_path, moment)


def wait_for_fork_server(process: subprocess.Popen[str]) -> psutil.Process:
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.NoSuchProcess):
                if any("forkserver" in word for word in child.cmdline()):
                    return child
        time.sleep(0.02)
    pytest.fail("no fork server came")


def seconds_computed(server: psutil.Process) -> float:
    seconds = 0.0
    for one in (server, *server.children()):
        with suppress(psutil.NoSuchProcess):
            seconds += one.cpu_times().user + one.cpu_times().system
    return seconds
