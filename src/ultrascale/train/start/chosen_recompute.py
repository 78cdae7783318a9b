"""recompute = "auto" at the start of a run: chosen once, stored in the run's folder, and read again when the run resumes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from ultrascale.catalogue.cluster import Cluster, Sourced
from ultrascale.description.run import Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.search.recompute_choice import with_recomputation
from ultrascale.train.folder.differences import differences, with_defaults
from ultrascale.train.folder.run_folder import RunFolder

FILE = "recompute.json"


def choose_recomputation(run: Run, ranks: Ranks, folder: RunFolder, cluster: Cluster, capacity_bytes: int) -> Run:
    """`run` with the recomputation of each block resolved; unchanged unless its recompute is "auto". Collective.

    A stored choice for the same model, batch and layout is reused. `capacity_bytes`: memory of this rank's device; the smallest
    of all ranks decides. Raises SpecError as `with_recomputation`.
    """
    if run.layout.recompute != "auto":
        return run
    question = _question(run)
    before = folder.read_json(FILE) if ranks.is_first else None
    gathered = ranks.gather_json([capacity_bytes, before])
    known: dict[str, Any] | None = gathered[0][1]
    if known is not None and not differences(known.get("asked"), question, _question(with_defaults(run))):
        blocks = tuple(known["recompute_blocks"])
        return replace(run, layout=replace(run.layout, recompute="blocks", recompute_budget=None, recompute_blocks=blocks))
    memory = Sourced(min(capacity for capacity, _ in gathered), "the devices of this run, the smallest", "now")
    node = replace(cluster.node, accelerator=replace(cluster.accelerator, memory_bytes=memory))
    chosen = with_recomputation(run, replace(cluster, node=node))
    if ranks.is_first:
        folder.write_json(FILE, {"asked": question, "recompute_blocks": list(chosen.layout.recompute_blocks)})
    return chosen


def _question(run: Run) -> dict[str, Any]:
    """Facts that the choice depends on, as plain data."""
    parts = {"model": asdict(run.model), "layout": asdict(run.layout), "batch": asdict(run.batch), "compile": run.compile}
    return json.loads(json.dumps(parts | {"document_mask": run.data.document_mask}))
