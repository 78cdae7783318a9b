"""The demo's run as a TOML file: sized so that training takes one to three minutes on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from ultrascale.config.resolve import resolve
from ultrascale.demo.stages.text import VOCABULARY
from ultrascale.description.layout import Precision
from ultrascale.description.run import Run

PROCESSES = 2
TRAINING_SECONDS = 90
"""Seconds of training at the rehearsed rate. What that leaves out (half as much again) and restarting after the kill come on
top, and a busy machine takes up to three times as long: the whole is to stay below five minutes."""
STEPS = (240, 640)
"""Fewest and most: below, the loss does not get far; above, the story gets long."""
SAVES = 5
_TOML = """\
# A Llama of 4 million parameters on the sources of Python's standard library, on two processes of this machine.

name = "run"
folder = {folder}
steps = {steps}
device = "cpu"

[model]
preset = "tiny-llama-4m"
vocab_size = {vocabulary}
initializer_range = 0.05    # a narrow model learns sooner from larger weights than the usual 0.02

[layout]
dp = {processes}
zero_stage = 2
micro_batch_size = 4
precision = "{precision}"

[batch]
sequence_length = 256
sequences_per_batch = 8

[data]
sources = [{data}]
validation = [{validation}]

[optimizer]
learning_rate = 2e-3
warmup_steps = 30
min_learning_rate_ratio = 0.05

[checkpoint]
every_steps = {every}
export = false          # the demo does it in a stage of its own

[evaluation]
every_steps = {every}
sequences = 64
"""


def write_run(folder: Path, *, precision: Precision = "fp32", steps: int = STEPS[0]) -> Run:
    """Write `folder`/run.toml and read it back as `ultrascale train` does."""
    file, data = folder / "run.toml", folder / "data"
    quoted = {"folder": folder, "data": data, "validation": data / "validation"}
    file.write_text(
        _TOML.format(
            steps=steps, precision=precision, every=steps // SAVES, processes=PROCESSES, vocabulary=VOCABULARY,
            **{key: json.dumps(str(path), ensure_ascii=False) for key, path in quoted.items()},
        )
    )  # fmt: skip
    return resolve(file).run


def fitting_steps(seconds_per_step: float) -> int:
    """Steps that take about TRAINING_SECONDS, a multiple of SAVES."""
    fewest, most = STEPS
    return round(min(most, max(fewest, TRAINING_SECONDS / seconds_per_step)) / SAVES) * SAVES
