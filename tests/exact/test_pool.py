"""The processes that prove hundreds of cases do not gather up what each case leaves."""

from dataclasses import replace

import torch.distributed as dist
from layouts.every_layout import DENSE, run_of

from ultrascale.check.compare import Difference, Verdict
from ultrascale.check.prove import Case, Pool
from ultrascale.description.layout import Layout
from ultrascale.parallel.mesh import Mesh, Ranks

LAYOUT = Layout(dp=2, tp=2, precision="fp64")


def count_groups(case: Case, ranks: Ranks) -> Verdict | None:
    """A verdict whose number is that of the groups of this process, once `case` has made its own."""
    mesh = Mesh(case.run.model, case.run.layout, ranks)
    assert mesh.group("tp") is not None
    groups = float(len(dist.distributed_c10d._world.pg_map))
    return Verdict(case.name, 0.0, {"groups": Difference(1, "groups", "", groups)}, ()) if ranks.is_first else None


def test_cases_of_one_grid_share_its_groups():
    runs = [run_of(DENSE, replace(LAYOUT, zero_stage=stage)) for stage in (0, 1, 2, 3)]
    cases = [Case(str(number), run) for number, run in enumerate(runs)]
    verdicts = Pool(4, count_groups, None, go_on=False, tolerance=0.0).prove(cases)
    counts = [verdict.worst["groups"].error for verdict in verdicts]
    assert counts[0] >= 4 and len(set(counts)) == 1  # the world, the host's, tp, data
