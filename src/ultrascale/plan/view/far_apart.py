"""Data centres far apart: one step's all-reduce over a long line, and the savings of reducing every H steps instead.

    site 0 ==line== site 1 ==line== ... ==line== site N-1 ==line== (back to 0)       a bidirectional ring of N sites

Gradients are reduced inside each site first (fast), then over the ring: each half of the buffer goes round one way. In either
direction a line carries 2 (N-1)/N of half of the buffer, and 2 (N-1) messages wait for light to cross, one after another:

    seconds = 2 (N-1)/N x bytes / ways / line rate  +  2 (N-1) x (distance / 200,000 km/s + switching)

with two ways round, or one between two sites, which are neighbours only once.

Islands of the trainer (`islands.link`) each have one line to a network that reaches all others (`uplink`): every piece is sent
directly to its receiver, in two rounds, and gloo sends a message once the receiver has reported that it is ready:

    seconds = 2 (N-1)/N x bytes / line rate  +  4 x (distance / 200,000 km/s + switching)

Distance costs little, bytes cost much. The remedy is fewer bytes: an outer step every H inner steps sends the difference of the
weights instead of every gradient (DiLoCo, Douillard et al. 2023, H = 50 to 500), in fewer bits (Streaming DiLoCo, 2025: 4), one
fragment at a time beside the computation. That is a different algorithm: its effect on the loss is not predicted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ultrascale.description.problems import Problem, expect_none

FIBRE_METRES_PER_SECOND = 2e8
"""Speed of light in fibre: 299,792 km/s over a refractive index of 1.47, rounded as usual."""
BITS_PER_BYTE = 8
UPLINK_HOPS = 4
"""Two rounds of messages, each there and back: gloo's receiver reports that it is ready, and then the message is sent."""
LIMITS: dict[str, tuple[str, float, float, float, str]] = {
    "num_parameters": ("parameters", 1e3, 1e16, 1, ""), "distance_kilometres": ("kilometres", 0, 1e6, 1, " km"),
    "line_bits_per_second": ("line-gbits", 1e6, 1e18, 1e9, " Gbit/s"), "step_seconds": ("step-seconds", 1e-3, 1e7, 1, " s"),
    "num_sites": ("sites", 2, 100_000, 1, ""), "bits_per_parameter": ("bits", 0.01, 64, 1, ""),
    "outer_every": ("every", 1, 1_000_000, 1, ""), "switching_seconds": ("switching-ms", 0, 10, 1e-3, " ms"),
}  # fmt: skip
"""Flag of each number, its lowest and highest value, and the unit of messages. The limits are far from anything built; a
million kilometres is beyond the moon."""


@dataclass(frozen=True)
class FarPlan:
    """Cost of training over a ring of far sites."""

    num_parameters: float
    bits_per_parameter: float
    num_sites: int
    distance_metres: float
    """Length of one line, from one site to the next."""
    line_bytes_per_second: float
    """Rate of one line in one direction."""
    switching_seconds: float
    """Latency per message, in addition to the propagation of light: routers, transport protocol."""
    step_seconds: float
    """Seconds of one step inside a site, without the traffic between sites."""
    outer_every: int
    """H: inner steps between two reductions over the line; 1 reduces every step's gradients."""
    overlap: bool
    """True if the reduction runs beside the next H steps, which then use the sum of H steps ago; False: steps wait for it."""
    uplink: bool = False
    """True if each site has one line to a network that reaches all others, as the trainer's islands; False: a ring."""

    @property
    def num_bytes(self) -> float:
        """Bytes of the reduced buffer."""
        return self.num_parameters * self.bits_per_parameter / BITS_PER_BYTE

    @property
    def flight_seconds(self) -> float:
        """Seconds of light over one line, one way."""
        return self.distance_metres / FIBRE_METRES_PER_SECOND

    @property
    def num_messages(self) -> int:
        """Consecutive hops: those of the reduce-scatter and of the all-gather."""
        return UPLINK_HOPS if self.uplink else 2 * (self.num_sites - 1)

    @property
    def num_ways(self) -> int:
        """Directions round the ring that are used at once."""
        return 2 if self.num_sites > 2 and not self.uplink else 1

    @property
    def bytes_per_line(self) -> float:
        """Bytes that a line carries in one direction: 2 (N-1)/N of the buffer, divided by the directions round the ring."""
        return 2 * (self.num_sites - 1) / self.num_sites * self.num_bytes / self.num_ways

    @property
    def latency_seconds(self) -> float:
        return self.num_messages * (self.flight_seconds + self.switching_seconds)

    @property
    def transfer_seconds(self) -> float:
        """Seconds of the bytes that a line carries in one direction."""
        return self.bytes_per_line / self.line_bytes_per_second

    @property
    def all_reduce_seconds(self) -> float:
        return self.latency_seconds + self.transfer_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a reduction that an outer step waits for; with overlap, the excess over the H inner steps."""
        hidden = self.outer_every * self.step_seconds if self.overlap else 0.0
        return max(0.0, self.all_reduce_seconds - hidden)

    @property
    def seconds_per_step(self) -> float:
        """Mean time per step, with the traffic between sites spread over the steps between two reductions."""
        return self.step_seconds + self.exposed_seconds / self.outer_every

    @property
    def utilisation(self) -> float:
        """Fraction of the time spent computing."""
        return self.step_seconds / self.seconds_per_step

    @property
    def bytes_in_flight(self) -> float:
        """Bandwidth-delay product of a line over the round trip of light, in bytes: the window that a transport protocol must
        allow."""
        return self.line_bytes_per_second * 2 * self.flight_seconds

    def every(self, outer_every: int) -> FarPlan:
        """This plan with another H."""
        return replace(self, outer_every=outer_every)

    def outer_every_for(self, utilisation: float) -> int:
        """Smallest H at which this fraction of the time is spent computing."""
        if self.overlap:
            # all_reduce <= H step + H step (1/u - 1) = H step / u
            return max(1, _ceil(self.all_reduce_seconds * utilisation / self.step_seconds))
        return max(1, _ceil(self.all_reduce_seconds * utilisation / (self.step_seconds * (1 - utilisation))))

    def line_bytes_per_second_for(self, utilisation: float) -> float:
        """Bandwidth of a line that this H needs for that fraction; infinite if light alone takes longer."""
        allowed = self.outer_every * self.step_seconds * (1 / utilisation - (0 if self.overlap else 1)) - self.latency_seconds
        if allowed <= 0:
            return float("inf")
        return self.bytes_per_line / allowed

    def to_json(self) -> dict[str, Any]:
        """Fields and derived quantities, in bytes and seconds."""
        derived = (
            "num_bytes", "bytes_per_line", "flight_seconds", "num_messages", "latency_seconds", "transfer_seconds",
            "all_reduce_seconds",
            "exposed_seconds", "seconds_per_step", "utilisation", "bytes_in_flight",
        )  # fmt: skip
        return asdict(self) | {name: getattr(self, name) for name in derived}


def far_apart(
    num_parameters: float,
    *,
    distance_kilometres: float,
    line_bits_per_second: float,
    step_seconds: float,
    num_sites: int = 2,
    bits_per_parameter: float = 16,
    outer_every: int = 1,
    overlap: bool = False,
    switching_seconds: float = 0.0,
    uplink: bool = False,
) -> FarPlan:
    """Cost of training on `num_sites` sites in a ring whose neighbours are `distance_kilometres` apart; with `uplink`, on sites
    that far apart with one line each to a network that reaches all others.

    Raises SpecError that names every invalid number.
    """
    numbers = {
        "num_parameters": num_parameters, "distance_kilometres": distance_kilometres,
        "line_bits_per_second": line_bits_per_second, "step_seconds": step_seconds, "num_sites": num_sites,
        "bits_per_parameter": bits_per_parameter, "outer_every": outer_every, "switching_seconds": switching_seconds,
    }  # fmt: skip
    problems = [problem for key, value in numbers.items() for problem in _problems(key, value)]
    expect_none(problems)
    return FarPlan(
        num_parameters, bits_per_parameter, num_sites, distance_kilometres * 1e3, line_bits_per_second / BITS_PER_BYTE,
        switching_seconds, step_seconds, outer_every, overlap, uplink,
    )  # fmt: skip


def _problems(key: str, value: float) -> Iterator[Problem]:
    """Problem of a number outside its limits."""
    flag, low, high, unit, name = LIMITS[key]
    if math.isfinite(value) and low <= value <= high:
        return
    rule = f"must be from {low / unit:,.9g} to {high / unit:,.10g}{name}, is {value / unit:,.12g}"
    is_alone = key == "num_sites" and value < low
    yield Problem(flag, rule, "One site needs no far plan." if is_alone else "Give a number in this range.")


def _ceil(value: float) -> int:
    return -int(-value // 1)
