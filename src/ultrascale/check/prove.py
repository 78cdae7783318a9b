"""The proof: N processes run the trainer, one runs the reference, and every number is compared.

Both compute in float64, where honest layouts agree to about 1e-15 and every classic bug stands out; in bf16 the same bugs hide
below the rounding. What is proven is the run's own model (or, if that is too large for a laptop, the same kind of model made
small), micro-batch, recomputation and optimizer, over several steps, with documents of very uneven length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ultrascale.check.compare import Verdict, judge
from ultrascale.check.documents import RandomDocuments
from ultrascale.check.faults import planted
from ultrascale.check.gathered import gather_parts
from ultrascale.check.reference import Reference, StepFacts
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.run import Batch, Log, Run
from ultrascale.spec.weights import num_parameters
from ultrascale.train.optimizer import MOMENTS
from ultrascale.train.trainer import Trainer

TOLERANCE = 1e-11
LARGEST_PARAMETERS = 3_000_000
"""Models above this are made small before they are proven."""
MOST_PROCESSES = 8
"""Runs of more processes than this are proven with fewer, unless somebody says how many."""


@dataclass(frozen=True)
class Case:
    """One thing to prove: a run (in float64, at a size a laptop can do), and the fault planted in it, if any."""

    name: str
    run: Run
    fault: str | None = None


def cases(run: Run, *, own_layout: bool = False) -> Iterator[Case]:
    """Every ZeRO stage over as many processes as `run` has, whole and in groups, the embedding both tied and untied, with and
    without accumulation. With `own_layout` only the run's own stage, groups and embedding."""
    base = provable(run)
    own = base.model.tie_word_embeddings
    for tied in (own,) if own_layout else (own, not own):
        model = replace(base.model, tie_word_embeddings=tied)
        for layout in (base.layout,) if own_layout else _every_layout(base.layout):
            for accumulation in (1, 3):
                sequences = accumulation * layout.dp * layout.micro_batch_size
                case = replace(base, model=model, layout=layout, batch=replace(base.batch, sequences_per_batch=sequences))
                yield Case(_case_name(layout, accumulation, tied=tied), case)


def usual_processes(run: Run) -> int:
    """How many processes prove `run` unless somebody says: its own number, but 2 for one process, which would prove no
    communication, and 4 (two groups of two) for more than a laptop can start."""
    if run.layout.dp > MOST_PROCESSES:
        return 4
    return max(2, run.layout.dp)


def with_processes(run: Run, processes: int) -> Run:
    """`run` cut over another number of processes. Several groups with a copy of the state each stay several where that can be,
    as large as they were at most. The batch is left to `provable`."""
    own = run.layout
    if own.dp_shard is None or own.dp_replicate == 1:
        return replace(run, layout=replace(own, dp=processes, dp_shard=None))
    sizes = [size for size in range(1, own.dp_shard + 1) if processes % size == 0 and size < processes]
    return replace(run, layout=replace(own, dp=processes, dp_shard=max(sizes, default=1)))


def provable(run: Run) -> Run:
    """`run` in float64 and small enough: the same kind of model, layout and optimizer."""
    model = run.model if num_parameters(run.model) <= LARGEST_PARAMETERS else made_small(run.model)
    length = min(run.batch.sequence_length, 64, model.max_position_embeddings)
    layout = replace(run.layout, precision="fp64", reduce_dtype=None, micro_batch_size=min(2, run.layout.micro_batch_size))
    return replace(
        run, model=model, layout=layout, device="cpu", compile=False, log=Log(memory_steps=0),
        batch=Batch(sequence_length=length, sequences_per_batch=layout.dp * layout.micro_batch_size),
    )  # fmt: skip


def made_small(model: Model) -> Model:
    """The same kind of model (heads per group, norms, biases, positions, windows, tying) with odd small sizes, so that shards
    are uneven."""
    groups = 2 if model.num_key_value_heads > 1 else 1
    heads = groups * min(3, model.num_attention_heads // model.num_key_value_heads)
    window = None if model.sliding_window is None else min(model.sliding_window, 24)
    bare = None if model.no_rope_layer_interval is None else min(model.no_rope_layer_interval, 2)
    return replace(
        model, vocab_size=211, hidden_size=8 * heads, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=8, sliding_window=window, no_rope_layer_interval=bare,
        max_window_layers=min(1, model.max_window_layers), max_position_embeddings=min(128, model.max_position_embeddings),
    )  # fmt: skip


def prove(case: Case, *, steps: int = 3) -> Verdict:
    """Run `case` on its processes and on one, and compare. Raises RankFailed if a rank does."""
    return prove_all([case], steps=steps)[0]


def prove_all(todo: list[Case], *, steps: int = 3) -> list[Verdict]:
    """Prove cases of one number of processes together, so that these are started once."""
    worlds = {case.run.layout.dp for case in todo}
    if len(worlds) != 1:
        raise ValueError(f"cases proven together need one number of processes, got {sorted(worlds)}")
    rows = run_forked(worlds.pop(), _rank_main, todo, steps)[0]
    return [Verdict.from_json(row) for row in rows]


def _rank_main(rendezvous: str, todo: list[Case], steps: int) -> list[dict[str, Any]] | None:
    torch.set_num_threads(1)
    with process_group(todo[0].run.layout, device="cpu", timeout_seconds=120, rendezvous=rendezvous) as ranks:
        verdicts = [_prove_on_rank(case, ranks, steps) for case in todo]
        ranks.barrier()  # rank 0 compares long after the others are done; connections end together
    return [verdict.to_json() for verdict in verdicts if verdict is not None]


def _prove_on_rank(case: Case, ranks: Ranks, steps: int) -> Verdict | None:
    """The verdict on rank 0; other ranks only take part."""
    run = case.run
    loader = RandomDocuments(
        sequence_length=run.batch.sequence_length, vocab_size=run.model.vocab_size, seed=run.seed,
        document_mask=run.data.document_mask,
    )  # fmt: skip
    trainer = Trainer(run, ranks, loader)
    with planted(case.fault, trainer):
        found = [_trainer_step(trainer) for _ in range(steps)]
    if not ranks.is_first:
        return None
    reference = Reference(run, loader)
    return judge(case.name, found, [reference.train_step() for _ in range(steps)], TOLERANCE)


def _trainer_step(trainer: Trainer) -> StepFacts:
    result = trainer.compute_gradients()
    share, state = trainer.share, trainer.optimizer.state
    gradients = gather_parts(share, lambda p: p.grad if p.grad is not None else torch.zeros_like(p))
    trainer.update(result.norm)
    weights = gather_parts(share, lambda p: p.detach())
    moments = {moment: gather_parts(share, lambda p, moment=moment: state[p][moment]) for moment in MOMENTS}
    differing = {f"gradient of {name}" for name in gradients.differing} | {f"weight {name}" for name in weights.differing}
    named = {f"{moment}.{name}": value for moment, found in moments.items() for name, value in found.whole.items()}
    return StepFacts(result.loss, result.norm, gradients.whole, weights.whole, named, tuple(sorted(differing)))


def _case_name(layout: Layout, accumulation: int, *, tied: bool) -> str:
    shard = f" shard {layout.shard_size}" if layout.zero_stage and layout.shard_size < layout.dp else ""
    micro_batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
    return f"dp {layout.dp} zero {layout.zero_stage}{shard} x {micro_batches}, {'tied' if tied else 'untied'}"


def _every_layout(own: Layout) -> list[Layout]:
    """Every ZeRO stage, over all ranks and over groups of half of them and of the layout's own size."""
    groups = {own.dp // 2} if own.dp >= 4 and own.dp % 2 == 0 else set()
    if own.zero_stage and own.shard_size < own.dp:
        groups.add(own.shard_size)
    whole = [replace(own, zero_stage=stage, dp_shard=None) for stage in (0, 1, 2, 3)]
    return whole + [replace(own, zero_stage=stage, dp_shard=size) for size in sorted(groups) for stage in (1, 2, 3)]
