"""`ultrascale report`: plots of a run's folder, and a summary."""

from __future__ import annotations

from ultrascale import console
from ultrascale.api.report import ReportOptions, answer
from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import print_json


def command(arguments: list[str]) -> int:
    """Run the verb."""
    options = parse(ReportOptions, "report", arguments, positional={"folder": None})
    report = answer(options)
    if report.not_drawn:
        console.print_line(f"note: no pictures are drawn, {report.not_drawn}", "stderr")
    if options.json:
        print_json(report.to_dict(), indent=2)
        return 0
    drawn = [("picture", str(picture)) for picture in report.pictures]
    drawn += [] if options.html is None else [("page", str(options.html))]
    for name, text in (*report.lines(), *drawn):
        print(f"{name:<10}{text}")
    return 0
