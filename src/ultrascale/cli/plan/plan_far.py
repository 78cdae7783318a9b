"""`ultrascale plan far`: one training run on distant data centres."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.description.problems import Problem, SpecError, expect_none
from ultrascale.description.units import UnitError, parse_tokens
from ultrascale.plan.view.far_apart import FarPlan, far_apart


@dataclass(frozen=True)
class FarOptions:
    """Predict the cost of distance for training on several data centres, and the effect of reducing gradients less often.

    For example:

        ultrascale plan far --parameters 72T --kilometres 4800 --line-gbits 400 --step-seconds 60
    """

    parameters: str
    """Parameters of the model, such as 405B."""
    kilometres: float
    """Distance from one site to the next; without --uplink the sites form a ring."""
    line_gbits: float
    """Bandwidth of the line between two sites, in Gbit/s per direction."""
    step_seconds: float
    """Seconds of a step without the reduction between sites."""
    sites: int = 2
    """Number of data centres."""
    bits: float = 16
    """Bits per parameter sent."""
    every: int = 1
    """Steps between two reductions (an outer step every H steps)."""
    overlap: bool = False
    """Overlap the reduction with the next steps."""
    switching_ms: float = 0.0
    """Latency of network equipment per hop, in milliseconds."""
    uplink: bool = False
    """Each site has one line to a network that reaches all others, as for the trainer's islands; else a ring."""
    json: bool = False
    """Print one JSON object."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0, or raises SpecError with every invalid value."""
    options = parse(FarOptions, "plan far", arguments)
    plan = _plan(options)
    if options.json:
        print_json(plan.to_json(), "plan-far", indent=2)
        return 0

    from ultrascale.plan.view.far_view import show

    show(plan, console_for_people())
    return 0


def _plan(options: FarOptions) -> FarPlan:
    """The requested plan. Raises SpecError with every invalid value."""
    problems: list[Problem] = []
    try:
        parameters = parse_tokens(options.parameters)
    except UnitError as error:
        problems.append(Problem("parameters", str(error).replace("tokens", "parameters"), "Write 405B or 72T."))
        parameters = 10**9  # so that the other numbers are still checked
    try:
        plan = far_apart(
            parameters, distance_kilometres=options.kilometres, line_bits_per_second=options.line_gbits * 1e9,
            step_seconds=options.step_seconds, num_sites=options.sites, bits_per_parameter=options.bits,
            outer_every=options.every, overlap=options.overlap, switching_seconds=options.switching_ms / 1e3,
            uplink=options.uplink,
        )  # fmt: skip
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None
    expect_none(problems)
    return plan
