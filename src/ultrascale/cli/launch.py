"""`ultrascale launch`: a run as a job of a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ultrascale.cli.measure.measure_speed import TIMED, WARM
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.config.layers import take_settings
from ultrascale.config.resolve import Resolved, resolve
from ultrascale.config.rules.early import data_missing_here
from ultrascale.console import print_line
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes, format_seconds
from ultrascale.jobs.hosts import ssh_text, torchrun_text
from ultrascale.jobs.job import job_of, num_nodes_of, ranks_per_node
from ultrascale.jobs.kubernetes import kubernetes_text
from ultrascale.jobs.skypilot import skypilot_text
from ultrascale.jobs.slurm import slurm_array_text, slurm_text
from ultrascale.jobs.submit import COMMANDS, LauncherError, expect_launcher, submit
from ultrascale.output_file import write_output

TEXTS = {
    "slurm": (slurm_text, ".sbatch"), "kubernetes": (kubernetes_text, ".k8s.yaml"), "skypilot": (skypilot_text, ".sky.yaml"),
    "torchrun": (torchrun_text, ".torchrun.sh"), "ssh": (ssh_text, ".ssh.sh"),
}  # fmt: skip


@dataclass(frozen=True)
class LaunchOptions:
    """Write a complete, commented job script for a run on a cluster, for you to edit.

    A Slurm job requeues itself until the run is complete; Kubernetes restarts lost pods; SkyPilot replaces machines. Settings
    are in [launch] of the run, or in flags:

        ultrascale launch slurm run.toml --nodes 8 --launch.time-limit 24h --launch.slurm.partition gpu

        ultrascale launch slurm run.toml --nodes 1 --measure --layout.tp 1,2,4 --submit
    """

    launcher: Literal["slurm", "kubernetes", "skypilot", "torchrun", "ssh"]
    """Program that starts the nodes."""
    run: str
    """TOML file of the run. The job reads it again: keep it where all nodes can access it."""
    nodes: int | None = None
    """Number of machines; with islands.quorum, those of one island, each of which is a job."""
    print: bool = False
    """Print the script and write nothing."""
    submit: bool = False
    """Write the script and submit it to the launcher."""
    out: Path | None = None
    """File for the script. Default: the run's name with an extension, in this folder."""
    measure: bool = False
    """Measure instead of train: a job array with one cell per combination of settings with several values."""
    timed: int = TIMED
    """Timed steps in each cell, with --measure."""
    warm: int = WARM
    """Warm-up steps before them, with --measure."""
    island: int | None = None
    """Number of the one island whose script is written, with islands.quorum; None: of all."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0, or raises SpecError with every mistake, before a script is written or submitted."""
    from ultrascale.sweep.grid import split_axes

    axes, words = split_axes(arguments)
    positional = {"launcher": None, "run": "RUN.TOML"}
    options, overrides = parse_with_overrides(LaunchOptions, "launch", words, positional=positional)
    launcher, out = options.launcher, options.out
    _expect_consistent_flags(options, [axis.key for axis in axes])
    if options.measure and options.island is not None:
        raise mistake("--island", "is given beside --measure, which measures cells and no islands", "Leave one of them out.")
    if "\n" in f"{out or ''}{Path.cwd()}":
        raise mistake(
            "--out",
            "or the current folder has a line break in its path, which a script's comments cannot have",
            "Name another.",
        )
    typed = shlex.join(["ultrascale", "launch", *arguments])
    resolved = resolve(options.run, overrides, require_data=not options.measure)
    if options.measure:
        text_file = out or Path(f"{resolved.run.name}.measure{TEXTS[launcher][1]}")
        texts = {text_file: _measuring_text(options, axes, overrides, resolved, text_file, typed)}
    else:
        texts = _texts(options, resolved, overrides, typed, _islands_of(resolved, options.island))
        for place in data_missing_here(resolved.run):
            print_line(f"note: {place} is not on this machine; every node must have it", "stderr")
    if len(texts) > 1 and (options.print or (options.submit and launcher in ("ssh", "torchrun"))):
        rule = f"is one text, and {len(texts)} islands with a quorum (islands.quorum) are a job each"
        raise mistake("--print" if options.print else "--submit", rule, "Name one of them: --island NUMBER.")
    if options.print:
        print(*texts.values(), end="")
        return 0
    nodes = num_nodes_of(options.nodes, resolved.launch)
    if options.submit:
        expect_launcher(launcher, nodes)
    _expect_unedited(texts, launcher)
    for number, (text_file, text) in enumerate(texts.items()):
        text_file.parent.mkdir(parents=True, exist_ok=True)
        write_output(text_file, text)
        if options.submit:
            try:
                output = submit(launcher, text_file)
            except LauncherError as error:
                if number == 0:
                    raise
                before = "island 0 is" if number == 1 else f"islands 0 to {number - 1} are"
                retry_flags = " and ".join(f"--island {later}" for later in range(number, len(texts)))
                raise LauncherError(
                    f"{error}; {before} submitted: go on with {retry_flags}, each a command of its own"
                ) from error
            if output:
                print(output)
        else:
            each = f" NUMBER FIRST_HOST   on each of {nodes} nodes" if launcher == "torchrun" and nodes > 1 else ""
            print(f"{text_file}\nnext  {shlex.join([*COMMANDS[launcher], str(text_file)])}{each}")
    return 0


def _expect_consistent_flags(options: LaunchOptions, axes: Sequence[str]) -> None:
    if options.print and options.submit:
        raise mistake("--print", "is given beside --submit", "Keep one of the two.")
    launcher = options.launcher
    if options.measure and launcher != "slurm":
        remedy = (
            f"`ultrascale sweep` measures on one machine; on nodes of {launcher}, `ultrascale measure speed` under torchrun."
        )
        raise mistake("--measure", f"{launcher} has no arrays of jobs", remedy)
    if axes and not options.measure:
        rule = "has several values, and one run is trained"
        raise mistake(f"--{axes[0].replace('_', '-')}", rule, "Give one value, or measure all: --measure.")


def _islands_of(resolved: Resolved, island: int | None) -> list[int | None]:
    """Islands that are separate jobs; None for one job."""
    islands = resolved.run.islands
    apart = islands.quorum > 0 and islands.count > 1
    if island is not None and not (apart and 0 <= island < islands.count):
        rule = f"is {island}, of {islands.count} islands" if apart else "is given, and without islands.quorum a run is one job"
        remedy = f"Give 0 to {islands.count - 1}, or leave it out." if apart else "Leave it out, or set islands.quorum."
        raise mistake("--island", rule, remedy)
    return [*range(islands.count)] if apart and island is None else [island]


def _texts(
    options: LaunchOptions, resolved: Resolved, overrides: Sequence[str], typed: str, islands: Sequence[int | None]
) -> dict[Path, str]:
    """Scripts of a training run by file name; with several islands, each has its number before the extension."""
    path, out = Path(options.run), options.out
    path = path / "run.toml" if path.is_dir() else path
    write, ending = TEXTS[options.launcher]
    texts, notes = {}, _planned(resolved)
    _, settings = take_settings(overrides, "launch")  # the others are also the trainer's
    for island in islands:
        met = [] if island is None else [_meeting_place(resolved.run, island)]
        job = job_of(
            resolved.run, resolved.launch, file=path, settings=settings, nodes=options.nodes, command=typed,
            notes=[*notes, *met], island=island,
        )  # fmt: skip
        file = out or Path(f"{job.name}{ending}")
        if out is not None and len(islands) > 1:
            file = out.with_name(f"{out.name.removesuffix(ending)}-island-{island}{ending}")
        texts[file] = write(job, file)
    return texts


def _meeting_place(run: Run, island: int) -> str:
    """Rendezvous of a run's islands, for the head of a script."""
    kind, _, server = run.islands.meet.partition("://")
    where = {"": "in the run's folder", "file": f"in {server}"}.get(
        kind, f"at {run.islands.meet}: start it there, for all, with"
    )
    start = f"`python -m ultrascale.islands.store {server.replace(':', ' ')}`" if kind == "tcp" else ""
    return (
        f"Island {island} of {run.islands.count}; {run.islands.quorum} or more go on. They meet {where} {start}".rstrip() + "."
    )


def _planned(resolved: Resolved) -> list[str]:
    """Lines of the plan for the run on its machines. Raises SpecError if their memory does not suffice."""
    run, limit = resolved.run, resolved.launch.time_limit_seconds
    if run.cluster == "auto" or run.cluster.endswith("cpu"):
        return ["No plan: cluster does not name the machines."]
    from ultrascale.catalogue.cluster import parse_cluster
    from ultrascale.plan.report import plan_run

    cluster = parse_cluster(run.cluster)
    if cluster.num_accelerators != run.layout.world_size:
        rule = f"has {cluster.num_accelerators:,} accelerators, and the layout has {run.layout.world_size:,} ranks"
        dp, rest = divmod(cluster.num_accelerators * run.layout.dp, run.layout.world_size)
        remedy = (
            "Name as many, or change an axis." if rest or not dp else f"Set layout.dp = {dp}, or name as many accelerators."
        )
        raise mistake("cluster", rule, remedy)
    plan = plan_run(run, cluster)
    need = f"{format_bytes(plan.needed_bytes)} of {format_bytes(plan.capacity_bytes)}"
    if not plan.fits:
        remedy = "`ultrascale plan` names layouts that fit; every node would fail at the first step."
        raise mistake("layout", f"does not fit: the plan needs {need} of each device", remedy)
    if plan.prediction is None:
        return [f"Planned: {need} of each device."]
    seconds = float(plan.prediction.step_seconds)
    jobs = "" if limit is None else f", {max(1, -(-round(seconds * run.steps) // limit)):,} times the time limit or part of it"
    total = format_seconds(seconds * run.steps)
    return [f"Planned: {need} of each device, {format_seconds(seconds)} a step, {total} for all{jobs}."]


def _measuring_text(
    options: LaunchOptions, axes: Sequence, overrides: Sequence[str], resolved: Resolved, text_file: Path, typed: str
) -> str:
    """Array script over all cells, whose folders are created as `ultrascale sweep` creates and reads them."""
    from ultrascale.sweep.cells import place_of
    from ultrascale.sweep.grid import cells

    path, steps, warm = options.run, options.timed, options.warm
    for flag, value in (("--timed", steps), ("--warm", warm)):
        if value < 1:
            raise mistake(flag, f"must be at least 1, is {value}", "Leave it out for the usual number.")
    count = num_nodes_of(options.nodes, resolved.launch)
    ranks = count * ranks_per_node(resolved.run, resolved.launch)
    _, settings = take_settings(overrides, "launch")
    grid_cells, _ = cells(path, axes, settings, processes=ranks)
    folder = Path(resolved.run.folder) / "sweeps" / resolved.run.name
    places = [place_of(folder, cell, axes, steps=steps, warm=warm) for cell in grid_cells if cell.run is not None]
    first = replace(places[0].run, name=resolved.run.name)
    listing = folder / "cells.txt"
    words = [f"--{axis.key.replace('_', '-')}={','.join(axis.values)}" for axis in axes]
    results = ["ultrascale", "sweep", path, "--processes", str(ranks), *words, *settings]
    results += ["--steps", str(steps), "--warm", str(warm), "--list"]
    notes = [f"{len(places)} cells, {len(grid_cells) - len(places)} refused; {steps} steps are timed after {warm}."]
    listed = " ".join(shlex.join(results).split())  # one line of a comment
    job = job_of(first, resolved.launch, file=Path(path), nodes=count, command=typed, notes=notes)
    if not options.print:
        for place in places:
            place.prepare()
        listing.write_text("".join(f"{place.path}\n" for place in places))
    return slurm_array_text(job, text_file, listing, len(places), steps=steps, warm=warm, results=listed)


def _expect_unedited(texts: dict[Path, str], launcher: str) -> None:
    """Raises SpecError if an existing file was edited: it is not overwritten."""
    for file, text in texts.items():
        if file.is_dir():
            raise mistake("--out", f"{file} is a folder", f"Name a file, such as {file / 'job'}{TEXTS[launcher][1]}.")
        if file.exists() and file.read_text() != text:
            submitted = shlex.join([*COMMANDS[launcher], str(file)])
            remedy = f"Hand it in as it is (`{submitted}`), remove it, or name another file with --out."
            raise mistake("--out", f"{file} is there and differs: it may have been edited", remedy)
