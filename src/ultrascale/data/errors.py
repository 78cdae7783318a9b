"""The one error of this package."""

from __future__ import annotations

from ultrascale.description.problems import Problem


class DataError(ValueError):
    """Something is wrong with input text, a shard, or where it is to be written.

    `where` names the file, with the line, byte or token it is about; `problem` says what was expected and found; `remedy` says
    what to do; `reason` is the short name under which `--on-bad skip` counts it ("" when it cannot be skipped).
    """

    def __init__(self, where: str, problem: str, remedy: str, reason: str = ""):
        super().__init__(where, problem, remedy, reason)
        self.where, self.problem, self.remedy, self.reason = where, problem, remedy, reason

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Mistakes as the command line lists them."""
        return (Problem(self.where, self.problem, self.remedy),)

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}. {self.remedy}"


class SeveralDataErrors(DataError):
    """Mistakes that can be told together; `where` and the rest are those of the first."""

    def __init__(self, errors: list[DataError]):
        first = errors[0]
        super().__init__(first.where, first.problem, first.remedy, first.reason)
        self.errors = tuple(errors)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Mistakes of all errors."""
        return tuple(problem for error in self.errors for problem in error.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))
