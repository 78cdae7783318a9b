"""`ultrascale measure speed`: measures speed and memory of a run here, compared with the plan."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import print_json
from ultrascale.config.failures import explained, print_error
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.problems import mistake
from ultrascale.description.rank_environment import env_rank
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes, format_share
from ultrascale.sweep.cells import TIMED, WARM
from ultrascale.train.corpora import expect_startable
from ultrascale.train.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from ultrascale.train.speed import Speed


@dataclass(frozen=True)
class SpeedOptions:
    """Time some steps of a run, and measure their memory, compared with the plan. No profiler, no checkpoint.

    The run starts anew and writes only the measurement to its folder.

    Any setting can follow as a dotted flag (`ultrascale show keys` lists them):

        ultrascale measure speed run.toml --steps 20 --layout.dp 2

    Under torchrun this is one rank, as with train. `ultrascale sweep` does the same for many layouts.
    """

    run: str
    """TOML file of the run."""
    steps: int = TIMED
    """Number of timed steps."""
    warm: int = WARM
    """Number of warm-up steps before them; memory is measured in the first two."""
    out: Path | None = None
    """File for the result. Default: `speed/speed.json` in the run's folder."""
    processes: int | None = None
    """Start this many processes here, as `ultrascale train` does."""
    json: bool = False
    """Print the result as one JSON object."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if measured, 1 if it failed, 2 if the configuration is invalid."""
    name, positional = "measure speed", {"run": "RUN.TOML"}
    options, overrides = parse_with_overrides(SpeedOptions, name, arguments, positional=positional)
    for flag, value, usual in (("--steps", options.steps, TIMED), ("--warm", options.warm, WARM)):
        if value < 1:
            raise mistake(flag, f"must be at least 1, is {value}", f"Such as {usual}.")
    run = resolve(options.run, overrides, require_data=True, processes=options.processes).run
    expect_startable(run)
    file = options.out or RunFolder.of(run).path / "speed" / "speed.json"
    if file.is_dir():
        raise mistake("--out", f"{file} is a folder", f"Name a file, such as {file / 'speed.json'}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    code = _measured(run, options.steps, options.warm, file)
    if code == 0 and env_rank() == 0:
        document = json.loads(file.read_text())
        if options.json:
            print_json(document, "measure-speed", indent=1)
        else:
            _show(document, file)
    return code


def _measured(run: Run, steps: int, warm: int, file: Path) -> int:
    if "WORLD_SIZE" in os.environ or run.layout.world_size == 1:
        from ultrascale.train.speed import measure_speed
        from ultrascale.train.worker import run_or_explain

        return run_or_explain(lambda: measure_speed(run, steps, file, warm=warm))
    arguments = ("--speed", str(file.absolute()), "--speed-steps", str(warm), str(steps))
    return launched_once(to_toml(run), run.layout.world_size, arguments)


def launched_once(
    run_toml: str, num_processes: int, worker_arguments: tuple[str, ...], *, worker: str = "ultrascale.train.worker"
) -> int:
    """Start the ranks of a measurement here, without restarts; returns the exit code. `worker`: the module that each rank
    runs."""
    from ultrascale.launch.local import launch_local

    ending = launch_local(run_toml, num_processes, worker_arguments=worker_arguments, max_restarts=0, worker=worker)
    if ending.reason and not ending.explained:
        print_error(explained(ending.reason, "measure")[1])
    return ending.exit_code if ending.reason else 0


def _show(document: dict, file: Path) -> None:
    from ultrascale.train.speed import Speed

    for name, text in (*lines(Speed(**document)), ("file", str(file))):
        print(f"{name:<10}{text}")


def lines(measured: Speed) -> list[tuple[str, str]]:
    """Names and values for display."""
    slowest, fastest = max(measured.step_seconds), min(measured.step_seconds)
    spread = f"{fastest * 1e3:,.2f} to {slowest * 1e3:,.2f} of {len(measured.step_seconds)}"
    planned = "" if measured.planned_step_seconds is None else f", {measured.planned_step_seconds * 1e3:,.2f} ms planned"
    rate = measured.tokens_per_second_per_rank
    rows = [
        ("step", f"{measured.median_seconds * 1e3:,.2f} ms, the median ({spread}){planned}"),
        (
            "speed",
            f"{rate * measured.ranks:,.0f} tokens/s, {rate:,.0f} a rank",
        ),
        ("MFU", f"{format_share(measured.mfu)} of {measured.peak_flops / 1e12:.3g} TFLOP/s, {measured.peak_origin}"),
    ]
    if measured.measured_peak_bytes is None:
        return [*rows, ("memory", f"{format_bytes(measured.planned_peak_bytes)} planned; not counted: blocks are compiled")]
    off = 100 * (measured.planned_peak_bytes / measured.measured_peak_bytes - 1)
    both = f"{format_bytes(measured.planned_peak_bytes)} planned, {format_bytes(measured.measured_peak_bytes)} measured"
    rows.append(("memory", f"{both} at the peak of rank {measured.fullest_rank}: {round(off, 1) + 0.0:.1f}% off"))
    if measured.measured_reserved_bytes is not None:
        planned_reserved = (
            "" if measured.planned_reserved_bytes is None else f"{format_bytes(measured.planned_reserved_bytes)} planned, "
        )
        rows.append(("reserved", f"{planned_reserved}{format_bytes(measured.measured_reserved_bytes)} measured"))
    return rows
