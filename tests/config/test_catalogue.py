"""Packaged tables: what is wrong with an entry is told with its file, its name and its key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ultrascale.catalogue.machines import ACCELERATORS, ALIASES, NODES, USUAL_NODE, read_accelerator, usual_node
from ultrascale.catalogue.tables import Entry, entries, read_tables, with_aliases
from ultrascale.description.problems import SpecError
from ultrascale.plan.laws.devices import FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "watts: is missing"),
        ({"watts": 700}, "watts: must be a list, is 700"),
        ({"watts": [700, "NVIDIA H100 datasheet"]}, "Write [number"),
        ({"watts": ["700", "NVIDIA H100 datasheet", "2023"]}, "Write [number"),
        ({"watts": [700, "NVIDIA H100 datasheet", 2023]}, "Write [number"),
    ],
)
def test_a_number_without_source_or_date_is_refused_by_its_place(values: dict, message: str):
    with pytest.raises(SpecError) as caught:
        Entry("accelerators.toml: h100", values).sourced("watts")
    assert message in str(caught.value) and "accelerators.toml: h100.watts" in str(caught.value)


def test_numbers_keep_their_unit_source_and_date():
    said = Entry("x", {"memory_mib": [81559, "nvidia-smi", "2023"]}).sourced("memory_mib", 2**20)
    assert (said.value, said.source, said.date) == (81559 * 2**20, "nvidia-smi", "2023")


def test_unknown_keys_names_and_shared_aliases_are_refused():
    with pytest.raises(SpecError, match=re.escape("machines.toml: dgx.wats: is no key")):
        list(entries("machines.toml", {"dgx": {"wats": 1}}, "watts"))
    with pytest.raises(SpecError, match="Choose one of nvlink-4, pcie"):
        Entry("x", {"inside": "nvlink-9"}).one_of("inside", {"nvlink-4": 1, "pcie": 2})
    shared = {name: Entry(name, {"aliases": ["h100"]}) for name in ("h100-sxm", "h100-pcie")}
    with pytest.raises(SpecError, match="'h100' is taken by h100-sxm"):
        with_aliases(shared)


def test_a_machine_of_other_accelerators_is_refused():
    with pytest.raises(SpecError, match=r"x\.machine: is 'dgx-h200', which holds h200\. Name one with accelerator = 'h300'"):
        usual_node("h300", Entry("x", {"machine": "dgx-h200"}))


def test_a_law_that_nobody_measured_and_a_flag_in_quotes_are_refused():
    whole = tomllib.loads((ROOT / "src/ultrascale/catalogue/accelerators.toml").read_text())["h100-96"]
    for wrong, message in (
        ({"law": "h100"}, r"x\.law: is 'h100', which is not there\. Choose one of a100-80, h100-sxm"),
        ({"law": "h100-96"}, r"x\.law: is 'h100-96'"),
        ({"same_chip": "false"}, r"x\.same_chip: must be true or false, is 'false'\. Write it without quotes\."),
        ({"same_chip": 1}, r"x\.same_chip: must be true or false, is 1"),
    ):
        with pytest.raises(SpecError, match=message):
            read_accelerator("x", Entry("x", whole | wrong))
    assert read_accelerator("x", Entry("x", whole)).law == "h100-sxm"


def test_every_accelerator_without_a_law_has_one_of_its_own():
    assert {accelerator.name for accelerator in ACCELERATORS.values() if not accelerator.law} == set(FAMILIES)


def test_a_file_that_is_not_toml_says_so(tmp_path: Path):
    (tmp_path / "broken.toml").write_text("[h100\n")
    with pytest.raises(SpecError, match="is not TOML"):
        read_tables("broken.toml", tmp_path)


def test_every_table_is_packaged():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {ROOT / "src" / name.replace(".", "/"): patterns for name, patterns in packaged.items()}
    found = {path for folder, patterns in folders.items() for pattern in patterns for path in folder.glob(pattern)}
    tables = {*(ROOT / "src").rglob("*.toml")}
    assert tables <= found and {"accelerators.toml", "models.toml", "computing.toml"} <= {path.name for path in tables}


def test_names_are_one_to_one_and_lead_somewhere():
    assert not set(ALIASES) & (set(ACCELERATORS) | set(NODES))
    assert set(USUAL_NODE) == set(ACCELERATORS) and set(ALIASES.values()) <= set(ACCELERATORS) | set(NODES)


def test_amd_s_accelerators_are_there_with_what_their_datasheets_say():
    peaks = {name: ACCELERATORS[name].peak_flops for name in ("mi300x", "mi325x", "mi350x", "mi355x")}
    assert [round(one["bf16"].value / 1e12) for one in peaks.values()] == [1307, 1307, 2307, 2517]
    assert [round(one["fp8"].value / one["bf16"].value, 2) for one in peaks.values()] == [2, 2, 2, 2]
    assert ["mxfp8" in one for one in peaks.values()] == [False, False, True, True]
    for name in peaks:
        node = NODES[USUAL_NODE[name]]
        assert node.num_accelerators == 8 and node.inter_link is not None
        assert node.inter_link.bytes_per_second.value == 8 * 50e9
