"""Many cases on one set of processes, which start once and are started again only if one of them fails.

Rank 0 writes each verdict down as it is known: what was proven before a failure stays proven, and the case that failed is done
once more alone, since the other ranks may have been ahead of rank 0 when one of them failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from ultrascale.check.compare import Verdict
from ultrascale.launch.forked import RankFailed, run_forked
from ultrascale.launch.scratch import scratch_folder
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.torch_private import load_compiler

TIMEOUT_SECONDS = 300
"""A collective of a proof that takes longer will never end."""


@dataclass
class Pool:
    """`world` processes that prove case after case."""

    world: int
    prove_one: Callable[[Any, Ranks], Verdict | None]
    on_verdict: Callable[[Verdict], None] | None
    go_on: bool
    """After a failure, with the next case."""
    tolerance: float

    def prove(self, todo: Sequence[Any]) -> list[Verdict]:
        """The verdict of each case. Raises RankFailed if a rank does and the pool does not go on."""
        done: list[Verdict] = []
        alone = False
        while len(done) < len(todo):
            rest = todo[len(done) : len(done) + 1] if alone else todo[len(done) :]
            found, failure = self._start(rest)
            done += found
            if failure is None:
                alone = False
            elif not self.go_on:
                raise RankFailed(f"{rest[len(found)].name}: {failure}") from failure
            elif alone:
                done.append(self._failed(todo[len(done)], failure))
                alone = False
            else:
                alone = True
        return done

    def _start(self, todo: Sequence[Any]) -> tuple[list[Verdict], RankFailed | None]:
        """The verdicts on the first cases of `todo`, and what ended them early."""
        failure = None
        load_compiler()
        with scratch_folder("proof") as folder:
            told = folder / "verdicts"
            try:
                run_forked(self.world, self._rank_main, list(todo), told)
            except RankFailed as error:
                failure = error
            lines = told.read_text().splitlines() if told.exists() else []
        return [Verdict.from_json(json.loads(line)) for line in lines], failure

    def _rank_main(self, rendezvous: str, todo: list[Any], told: Path) -> None:
        torch.set_num_threads(1)
        layout = todo[0].run.layout
        with (
            process_group(layout, device="cpu", timeout_seconds=TIMEOUT_SECONDS, rendezvous=rendezvous) as ranks,
            # A group has connections, and threads that wake a hundred times a second; cases share those of few grids.
            patch.object(dist, "new_group", _made_once(dist.new_group)),
        ):
            for case in todo:
                verdict = self.prove_one(case, ranks)
                if verdict is not None:
                    with told.open("a") as out:
                        out.write(json.dumps(verdict.to_json()) + "\n")
                    if self.on_verdict is not None:
                        self.on_verdict(verdict)
            ranks.barrier()  # rank 0 compares long after the others are done; connections end together

    def _failed(self, case: Any, failure: RankFailed) -> Verdict:
        verdict = Verdict(case.name, self.tolerance, {}, (), failure=str(failure).strip())
        if self.on_verdict is not None:
            self.on_verdict(verdict)
        return verdict


def _made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`dist.new_group` as `Mesh` calls it, which remembers the groups of each list of ranks."""
    made: dict[tuple[int, ...], Any] = {}

    def call(ranks: list[int], **options: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = make(ranks, **options)
        return made[key]

    return call
