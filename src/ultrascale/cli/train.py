"""`ultrascale train`: train, or resume a stopped run.

The run's store is tested here, without torch, before ranks start and before anything is written.
"""

from __future__ import annotations

import json as json_module
import os
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from shlex import join, quote
from typing import Any

from ultrascale import console
from ultrascale.api.stamp import stamped
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.config.failures import explained, print_error
from ultrascale.config.resolve import OF_CONFIG, Resolved, resolve, to_toml
from ultrascale.config.rules.early import expect_processes
from ultrascale.config.rules.time_limits import grace_seconds
from ultrascale.config.train_defaults import train_defaults
from ultrascale.description.problems import mistake
from ultrascale.description.rank_environment import env_rank, env_world_size, expect_rank_environment
from ultrascale.description.run import Run
from ultrascale.launch.apart import launch_islands
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.run_rows import event_line
from ultrascale.schedules.for_layout import schedule_of
from ultrascale.storage import join_url, open_store, url_of
from ultrascale.storage.location import url_problem
from ultrascale.train.corpora import expect_startable
from ultrascale.train.folder.island_folder import island_folder, of_island, where_they_meet
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.observers.metrics import expect_trackers


@dataclass(frozen=True)
class TrainOptions:
    """Train a run, or resume it: the same command does both.

    Any setting can follow as a dotted flag (`ultrascale show keys` lists them):

        ultrascale train run.toml --processes 2 --layout.zero-stage 3 --steps 200

    Under torchrun this is one rank: torchrun --nproc-per-node 8 -m ultrascale train run.toml --layout.dp 8
    """

    run: str
    """TOML file of the run, or the folder of a run, or the URL of a stored run, as in s3://BUCKET/PREFIX/NAME."""
    processes: int | None = None
    """Start this many processes here; dp = processes / (tp x cp x pp) (layout.dp)."""
    elastic: bool = False
    """Let the planner choose the layout if the number of processes has changed. The global batch stays the same."""
    max_restarts: int = 3
    """Restart all processes at most this often without a new checkpoint in between if one of them dies."""
    allow_changes: bool = False
    """Resume from a checkpoint although model, data or seed have changed."""
    ignore_memory: bool = False
    """Start on GPUs although the plan predicts that a rank needs more memory than they have."""
    leave_by: float | None = None
    """Save and exit before this Unix time in seconds (`date +%s`), for a job with a time limit."""
    island: int | None = None
    """Start only the island with this number, if others run elsewhere (islands.quorum). None: start all here."""
    json: bool = False
    """Print one JSON object at the end; all other output goes to stderr."""

    def of_ranks(self) -> dict[str, Any]:
        """The options that `train.loop.train` takes, in this process or, as flags, in each of several."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _READ_HERE}


_READ_HERE = ("run", "processes", "elastic", "max_restarts", "island", "json")


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if the run is complete or was stopped in order, 1 if it failed, 2 if the configuration is
    invalid."""
    options, settings = parse_with_overrides(TrainOptions, "train", arguments, positional={"run": "RUN.TOML"})
    with console.redirect_stdout_to_stderr() if options.json else nullcontext():
        run, code = _train(options, settings)
        is_whole = options.island is None  # an island's command is one of several
        if code == 0 and is_whole and env_rank() == 0 and (folder := RunFolder.of(run)).metrics.exists():
            console.print_line(f"its loss, speed and memory, drawn and in numbers: ultrascale report {quote(str(folder.path))}")
    if options.json and env_rank() == 0:
        console.print_line(json_module.dumps(stamped("train", _summary(run, code))))
    return code


def _train(options: TrainOptions, settings: list[str]) -> tuple[Run, int]:
    """The trained run, and the exit code."""
    processes, leave_by, island = options.processes, options.leave_by, options.island
    if options.max_restarts < 0:
        raise mistake("--max-restarts", f"must be at least 0, is {options.max_restarts}", "0 never starts again.")
    if leave_by is not None and not time.time() < leave_by < float("inf"):
        rule = f"must be a second of the wall clock that is to come, is {leave_by:.0f}"
        raise mistake("--leave-by", rule, "For an hour from now: $(( $(date +%s) + 3600 )).")
    expect_rank_environment()
    path, settings = _fetched_run(options.run, settings)
    overrides = [*_place_flags(path, settings), *settings]
    if island is not None and processes is not None:
        rule = "does not go with --island: an island has the processes of [layout]"
        raise mistake("--processes", rule, "Leave one of the two out.")
    described = resolve(path, overrides, require_data=True, processes=None if options.elastic else processes)
    chosen, choices = train_defaults(described, island_folder(described.run, island))
    resolved = chosen.run
    if options.elastic:
        if resolved.islands.count > 1:
            rule = "does not go with islands.count > 1: islands keep their layouts"
            raise mistake("--elastic", rule, "Leave one of the two out.")
        world = env_world_size() if "WORLD_SIZE" in os.environ else resolved.layout.world_size
        resolved = _elastic(resolved, world if processes is None else processes)
    expect_startable(resolved)
    if env_rank() == 0:
        for line in [*choices, *_weights_notes(chosen, [path, *overrides])]:
            console.print_line(line)
    expect_trackers(resolved)
    if env_rank() == 0:
        expect_store(resolved)
    if resolved.layout.pp > 1:
        schedule_of(resolved.layout, num_micro_batches(resolved.layout, resolved.batch.sequences_per_batch))
    given = {name.replace("_", "-"): value for name, value in options.of_ranks().items() if value not in (None, False)}
    flags = tuple(f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items())
    if "WORLD_SIZE" in os.environ or (resolved.num_processes == 1 and island is None):
        from ultrascale.train.loop import train
        from ultrascale.train.worker import run_or_explain

        code = run_or_explain(lambda: train(resolved, **options.of_ranks(), island=island))
    elif resolved.islands.quorum and resolved.islands.count > 1 and island is None:
        code = launch_islands(to_toml(resolved), resolved, (*flags, "--max-restarts", str(options.max_restarts)))
    else:
        code = _launch(resolved, options.max_restarts, flags, island)
    return resolved, code


def _weights_notes(resolved: Resolved, words: list[str]) -> list[str]:
    """A note if a new run reads its model from a folder with weights, which it does not begin from. A run that is kept in a
    store may have begun elsewhere, and gets none."""
    origins = resolved.provenance.values()
    named = (origin.removeprefix(OF_CONFIG) for origin in origins if origin.startswith(OF_CONFIG))
    folder = next((place if place.is_dir() else place.parent for place in map(Path, named)), None)
    run = resolved.run
    has_begun = any(Path(run.folder, run.name, "checkpoints").glob("step-*")) or run.checkpoint.store is not None
    if folder is None or has_begun or not any(folder.glob("*.safetensors")):
        return []
    command = join(["ultrascale", "import", str(folder), *words])
    return [f"note: weights begin at random; `{command}` begins from those in {folder}"]


def _elastic(run: Run, world: int) -> Run:
    """`run` with a layout for `world` processes; prints the layout if it changes."""
    from ultrascale.measure.machine.ceilings import this_gpu
    from ultrascale.parallel.mesh import choose_device
    from ultrascale.plan.search.elastic import elastic_layout

    if world < 1:
        raise mistake("--processes", f"must be at least 1, is {world}", "Start one or more.")
    gpu = this_gpu(choose_device(run.device))
    layout = elastic_layout(run, world, device=gpu.name if gpu is not None else "cpu")
    if layout != run.layout and env_rank() == 0:
        axes = ("dp", "tp", "cp", "pp", "ep", "zero_stage", "micro_batch_size")
        axes_text = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
        console.print_line(f"elastic: {world} processes instead of {run.layout.world_size}: {axes_text}")
    return replace(run, layout=layout)


def _fetched_run(path: str, settings: list[str]) -> tuple[str, list[str]]:
    """A run given by its store: a local folder to resume in, and flags with the store's URL."""
    url = url_of(path)
    if url is None:
        return path, settings
    from ultrascale.train.folder.run_store import fetch_run

    flags = dict(pairwise([*settings, ""])) | dict(word.split("=", 1) for word in settings if "=" in word)
    folder = fetch_run(url, Path(flags.get("--folder", "out")))
    return str(folder), settings if "--checkpoint.store" in flags else [*settings, "--checkpoint.store", url.rpartition("/")[0]]


def _place_flags(path: str, settings: list[str]) -> list[str]:
    """Flags that keep a run in the given folder, even if that was moved or renamed."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    given_flags = {word.partition("=")[0] for word in settings}
    place_flags = (("--folder", str(folder.parent)), ("--name", folder.name))
    return [word for flag, value in place_flags if flag not in given_flags for word in (flag, value)]


def _launch(run: Run, max_restarts: int, flags: tuple[str, ...], island: int | None) -> int:
    """Start all processes of a run, or of one of its islands; returns the exit code."""
    from ultrascale.launch.local import launch_local
    from ultrascale.launch.restarts import read_account, summary

    where_they_meet(run, island)
    num_processes = run.num_processes if island is None else run.worlds[island]
    expect_processes(num_processes)

    prefix = "" if island is None else f"island {island}: "

    def notice(text: str) -> None:
        console.print_line(f"ultrascale: {prefix}{text}", "stderr")

    with RunFolder.of(of_island(run, island)).commanded() as folder:
        ending = launch_local(
            to_toml(run),
            num_processes,
            worker_arguments=flags if island is None else (*flags, "--island", str(island)),
            max_restarts=max_restarts,
            say=notice,
            progress=folder.progress,
            record=lambda event: _append(folder, "events.jsonl", event_line(event)),
            keep=folder.path,
            grace=grace_seconds(run),
        )
        for line in [] if ending.refused else summary(read_account(folder.path / "events.jsonl")):
            console.print_line(line)
            _append(folder, "log.txt", line)
    if not ending.reason or ending.saved:
        return 0
    if not ending.explained:
        from ultrascale.checkpoint.listing import newest_listed

        saved = f"What is saved is in {folder.checkpoints}."
        saved = saved if newest_listed(folder.checkpoints) is not None else "Nothing is saved yet."
        print_error(explained(f"{prefix}{ending.reason.rstrip('.')}. {saved}", "train")[1])
    return ending.exit_code


def _append(folder: RunFolder, name: str, line: str) -> None:
    with suppress(OSError):  # a full disk, or a removed folder: the ranks have reported it
        folder.append(name, line)


def _summary(run: Run, code: int) -> dict[str, object]:
    folder = RunFolder.of(run)
    rows = folder.metric_rows()
    return {"finished": code == 0, "folder": str(folder.path), "last": rows[-1] if rows else None}


START_PATIENCE_SECONDS = 20.0
"""Time to wait for a server that is briefly unreachable; an absent one is reported soon after."""


def expect_store(run: Run) -> None:
    """Test that `run` can be kept in its store, if it has one: write, read, list and remove an object; the Hub is only queried.

    Raises SpecError if the store's name is invalid, StorageError with one sentence if it cannot be used.
    """
    remedy = 'Name a folder of this machine there, and the store in the run\'s file: [checkpoint] store = "s3://..."'
    if url_of(run.folder) is not None:
        raise mistake("folder", f"is {run.folder!r}, but checkpoints are on disk first", remedy)
    if run.checkpoint.store is None:
        return
    if problem := url_problem(run.checkpoint.store, to_write=True):
        raise mistake("checkpoint.store", problem, "For example s3://BUCKET/PREFIX, or a folder.")
    place = join_url(run.checkpoint.store, run.name)
    store = open_store(place, patience_seconds=START_PATIENCE_SECONDS, to_write=True)
    store.expect_usable(f".probe-{uuid.uuid4().hex}")
