"""Cost of a training run: energy and money.

energy   each accelerator's share of its machine's maximum power; cooling of the building excluded
money    on-demand list price of one accelerator-hour; contracts cost less
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.catalogue.cluster import Cluster

SECONDS_PER_HOUR = 3600
ENERGY = {1e6: " GWh", 1e3: " MWh", 1.0: " kWh"}
MONEY = {1e9: "B", 1e6: "M", 1e3: "k", 1.0: ""}
"""Units by their size in kWh, and in dollars."""


@dataclass(frozen=True)
class Cost:
    """Cost of a number of seconds on a cluster."""

    seconds: float
    gpu_hours: float
    kilowatt_hours: float | None
    """None if the power of machine and accelerator is unknown."""
    dollars: float | None
    """None if no price is listed."""

    @property
    def words(self) -> str:
        """`, 1.2 GWh, $3.4M at list price`."""
        energy = "" if self.kilowatt_hours is None else f", {_in_units(self.kilowatt_hours, ENERGY)}"
        return energy + ("" if self.dollars is None else f", ${_in_units(self.dollars, MONEY)} at list price")


def cost(cluster: Cluster, seconds: float, *, num_gpus: int) -> Cost:
    """Cost of `num_gpus` accelerators of `cluster` for this many seconds, all busy."""
    accelerator, hours = cluster.accelerator, num_gpus * seconds / SECONDS_PER_HOUR
    watts, price = cluster.node.watts_per_accelerator, accelerator.dollars_per_hour
    return Cost(
        seconds,
        hours,
        None if watts is None else watts * hours / 1e3,
        None if price is None else price.value * hours,
    )


def _in_units(amount: float, units: dict[float, str]) -> str:
    """`amount` in the largest of `units` that it reaches, which are in descending order, or else in the last."""
    size = next((size for size in units if amount >= size), min(units))
    return f"{amount / size:.3g}{units[size]}"
