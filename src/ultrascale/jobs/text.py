"""Templates of the package, filled in: `@{name}` stands for a value, and `@@` for an @, which shell and YAML seldom need."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from textwrap import indent, wrap

from ultrascale.description.units import count_of
from ultrascale.jobs.environment import variables
from ultrascale.jobs.job import Job

TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 124


class _Text(Template):
    delimiter = "@"


def fill(template: str, /, **values: object) -> str:
    """The template of this name with all `values`; lines that become blank are left empty."""
    text = _Text((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))


def quoted(words: Iterable[object]) -> str:
    """Words, quoted for a shell."""
    return " ".join(shlex.quote(str(word)) for word in words)


def comment(lines: Sequence[str]) -> str:
    """Lines as a shell comment."""
    return "\n".join(f"# {part}".rstrip() for line in lines for part in wrap(line, WIDTH) or [""])


def exports(job: Job) -> str:
    """The variables as shell exports, each below its reason."""
    return "\n".join(f"{comment([var.reason])}\nexport {var.name}={shlex.quote(var.value)}" for var in variables(job))


def head(job: Job) -> str:
    """Head of the text, as a comment: what is trained, on which machines, and lines of the plan."""
    ranks = count_of(job.ranks_per_node, "GPU" if job.on_gpus else "process")
    first = f"{job.name}: {count_of(job.run.steps, 'step')} on {count_of(job.nodes, 'node')} of {ranks}"
    return comment([first, f"Made by: {job.command}", "Edit it as you like: nothing reads it but the launcher.", *job.notes])


def setup(job: Job, *, default: Sequence[str] = ()) -> str:
    """Lines of shell before anything else."""
    return "\n".join(job.launch.setup or default) or ": # launch.setup is empty: python must have ultrascale already"


def train_words(job: Job) -> str:
    """The command of one rank, after torchrun's own arguments."""
    island = [] if job.island is None else ["--island", job.island]
    return quoted(["-m", "ultrascale", "train", job.file, *job.settings, *island])


def no_time_limit(job: Job) -> Job:
    """`job` with a note, for launchers without a time limit."""
    if job.launch.time_limit is None:
        return job
    note = f"launch.time_limit = {job.launch.time_limit} is of no effect: nothing here ends by the clock."
    return replace(job, notes=(*job.notes, note))


def block(text: str, spaces: int) -> str:
    """Text indented for a block of YAML; the template indents the first line."""
    return indent(text.rstrip("\n"), " " * spaces).lstrip(" ")
