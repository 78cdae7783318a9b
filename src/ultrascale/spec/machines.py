"""The catalogue of machines. Every number has its source and date; what nobody publishes says `assumed`.

Peaks are dense (vendors often print the double, with sparsity). Memory is what the driver reports, which is a little less than
the number on the box where error correction or the firmware keeps some. Fractions of the peak are medians over matrix products
of 0.5 to 2 TFLOP in the tables of NVIDIA's aiconfigurator (TensorRT-LLM torch flow, bf16).
"""

from __future__ import annotations

import os
from pathlib import Path

from ultrascale.spec.cluster import Accelerator, Link, Node, Sourced

_TERA, _GIGA, _MIB, _GIB = 1e12, 1e9, 2**20, 2**30
_SMI = "nvidia-smi memory.total"


def _peaks(source: str, date: str, **tera: float) -> dict[str, Sourced]:
    return {dtype: Sourced(value * _TERA, source, date) for dtype, value in tera.items()}


def _gemm(value: float) -> Sourced:
    return Sourced(value, "aiconfigurator GEMM tables, median of 0.5 to 2 TFLOP, bf16", "2026-08")


def _gathered(value: float) -> Sourced:
    return Sourced(
        value * _GIGA, "aiconfigurator NCCL 2.27-2.29 tables, 8 GPUs, all-gather, large-size limit of a fit", "2026-08"
    )


_A100 = "NVIDIA A100 datasheet"
_A100_PEAKS = _peaks(_A100, "2021-06", fp64=19.5, fp32=19.5, tf32=156, bf16=312)
_H100 = "NVIDIA H100 datasheet"
_H100_SXM_PEAKS = _peaks(_H100, "2023", fp64=66.9, fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9)
_H200 = "NVIDIA H200 datasheet"
_B200 = "NVIDIA HGX B200 datasheet, an eighth of eight"
_GB200 = "NVIDIA GB200 NVL72 datasheet, a 72nd of the rack"
_MI300X = "AMD Instinct MI300X datasheet"

ACCELERATORS: dict[str, Accelerator] = {
    item.name: item
    for item in (
        Accelerator(
            "a100-40", "NVIDIA A100 SXM 40 GB", Sourced(40960 * _MIB, _SMI, "2021"), Sourced(1555 * _GIGA, _A100, "2021-06"),
            _A100_PEAKS, _gemm(0.83),
        ),
        Accelerator(
            "a100-80", "NVIDIA A100 SXM 80 GB", Sourced(81920 * _MIB, _SMI, "2021"), Sourced(2039 * _GIGA, _A100, "2021-06"),
            _A100_PEAKS, _gemm(0.83),
        ),
        Accelerator(
            "h100-sxm", "NVIDIA H100 SXM 80 GB", Sourced(81559 * _MIB, _SMI, "2023"), Sourced(3.35 * _TERA, _H100, "2023"),
            _H100_SXM_PEAKS, _gemm(0.77),
        ),
        Accelerator(
            "h100-pcie", "NVIDIA H100 PCIe 80 GB", Sourced(81559 * _MIB, _SMI, "2023"), Sourced(2.0 * _TERA, _H100, "2023"),
            _peaks(_H100, "2023", fp64=51.2, fp32=51.2, tf32=378, bf16=756, fp8=1513),
            Sourced(0.77, "assumed: that of H100 SXM; its 350 W limit may lower it", "2026-11"),
        ),
        Accelerator(
            "h200", "NVIDIA H200 SXM 141 GB", Sourced(143771 * _MIB, _SMI, "2024"), Sourced(4.8 * _TERA, _H200, "2024"),
            _peaks(_H200, "2024", fp64=66.9, fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9), _gemm(0.77),
        ),
        Accelerator(
            "b200", "NVIDIA B200 SXM 180 GB", Sourced(183359 * _MIB, _SMI, "2025"), Sourced(7.7 * _TERA, _B200, "2025"),
            _peaks(_B200, "2025", fp64=37, fp32=75, tf32=1125, bf16=2250, fp8=4500), _gemm(0.67),
        ),
        Accelerator(
            "gb200", "NVIDIA GB200, one GPU of it", Sourced(186 * _GIGA, _GB200, "2025"), Sourced(8 * _TERA, _GB200, "2025"),
            _peaks(_GB200, "2025", fp64=40, fp32=80, tf32=1250, bf16=2500, fp8=5000), _gemm(0.63),
        ),
        Accelerator(
            "mi300x", "AMD MI300X 192 GB", Sourced(196592 * _MIB, "rocm-smi VRAM total", "2024"),
            Sourced(5.3 * _TERA, _MI300X, "2023-12"),
            _peaks(_MI300X, "2023-12", fp64=163.4, fp32=163.4, tf32=653.7, bf16=1307.4, fp8=2614.9),
            Sourced(0.51, "ml-engineering (S. Bekman), best shape of its matmul sweep, bf16", "2025"),
        ),
    )
}  # fmt: skip

_NVLINK3 = Link("NVLink 3", Sourced(300 * _GIGA, _A100, "2021-06"), _gathered(209))
_NVLINK4 = Link("NVLink 4", Sourced(450 * _GIGA, _H100, "2023"), _gathered(357))
_NVLINK4_H200 = Link("NVLink 4", Sourced(450 * _GIGA, _H200, "2024"), _gathered(354))
_NVLINK5 = Link("NVLink 5", Sourced(900 * _GIGA, _B200, "2025"), _gathered(761))
_NVL72 = Link("NVLink 5, 72 GPUs", Sourced(900 * _GIGA, _GB200, "2025"))
_FABRIC = Link("Infinity Fabric", Sourced(448 * _GIGA, "AMD MI300X platform datasheet, 7 links of 64 GB/s", "2023-12"))
_PCIE5 = Link("PCIe 5.0 x16", Sourced(64 * _GIGA, "PCI-SIG PCI Express 5.0", "2019"))


def _network(name: str, giga_bytes: float, source: str, date: str) -> Link:
    return Link(name, Sourced(giga_bytes * _GIGA, source, date))


def _node(name: str, title: str, accelerator: str, intra: Link, inter: Link, *, count: int = 8) -> Node:
    return Node(name, title, ACCELERATORS[accelerator], count, intra, inter)


_NDR = _network("8 x InfiniBand NDR 400", 400, "NVIDIA DGX H100/H200 user guide", "2023")
_HDR = _network("8 x InfiniBand HDR 200", 200, "NVIDIA DGX A100 user guide", "2021")
_AWS = "AWS EC2 instance type pages"
_GCP = "Google Cloud GPU machine type pages, network cards of the GPUs"

NODES: dict[str, Node] = {
    item.name: item
    for item in (
        _node("dgx-a100-40", "NVIDIA DGX A100 320 GB", "a100-40", _NVLINK3, _HDR),
        _node("dgx-a100", "NVIDIA DGX A100 640 GB", "a100-80", _NVLINK3, _HDR),
        _node("dgx-h100", "NVIDIA DGX H100", "h100-sxm", _NVLINK4, _NDR),
        _node("dgx-h200", "NVIDIA DGX H200", "h200", _NVLINK4_H200, _NDR),
        _node(
            "dgx-b200", "NVIDIA DGX B200", "b200", _NVLINK5,
            _network("8 x InfiniBand NDR 400", 400, "NVIDIA DGX B200 datasheet", "2024"),
        ),
        _node(
            "gb200-nvl72", "NVIDIA GB200 NVL72, one rack", "gb200", _NVL72,
            _network("72 x 400 Gb/s", 3600, "NVIDIA DGX GB200 user guide, four cards in each of 18 trays", "2025"), count=72,
        ),
        _node("aws-p4d", "AWS p4d.24xlarge", "a100-40", _NVLINK3, _network("EFA 400 Gb/s", 50, _AWS, "2024")),
        _node("aws-p4de", "AWS p4de.24xlarge", "a100-80", _NVLINK3, _network("EFA 400 Gb/s", 50, _AWS, "2024")),
        _node("aws-p5", "AWS p5.48xlarge", "h100-sxm", _NVLINK4, _network("EFA v2 3200 Gb/s", 400, _AWS, "2024")),
        _node("aws-p5e", "AWS p5e.48xlarge", "h200", _NVLINK4_H200, _network("EFA v2 3200 Gb/s", 400, _AWS, "2024")),
        _node("aws-p5en", "AWS p5en.48xlarge", "h200", _NVLINK4_H200, _network("EFA v3 3200 Gb/s", 400, _AWS, "2024")),
        _node("gcp-a3-high", "Google Cloud a3-highgpu-8g", "h100-sxm", _NVLINK4, _network("4 x 200 Gb/s", 100, _GCP, "2024")),
        _node("gcp-a3-mega", "Google Cloud a3-megagpu-8g", "h100-sxm", _NVLINK4, _network("8 x 200 Gb/s", 200, _GCP, "2024")),
        _node(
            "pcie-h100", "server with eight H100 PCIe", "h100-pcie", _PCIE5,
            _network("400 Gb/s", 50, "assumed: one 400 Gb/s card; servers differ", "2026-11"),
        ),
        _node(
            "mi300x-node", "AMD MI300X platform", "mi300x", _FABRIC,
            _network("8 x InfiniBand NDR 400", 400, "Azure ND MI300X v5 size page", "2024"),
        ),
    )
}  # fmt: skip

# The node that a bare count of accelerators is put into.
USUAL_NODE = {
    "a100-40": "dgx-a100-40", "a100-80": "dgx-a100", "h100-sxm": "dgx-h100", "h100-pcie": "pcie-h100", "h200": "dgx-h200",
    "b200": "dgx-b200", "gb200": "gb200-nvl72", "mi300x": "mi300x-node",
}  # fmt: skip
ALIASES = {
    "a100": "a100-80", "a100-40gb": "a100-40", "a100-80gb": "a100-80", "h100": "h100-sxm", "h100-80": "h100-sxm",
    "h100-80gb": "h100-sxm", "h200-141": "h200", "p4d": "aws-p4d", "p4de": "aws-p4de", "p5": "aws-p5", "p5e": "aws-p5e",
    "p5en": "aws-p5en", "a3-high": "gcp-a3-high", "a3-mega": "gcp-a3-mega", "gcp-a3": "gcp-a3-high", "dgx-a100-80": "dgx-a100",
}  # fmt: skip


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


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
