"""Every kernel of the primer computes what torch does, in Triton's interpreter or on a GPU, at sizes that divide nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from api.validator import wrong

LESSONS = ("access", "tiles", "coarsening", "divergence", "softmax", "attention")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the command says, in a process of its own: Triton must be told of its interpreter before it is imported."""
    words = [sys.executable, "-m", "ultrascale", "primer", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_json_follows_its_schema(told):
    assert wrong(told) == []


def test_all_lessons_are_told_in_order(told):
    assert [lesson["lesson"] for lesson in told["lessons"]] == list(LESSONS)
    assert told["all_right"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_variant_agrees_with_torch_in_fp64(told, lesson):
    (found,) = (one for one in told["lessons"] if one["lesson"] == lesson)
    limit = 1e-5 if told["place"]["device"] == "cpu" else 2e-2
    assert len(found["variants"]) >= 2
    assert {one["name"]: one["error"] < limit for one in found["variants"]} == {one["name"]: True for one in found["variants"]}


def test_speed_is_told_on_a_gpu_alone(told):
    on_gpu = told["place"]["device"] != "cpu"
    assert all((one["seconds"] is not None) == on_gpu for lesson in told["lessons"] for one in lesson["variants"])
