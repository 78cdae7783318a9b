"""Submission of a written script by the launcher's own command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ultrascale.description.problems import mistake

COMMANDS = {
    "slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f"], "skypilot": ["sky", "jobs", "launch", "--yes"],
    "ssh": ["bash"], "torchrun": ["bash"],
}  # fmt: skip
NEEDS = {"ssh": "ssh"}
"""Required programs other than the command's first word."""
FROM = {
    "sbatch": "Submit from a login node of the cluster.", "kubectl": "Install it, and point it at the cluster.",
    "sky": "pip install 'skypilot[aws]' (or another cloud) in an environment of its own.", "ssh": "Install OpenSSH's client.",
}  # fmt: skip


class LauncherError(RuntimeError):
    """The launcher's command refused the script; includes its output."""


def expect_launcher(launcher: str, nodes: int) -> None:
    """Raise SpecError if the launcher's command is not on this machine, or cannot start several nodes from here."""
    program = NEEDS.get(launcher, COMMANDS[launcher][0])
    if shutil.which(program) is None:
        remedy = f"{FROM.get(program, '')} Or leave --submit out, and take the text there.".strip()
        raise mistake("--submit", f"{program} is not installed here", remedy)
    if launcher == "torchrun" and nodes > 1:
        rule = f"torchrun must be started on each of {nodes} nodes, and this is one of them"
        raise mistake("--submit", rule, "Run the text on each, or take `ultrascale launch ssh`.")


def submit(launcher: str, file: Path) -> str:
    """Submit `file` to the launcher; returns its output. Raises LauncherError if it refuses."""
    words = [*COMMANDS[launcher], str(file)]
    if launcher in ("ssh", "torchrun"):  # they are the run itself, in the foreground
        code = subprocess.run(words).returncode
        if code != 0:
            raise LauncherError(f"{' '.join(words)}: ended with exit code {code}")
        return ""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        # In one line: a line that begins with a name would be listed as a separate error.
        said = "; ".join((done.stderr or done.stdout).strip().splitlines())
        raise LauncherError(f"{' '.join(words)}: refused it: {said}")
    return done.stdout.strip()
