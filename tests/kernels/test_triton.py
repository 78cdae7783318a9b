"""Our Triton kernels on the CPU, interpreted. That must be asked for before triton is imported: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.triton_cases import CASES

CASES_FILE = Path(__file__).with_name("triton_cases.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux alone")


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """What is wrong with each case, or nothing."""
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES_FILE)], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_and_its_gradients_equal_plain_torch_in_fp64(case, wrong):
    assert not wrong[case], wrong[case]
