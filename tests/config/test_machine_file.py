"""Machines of a file: what is not said comes from the catalogue, every mistake is told with its line, and plans take them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ultrascale.catalogue.cluster import Accelerator, parse_cluster
from ultrascale.catalogue.machines import ACCELERATORS, NODES
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.cli.main import main
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.laws.devices import matmul_curve, power_slowdown, relative_of
from ultrascale.plan.time.price import half_precision_peak, predict
from ultrascale.plan.workload import Workload

DGX = """
accelerator = "h100"
accelerators = 8
[network]
name = "8 x InfiniBand NDR 400"
gbits_per_second = 3200
"""


def _file(folder: Path, text: str, name: str = "ours.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def _seconds(cluster_name: str) -> float:
    workload = Workload(preset("llama-3-8b"), parse_cluster(cluster_name), 4096, 128)
    return predict(workload, Layout(dp=16, tp=8, zero_stage=1, precision="bf16")).step_seconds


def test_a_machine_written_as_the_catalogues_is_priced_as_it(tmp_path):
    file = _file(tmp_path, DGX)
    ours, theirs = parse_cluster(f"16x{file}"), parse_cluster("16xdgx-h100")
    assert (ours.num_accelerators, ours.num_nodes, ours.accelerator) == (128, 16, theirs.accelerator)
    assert ours.node.intra_link == NODES["dgx-h100"].intra_link
    assert _seconds(f"16x{file}") == _seconds("16xdgx-h100")


def test_a_slower_network_fewer_cards_and_thin_switches_cost_time(tmp_path):
    slow = _file(tmp_path, DGX.replace("3200", "400"), "slow.toml")
    thin = _file(tmp_path, f"{DGX}[spine]\nnodes_per_leaf = 2\noversubscription = 8\n", "thin.toml")
    reached = _file(tmp_path, f"{DGX}achieved_gbytes_per_second = 40\n", "reached.toml")
    usual = _seconds("16xdgx-h100")
    assert all(_seconds(f"16x{file}") > 1.02 * usual for file in (slow, thin, reached))


def _own(tmp_path: Path, table: str) -> Accelerator:
    return parse_cluster(f"4x{_file(tmp_path, DGX.replace(chr(34) + 'h100' + chr(34), table))}").accelerator


def test_an_accelerator_with_less_power_is_slower(tmp_path):
    text = DGX.replace('"h100"', '{ like = "h100", name = "limited", watts = 350 }')
    assert _seconds(f"16x{_file(tmp_path, text)}") > 1.2 * _seconds("16xdgx-h100")
    measured = _own(tmp_path, '{ like = "h100", name = "limited", watts = 350, matmul_fraction = 0.5 }')
    assert power_slowdown(measured) == 1  # what large GEMMs reach already tells


@pytest.mark.parametrize(
    ("like", "dtype", "ratio"),
    [("gb300", "bf16", 2), ("h100-sxm", "fp16", 2), ("v100-32", "bf16", 2), ("v100-32", "fp16", 0.5)],
)
def test_an_accelerator_with_other_peaks_has_as_much_power_for_a_flop(tmp_path, like: str, dtype, ratio):
    base = ACCELERATORS[like]
    peak = ratio * half_precision_peak(base) / 1e12
    own = _own(tmp_path, f'{{ like = "{like}", name = "next", tflops = {{ {dtype} = {peak} }} }}')
    assert own.watts and base.watts and own.watts.value == pytest.approx(ratio * base.watts.value)
    assert power_slowdown(own) == pytest.approx(power_slowdown(base))


def test_an_accelerator_of_ones_own_keeps_the_law_of_what_it_is_like(tmp_path):
    text = DGX.replace('"h100"', '{ like = "h100", name = "capped", memory_gib = 64, tflops = { bf16 = 400, fp8 = 800 } }')
    own = parse_cluster(f"4x{_file(tmp_path, text)}").accelerator
    assert (own.memory_bytes.value, own.peak_flops["bf16"].value, own.kind) == (64 * 2**30, 400e12, "h100-sxm")
    assert own.memory_bytes_per_second == ACCELERATORS["h100-sxm"].memory_bytes_per_second
    assert relative_of(own) == "h100-sxm"
    like = matmul_curve(ACCELERATORS["h100-sxm"], "bf16", True)
    assert asdict(matmul_curve(own, "bf16", True)) == asdict(replace(like, peak_flops=400e12))
    assert _seconds(f"16x{tmp_path / 'ours.toml'}") > 1.5 * _seconds("16xdgx-h100")


@pytest.mark.parametrize(
    ("text", "key", "line", "told"),
    [
        (DGX.replace('"h100"', '"h1000"'), "accelerator", 2, "no accelerator called 'h1000'"),
        (DGX.replace("= 8", "= 0"), "accelerators", 3, "whole number from 1 to 1024, is 0"),
        (DGX.replace("accelerators = 8\n", ""), "accelerators", None, "is missing"),
        (DGX.replace("gbits_per", "gbit_per"), "network.gbit_per_second", 6, "is no key"),
        (DGX.replace("3200", "-1"), "network.gbits_per_second", 6, "must be a positive number, is -1"),
        (DGX.replace("3200", "nan"), "network.gbits_per_second", 6, "must be a positive number, is nan"),
        (DGX.replace("3200", "true"), "network.gbits_per_second", 6, "must be a positive number, is True"),
        (f"{DGX}achieved_gbytes_per_second = 3200\n", "network.achieved_gbytes_per_second", 7, "more than the 400 GB/s"),
        (f"{DGX}[spine]\nnodes_per_leaf = 4\noversubscription = 0.5\n", "spine.oversubscription", 9, "a number from 1, is 0.5"),
        (f"network = 3\n{DGX.partition('[')[0]}", "network", 1, "must be a table"),
        (DGX.replace('"h100"', '{ like = "h100", name = "b200" }'), "accelerator.name", 2, "one of the catalogue"),
        (DGX.replace('"h100"', '{ like = "h100", name = "x", tflops = { int8 = 3 } }'), "accelerator.tflops.int8", 2, "no key"),
    ],
)  # fmt: skip
def test_every_mistake_is_told_with_its_key_and_line(text, key, line, told, tmp_path):
    file = _file(tmp_path, text)
    with pytest.raises(SpecError) as raised:
        parse_cluster(f"2x{file}")
    problem = next(one for one in raised.value.problems if one.key == key)
    assert told in problem.rule
    assert problem.where == (f"{file}:{line}" if line else file)


def test_no_file_a_folder_and_what_is_not_toml_are_told(tmp_path):
    for name, told in ((f"2x{tmp_path}/none.toml", "No such file"), (f"2x{_file(tmp_path, '= 3')}", "is not TOML")):
        with pytest.raises(SpecError, match=told):
            parse_cluster(name)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match="directory"):
        parse_cluster(f"{tmp_path}/folder.toml")
    with pytest.raises(SpecError, match="at least one"):
        parse_cluster(f"0x{_file(tmp_path, DGX)}")


def test_a_plan_takes_the_file_and_says_so(tmp_path, capsys):
    file = _file(tmp_path, DGX)
    assert main(["plan", "--model", "llama-3-8b", "--gpus", f"2x{file}", "--seq-len", "4096", "--top", "1"]) == 0
    assert "on 16 x NVIDIA H100 SXM 80 GB, 2 nodes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("accelerators", f"1{'0' * 400}"),
        ("gbits_per_second", f"1{'0' * 400}"),
        ("gbits_per_second", "1e300"),
        ("gbits_per_second", "5e-324"),
    ],
)
def test_numbers_that_overflow_or_vanish_are_refused_with_their_key(key, number, tmp_path):
    text = "\n".join(f"{key} = {number}" if line.startswith(f"{key} =") else line for line in DGX.splitlines())
    with pytest.raises(SpecError, match=rf"{key}.*must be a .*number"):
        parse_cluster(f"2x{_file(tmp_path, text)}")


def test_a_file_may_be_called_in_capitals_and_with_blanks_and_an_x(tmp_path):
    (tmp_path / "8x of us").mkdir()
    assert parse_cluster(f"2x{_file(tmp_path / '8x of us', DGX, 'Größe.TOML')}").num_accelerators == 16
