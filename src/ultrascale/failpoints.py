"""Places where a test may kill this process: `ULTRASCALE_FAILPOINT=name:rank:hit` sends SIGKILL to rank `rank` (as torchrun
counts them) the `hit`-th time (from one) that it passes the point `name`. Without the variable a point costs a look-up."""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "ULTRASCALE_FAILPOINT"
_hits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here if the environment says so. Raises ValueError for a malformed variable."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    try:
        wanted_name, rank, hit = text.rsplit(":", 2)
        wanted_rank, wanted_hit = int(rank), int(hit)
    except ValueError:
        raise ValueError(f"{VARIABLE}={text!r}: expected name:rank:hit, as in publish.renamed:0:1") from None
    if name == wanted_name and wanted_rank == int(os.environ.get("RANK", "0")):
        _hits[name] += 1
        if _hits[name] == wanted_hit:
            os.kill(os.getpid(), signal.SIGKILL)
