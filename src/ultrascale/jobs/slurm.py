"""Scripts for sbatch: a run that requeues itself until it is complete, and an array that measures cells.

The template holds the job's shell code; this file adds its options and everything that depends on the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ultrascale.jobs.job import FIRST_PORT, PORTS, Job
from ultrascale.jobs.text import comment, exports, fill, head, quoted, setup, train_words

LEAVING_SECONDS = 60
"""Seconds for torchrun and srun to exit after the ranks."""


def slurm_text(job: Job, file: Path) -> str:
    """The batch script of a run, for the file `file`."""
    return fill("slurm.sh", text_file=file, train=train_words(job), folder=quoted([job.folder]), log=_log(job, "JOBID"),
                may_requeue=str(job.launch.slurm.requeue).lower(), restarts=job.launch.restarts,
                gpus_wanted=f" --gpus {job.ranks_per_node}" if job.on_gpus else "",
                numa_reason=", and binds each rank to those beside its GPU and its network card" if job.on_gpus else "",
                on_one_node=_on_one_node(job), **_shared(job, [*_options(job), *_signal(job)]))  # fmt: skip


def slurm_array_text(job: Job, file: Path, cells: Path, count: int, *, steps: int, warm: int, results: str) -> str:
    """The batch script that measures `count` cells, whose folders `cells` lists; `results`: the command that shows them."""
    more = [("Tasks at once: append %N to the numbers for at most N.", f"--array=0-{count - 1}")]
    return fill("slurm_array.sh", text_file=file, cells=quoted([cells]), steps=steps, warm=warm, results=results,
                **_shared(job, [*_options(job, array=True), *more]))  # fmt: skip


def _shared(job: Job, options: list[tuple[str, str]]) -> dict[str, object]:
    lines = [f"{comment([reason])}\n#SBATCH {option}" if reason else f"#SBATCH {option}" for reason, option in options]
    drawn = f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
    return {
        "head": head(job), "options": "\n".join(lines), "setup": setup(job), "exports": exports(job),
        "ranks": job.ranks_per_node, "port": job.launch.port or drawn, "container": _container(job),
        "numa": " --numa-binding node" if job.on_gpus else "",
    }  # fmt: skip


def _options(job: Job, *, array: bool = False) -> Iterator[tuple[str, str]]:
    """Options of sbatch, each with its reason unless obvious."""
    config, launch = job.launch.slurm, job.launch
    yield "", f"--job-name={job.name}"
    yield "", f"--nodes={job.nodes}"
    yield "One task per node: torchrun, which starts the ranks.", "--ntasks-per-node=1"
    if job.on_gpus:
        yield "", f"--gres=gpu:{job.ranks_per_node}"
    if config.exclusive:
        yield "Whole nodes: other jobs on a node slow down every step by their traffic and page cache.", "--exclusive"
        yield "All memory of a node; the default may be a share per core.", "--mem=0"
    if launch.time_limit_seconds is not None:
        yield f"launch.time_limit = {launch.time_limit}", f"--time={_slurm_time(launch.time_limit_seconds)}"
    options = {
        "partition": config.partition, "account": config.account, "qos": config.qos, "reservation": config.reservation,
        "constraint": config.constraint,
    }  # fmt: skip
    yield from (("", f"--{name}={_word(value)}") for name, value in options.items() if value is not None)
    if config.requeue:
        yield "Requeue the job under the same number if a node fails or the job is preempted.", "--requeue"
    yield "A restarted job appends to the same log.", "--open-mode=append"
    yield "", f"--output={_log(job, '%A_%a' if array else '%j')}"
    yield "Paths in the run are relative to this folder, which all nodes must be able to read.", f"--chdir={_word(Path.cwd())}"
    yield from (("launch.slurm.options", option) for option in config.options)


def _word(value: object) -> str:
    """A value as sbatch reads it in a line of its own."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r"[\s\"'#\\]", text) else text


def _signal(job: Job) -> Iterator[tuple[str, str]]:
    lead = job.grace + LEAVING_SECONDS
    why = f"Signal this script this many seconds before the time limit. Time to save and exit: {job.grace_reason}."
    yield why, f"--signal=B:USR1@{lead}"


def _slurm_time(seconds: int) -> str:
    minutes = -(-seconds // 60)
    return f"{minutes // 1440}-{minutes % 1440 // 60:02d}:{minutes % 60:02d}:00"


def _log(job: Job, number: str) -> str:
    return f"{job.name}-{number}.log"


def _container(job: Job) -> str:
    """Words between srun and its command."""
    image, folder = job.launch.container, str(Path.cwd())
    if image is None:
        return ""
    if job.launch.slurm.container_runtime == "pyxis":
        mounts = ",".join(f"{path}:{path}" for path in (folder, *job.launch.mounts))
        words = [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={folder}"]
        return f" \\\n    {quoted(words)}"
    binds = [word for path in (folder, *job.launch.mounts) for word in ("--bind", path)]
    gpus = ["--nv"] if job.on_gpus else []
    return f" \\\n    {quoted(['apptainer', 'exec', *gpus, *binds, '--pwd', folder, image])}"


def _on_one_node(job: Job) -> str:
    """Prefix of a command that needs ultrascale outside the ranks: the package may exist only in the container."""
    return "" if job.launch.container is None else f"srun --nodes=1 --ntasks=1{_container(job)} "
