"""`ultrascale doctor`: reports what this machine has, and what would prevent a run on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json

if TYPE_CHECKING:
    from ultrascale.measure.machine.doctor import Finding


@dataclass
class Doctor:
    """Report what this machine has, and what would prevent a training run on it.

    Exit code 0: a run can start here; 1: something would prevent it.

    Example: ultrascale doctor --folder /scratch/runs
    """

    folder: Path = Path(".")
    """Folder to check: the one for runs."""
    gpus: int | None = None
    """Also fail if there are fewer GPUs than this, as on a node that has lost one."""
    json: bool = False
    """Print one JSON object."""


def command(arguments: list[str]) -> int:
    """Parse, examine, print. Returns 1 if a training run would be prevented."""
    options = parse(Doctor, "doctor", arguments)
    from ultrascale.measure.machine.doctor import examine

    findings = examine(options.folder, gpus=options.gpus)
    stops = [finding for finding in findings if finding.state == "stop"]
    if options.json:
        document = {"can_train": not stops, "findings": [asdict(finding) for finding in findings]}
        print_json(document, "doctor", indent=2)
    else:
        print_report(findings)
    return 1 if stops else 0


def print_report(findings: list[Finding]) -> None:
    """Print one table per part, and a summary."""
    from rich.markup import escape
    from rich.table import Table

    marks = {"good": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "stop": "[bold red]stop[/bold red]"}
    console = console_for_people()
    for part in dict.fromkeys(finding.part for finding in findings):
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=4)
        table.add_column(style="cyan", min_width=15)
        table.add_column()
        for finding in (finding for finding in findings if finding.part == part):
            remedy = f"\n[yellow]{escape(finding.remedy)}[/yellow]" if finding.remedy else ""
            table.add_row(marks[finding.state], finding.name, escape(finding.value) + remedy)
        console.print(f"[bold]{part.capitalize()}[/bold]", table, "")
    stops = sum(finding.state == "stop" for finding in findings)
    verdict = f"[bold red]{stops} of these would stop a training run.[/bold red]" if stops else "A run can start here."
    console.print(verdict)
