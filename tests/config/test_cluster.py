import re

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.machines import ACCELERATORS, ALIASES, NODES, USUAL_NODE, machine_memory_bytes
from ultrascale.catalogue.racks import places_used, resized, using
from ultrascale.description.problems import SpecError


def sourced_numbers():
    """(name, number) of every number in the catalogue."""
    for item in ACCELERATORS.values():
        yield f"{item.name} memory", item.memory_bytes
        assert item.memory_bytes_per_second is not None and item.matmul_fraction is not None
        yield f"{item.name} bandwidth", item.memory_bytes_per_second
        yield f"{item.name} fraction", item.matmul_fraction
        assert item.watts is not None and item.dollars_per_hour is not None
        yield f"{item.name} watts", item.watts
        yield f"{item.name} rent", item.dollars_per_hour
        yield from ((f"{item.name} {dtype}", peak) for dtype, peak in item.peak_flops.items())
    for node in NODES.values():
        for link in (node.intra_link, node.inter_link):
            assert link is not None
            if node.watts is not None:
                yield f"{node.name} watts", node.watts
            yield f"{node.name} {link.name}", link.bytes_per_second
            if link.achieved_bytes_per_second:
                yield f"{node.name} {link.name} achieved", link.achieved_bytes_per_second


@pytest.mark.parametrize(
    ("text", "accelerator", "count", "nodes"),
    [
        ("64xh100", "h100-sxm", 64, 8), ("8xA100-80", "a100-80", 8, 1), ("4xa100-40", "a100-40", 4, 1),
        ("h200", "h200", 1, 1),
        ("2xdgx-h100", "h100-sxm", 16, 2), ("aws-p5", "h100-sxm", 8, 1), ("2 x P4d", "a100-40", 16, 2),
        ("144xgb200", "gb200", 144, 2),
        ("16xH100-80GB", "h100-sxm", 16, 2), ("8xA100-80GB-SXM", "a100-80", 8, 1), ("2048xh800", "h800", 2048, 256),
        ("8xv100", "v100-32", 8, 1), ("8xgh200", "gh200", 8, 2), ("72xgb300", "gb300", 72, 1), ("8xh100-96", "h100-96", 8, 1),
        ("16xmi325x", "mi325x", 16, 2), ("8xb300", "b300", 8, 1), ("8xa800", "a800", 8, 1),
        ("8xh100-pcie", "h100-pcie", 8, 1), ("16xMI300X", "mi300x", 16, 2), ("3xgcp-a3-mega", "h100-sxm", 24, 3),
    ],
)  # fmt: skip
def test_a_cluster_is_a_count_and_a_name(text, accelerator, count, nodes):
    cluster = parse_cluster(text)
    assert (cluster.accelerator.name, cluster.num_accelerators, cluster.num_nodes) == (accelerator, count, nodes)


def test_the_issues_catalogue_is_complete():
    wanted = (
        "a100-40 a100-80 h100-sxm h100-pcie h200 b200 gb200 mi300x cpu dgx-a100 dgx-h100 dgx-h200 dgx-b200 aws-p4d aws-p4de "
    )
    for name in (wanted + "aws-p5 aws-p5e aws-p5en gcp-a3-high gcp-a3-mega").split():
        assert parse_cluster(name).node.num_accelerators >= 1, name


def test_every_number_has_a_source_and_a_date():
    missing = [
        n for n, x in sourced_numbers() if x.value <= 0 or len(x.source) < 5 or not re.fullmatch(r"\d{4}(-\d\d)?", x.date)
    ]
    assert missing == []


def test_dense_peaks_are_those_of_the_datasheets():
    assert ACCELERATORS["h100-sxm"].peak_flops_per_second("bf16") == 989.4e12
    assert [ACCELERATORS[n].peak_flops_per_second("bf16") / 1e12 for n in ("a100-80", "b200", "gb200")] == [312, 2250, 2500]


def test_faster_dtypes_are_faster():
    for item in ACCELERATORS.values():
        dtypes = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
        peaks = [item.peak_flops[dtype].value for dtype in dtypes if dtype in item.peak_flops]
        assert peaks == sorted(peaks), item.name


def test_a_machine_draws_more_than_its_accelerators():
    assert NODES["dgx-h100"].watts_per_accelerator == 10200 / 8
    assert NODES["hgx-h800"].watts_per_accelerator == pytest.approx(1.8 * 700)
    for node in NODES.values():
        own, share = node.accelerator.watts, node.watts_per_accelerator
        assert own is not None and share is not None
        assert 1.3 * own.value < share < 2.1 * own.value, node.name
    assert parse_cluster("cpu").node.watts_per_accelerator is None


def test_the_cpu_is_this_machine_and_has_no_peak_in_the_catalogue():
    cpu = parse_cluster("4xcpu").accelerator
    assert cpu.measured_at_run_time
    assert cpu.memory_bytes.value == machine_memory_bytes()[0] // 4
    with pytest.raises(SpecError, match="measured at run time"):
        cpu.peak_flops_per_second("fp32")


def test_a_dtype_without_a_peak_is_an_error_that_names_those_with_one():
    with pytest.raises(SpecError, match=r"no fp8 peak.*fp64, fp32, tf32, bf16"):
        ACCELERATORS["a100-80"].peak_flops_per_second("fp8")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("65xh100", "64xh100-sxm or 72xh100-sxm"), ("8xh10", "Did you mean h100"), ("0xh100", "Ask for at least one: 1xh100"),
        ("", "not a count and a name"), ("auto", "Name one"), ("dgx-h10", "dgx-h100"),
    ],
)  # fmt: skip
def test_what_is_not_a_cluster_is_answered_with_what_is(text, answer):
    with pytest.raises(SpecError, match=re.escape(answer)):
        parse_cluster(text)


def test_every_short_name_and_usual_node_leads_somewhere():
    assert {USUAL_NODE.get(a) or NODES[a].name for a in ALIASES.values()} <= set(NODES)
    assert all(NODES[node].accelerator.name == name for name, node in USUAL_NODE.items())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dgx_h100", "h100-sxm"),
        ("8x4090", "rtx-4090"), ("8xrtx-4090", "rtx-4090"), ("8xRTX_4090", "rtx-4090"), ("4090", "rtx-4090"),
        ("8xNVIDIA GeForce RTX 4090", "rtx-4090"), ("8xh100-sxm", "h100-sxm"), ("64xH100-SXM5", "h100-sxm"),
        ("8xh100 pcie", "h100-pcie"), ("8xNVIDIA H100 PCIe", "h100-pcie"), ("8xNVIDIA H100 80GB HBM3", "h100-sxm"),
        ("8xNVIDIA H100 NVL", "h100-nvl"), ("8xa100-40gb", "a100-40"), ("8xNVIDIA A100-SXM4-80GB", "a100-80"),
        ("8xA100-SXM4-40GB", "a100-40"), ("8xTesla V100-SXM2-32GB", "v100-32"), ("8xNVIDIA RTX A6000", "a6000"),
        ("8xrtx5090", "rtx-5090"), ("8xNVIDIA L40S", "l40s"), ("8xNVIDIA A10G", "a10g"), ("8xAMD Instinct MI300X", "mi300x"),
        ("8xNVIDIA A100-PCIE-40GB", "a100-pcie-40"), ("8xNVIDIA A100 80GB PCIe", "a100-pcie"),
        ("8xNVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("8xH200-141GB", "h200"), ("8xNVIDIA GH200 480GB", "gh200"),
    ],
)  # fmt: skip
def test_names_are_read_as_people_and_drivers_write_them(text: str, name: str):
    assert parse_cluster(text).accelerator.name == name


@pytest.mark.parametrize("text", ["8xtpu-v5p", "v5e-256", "8xgaudi3", "16xtrn2", "8xTPU v4", "1xapple-m3-max"])
def test_machines_of_other_laws_are_refused_with_words_that_say_why(text: str):
    with pytest.raises(SpecError) as error:
        parse_cluster(text)
    (problem,) = error.value.problems
    assert "follow other laws than the GPUs" in problem.rule and "8xh100" in problem.remedy


def test_a_count_alone_is_no_machine_and_a_near_name_is_told():
    for text, answer in (
        ("64", "not a count and a name"),
        ("1e6xh100", "not a count and a name"),
        ("1,024xh100", "not a count and a name"),
        ("8xh100nvl", "h100-nvl"),
        ("8xrtx-4080", "rtx-4090"),
    ):
        with pytest.raises(SpecError) as error:
            parse_cluster(text)
        assert answer in str(error.value)


@pytest.mark.parametrize("count", ["0", "00", "1000001", "9" * 30, "1" + "0" * 5000])
def test_counts_that_no_cluster_has_are_refused_at_once(count):
    with pytest.raises(SpecError, match="has no machine" if not count.strip("0") else "more machines than anybody plans for"):
        parse_cluster(f"{count}xh100")


@pytest.mark.parametrize(
    ("text", "nodes", "used"),
    [
        ("8xgb200", 1, 72), ("72xgb200", 1, 72), ("144xgb200", 2, 72), ("576xgb300", 8, 72),
        ("128xgb200", 2, 64), ("192xgb200", 3, 64), ("256xgb200", 4, 64), ("512xgb200", 8, 64), ("256xgb300", 4, 64),
        ("96xgb200", 2, 48), ("100xgb200", 2, 50), ("1000xgb300", 25, 40),
        ("256xgb200/32", 8, 32), ("4xgb200-nvl72/64", 4, 64), ("146xgb200/64", 3, 64), ("256 x GB200 / 72", 4, 72),
        ("16xh100/4", 4, 4),
    ],
)  # fmt: skip
def test_racks_are_filled_with_as_many_in_each_and_the_name_may_say_how_many(text: str, nodes: int, used: int):
    cluster = parse_cluster(text)
    assert (cluster.num_nodes, cluster.node.num_accelerators) == (nodes, used)
    again = parse_cluster(cluster.name)
    assert again == cluster


def test_a_rack_used_in_part_keeps_each_accelerator_s_share_of_network_and_power():
    whole, part = NODES["gb200-nvl72"], parse_cluster("256xgb200").node
    assert whole.inter_link is not None and part.inter_link is not None
    shares = [one.bytes_per_second.value / n for one, n in ((whole.inter_link, 72), (part.inter_link, 64))]
    assert shares[0] == shares[1] == 50e9
    assert part.watts_per_accelerator == pytest.approx(whole.watts_per_accelerator)
    assert parse_cluster("256xgb200").places_words == "64 of 72 in each"
    assert parse_cluster("144xgb200").places_words == parse_cluster("64xh100").places_words == ""
    few = using(NODES["aws-p4d"], 4)  # four cards for eight
    assert few.num_network_cards == 2


def test_every_count_is_as_many_in_every_rack_or_refused_with_counts_and_a_name_that_work():
    rack = NODES["gb200-nvl72"]
    for count in range(1, 1200):
        used = places_used(count, rack)
        if used is not None:
            assert count <= 72 or count % used == 0
            continue
        with pytest.raises(SpecError) as caught:
            parse_cluster(f"{count}xgb200")
        offered = re.findall(r"\d+xgb200(?:/\d+)?", caught.value.problems[0].remedy)
        assert len(offered) == 3 and all(parse_cluster(one) for one in offered)
    with pytest.raises(SpecError, match="Write a number from 1 to 72"):
        parse_cluster("64xgb200/73")


def test_more_of_a_rack_s_accelerators_fill_racks_anew_and_named_places_stay():
    one_rack = parse_cluster("64xgb200")
    assert resized(one_rack, 128) == parse_cluster("128xgb200")
    assert resized(parse_cluster("256xgb200/32"), 64).num_nodes == 2


@pytest.mark.parametrize(("text", "meant"), [("8h100", "8xh100"), ("64H100", "64xh100"), ("2 dgx-h100", "2xdgx-h100")])
def test_a_count_without_its_x_is_answered_with_both(text, meant):
    with pytest.raises(SpecError) as error:
        parse_cluster(text)
    assert error.value.problems[0].remedy.startswith(f"Did you mean {meant}? ")
