"""Cost of a training run: energy and money.

energy   each accelerator's share of its machine's maximum power; cooling of the building excluded
money    on-demand list price of one accelerator-hour; contracts cost less
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.catalogue.cluster import Cluster

SECONDS_PER_HOUR = 3600


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
        energy = "" if self.kilowatt_hours is None else f", {_energy(self.kilowatt_hours)}"
        return energy + ("" if self.dollars is None else f", {_dollars(self.dollars)} at list price")


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


def _energy(kilowatt_hours: float) -> str:
    for size, unit in ((1e6, "GWh"), (1e3, "MWh")):
        if kilowatt_hours >= size:
            return f"{kilowatt_hours / size:.3g} {unit}"
    return f"{kilowatt_hours:.3g} kWh"


def _dollars(amount: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"${amount / size:.3g}{unit}"
    return f"${amount:.3g}"
