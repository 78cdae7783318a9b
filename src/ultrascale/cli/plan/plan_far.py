"""`ultrascale plan far`: one training run on distant data centres."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.description.problems import Problem, SpecError, expect_none
from ultrascale.description.units import UnitError, parse_tokens
from ultrascale.plan.view.far_apart import FarPlan, far_apart


def far(
    parameters: str,
    kilometres: float,
    line_gbits: float,
    step_seconds: float,
    sites: int = 2,
    bits: float = 16,
    every: int = 1,
    overlap: bool = False,
    switching_ms: float = 0.0,
    uplink: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Predict the cost of distance for training on several data centres, and the effect of reducing gradients less often.

    For example:

        ultrascale plan far --parameters 72T --kilometres 4800 --line-gbits 400 --step-seconds 60

    Args:
        parameters: Parameters of the model, such as 405B.
        kilometres: Distance from one site to the next; without --uplink the sites form a ring.
        line_gbits: Bandwidth of the line between two sites, in Gbit/s per direction.
        step_seconds: Seconds of a step without the reduction between sites.
        sites: Number of data centres.
        bits: Bits per parameter sent.
        every: Steps between two reductions (an outer step every H steps).
        overlap: Overlap the reduction with the next steps.
        switching_ms: Latency of network equipment per hop, in milliseconds.
        uplink: Each site has one line to a network that reaches all others, as for the trainer's islands; else a ring.
        json: Print one JSON object.
    """
    return dict(locals())


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0, or raises SpecError with every invalid value."""
    parsed = parse(far, "plan far", arguments)
    plan = _plan(parsed)
    if parsed["json"]:
        print_json(plan.to_json(), "plan-far", indent=2)
        return 0

    from ultrascale.plan.view.far_view import show

    show(plan, console_for_people())
    return 0


FLAGS = {
    "num_parameters": "parameters", "distance_kilometres": "kilometres", "line_bits_per_second": "line-gbits",
    "step_seconds": "step-seconds", "num_sites": "sites", "bits_per_parameter": "bits", "outer_every": "every",
    "switching_seconds": "switching-ms",
}  # fmt: skip
"""Flag of each number of a far plan on the command line."""


def _plan(parsed: dict[str, Any]) -> FarPlan:
    """The requested plan. Raises SpecError with every invalid value, under the flags' names."""
    problems: list[Problem] = []
    try:
        parameters = parse_tokens(parsed["parameters"])
    except UnitError as error:
        problems.append(Problem("parameters", str(error).replace("tokens", "parameters"), "Write 405B or 72T."))
        parameters = 10**9  # so that the other numbers are still checked
    try:
        plan = far_apart(
            parameters,
            distance_kilometres=parsed["kilometres"],
            line_bits_per_second=parsed["line_gbits"] * 1e9,
            step_seconds=parsed["step_seconds"],
            num_sites=parsed["sites"],
            bits_per_parameter=parsed["bits"],
            outer_every=parsed["every"],
            overlap=parsed["overlap"],
            switching_seconds=parsed["switching_ms"] / 1e3,
            uplink=parsed["uplink"],
        )
    except SpecError as error:
        named = (replace(problem, key=FLAGS[problem.key.removeprefix("far.")]) for problem in error.problems)
        raise SpecError([*problems, *named]) from None
    expect_none(problems)
    return plan
