"""The entry point of the command line: finds the verb, and turns its outcome into an exit code.

    0  done                                     2    invalid command or configuration
    1  failed; one message says why             130  stopped by Ctrl-C

A verb is a module with `command(arguments: list[str]) -> int`; only the chosen one is imported, so that `plan` starts at once.
An exception class defined anywhere in `ultrascale` is addressed to the user: its text is printed without a traceback.
ULTRASCALE_TRACEBACK=1 prints tracebacks.
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from importlib import import_module

from ultrascale import __version__, console
from ultrascale.api.extras import lacked
from ultrascale.cli.terminal.screen import console_for_people
from ultrascale.config.failures import explained, is_for_people, print_error, problem_list
from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.description.rank_environment import env_rank, env_world_size


@dataclass(frozen=True)
class Verb:
    """A verb of the command line, and its module."""

    module: str
    summary: str
    group: str


VERBS = {
    "demo": Verb("start.demo", "plan, prove, train, kill, resume, compare: in five minutes", "Start here"),
    "doctor": Verb("start.doctor", "check this machine: hardware, software, and what would prevent a run", "Start here"),
    "primer": Verb("start.primer", "small kernels on this machine's GPU: achieved rate against peak", "Start here"),
    "plan": Verb("plan.plan_command", "predict memory and time of a run, or find its best layout", "Before a run"),
    "page": Verb("plan.page", "the planner in a browser: memory, time, schedule, explanation", "Before a run"),
    "show": Verb("show.show_command", "print a run's settings with their sources; presets, machines, keys", "Before a run"),
    "validate": Verb("plan.validate", "compare predictions with measured runs", "Before a run"),
    "trace": Verb("trace", "run any rank of a job without a device: exact memory and messages", "Before a run"),
    "check": Verb("check", "prove that N processes compute what one process computes", "Before a run"),
    "data": Verb("data", "prepare token files from text, and inspect them", "Before a run"),
    "train": Verb("train", "train a run, or resume it", "A run and after"),
    "launch": Verb("launch", "write a job for Slurm, Kubernetes, SkyPilot, torchrun or ssh", "A run and after"),
    "measure": Verb("measure.measure_command", "profile or time steps of a run, compared with the plan", "A run and after"),
    "sweep": Verb("measure.sweep", "measure many layouts of a run, compared with the plan", "A run and after"),
    "report": Verb("report", "plots and summary of a run's folder", "A run and after"),
    "checkpoint": Verb("weights.checkpoint", "list and verify checkpoints", "A run and after"),
    "soak": Verb("soak", "train under injected faults; the result must be bit-identical", "A run and after"),
    "generate": Verb("weights.generate", "sample text from a checkpoint or an exported folder", "A run and after"),
    "evaluate": Verb(
        "weights.evaluate", "loss, perplexity and bits per byte of trained weights on a corpus", "A run and after"
    ),
    "export": Verb("weights.export", "export a checkpoint as a Hugging Face folder", "A run and after"),
    "convert": Verb("weights.convert", "convert a pickle checkpoint to safetensors, in a sandboxed process", "A run and after"),
    "import": Verb("weights.import_", "import a Hugging Face folder as the first checkpoint of a run", "A run and after"),
}

EXAMPLES = (
    "ultrascale plan --model llama-3-8b --gpus 64xh100 --seq-len 8192 --tokens-per-batch 4M",
    "ultrascale check run.toml --layout.dp 2 --layout.zero-stage 3",
    "ultrascale train run.toml --processes 2",
)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to disk. For a file of this package, the error names it."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` are the words after `ultrascale`; None: the process's own."""
    console.reserve_closed_streams()
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print_help()
        return 0
    if words[0] in ("-V", "--version"):
        print(f"ultrascale {__version__}")
        return 0
    if words[0] not in VERBS:
        return explain(unknown_verb(words[0]), words[0])
    return run_verb(words[0], words[1:])


def run_verb(word: str, arguments: list[str]) -> int:
    """Import the verb's module, run it, and turn any exception into a message on stderr and an exit code."""
    try:
        code = import_module(f"ultrascale.cli.{VERBS[word].module}").command(arguments)
        if word == "train":  # its results are in the run's folder
            console.finish_stdout()
        elif sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error("stopped.")
        return 130
    except BrokenPipeError:  # `ultrascale plan ... | head`: the reader has exited, which is not an error here
        console.redirect_to_null("stdout")
        return 1
    except Exception as error:
        if os.environ.get("ULTRASCALE_TRACEBACK") == "1":
            raise
        return explain(error, word)


def explain(error: Exception, word: str) -> int:
    """Print an error that a user can act on and return the exit code; other errors are raised again."""
    code, text = exit_code_and_text(error, word)
    print_error(text, rank=env_rank() if env_world_size() > 1 and "RANK" in os.environ else None)
    return code


def exit_code_and_text(error: Exception, word: str) -> tuple[int, str]:
    """The exit code and text of an error that a user can act on; other errors are raised again."""
    if is_for_people(error):
        return explained(error, word)
    if isinstance(error, ModuleNotFoundError) and (lacking := lacked(error, word)):
        return explained(lacking, word)
    if isinstance(error, OSError) and error.filename is not None:
        why = (error.strerror or str(error)).lower()
        return _system_error(str(error.filename), why, "Check the path, its permissions and the free space on its disk.")
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:  # such as `ultrascale plan ... > file` on a full disk
        console.finish_stdout()
        why = f"output could not be written: {error.strerror}"
        return _system_error(word, why, "Free space, or write elsewhere.")
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        lost = f"{error.object[error.start : error.end]!a}"
        return _system_error(word, f"this locale cannot encode {lost} in a path or text", "Set LC_ALL=C.UTF-8.")
    raise error


def _system_error(key: str, rule: str, remedy: str) -> tuple[int, str]:
    return 1, problem_list([Problem(key, rule, remedy)], is_usage_error=False)


def unknown_verb(word: str) -> SpecError:
    """The error for an unknown verb, with the most similar one."""
    from difflib import get_close_matches

    close = get_close_matches(word, VERBS, n=1, cutoff=0.5)
    hint = f"Did you mean `{close[0]}`? " if close else ""
    verbs = f"The verbs are {', '.join(VERBS)}; `ultrascale --help` says what each does."
    return mistake("VERB", f"there is no verb `{word}`", f"{hint}{verbs}")


def print_help() -> None:
    """Print the help, which is also the output of `ultrascale` without arguments."""
    from rich.table import Table

    screen = console_for_people()
    screen.print(f"[bold]ultrascale[/bold] {__version__}  plan, prove, train, measure: pretraining of language models\n")
    for group in dict.fromkeys(verb.group for verb in VERBS.values()):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", min_width=12)
        table.add_column()
        for word, verb in VERBS.items():
            if verb.group == group:
                table.add_row(f"  {word}", verb.summary)
        screen.print(f"[bold]{group}[/bold]")
        screen.print(table)
    screen.print("\n[bold]Examples[/bold]")
    for example in EXAMPLES:
        screen.print(f"  {example}", soft_wrap=True)
    screen.print("\n`ultrascale VERB --help` explains a verb, `--json` prints for machines.")


if __name__ == "__main__":
    sys.exit(main())
