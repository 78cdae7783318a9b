"""`ultrascale doctor` tells what would stop a run, and nothing secret."""

from __future__ import annotations

import json
import signal
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ultrascale.cli.start.doctor import command
from ultrascale.measure.machine import doctor


@pytest.fixture
def hide(monkeypatch):
    """Make packages look as if they were not installed."""

    def pretend(*packages: str):
        def version(package: str) -> str:
            if package in packages:
                raise metadata.PackageNotFoundError(package)
            return metadata.version(package)

        monkeypatch.setattr(doctor, "metadata", type("metadata", (), {
            "version": staticmethod(version), "PackageNotFoundError": metadata.PackageNotFoundError,
        }))  # fmt: skip

    return pretend


def findings(capsys, *arguments: str) -> tuple[int, dict[str, dict]]:
    code = command([*arguments, "--json"])
    return code, {found["name"]: found for found in json.loads(capsys.readouterr().out)["findings"]}


def test_a_machine_with_everything_can_train_and_gives_exit_code_0(capsys, tmp_path):
    code, found = findings(capsys, "--folder", str(tmp_path))
    assert (code, found["torch"]["state"], found["gloo"]["state"]) == (0, "good", "good")


def test_without_torch_it_names_the_extra_and_gives_exit_code_1(capsys, hide):
    hide("torch")
    code, found = findings(capsys)
    assert (code, found["torch"]["state"], found["torch"]["remedy"]) == (1, "stop", "pip install 'ultrascale[train]'")
    assert "gloo" not in found


def test_a_missing_optional_package_is_a_note_that_does_not_stop(capsys, hide):
    hide("pyarrow")
    code, found = findings(capsys)
    assert (code, found["pyarrow"]["state"]) == (0, "note")


def test_a_torch_release_that_is_too_new_stops():
    assert doctor.torch_release("2.15.0+cpu").state == "stop"
    assert doctor.torch_installed() == doctor.torch_release(torch.__version__)


def test_processes_that_cannot_reach_each_other_stop(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such0")
    assert doctor.gloo_loopback().state == "stop"


def test_ctrl_c_is_left_to_the_process_that_started_them(monkeypatch):
    begin = dist.init_process_group

    def interrupted(*words, **settings):
        signal.raise_signal(signal.SIGINT)
        begin(*words, **settings)

    monkeypatch.setattr(dist, "init_process_group", interrupted)
    assert doctor.gloo_loopback().state == "good"


def test_fewer_gpus_than_a_job_expects_stop(capsys, tmp_path):
    code, found = findings(capsys, "--folder", str(tmp_path), "--gpus", "99")
    assert (code, found["GPUs"]["state"]) == (1, "stop") and found["GPUs"]["value"].endswith(" answer, 99 are expected")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no place in which not even root may make a file")
def test_a_folder_that_cannot_be_written_stops():
    assert {found.name: found.state for found in doctor.disk(Path("/proc"))}["writable"] == "stop"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_where_the_folder_of_runs_would_be_stops(capsys, tmp_path, place):
    (tmp_path / "file").write_text("")
    code, found = findings(capsys, "--folder", str(tmp_path / place))
    assert (code, found["folder"]["state"]) == (1, "stop")
    assert found["folder"]["value"] == f"{tmp_path / 'file'} is no folder"


def test_a_folder_that_is_not_there_yet_is_a_note_about_where_it_would_be_made(tmp_path):
    found = {each.name: each for each in doctor.disk(tmp_path / "new" / "runs")}
    assert {name: each.state for name, each in found.items()} == {"folder": "note", "free": "good"}
    assert f"looked at {tmp_path}" in found["folder"].value


def test_no_value_of_the_environment_is_shown_but_the_named_ones(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    command([])
    printed = capsys.readouterr().out
    assert ("hf_secret_value" in printed, "INFO" in printed) == (False, True)


def test_the_tested_torch_releases_are_those_of_pyproject():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (oldest, first_too_new) = (".".join(map(str, release)) for release in doctor.TORCH_RANGE)
    assert f'"torch>={oldest},<{first_too_new}"' in text
