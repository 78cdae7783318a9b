"""Format of error messages, common to all commands and ranks.

    ultrascale: error on rank 1: cannot go on:

      out/run/checkpoints/step-00000002/manifest.json
        checksum is 5d41402a, expected 2cf24dba: it is damaged
        -> Use another checkpoint.

The head classifies the error: `invalid arguments` or `invalid configuration` (exit code 2); for a file, a disk or another rank
`cannot go on` (exit code 1). An error carries its `problems`, or its text reads `KEY: RULE. REMEDY`: ranks send each other only
text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ultrascale import console
from ultrascale.description.problems import Problem, SpecError

_KEY = re.compile(
    r"(?P<key>(?:pipeline )?rank \d+(?: \([^)]*\))?) (?P<rank>.+)"
    r"|(?P<place>\S*/\S*[^\s:]) (?P<told>(?:is|was|has|holds|cannot|needs|refuses|came|does) .+)"
    r"|(?P<name>(?:[^.:(]|[.:](?! )|\([^)]*\))+): (?P<rule>.+)"
)
"""A rank, a path or a URL, or the text before the first colon outside parentheses."""
_DOING = re.compile(r"^(?:verifying|loading|reading) [^:]+: (?=\S*/\S+: )")
"""Prefix of a message with the operation during which a file was found damaged, before the file itself."""
_REMEDY = re.compile(r"\. (?=[A-Z`\"'-])")


def is_for_people(error: BaseException) -> bool:
    """True for an exception class of this package: its text contains the remedy, and a traceback would add nothing."""
    return type(error).__module__.split(".")[0] == "ultrascale"


def explained(error: BaseException | str, subject: str) -> tuple[int, str]:
    """Exit code and text of an error for users, or of such a text. `subject` stands for a missing key."""
    problems = getattr(error, "problems", ()) or problems_in(str(error), subject)
    is_usage_error = getattr(error, "is_usage_error", isinstance(error, SpecError)) or all(
        problem.key.startswith("--") for problem in problems
    )
    return 2 if is_usage_error else 1, problem_list(problems, is_usage_error=is_usage_error)


def problem_list(problems: Sequence[Problem], *, is_usage_error: bool = True) -> str:
    """Every mistake: its key or file, the source of the value, the rule, and the remedy. `is_usage_error`: about a
    configuration or a command rather than a file or a disk."""
    count = len(problems)
    head = "invalid arguments" if is_usage_error else "cannot go on"
    head = "invalid configuration" if is_usage_error and any(map(_is_configured, problems)) else head
    lines = [f"{head}, {count} mistakes:" if count > 1 else f"{head}:"]
    for problem in problems:
        lines += ["", problem_lines(problem)]
    return "\n".join(lines)


def problem_lines(problem: Problem) -> str:
    """One mistake, indented: its key and the source of the value, the rule, the remedy."""
    origin = f"  ({problem.where})" if problem.where else ""
    rule = problem.rule.replace("\n", "\n    ")
    remedy = f"\n    -> {problem.remedy}" if problem.remedy else ""
    return f"  {problem.key}{origin}\n    {rule}{remedy}"


def print_error(message: str, *, rank: int | None = None) -> None:
    """Print an error to stderr, with the rank in front if there are several."""
    console.print_line(f"ultrascale: error{'' if rank is None else f' on rank {rank}'}: {message}", "stderr")


def problems_in(text: str, subject: str) -> tuple[Problem, ...]:
    """Problems in a message: one per line, or, for a line with indented lines under it, all of them together."""
    lines = text.strip().splitlines() or [""]
    if len(lines) > 1 and all(not line.startswith(" ") and ": " in line for line in lines):
        return tuple(_problem(line, "", subject) for line in lines)
    last = lines.pop() if any(line.startswith(" ") for line in lines) and not lines[-1].startswith(" ") else ""
    problem = _problem(lines[0], last, subject)
    return (Problem(problem.key, "\n".join([problem.rule, *lines[1:]]), problem.remedy),)


def _problem(line: str, remedy: str, subject: str) -> Problem:
    line = _DOING.sub("", line)
    match = _KEY.fullmatch(line)
    key, message = (subject, line) if match is None else [part for part in match.groups() if part is not None]
    rule, *remedies = [message, remedy] if remedy else _REMEDY.split(message, maxsplit=1)
    return Problem(key, rule if remedies else message.removesuffix("."), " ".join(remedies))


def _is_configured(problem: Problem) -> bool:
    """True if the problem is about a value in a run's configuration rather than a word of the command."""
    from ultrascale.config.schema import STAND_INS, leaves, sections

    key, (_, colon, line) = problem.key.partition("[")[0], problem.key.rpartition(":")
    is_key = key in leaves() or key in STAND_INS or not {key, key.partition(".")[0]}.isdisjoint(sections())
    return is_key or (colon != "" and line.isdigit()) or problem.where != ""
