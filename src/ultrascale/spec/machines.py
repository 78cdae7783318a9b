"""The catalogue of machines. Every number has its source and date; what nobody publishes says `assumed`.

The accelerators in them are in `spec.accelerators`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ultrascale.spec.accelerators import ACCELERATORS as ACCELERATORS
from ultrascale.spec.cluster import Accelerator, Link, Node, Sourced

_GIGA = 1e9


def _gathered(value: float) -> Sourced:
    return Sourced(
        value * _GIGA, "aiconfigurator NCCL 2.27-2.29 tables, 8 GPUs, all-gather, large-size limit of a fit", "2026-08"
    )


def _link(name: str, giga_bytes: float, source: str, date: str, achieved: Sourced | None = None) -> Link:
    return Link(name, Sourced(giga_bytes * _GIGA, source, date), achieved)


_NVLINK2 = _link("NVLink 2", 150, "NVIDIA V100 datasheet", "2020")
_NVLINK3 = _link("NVLink 3", 300, "NVIDIA A100 datasheet", "2021-06", _gathered(209))
_NVLINK3_A800 = _link("NVLink 3, 8 links", 200, "NVIDIA A800 datasheet", "2023")
_NVLINK4 = _link("NVLink 4", 450, "NVIDIA H100 datasheet", "2023", _gathered(357))
_NVLINK4_H200 = _link("NVLink 4", 450, "NVIDIA H200 datasheet", "2024", _gathered(354))
_NVLINK4_H800 = _link("NVLink 4, 8 links", 200, "NVIDIA H800 datasheet", "2023")
_NVLINK4_QUAD = _link("NVLink 4, four GPUs", 450, "CSCS Alps: three peers at 150 GB/s each (Fusco et al. 2024)", "2024")
_NVLINK5 = _link("NVLink 5", 900, "NVIDIA HGX B200 datasheet, an eighth of eight", "2025", _gathered(761))
_NVLINK5_B300 = _link("NVLink 5", 900, "NVIDIA HGX B300 datasheet, an eighth of eight", "2025")
_NVL72 = _link("NVLink 5, 72 GPUs", 900, "NVIDIA GB200 NVL72 datasheet, a 72nd of the rack", "2025")
_FABRIC = _link("Infinity Fabric", 448, "AMD MI300X platform datasheet, 7 links of 64 GB/s", "2023-12")
_FABRIC4 = _link("Infinity Fabric 4", 537.6, "AMD MI350 series datasheet, 7 links of 76.8 GB/s", "2025-06")
_FABRIC3 = _link("Infinity Fabric 3, the narrowest", 50, "OLCF Frontier user guide: 50 to 200 GB/s between dies", "2024")
_PCIE4 = _link("PCIe 4.0 x16", 32, "PCI-SIG PCI Express 4.0", "2017")
_PCIE5 = _link("PCIe 5.0 x16", 64, "PCI-SIG PCI Express 5.0", "2019")
_NDR = _link("8 x InfiniBand NDR 400", 400, "NVIDIA DGX H100/H200 user guide", "2023")
_HDR = _link("8 x InfiniBand HDR 200", 200, "NVIDIA DGX A100 user guide", "2021")
_EDR = _link("4 x InfiniBand EDR 100", 50, "NVIDIA DGX-1 user guide", "2017")
_XDR = _link("8 x InfiniBand XDR 800", 800, "NVIDIA DGX B300 datasheet", "2025")
_NDR_B200 = _link("8 x InfiniBand NDR 400", 400, "NVIDIA DGX B200 datasheet", "2024")
_GB200_CARDS = _link("72 x 400 Gb/s", 3600, "NVIDIA DGX GB200 user guide, four cards in each of 18 trays", "2025")
_GB300_CARDS = _link("72 x InfiniBand XDR 800", 7200, "NVIDIA DGX GB300 datasheet, a card for each GPU", "2025")
_ONE_CARD = _link("400 Gb/s", 50, "assumed: one 400 Gb/s card; servers differ", "2026-11")
_HDR_CARD = _link("InfiniBand HDR 200", 25, "assumed: one 200 Gb/s card; servers differ", "2026-11")
_AWS_100 = _link("EFA 100 Gb/s", 12.5, "AWS EC2 instance type pages", "2024")
_GCP_100 = _link("100 Gb/s", 12.5, "Google Cloud GPU machine type pages", "2024")
_EFA_400 = _link("EFA 400 Gb/s", 50, "AWS EC2 instance type pages", "2024")
_TEN_GIGABIT = _link("10 Gb/s", 1.25, "assumed: 10 Gb/s Ethernet between workstations", "2026-11")
_FRONTIER = _link("4 x Slingshot 200 Gb/s", 100, "OLCF Frontier user guide", "2024")
_SLINGSHOT = _link("4 x Slingshot 200 Gb/s", 100, "CSCS Alps: one card for each GPU (Fusco et al. 2024)", "2024")
_AZURE_ND = _link("8 x InfiniBand NDR 400", 400, "Azure ND MI300X v5 size page", "2024")
_AMD_CARDS = _link("8 x 400 Gb/s", 400, "assumed: a 400 Gb/s card for each GPU, as AMD's reference platforms have", "2026-11")
_AWS, _GCP = "AWS EC2 instance type pages", "Google Cloud GPU machine type pages, network cards of the GPUs"
_EFA, _EFA2, _EFA3, _EFA4 = (
    _link(name, rate, _AWS, date)
    for name, rate, date in (
        ("EFA 400 Gb/s", 50, "2024"), ("EFA v2 3200 Gb/s", 400, "2024"), ("EFA v3 3200 Gb/s", 400, "2024"),
        ("EFA v4 3200 Gb/s", 400, "2025"),
    )
)  # fmt: skip


_A3_HIGH, _A3_MEGA = (_link(f"{cards} x 200 Gb/s", 25 * cards, _GCP, "2024") for cards in (4, 8))
_DGX_1 = Sourced(3500, "NVIDIA DGX-1 datasheet, at most", "2017")
_DGX_A100 = Sourced(6500, "NVIDIA DGX A100 datasheet, at most", "2021")
_DGX_HOPPER = Sourced(10200, "NVIDIA DGX H100/H200 user guide, at most", "2023")
_DGX_B200 = Sourced(14300, "NVIDIA DGX B200 datasheet, about", "2024")
_DGX_B300 = Sourced(14000, "NVIDIA DGX B300 datasheet, about", "2025")
_GB_RACK = Sourced(132_000, "NVIDIA DGX GB200 user guide, a rack, about; GB300 is taken to draw as much", "2025")


def _node(
    name: str,
    title: str,
    accelerator: str,
    intra: Link,
    inter: Link,
    *,
    count: int = 8,
    cards: int | None = None,
    watts: Sourced | None = None,
    tray: int | None = None,
) -> Node:
    return Node(name, title, ACCELERATORS[accelerator], count, intra, inter, cards, watts, tray)


NODES: dict[str, Node] = {
    item.name: item
    for item in (
        _node("dgx-1", "NVIDIA DGX-1, 32 GB", "v100-32", _NVLINK2, _EDR, cards=4, watts=_DGX_1),
        _node("dgx-1-16", "NVIDIA DGX-1, 16 GB", "v100-16", _NVLINK2, _EDR, cards=4, watts=_DGX_1),
        _node("dgx-a100-40", "NVIDIA DGX A100 320 GB", "a100-40", _NVLINK3, _HDR, watts=_DGX_A100),
        _node("dgx-a100", "NVIDIA DGX A100 640 GB", "a100-80", _NVLINK3, _HDR, watts=_DGX_A100),
        _node("hgx-a800", "NVIDIA HGX A800", "a800", _NVLINK3_A800, _HDR),
        _node("pcie-a100", "server with eight A100 PCIe", "a100-pcie", _PCIE4, _HDR_CARD, cards=1),
        _node("dgx-h100", "NVIDIA DGX H100", "h100-sxm", _NVLINK4, _NDR, watts=_DGX_HOPPER),
        _node("grand-teton-96", "Meta Grand Teton, H100 96 GB", "h100-96", _NVLINK4, _NDR),
        _node("hgx-h800", "NVIDIA HGX H800", "h800", _NVLINK4_H800, _NDR),
        _node("hgx-h20", "NVIDIA HGX H20", "h20", _NVLINK4, _NDR),
        _node("dgx-h200", "NVIDIA DGX H200", "h200", _NVLINK4_H200, _NDR, watts=_DGX_HOPPER),
        _node("gh200-quad", "four GH200 (CSCS Alps)", "gh200", _NVLINK4_QUAD, _SLINGSHOT, count=4),
        _node("dgx-b200", "NVIDIA DGX B200", "b200", _NVLINK5, _NDR_B200, watts=_DGX_B200),
        _node("dgx-b300", "NVIDIA DGX B300", "b300", _NVLINK5_B300, _XDR, watts=_DGX_B300),
        _node("gb200-nvl72", "NVIDIA GB200 NVL72, one rack", "gb200", _NVL72, _GB200_CARDS, count=72, watts=_GB_RACK, tray=4),
        _node("gb300-nvl72", "NVIDIA GB300 NVL72, one rack", "gb300", _NVL72, _GB300_CARDS, count=72, watts=_GB_RACK, tray=4),
        _node("aws-p4d", "AWS p4d.24xlarge", "a100-40", _NVLINK3, _EFA, cards=4),
        _node("aws-p4de", "AWS p4de.24xlarge", "a100-80", _NVLINK3, _EFA, cards=4),
        _node("aws-p5", "AWS p5.48xlarge", "h100-sxm", _NVLINK4, _EFA2),
        _node("aws-p5e", "AWS p5e.48xlarge", "h200", _NVLINK4_H200, _EFA2),
        _node("aws-p5en", "AWS p5en.48xlarge", "h200", _NVLINK4_H200, _EFA3),
        _node("aws-p6-b200", "AWS p6-b200.48xlarge", "b200", _NVLINK5, _EFA4),
        _node("gcp-a3-high", "Google Cloud a3-highgpu-8g", "h100-sxm", _NVLINK4, _A3_HIGH, cards=4),
        _node("gcp-a3-mega", "Google Cloud a3-megagpu-8g", "h100-sxm", _NVLINK4, _A3_MEGA),
        _node("pcie-h100", "server with eight H100 PCIe", "h100-pcie", _PCIE5, _ONE_CARD, cards=1),
        _node("nvl-h100", "server with eight H100 NVL", "h100-nvl", _PCIE5, _ONE_CARD, cards=1),
        _node("aws-g6e", "AWS g6e.48xlarge", "l40s", _PCIE4, _EFA_400, cards=4),
        _node("gcp-g2", "Google Cloud g2-standard-96", "l4", _PCIE4, _GCP_100, cards=1),
        _node("aws-g5", "AWS g5.48xlarge", "a10g", _PCIE4, _AWS_100, cards=1),
        _node("pcie-a6000", "server with eight RTX A6000", "a6000", _PCIE4, _HDR_CARD, cards=1),
        _node("pcie-6000-ada", "server with eight RTX 6000 Ada", "rtx-6000-ada", _PCIE4, _HDR_CARD, cards=1),
        _node("pcie-3090", "server with eight RTX 3090", "rtx-3090", _PCIE4, _TEN_GIGABIT, cards=1),
        _node("pcie-4090", "server with eight RTX 4090", "rtx-4090", _PCIE4, _TEN_GIGABIT, cards=1),
        _node("pcie-5090", "server with eight RTX 5090", "rtx-5090", _PCIE5, _TEN_GIGABIT, cards=1),
        _node("frontier", "four MI250X, eight dies (OLCF Frontier)", "mi250x", _FABRIC3, _FRONTIER, cards=4),
        _node("mi300x-node", "AMD MI300X platform", "mi300x", _FABRIC, _AZURE_ND),
        _node("mi325x-node", "AMD MI325X platform", "mi325x", _FABRIC, _AMD_CARDS),
        _node("mi355x-node", "AMD MI355X platform", "mi355x", _FABRIC4, _AMD_CARDS),
    )
}  # fmt: skip

# The node that a bare count of accelerators is put into.
USUAL_NODE = {
    "v100-32": "dgx-1", "v100-16": "dgx-1-16", "a100-40": "dgx-a100-40", "a100-80": "dgx-a100", "a100-pcie": "pcie-a100",
    "a800": "hgx-a800", "h100-sxm": "dgx-h100", "h100-pcie": "pcie-h100", "h100-nvl": "nvl-h100", "h100-96": "grand-teton-96",
    "h800": "hgx-h800", "h20": "hgx-h20", "h200": "dgx-h200", "gh200": "gh200-quad", "b200": "dgx-b200", "b300": "dgx-b300",
    "gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "mi300x": "mi300x-node", "mi325x": "mi325x-node", "mi355x": "mi355x-node",
    "l40s": "aws-g6e", "l4": "gcp-g2", "a10g": "aws-g5", "a6000": "pcie-a6000", "rtx-6000-ada": "pcie-6000-ada",
    "rtx-3090": "pcie-3090", "rtx-4090": "pcie-4090", "rtx-5090": "pcie-5090", "mi250x": "frontier",
}  # fmt: skip
ALIASES = {
    "3090": "rtx-3090", "4090": "rtx-4090", "5090": "rtx-5090", "h100-pcie-80": "h100-pcie", "h100-nvl-94": "h100-nvl",
    "a100": "a100-80", "a100-40gb": "a100-40", "a100-80gb": "a100-80", "a100-sxm": "a100-80", "a100-80gb-sxm": "a100-80",
    "a800-80": "a800", "h100": "h100-sxm", "h100-80": "h100-sxm", "h100-80gb": "h100-sxm", "h100-80gb-sxm": "h100-sxm",
    "h100-96gb": "h100-96", "h800-80": "h800", "h800-80gb": "h800", "h200-141": "h200", "h200-141gb": "h200",
    "h200-sxm": "h200", "b200-180": "b200", "b200-180gb": "b200", "v100": "v100-32", "v100-32gb": "v100-32",
    "v100-16gb": "v100-16", "p4d": "aws-p4d", "p4de": "aws-p4de", "p5": "aws-p5", "p5e": "aws-p5e", "p5en": "aws-p5en",
    "p6-b200": "aws-p6-b200", "a3-high": "gcp-a3-high", "a3-mega": "gcp-a3-mega", "gcp-a3": "gcp-a3-high",
    "g5": "aws-g5", "g6e": "aws-g6e", "g2": "gcp-g2", "6000-ada": "rtx-6000-ada",
    "a100-pcie-40": "a100-40", "a100-40-pcie": "a100-40", "a100-80-pcie": "a100-pcie", "a100-80gb-pcie": "a100-pcie",
    "h100-80gb-pcie": "h100-pcie", "h100-94": "h100-nvl", "h100-94gb": "h100-nvl", "gh200-480gb": "gh200",
    "dgx-a100-80": "dgx-a100", "nvl72": "gb200-nvl72",
}  # fmt: skip


def accelerator_in(text: str) -> str | None:
    """The accelerator that a text names somewhere, as tables do (`H100-96GB-HBM2e-500W`, `DGX A100 (40GB)`); None if none.

    Of names and aliases whose words all stand in the text the one with most words counts: `a100-pcie-40` before `a100-40`.
    """
    words = _words(text)
    names = [(_words(alias), name) for alias, name in (*((one, one) for one in ACCELERATORS), *ALIASES.items())]
    found = [(len(of), any(word.isdigit() for word in of), len(name), name) for of, name in names if of <= words]
    known = [one for one in found if one[-1] in ACCELERATORS]
    return max(known)[-1] if known else None


def _words(text: str) -> frozenset[str]:
    """Words of a machine's name without its maker and form: 80GB is 80, SXM5 sxm, RTX4090 rtx and 4090."""
    words = re.split(r"[^a-z0-9.]+", re.sub(r"\brtx(?=\d)", "rtx-", text.lower()))
    return frozenset(re.sub(r"^(\d+)gb?$|^(sxm)\d$", r"\1\2", word) for word in words if word)


def this_machine(num_processes: int) -> Node:
    """This machine's CPU, shared by `num_processes` ranks: memory and cores as the operating system tells them now.

    Its rates are not in any catalogue; `Accelerator.measured_at_run_time` says so.
    """
    total, source = machine_memory_bytes()
    memory = Sourced(total // num_processes, f"{source}, an equal share of {num_processes}", "now")
    cpu = Accelerator("cpu", "CPU of this machine", memory, None, cores=usable_cores())
    return Node("cpu", "this machine", cpu, num_processes, None, None)


def machine_memory_bytes() -> tuple[int, str]:
    """Memory this process may use, and who says so: the machine's, or a container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < total:
            return int(text), limit
    return total, "operating system"


def free_bytes() -> int | None:
    """Memory that this process may still take: what the machine has, or a container has left; None where nobody says."""
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":", 1) for line in lines)
        free = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        names = os.sysconf_names
        return None if "SC_AVPHYS_PAGES" not in names else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, KeyError, ValueError):  # no container, or its limit is "max"
        return free
    return min(free, max(0, limit - used + int(cached)))


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
