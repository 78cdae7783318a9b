"""Makes collections of garbage rare when imported: the first module that a fork server of ranks loads, before torch."""

from ultrascale.garbage import collect_rarely

collect_rarely()
