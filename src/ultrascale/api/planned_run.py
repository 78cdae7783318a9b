"""`--model ... --gpus ...` where a run's file may stand: the run whose layout `ultrascale plan` of the same words chooses."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.api.asked import Asked
from ultrascale.api.planning.plan_request import PlanOptions
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Run


@dataclass(frozen=True)
class Described:
    """A model and machines in place of a run's file."""

    model: str | None
    gpus: str | None
    seq_len: int | None
    tokens_per_batch: str | None

    @property
    def is_given(self) -> bool:
        """True if any of the fields is given."""
        return any(value is not None for value in vars(self).values())


def planned_run(described: Described, settings: tuple[str, ...] | list[str], *, run: str | None, verb: str) -> Run:
    """The run of the best layout that `ultrascale train` runs. `run`: a file that is given too, which is a contradiction.

    Raises SpecError with what is wrong, or that nothing fits.
    """
    from ultrascale.api.planning.plan import answer

    if run is not None:
        remedy = "Keep one of the two; settings of a file are changed by flags such as --layout.tp 2."
        raise SpecError([Problem("--model", f"describes a run, and the file {run} is given too", remedy)])
    words = [word for name, value in vars(described).items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
    asked = Asked(PlanOptions(**vars(described), runnable=_is_searched(described)), tuple(settings), (), (*words, *settings))
    found = answer(asked)
    if not found.fits:
        rule = f"no layout of {described.model} fits on {described.gpus}"
        raise SpecError([Problem("--gpus", rule, f"{found.command} says how much is missing; {verb} fewer or larger GPUs.")])
    return found.run


def _is_searched(described: Described) -> bool:
    """True if the machines' speed is known, so that layouts are searched."""
    return described.gpus is not None and "cpu" not in described.gpus
