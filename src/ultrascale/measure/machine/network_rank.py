"""One rank of the network measurement, as the launcher starts it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ultrascale import console
from ultrascale.config.failures import explained, print_error
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.rank_environment import env_rank, env_world_size
from ultrascale.measure.machine.network import (
    MessageTooLargeError,
    WrongResultError,
    default_groups,
    measure_network,
    ranks_per_node,
    sizes_up_to,
)
from ultrascale.parallel.mesh import process_group


def main() -> int:
    """Run the measurement that the command-line arguments describe. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", help="the launcher's; nothing is trained")
    parser.add_argument("--rendezvous", default="env://")
    parser.add_argument("--failure", type=Path)
    for flag in ("--saved", "--launcher"):
        parser.add_argument(flag)
    parser.add_argument("--asked", required=True, help="JSON: out, groups, largest, kinds, machine, device")
    words = parser.parse_args()
    try:
        measure(json.loads(words.asked), rendezvous=words.rendezvous)
    except (SpecError, WrongResultError, MessageTooLargeError) as error:
        rank, (code, message) = env_rank(), explained(error, "measure network")
        if rank == 0 or not isinstance(error, SpecError):
            print_error(message, rank=rank)
        if words.failure is not None:
            words.failure.write_text(json.dumps({"rank": rank, "exit_code": code, "message": str(error)}))
        return code
    return 0


def measure(request: dict, *, rendezvous: str = "env://") -> None:
    """Measure together with all other ranks; rank 0 writes the file `request["out"]`."""
    world = env_world_size()
    with process_group(Layout(dp=world), device=request["device"], rendezvous=rendezvous) as ranks:
        groups = [(size, stride) for size, stride in request["groups"] or default_groups(world, ranks_per_node(ranks))]
        largest = request["largest"] or (2**30 if ranks.device.type == "cuda" else 2**24)
        results = measure_network(
            ranks, groups, sizes_up_to(largest), request["kinds"], machine=request["machine"],
            report=lambda line: console.print_line(line, "stderr"),
        )  # fmt: skip
        if ranks.is_first:
            Path(request["out"]).write_text(json.dumps(results, indent=1) + "\n")
        ranks.barrier()


if __name__ == "__main__":
    sys.exit(main())
