"""`ultrascale report`: plots of a run's folder, and a summary."""

from __future__ import annotations

from ultrascale.api.report import ReportOptions, answer
from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import print_json


def command(arguments: list[str]) -> int:
    """Run the verb."""
    options = parse(ReportOptions, "report", arguments, positional={"folder": None})
    report = answer(options)
    if options.json:
        print_json(report.to_dict(), indent=2)
        return 0
    for name, text in (*report.lines(), *(("picture", str(picture)) for picture in report.pictures), *_drawn(options)):
        print(f"{name:<10}{text}")
    return 0


def _drawn(options: ReportOptions) -> list[tuple[str, str]]:
    return [] if options.html is None else [("page", str(options.html))]
