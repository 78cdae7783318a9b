"""Collectives that are timed: every kind, in every shape of group, with a right result or none at all."""

from __future__ import annotations

import json
import os
import platform
import re
from typing import cast

import pytest
import torch
import torch.distributed as dist

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.cli.main import main
from ultrascale.cli.measure.measure_network import parse_groups, parse_size
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.launch.forked import run_forked
from ultrascale.measure.machine.network import (
    MessageTooLargeError,
    _call,
    _group_of_this_rank,
    default_groups,
    expect_groups,
    measure_network,
    network_bytes_per_second,
    planned_cluster,
    ranks_per_node,
    sizes_up_to,
)
from ultrascale.measure.machine.timed import Timed
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.laws.nccl import KINDS


def _measured(rendezvous, groups, sizes, kinds, machine=None, spoil=""):
    if spoil and os.environ["RANK"] == "1":
        broadcast = dist.broadcast

        def spoilt(tensor, *arguments, **options):
            broadcast(tensor, *arguments, **options)
            tensor[-1] += 1

        dist.broadcast = spoilt
    try:
        with process_group(Layout(dp=int(os.environ["WORLD_SIZE"])), device="cpu", rendezvous=rendezvous) as ranks:
            return measure_network(ranks, groups, sizes, kinds, machine=machine)
    except Exception as error:  # which rank is seen to fail first is chance
        return f"{type(error).__name__}: {error}"


def test_every_kind_is_timed_in_groups_side_by_side_and_across():
    told = run_forked(4, _measured, [(4, 1), (2, 2)], [1024, 4096], KINDS, "4xh100")
    assert told[0] == told[3]
    timed = [Timed(**one) for one in told[0]["timed"]]
    assert [(one.size, one.stride, one.kind, one.num_bytes) for one in timed] == [
        (size, stride, kind, num_bytes) for size, stride in ((4, 1), (2, 2)) for kind in KINDS for num_bytes in (1024, 4096)
    ]
    one = next(one for one in timed if (one.size, one.kind, one.num_bytes) == (4, "all_reduce", 4096))
    assert one.bus_bytes_per_second == pytest.approx(4096 * 2 * 3 / 4 / one.seconds)
    assert one.planned_seconds == collective_seconds(parse_cluster("4xh100"), "all_reduce", 4096, size=4, stride=1)


def test_a_wrong_result_is_an_error_and_no_time():
    told = run_forked(2, _measured, [(2, 1)], [1024], ["broadcast"], None, "yes")
    assert re.match(r"WrongResultError: rank 1: broadcast of 1,024 bytes over 2 ranks gave", told[1])
    assert isinstance(told[0], str)  # it was right there, and has lost the other


@pytest.mark.parametrize(
    ("world", "per_node", "groups"),
    [(8, 8, [(8, 1)]), (16, 8, [(16, 1), (8, 1), (2, 8)]), (4, 1, [(4, 1)]), (12, 8, [(12, 1)])],
)
def test_without_being_asked_all_ranks_those_of_a_node_and_one_of_each(world, per_node, groups):
    assert default_groups(world, per_node) == groups
    expect_groups(groups, world)


@pytest.mark.parametrize(
    ("world", "per_node", "gpu", "machine", "name"),
    [
        (16, 8, "h100-sxm", None, "16xh100-sxm"), (4, 4, "h100-sxm", None, "4xh100-sxm"), (8, 4, "gb200", None, "8xgb200"),
        (8, 4, "h100-sxm", None, None), (12, 12, "h100-sxm", None, None), (12, 4, "h100-sxm", None, None),  # no usual nodes
        (8, 8, None, None, None), (8, 4, "h100-sxm", "2xdgx-h100", "2xdgx-h100"),
    ],
)  # fmt: skip
def test_the_plan_is_for_the_machine_that_the_ranks_are_on_or_there_is_none(world, per_node, gpu, machine, name):
    found = planned_cluster(world, per_node, gpu, machine)
    assert (None if found is None else found.name) == name


def test_a_machine_with_fewer_accelerators_than_ranks_is_not_planned_for():
    with pytest.raises(SpecError, match="has 8 accelerators, for 16 ranks"):
        planned_cluster(16, 8, "h100", "8xh100")


def test_memory_for_a_message_that_is_not_there_is_told(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    group = cast(dist.ProcessGroup, None)
    with pytest.raises(MessageTooLargeError, match=r"rank 3 has no memory for send of 4 GiB\. Give a smaller --largest"):
        _call("send", 2**32, group, 2, Ranks(3, 4, torch.device("cpu")))


def _members_and_groups_made(rendezvous):
    made = []
    new_group = dist.new_group

    def counted(members=None, **options):
        made.append(members)
        return new_group(members, **options)

    with process_group(Layout(dp=4), device="cpu", rendezvous=rendezvous) as ranks:
        dist.new_group = counted
        own = [dist.get_process_group_ranks(_group_of_this_rank(ranks, *shape)) for shape in ((4, 1), (2, 1), (2, 2))]
        ranks.barrier()
        return [own, len(made)]


def test_a_rank_makes_its_own_groups_and_no_others():
    own = [[[0, 1, 2, 3], [0, 1], [0, 2]], [[0, 1, 2, 3], [0, 1], [1, 3]]]
    own += [[[0, 1, 2, 3], [2, 3], [0, 2]], [[0, 1, 2, 3], [2, 3], [1, 3]]]
    assert run_forked(4, _members_and_groups_made) == [[groups, 3] for groups in own]


def _per_node(rendezvous):
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    name = "ab"[int(os.environ["RANK"]) // 2]
    platform.node = lambda: name
    with process_group(Layout(dp=4), device="cpu", rendezvous=rendezvous) as ranks:
        return ranks_per_node(ranks)


def test_ranks_of_a_node_are_counted_where_the_launcher_tells_nothing():
    assert run_forked(4, _per_node) == [2] * 4


def test_groups_must_cut_the_ranks():
    expect_groups([(2, 2), (4, 1)], 4)
    for wrong in ((3, 1), (2, 4), (1, 1), (2, 0)):
        with pytest.raises(SpecError, match="does not cut 4 ranks"):
            expect_groups([wrong], 4)


def test_sizes_and_groups_are_read_as_people_write_them():
    assert sizes_up_to(4096) == [1024, 4096] and sizes_up_to(5000) == [1024, 4096, 5000]
    assert [parse_size(text) for text in ("64MiB", "64 mib", "1GB", "65536")] == [2**26, 2**26, 10**9, 65536]
    assert parse_groups("8:1, 2:8") == [(8, 1), (2, 8)]
    for text in ("", "1", "-4MiB", "3XB", "nan", "9999GiB"):
        with pytest.raises(SpecError, match="--largest"):
            parse_size(text)


def test_what_a_node_gives_is_what_its_ranks_give_together():
    def gathered(stride, num_bytes, rate):
        return Timed("all_gather", 2, stride, num_bytes, 1.0, 0.0, rate, None)

    found = [gathered(8, 1024, 1e9), gathered(8, 2**30, 40e9), gathered(1, 2**30, 300e9)]
    assert network_bytes_per_second(found, 8) == 320e9
    assert network_bytes_per_second(found[2:], 8) is None


def test_the_command_prints_times_and_bandwidths(tmp_path, capfd):
    out = tmp_path / "network.json"
    words = ["measure", "network", "--processes", "2", "--largest", "4KiB", "--kinds", "all-reduce,send", "--out", str(out)]
    assert main(words) == 0
    told = capfd.readouterr().out
    assert "groups of 2 ranks: time" in told and "groups of 2 ranks: GB/s of bus" in told
    assert [line.split()[:2] for line in told.splitlines() if "KiB" in line] == [["1", "KiB"], ["4", "KiB"]] * 2
    assert len(json.loads(out.read_text())["timed"]) == 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--processes"),
        (["--processes", "1"], "must be at least 2"),
        (["--processes", "1k"], "must be at most 124 on one machine, is 1,000"),
        (["--processes", "2", "--kinds", "all_scatter"], "all_scatter"),
        (["--processes", "2", "--groups", "2"], "SIZE:STRIDE"),
        (["--processes", "2", "--machine", "2xnothing"], "2xnothing"),
        (["--processes", "2", "--device", "tpu"], "--device"),
        (["--processes", "2", "--out", "/no/such/folder/x.json"], "--out"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(words, told, capfd):
    assert main(["measure", "network", *words]) == 2
    assert told in capfd.readouterr().err
