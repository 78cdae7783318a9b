"""The front of the command line."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ultrascale import __version__
from ultrascale.cli import main as front
from ultrascale.description.problems import Problem, SpecError


@pytest.fixture
def verb(monkeypatch):
    """Put a function in the place of the verb `plan`."""

    def install(function):
        monkeypatch.setitem(sys.modules, f"ultrascale.cli.{front.VERBS['plan'].module}", SimpleNamespace(command=function))
        monkeypatch.delenv("ULTRASCALE_TRACEBACK", raising=False)

    return install


def raising(error: BaseException):
    def command(arguments):
        raise error

    return command


def test_alone_it_prints_every_verb_and_succeeds(capsys):
    assert front.main([]) == 0
    printed = capsys.readouterr().out
    assert [word for word in front.VERBS if word not in printed] == []


def test_a_misspelt_verb_is_answered_with_the_right_one_and_exit_code_2(capsys):
    assert front.main(["trian"]) == 2
    assert "Did you mean `train`?" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    assert front.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ultrascale {__version__}\n"


def test_a_verb_gets_its_arguments_and_gives_the_exit_code(verb):
    verb(lambda arguments: len(arguments))
    assert front.main(["plan", "run.toml", "--json"]) == 2


def test_every_mistake_of_a_description_is_listed_with_origin_rule_and_remedy(verb, capsys):
    problems = [Problem("layout.dp", "must be 2", "Say 2.", "run.toml:3"), Problem("steps", "must be 1", "Say 1.")]
    verb(raising(SpecError(problems)))
    assert front.main(["plan"]) == 2
    told = capsys.readouterr().err
    for text in ("2 mistakes", "layout.dp  (run.toml:3)", "must be 2", "-> Say 2.", "steps", "must be 1", "-> Say 1."):
        assert text in told


def test_an_error_of_ours_has_the_form_of_all_and_no_traceback(verb, capsys):
    error = type("DataError", (Exception,), {"__module__": "ultrascale.data.indexed"})("shard.bin: cut short. Copy it again.")
    verb(raising(error))
    assert front.main(["plan"]) == 1
    listed = "cannot go on:\n\n  shard.bin\n    cut short\n    -> Copy it again.\n"
    assert capsys.readouterr().err == f"ultrascale: error: {listed}"


def test_a_rank_under_torchrun_names_itself(verb, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    verb(raising(FileNotFoundError(2, "No such file or directory", "run.toml")))
    assert front.main(["plan"]) == 1
    said, told = "run.toml\n    no such file or directory\n    -> Check", capsys.readouterr().err
    assert told.startswith(f"ultrascale: error on rank 3: cannot go on:\n\n  {said}")


def test_a_bug_keeps_its_traceback(verb):
    verb(raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        front.main(["plan"])


def test_ultrascale_traceback_shows_where_an_error_of_ours_came_from(verb, monkeypatch):
    verb(raising(SpecError([])))
    monkeypatch.setenv("ULTRASCALE_TRACEBACK", "1")
    with pytest.raises(SpecError):
        front.main(["plan"])


def test_a_missing_package_is_answered_with_the_extra_that_brings_it(verb, capsys):
    verb(raising(ModuleNotFoundError("No module named 'torch'", name="torch.distributed")))
    assert front.main(["plan"]) == 1
    assert "pip install 'ultrascale[train]'" in capsys.readouterr().err


def test_control_c_gives_exit_code_130(verb):
    verb(raising(KeyboardInterrupt()))
    assert front.main(["plan"]) == 130


def test_the_front_imports_neither_torch_nor_numpy_nor_tyro():
    heavy = "{'torch', 'numpy', 'tyro', 'rich'}"
    code = f"import sys; from ultrascale.cli.main import main; main(['nothing']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_python_m_ultrascale_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "ultrascale", "plam"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean `plan`?" in done.stderr


@pytest.mark.parametrize("verb", ["plan", "train", "check", "show schedule", "data prepare", "validate", "export"])
def test_help_says_what_to_give_and_not_none(verb, capsys):
    with pytest.raises(SystemExit):
        front.main([*verb.split(), "--help"])
    told = capsys.readouterr().out
    assert "{None}" not in told and "default: None" not in told and "(default: )" not in told
