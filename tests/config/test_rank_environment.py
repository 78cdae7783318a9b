"""What a scheduler set half-way is told before anything starts."""

from __future__ import annotations

import pytest

from ultrascale.cli.main import main
from ultrascale.description.problems import SpecError
from ultrascale.description.rank_environment import env_rank, env_world_size, expect_rank_environment

WHOLE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def keys_of(environment: dict[str, str], **options: bool) -> list[str]:
    try:
        expect_rank_environment(environment, **options)
    except SpecError as error:
        return [problem.key.removesuffix(" (environment)") for problem in error.problems]
    return []


def test_what_torchrun_sets_is_taken_and_so_is_nothing():
    assert keys_of(WHOLE) == keys_of({}) == keys_of({"RANK": "0"}) == []
    assert (env_rank(WHOLE), env_world_size(WHOLE)) == (1, 2)
    assert (env_rank({}), env_world_size({})) == (0, 1)


@pytest.mark.parametrize(
    "name, value",
    [
        ("WORLD_SIZE", ""), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-2"), ("WORLD_SIZE", "²"),
        ("RANK", ""), ("RANK", "x"), ("RANK", "-1"), ("RANK", "2"), ("RANK", "1.0"),
        ("LOCAL_RANK", "x"), ("LOCAL_RANK", ""),
        ("MASTER_ADDR", ""), ("MASTER_PORT", ""), ("MASTER_PORT", "x"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"),
    ],
)  # fmt: skip
def test_a_variable_that_cannot_be_meant_is_named_and_never_a_traceback(name, value):
    assert keys_of(WHOLE | {name: value}) == [name]
    assert env_rank({name: value}) >= 0 and env_world_size({name: value}) >= 1


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_one_that_is_missing_is_named(name):
    assert keys_of({key: value for key, value in WHOLE.items() if key != name}) == [name]


def test_ranks_that_meet_elsewhere_need_no_address_and_a_rank_alone_no_world():
    assert keys_of({"WORLD_SIZE": "2", "RANK": "1"}, with_address=False) == []
    assert keys_of({"RANK": "1"}) == ["RANK"]


def test_a_verb_that_has_no_ranks_tells_its_own_error_whatever_the_world_is(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert main(["plan", "nosuch.toml"]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_rank_beyond_the_world_does_not_wait_for_the_others(tmp_path, capsys, monkeypatch):
    for name, value in (WHOLE | {"RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tmp_path / "any.toml")]) == 2
    assert "RANK (environment)\n    must be a number from 0 to below WORLD_SIZE = 2, is '3'" in capsys.readouterr().err
