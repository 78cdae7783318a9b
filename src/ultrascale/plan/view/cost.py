"""Cost of a training besides time: energy and money.

energy   each accelerator's share of the most power that its machine draws; no cooling of the building
money    list price on demand of one accelerator for an hour; contracts cost less
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.catalogue.cluster import Cluster

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Cost:
    """Cost of so many seconds on a cluster."""

    seconds: float
    gpu_hours: float
    kilowatt_hours: float | None
    """None where nobody says what the machine or the accelerator draws."""
    dollars: float | None
    """None where nobody lists a price."""

    @property
    def words(self) -> str:
        """`, 1.2 GWh, $3.4M at list price`."""
        energy = "" if self.kilowatt_hours is None else f", {_energy(self.kilowatt_hours)}"
        return energy + ("" if self.dollars is None else f", {_dollars(self.dollars)} at list price")


def cost(cluster: Cluster, seconds: float, *, num_gpus: int) -> Cost:
    """The cost of `num_gpus` accelerators of `cluster` for so long, all of them busy."""
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
