"""`ultrascale demo`: a complete run in five minutes on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import ending_like_ctrl_c, print_json
from ultrascale.description.problems import mistake


def demo(
    folder: Path = Path("demo"),
    json: bool = False,
) -> int:
    """Plan, prove, train, kill, resume, compare, sample, export: a real run in five minutes. No GPU, no network.

    Example: ultrascale demo --folder demo

    The text is the Python standard library on this machine, the model a Llama of 4 million parameters, trained by two
    processes. Each stage prints the command that does the same. Exit code 1 if a claim fails.

    Args:
        folder: Folder for all output. A second demo starts afresh there and keeps only the prepared text.
        json: Print one JSON object at the end; all other output goes to stderr.
    """
    if folder.exists() and not folder.is_dir():
        raise mistake("--folder", f"{folder} cannot be written: file exists", "Name another.")
    import torch  # noqa: F401 (reports a missing package at once, before anything is created)

    from ultrascale.demo.screen import Screen
    from ultrascale.demo.story import run_demo

    with ending_like_ctrl_c(SIGINT, SIGTERM, SIGHUP):  # Ctrl-C even if a shell ignores it, and a closed terminal
        outcome = run_demo(folder, Screen.on(stderr=json))
    if json:
        document = {"folder": str(folder), "claims": [asdict(claim) for claim in outcome.claims]}
        print_json(document, "demo")
    return 1 if any(claim.verdict == "fails" for claim in outcome.claims) else 0


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if every claim holds, 1 if one fails."""
    return parse(demo, "demo", arguments)
