"""Process groups of a layout: what every rank makes, in one order, so that NCCL has every communicator when it is used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from ranks import RankError, run_ranks
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.prove import Case, prove_all
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Optimizer, Run
from ultrascale.gloo_threads import gloo_threads_as_batch
from ultrascale.parallel.groups import borders_of, copies_of, groups_of
from ultrascale.parallel.mesh import Mesh, Ranks
from ultrascale.train.trainer import Trainer

LENGTH = 12
TIED = replace(FAMILIES["llama"], tie_word_embeddings=True, num_hidden_layers=3)
MIXTRAL = EXPERT_FAMILIES["mixtral"]


def ranks_of(layout: Layout, rank: int) -> Ranks:
    return Ranks(rank, layout.world_size, torch.device("cpu"), dist.group.WORLD)


def groups_made(monkeypatch: pytest.MonkeyPatch, model: Model, layout: Layout, rank: int) -> list[list[int]]:
    """Ranks of each group that `rank` of `layout` makes, without any other process."""
    made: list[list[int]] = []
    original = dist.new_group

    def noting(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return original(ranks, **options)

    monkeypatch.setattr(dist, "new_group", noting)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        Mesh(model, layout, ranks_of(layout, rank))
    finally:
        dist.destroy_process_group()
        monkeypatch.undo()
    return made


def test_of_1024_ranks_each_makes_a_handful_of_groups_and_only_its_own(monkeypatch):
    layout = Layout(dp=16, tp=8, pp=8, ep=8, zero_stage=1)
    model = replace(MIXTRAL, num_experts=8)
    for rank in (0, 517, 1023):
        made = groups_made(monkeypatch, model, layout, rank)
        assert len(made) <= 8 and all(rank in ranks for ranks in made)
        assert sum(len(ranks) == 1 for ranks in made) <= 1
    on_cuda = {(axis.queue, axis.size, axis.stride if axis.size > 1 else 1) for axis in groups_of(model, layout)}
    assert len(on_cuda) <= 8


def test_every_rank_makes_as_many_groups_whatever_it_holds(monkeypatch):
    """Torch names a group by its ranks and by how many the process has: one more on some ranks, and none would meet again."""
    layout = Layout(dp=2, tp=2, pp=3, ep=2, schedule="1f1b", zero_stage=1)
    model = replace(MIXTRAL, tie_word_embeddings=True)
    counts = {len(groups_made(monkeypatch, model, layout, rank)) for rank in range(layout.world_size)}
    assert len(counts) == 1


def test_every_rank_is_in_one_group_of_every_axis():
    layout = Layout(dp=4, dp_shard=2, tp=2, pp=2, cp=2, ep=4, expert_tp=2, zero_stage=2)
    for axis in groups_of(replace(MIXTRAL, router_aux_loss_scope="global"), layout):
        rows = {tuple(axis.ranks_with(rank)) for rank in range(layout.world_size)}
        assert sorted(rank for row in rows for rank in row) == list(range(layout.world_size))


def ranks_of_data_grid(rank: int, layout: Layout) -> list[list[int]]:
    grid = Mesh(TIED, layout, ranks_of(layout, rank)).data
    assert grid is not None
    return [dist.get_process_group_ranks(grid[name].get_group()) for name in ("dp_replicate", "dp_shard")]


def test_neighbours_cut_a_copy_of_the_state_and_copies_lie_apart():
    """The other way round it computes the same, and gathers over the slow links."""
    found = run_ranks(4, ranks_of_data_grid, Layout(dp=4, dp_shard=2, zero_stage=2))
    assert found == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def test_copies_are_those_of_any_stage_and_known_to_all_ranks():
    wide = replace(FAMILIES["llama"], num_attention_heads=4, num_key_value_heads=2)
    assert copies_of(wide, Layout(tp=4)) == [2, 4]  # heads of keys, norms
    assert copies_of(wide, Layout(tp=4, sequence_parallel=False)) == [2]
    assert copies_of(EXPERT_FAMILIES["gpt-oss"], Layout(tp=2, expert_tp=4, dp=2)) == [2, 4]
    assert copies_of(wide, Layout(dp=4)) == []


def test_borders_are_those_of_the_schedule_a_wave_has_none_at_its_turn():
    assert set(borders_of(Layout(pp=4))) == {(0, 1), (1, 2), (2, 3)}
    assert set(borders_of(Layout(pp=4, schedule="interleaved", virtual_stages=2))) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert set(borders_of(Layout(pp=4, schedule="dualpipe"))) == {(0, 1), (1, 2), (2, 3)}
    assert set(borders_of(Layout(pp=3, schedule="zb-v", virtual_stages=2))) == {(0, 1), (1, 2)}


class NcclRules:
    """Watches a rank's calls as NCCL would take them: the first use of a communicator blocks until all its ranks are there."""

    def __init__(self, store: PrefixStore, *, patience_seconds: float = 120.0):
        self.store, self.may_begin, self.patience_seconds = store, True, patience_seconds
        self.made: set[tuple[int, ...]] = set()

    def use(self, group: dist.ProcessGroup | None, peer: int | None = None) -> None:
        """Of a collective or a batch: the group's communicator; of a single message: that of two ranks."""
        group = dist.group.WORLD if group is None else group
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        pair = ranks if peer is None else sorted((dist.get_rank(), ranks[peer]))
        key = (hash_of(group.group_name), *pair, -1 if peer is None else -2)
        if key in self.made or len(pair) == 1:
            return
        assert self.may_begin, f"rank {dist.get_rank()}: ranks {pair} of {group.group_desc} meet for the first time in a step"
        self.made.add(key)
        name = "/".join(map(str, key))
        self.store.set(f"{name}/{dist.get_rank()}", "here")
        end = time.monotonic() + self.patience_seconds
        while not self.store.check([f"{name}/{rank}" for rank in pair]):
            assert time.monotonic() < end, f"rank {dist.get_rank()}: not all of {pair} come to {group.group_desc}"
            time.sleep(0.002)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-6:], "little")


@contextmanager
def nccl_rules(rules: NcclRules) -> Iterator[None]:
    undo: list[Callable[[], None]] = []
    batching: list[bool] = []

    def wrap(name: str, note: Callable[..., None]) -> None:
        original = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if batching:
                return original(*arguments, **options)
            note(*arguments, **options)
            batching.extend([True] * (name == "batch_isend_irecv"))
            try:
                return original(*arguments, **options)
            finally:
                batching.clear()

        for module in (dist, distributed_c10d):
            setattr(module, name, call)
            undo.append(partial(setattr, module, name, original))

    def single(*arguments: Any, group: Any = None, tag: int = 0, **peers: int) -> None:
        """On CUDA the first four tags stand for collectives (`parallel.data.collectives`), but in a pipeline for messages."""
        in_pipeline = group is not None and group.group_desc.startswith("pp")
        rules.use(group, None if tag in range(1, 5) and not in_pipeline else peers.get("group_dst", peers.get("group_src")))

    for name in ("all_reduce", "all_to_all_single", "all_gather", "reduce_scatter_tensor", "all_gather_into_tensor"):
        wrap(name, lambda *arguments, group=None, **options: rules.use(group))
    wrap("isend", single)
    wrap("irecv", single)
    wrap("batch_isend_irecv", lambda operations: rules.use(operations[0].group))
    try:
        yield
    finally:
        for one in undo:
            one()


def step_by_nccls_rules(rank: int, model: Model, layout: Layout, warms_up: bool) -> float:
    """The loss of a step in which no communicator may be new."""
    rules = NcclRules(PrefixStore("rules", distributed_c10d._get_default_store()))
    make = Mesh._make_groups

    def make_as_on_cuda(mesh: Mesh, timeout: Any) -> None:
        make(mesh, timeout)
        if warms_up:
            mesh.warm_up()

    setattr(Mesh, "_make_groups", make_as_on_cuda)  # noqa: B010
    batch = Batch(sequence_length=LENGTH, sequences_per_batch=4 * layout.dp)
    run = Run(model, steps=2, layout=layout, batch=batch, optimizer=Optimizer(warmup_steps=1))
    loader = RandomDocuments(sequence_length=LENGTH, vocab_size=model.vocab_size, seed=0, document_mask=True)
    host = dist.new_group(backend="gloo")
    assert isinstance(host, dist.ProcessGroup)
    with nccl_rules(rules):
        trainer = Trainer(run, Ranks(rank, layout.world_size, torch.device("cpu"), host), loader)
        rules.may_begin = False
        rules.made.update({(hash_of(host.group_name), *range(layout.world_size), -1)})
        return trainer.train_step().gradients.loss


LAYOUTS = {
    "three stages, ends tied, tp": (TIED, Layout(pp=3, tp=2, precision="fp64")),
    "interleaved": (replace(TIED, num_hidden_layers=4), Layout(pp=2, virtual_stages=2, schedule="interleaved")),
    "a wave, backward passes in two": (replace(TIED, num_hidden_layers=6), Layout(pp=3, virtual_stages=2, schedule="zb-v")),
    "two copies of every stage": (replace(TIED, num_hidden_layers=4), Layout(pp=4, schedule="dualpipe")),
    "by torch's runtime": (replace(TIED, tie_word_embeddings=False), Layout(pp=2, tp=2, pipeline_runtime="torch")),
    "interleaved by torch's runtime": (
        replace(TIED, num_hidden_layers=6),
        Layout(pp=3, virtual_stages=2, schedule="interleaved", pipeline_runtime="torch"),
    ),
    "a stage without blocks, tp": (TIED, Layout(pp=2, tp=2, layers_per_stage=(0, 3))),
    "a stage without blocks, cp": (TIED, Layout(pp=2, cp=2, layers_per_stage=(0, 3))),
    "experts": (MIXTRAL, Layout(dp=2, tp=2, ep=2, expert_tp=2, zero_stage=2)),
    "loads of all ranks": (replace(MIXTRAL, router_aux_loss_scope="global"), Layout(dp=2, cp=2, ep=2, pp=1)),
}


@pytest.mark.parametrize(("model", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_all_communicators_are_made_before_the_first_step_and_nobody_waits_for_ever(model, layout):
    losses = run_ranks(layout.world_size, step_by_nccls_rules, model, layout, True)
    assert max(losses) > 0


def test_without_the_first_messages_a_step_would_begin_communicators():
    with pytest.raises(RankError, match="meet for the first time in a step"):
        run_ranks(2, step_by_nccls_rules, *LAYOUTS["interleaved"], False)


def test_the_rules_see_ranks_that_first_receive_from_one_another():
    with pytest.raises(RankError, match="not all of"):
        run_ranks(2, receive_from_one_another)


def receive_from_one_another(rank: int) -> None:
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    rules = NcclRules(PrefixStore("rules", distributed_c10d._get_default_store()), patience_seconds=3.0)
    own = first if rank else second
    assert isinstance(own, dist.ProcessGroup)
    with nccl_rules(rules):
        dist.irecv(torch.zeros(1), group=own, group_src=1 - rank)


FILES = {
    "two pairs of mirrors": "0F0,1F0,1B0,0B0 0F1,1F1,1B1,0B1 2F0,3F0,3B0,2B0 2F1,3F1,3B1,2B1",
    "a first stage alone": "0F0,0F1,0B0,0B1 1F0,2F0,2B0,1B0 1F1,2F1,2B1,1B1",
    "a last stage alone": "0F0,1F0,1B0,0B0 0F1,1F1,1B1,0B1 2F0,2B0,2F1,2B1",
}


@pytest.mark.parametrize("rows", FILES.values(), ids=FILES)
def test_a_file_puts_copies_on_any_ranks_and_an_embedding_at_both_ends_is_summed_over_all_that_hold_it(tmp_path, rows):
    path = tmp_path / "mine.csv"
    path.write_text(rows.replace(" ", "\n"))
    case = proof(replace(TIED, num_hidden_layers=4), pp=len(rows.split()), schedule=str(path), micro_batch_size=2)
    assert run_ranks(case.run.layout.world_size, step_by_nccls_rules, case.run.model, case.run.layout, True)
    assert [one.beyond for one in prove_all([case], steps=2) if not one.holds] == []


def proof(model: Model, **cut: Any) -> Case:
    layout = Layout(precision="fp64", **cut)
    batch = Batch(sequence_length=LENGTH, sequences_per_batch=4 * layout.dp)
    return Case(str(cut), Run(model=model, steps=9, layout=layout, batch=batch, optimizer=Optimizer(warmup_steps=1)))


def test_stages_without_blocks_under_tp_and_cp_give_the_gradients_of_one_process():
    wide = replace(TIED, num_attention_heads=4, num_key_value_heads=1)
    cases = [proof(wide, pp=2, layers_per_stage=(0, 3), **axis) for axis in ({"tp": 2}, {"cp": 2})]
    cases += [proof(wide, pp=2, layers_per_stage=layers, tp=2) for layers in ((1, 2), (3, 0))]
    assert [(one.case, one.beyond) for one in prove_all(cases, steps=2) if not one.holds] == []


def policies_of_threads(rank: int, layout: Layout) -> tuple[int, list[int]]:
    Mesh(TIED, layout, ranks_of(layout, rank))
    policies = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            policies.append(os.sched_getscheduler(int(thread)))
    return os.sched_getscheduler(0), policies


def can_be_batch() -> bool:
    """True on Linux, where nothing forbids it and this process is not scheduled otherwise."""
    with gloo_threads_as_batch():
        return hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH


@pytest.mark.skipif(not can_be_batch(), reason="scheduling as batch work is Linux's, and may be forbidden")
def test_threads_of_gloo_do_not_preempt_what_computes():
    for own, policies in run_ranks(4, policies_of_threads, Layout(dp=2, tp=2)):
        assert own == os.SCHED_OTHER
        assert policies.count(os.SCHED_BATCH) >= 3 * 2  # of all ranks, of data and of tp: an event loop, and who waits for it
        assert policies.count(os.SCHED_OTHER) <= 2  # this one, and one that looked up a name


def test_where_scheduling_is_forbidden_groups_are_made_all_the_same(monkeypatch):
    def refuse(*arguments: object) -> int:
        raise PermissionError

    for call in ("sched_getscheduler", "sched_setscheduler"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with gloo_threads_as_batch():
                pass


@pytest.mark.skipif(not can_be_batch(), reason="scheduling as batch work is Linux's, and may be forbidden")
def test_a_thread_has_its_policy_back_also_after_an_error_and_from_within():
    with pytest.raises(ZeroDivisionError), gloo_threads_as_batch():
        with gloo_threads_as_batch():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        raise ZeroDivisionError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
