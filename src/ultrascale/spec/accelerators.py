"""The catalogue of accelerators. Every number has its source and date; what nobody publishes says `assumed`.

Peaks are dense (vendors often print the double, with sparsity); fp16 is as fast as bf16 wherever there is both. Memory is what
the driver reports, which is a little less than the number on the box where error correction or the firmware keeps some.
Fractions of the peak are medians over matrix products of 0.5 to 2 TFLOP in the tables of NVIDIA's aiconfigurator (TensorRT-LLM
torch flow, bf16). Power is the limit of the device alone. Rents are list prices on demand of one cloud; contracts cost less.
"""

from __future__ import annotations

from ultrascale.spec.cluster import Accelerator, Sourced

_TERA, _GIGA, _MIB = 1e12, 1e9, 2**20
_SMI = "nvidia-smi memory.total"


def _peaks(source: str, date: str, **tera: float) -> dict[str, Sourced]:
    peaks = {dtype: Sourced(value * _TERA, source, date) for dtype, value in tera.items() if dtype != "fp8"}
    if "bf16" in peaks:
        peaks["fp16"] = peaks["bf16"]
    return peaks | ({"fp8": Sourced(tera["fp8"] * _TERA, source, date)} if "fp8" in tera else {})


def _gemm(value: float) -> Sourced:
    return Sourced(value, "aiconfigurator GEMM tables, median of 0.5 to 2 TFLOP, bf16", "2026-08")


def _like(value: float, whose: str) -> Sourced:
    return Sourced(value, f"assumed: that of {whose}", "2026-11")


def _runpod(dollars: float) -> Sourced:
    return Sourced(dollars, "RunPod list price, Secure Cloud (deploybase.ai, Spheron)", "2026-03")


def _rent(dollars: float, why: str, date: str = "2026-11") -> Sourced:
    return Sourced(dollars, why, date)


_V100 = "NVIDIA V100 datasheet"
_V100_PEAKS = _peaks(_V100, "2020", fp64=7.8, fp32=15.7, fp16=125)
_V100_RENT = _rent(0.55, "Lambda list price, 8 x V100 16 GB", "2025")
_A100 = "NVIDIA A100 datasheet"
_A100_PEAKS = _peaks(_A100, "2021-06", fp64=19.5, fp32=19.5, tf32=156, bf16=312)
_A800 = "NVIDIA A800 datasheet: an A100 with fewer links"
_H100 = "NVIDIA H100 datasheet"
_H100_SXM_PEAKS = _peaks(_H100, "2023", fp64=66.9, fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9)
_META = "Meta: H100 96 GB HBM2e, 2.4 TB/s, 500 W (torchtitan performance.md)"
_H800 = "NVIDIA H800 datasheet: an H100 with fewer links and little fp64"
_H20 = "NVIDIA H20 datasheet"
_H200 = "NVIDIA H200 datasheet"
_GH200 = "NVIDIA GH200 datasheet"
_B200 = "NVIDIA HGX B200 datasheet, an eighth of eight"
_B300 = "NVIDIA HGX B300 datasheet, an eighth of eight"
_GB200 = "NVIDIA GB200 NVL72 datasheet, a 72nd of the rack"
_GB300 = "NVIDIA GB300 NVL72 datasheet, a 72nd of the rack"
_L40S, _L4, _A10G = "NVIDIA L40S datasheet", "NVIDIA L4 datasheet", "NVIDIA A10G datasheet"
_A6000, _ADA_6000 = "NVIDIA RTX A6000 datasheet", "NVIDIA RTX 6000 Ada datasheet"
_GA102, _AD102, _GB202 = (
    f"NVIDIA {name} architecture white paper, sums in fp32" for name in ("Ampere GA102", "Ada", "RTX Blackwell")
)
_MI250X = "AMD Instinct MI250X datasheet, one of its two dies"
_MI300X, _MI325X, _MI355X = (f"AMD Instinct {name} datasheet" for name in ("MI300X", "MI325X", "MI355X"))
_MI300X_PEAKS = _peaks(_MI300X, "2023-12", fp64=163.4, fp32=163.4, tf32=653.7, bf16=1307.4, fp8=2614.9)
_SWEEP = "ml-engineering (S. Bekman), best shape of its matmul sweep, bf16"


def _accelerator(
    name: str,
    title: str,
    memory: Sourced,
    bandwidth: tuple[float, str, str],
    peaks: dict[str, Sourced],
    fraction: Sourced,
    watts: float,
    dollars: Sourced,
) -> Accelerator:
    """`bandwidth`: bytes per second, source and date, which are those of the power limit too."""
    rate, source, date = bandwidth
    power = Sourced(watts, source, date)
    return Accelerator(name, title, memory, Sourced(rate, source, date), peaks, fraction, power, dollars)


ACCELERATORS: dict[str, Accelerator] = {
    item.name: item
    for item in (
        _accelerator(
            "v100-16", "NVIDIA V100 SXM 16 GB", Sourced(16160 * _MIB, _SMI, "2018"), (900 * _GIGA, _V100, "2020"),
            _V100_PEAKS, _like(0.75, "older devices, between A100 and less"), 300, _V100_RENT,
        ),
        _accelerator(
            "v100-32", "NVIDIA V100 SXM 32 GB", Sourced(32510 * _MIB, _SMI, "2019"), (900 * _GIGA, _V100, "2020"),
            _V100_PEAKS, _like(0.75, "older devices, between A100 and less"), 300, _V100_RENT,
        ),
        _accelerator(
            "a100-40", "NVIDIA A100 SXM 40 GB", Sourced(40960 * _MIB, _SMI, "2021"), (1555 * _GIGA, _A100, "2021-06"),
            _A100_PEAKS, _gemm(0.83), 400, _rent(1.29, "Lambda list price, 8 x A100 40 GB", "2025"),
        ),
        _accelerator(
            "a100-80", "NVIDIA A100 SXM 80 GB", Sourced(81920 * _MIB, _SMI, "2021"), (2039 * _GIGA, _A100, "2021-06"),
            _A100_PEAKS, _gemm(0.83), 400, _runpod(1.39),
        ),
        _accelerator(
            "a100-pcie", "NVIDIA A100 PCIe 80 GB", Sourced(81920 * _MIB, _SMI, "2021"), (1935 * _GIGA, _A100, "2021-06"),
            _A100_PEAKS, _like(0.75, "A100 SXM, less for its 300 W limit"), 300, _runpod(1.19),
        ),
        _accelerator(
            "a800", "NVIDIA A800 SXM 80 GB", Sourced(81920 * _MIB, _SMI, "2023"), (2039 * _GIGA, _A800, "2023"),
            _A100_PEAKS, _like(0.83, "A100"), 400, _rent(1.39, "assumed: that of A100 80 GB"),
        ),
        _accelerator(
            "h100-sxm", "NVIDIA H100 SXM 80 GB", Sourced(81559 * _MIB, _SMI, "2023"), (3.35 * _TERA, _H100, "2023"),
            _H100_SXM_PEAKS, _gemm(0.77), 700, _runpod(2.69),
        ),
        _accelerator(
            "h100-96", "NVIDIA H100 SXM 96 GB HBM2e", Sourced(97871 * _MIB, _SMI, "2024"), (2.4 * _TERA, _META, "2024"),
            _H100_SXM_PEAKS, _like(0.65, "H100 SXM, less for its 500 W limit"), 500, _rent(2.69, "assumed: that of H100 SXM"),
        ),
        _accelerator(
            "h100-pcie", "NVIDIA H100 PCIe 80 GB", Sourced(81559 * _MIB, _SMI, "2023"), (2.0 * _TERA, _H100, "2023"),
            _peaks(_H100, "2023", fp64=51.2, fp32=51.2, tf32=378, bf16=756, fp8=1513),
            _like(0.77, "H100 SXM; its 350 W limit may lower it"), 350, _runpod(1.99),
        ),
        _accelerator(
            "h100-nvl", "NVIDIA H100 NVL 94 GB", Sourced(95830 * _MIB, _SMI, "2024"), (3.9 * _TERA, _H100, "2024"),
            _peaks(_H100, "2024", fp64=60, fp32=60, tf32=417.5, bf16=835.5, fp8=1670.5),
            _like(0.77, "H100 SXM; its 400 W limit may lower it"), 400, _rent(2.59, "assumed: a little below H100 SXM"),
        ),
        _accelerator(
            "h800", "NVIDIA H800 SXM 80 GB", Sourced(81559 * _MIB, _SMI, "2023"), (3.35 * _TERA, _H800, "2023"),
            _peaks(_H800, "2023", fp64=1, fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9), _like(0.77, "H100 SXM"), 700,
            _rent(2.0, "DeepSeek-V3 report, table 1: the rent it assumes", "2024-12"),
        ),
        _accelerator(
            "h20", "NVIDIA H20 96 GB", Sourced(97871 * _MIB, _SMI, "2024"), (4.0 * _TERA, _H20, "2024"),
            _peaks(_H20, "2024", fp64=1, fp32=44, tf32=74, bf16=148, fp8=296),
            _like(0.9, "Hopper at a seventh of its rate, where memory waits"), 400, _rent(1.2, "assumed: nobody lists it"),
        ),
        _accelerator(
            "h200", "NVIDIA H200 SXM 141 GB", Sourced(143771 * _MIB, _SMI, "2024"), (4.8 * _TERA, _H200, "2024"),
            _peaks(_H200, "2024", fp64=66.9, fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9), _gemm(0.77), 700, _runpod(3.59),
        ),
        _accelerator(
            "gh200", "NVIDIA GH200 96 GB", Sourced(97871 * _MIB, _SMI, "2024"), (4.0 * _TERA, _GH200, "2024"),
            _peaks(_GH200, "2024", fp64=67, fp32=67, tf32=494, bf16=990, fp8=1979), _like(0.77, "H200, the same chip"), 900,
            _rent(1.49, "Lambda list price, 1 x GH200", "2025"),
        ),
        _accelerator(
            "b200", "NVIDIA B200 SXM 180 GB", Sourced(183359 * _MIB, _SMI, "2025"), (7.7 * _TERA, _B200, "2025"),
            _peaks(_B200, "2025", fp64=37, fp32=75, tf32=1125, bf16=2250, fp8=4500), _gemm(0.67), 1000, _runpod(5.98),
        ),
        _accelerator(
            "b300", "NVIDIA B300 SXM 288 GB", Sourced(288 * _GIGA, _B300, "2025"), (8 * _TERA, _B300, "2025"),
            _peaks(_B300, "2025", fp64=1.25, fp32=75, tf32=1125, bf16=2250, fp8=4500), _like(0.67, "B200"), 1100,
            _rent(7.0, "assumed: a sixth above B200, as GB300's racks cost above GB200's"),
        ),
        _accelerator(
            "gb200", "NVIDIA GB200, one GPU of it", Sourced(186 * _GIGA, _GB200, "2025"), (8 * _TERA, _GB200, "2025"),
            _peaks(_GB200, "2025", fp64=40, fp32=80, tf32=1250, bf16=2500, fp8=5000), _gemm(0.63), 1200,
            _rent(6.5, "assumed: a little above B200, for the rack's network"),
        ),
        _accelerator(
            "gb300", "NVIDIA GB300, one GPU of it", Sourced(279 * _GIGA, _GB300, "2025"), (8 * _TERA, _GB300, "2025"),
            _peaks(_GB300, "2025", fp64=1.3, fp32=80, tf32=1250, bf16=2500, fp8=5000), _like(0.63, "GB200"), 1400,
            _rent(7.5, "assumed: a sixth above GB200"),
        ),
        _accelerator(
            "l40s", "NVIDIA L40S 48 GB", Sourced(46068 * _MIB, _SMI, "2024"), (864 * _GIGA, _L40S, "2023-08"),
            _peaks(_L40S, "2023-08", fp64=1.4, fp32=91.6, tf32=183, bf16=362.05, fp8=733),
            _like(0.75, "A100, less for its GDDR6"), 350, _rent(0.86, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "l4", "NVIDIA L4 24 GB", Sourced(23034 * _MIB, _SMI, "2024"), (300 * _GIGA, _L4, "2023-03"),
            _peaks(_L4, "2023-03", fp64=0.47, fp32=30.3, tf32=60, bf16=121, fp8=242.5),
            _like(0.6, "A100, less for its 72 W limit"), 72, _rent(0.43, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "a10g", "NVIDIA A10G 24 GB", Sourced(23028 * _MIB, _SMI, "2022"), (600 * _GIGA, _A10G, "2021-11"),
            _peaks(_A10G, "2021-11", fp64=0.55, fp32=35, tf32=35, bf16=70), _like(0.83, "A100"), 300,
            _rent(2.04, "AWS on demand, an eighth of g5.48xlarge", "2024"),
        ),
        _accelerator(
            "a6000", "NVIDIA RTX A6000 48 GB", Sourced(49140 * _MIB, _SMI, "2022"), (768 * _GIGA, _A6000, "2021"),
            _peaks(_A6000, "2021", fp64=1.2, fp32=38.7, tf32=77.4, bf16=154.8), _like(0.8, "A100, less for its GDDR6"), 300,
            _rent(0.49, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "rtx-6000-ada", "NVIDIA RTX 6000 Ada 48 GB", Sourced(49140 * _MIB, _SMI, "2023"), (960 * _GIGA, _ADA_6000, "2023"),
            _peaks(_ADA_6000, "2023", fp64=1.4, fp32=91.1, tf32=182.1, bf16=364.2, fp8=728.5),
            _like(0.75, "A100, less for its 300 W limit"), 300, _rent(0.77, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "rtx-3090", "NVIDIA GeForce RTX 3090 24 GB", Sourced(24576 * _MIB, _SMI, "2021"), (936 * _GIGA, _GA102, "2021"),
            _peaks(_GA102, "2021", fp64=0.56, fp32=35.6, tf32=35.6, bf16=71), _like(0.83, "A100"), 350,
            _rent(0.46, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "rtx-4090", "NVIDIA GeForce RTX 4090 24 GB", Sourced(24564 * _MIB, _SMI, "2023"), (1008 * _GIGA, _AD102, "2023"),
            _peaks(_AD102, "2023", fp64=1.3, fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3), _like(0.83, "A100"), 450,
            _rent(0.69, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "rtx-5090", "NVIDIA GeForce RTX 5090 32 GB", Sourced(32607 * _MIB, _SMI, "2025"), (1792 * _GIGA, _GB202, "2025-01"),
            _peaks(_GB202, "2025-01", fp64=1.6, fp32=104.8, tf32=104.8, bf16=209.5, fp8=419), _like(0.83, "A100"), 575,
            _rent(0.94, "assumed: about what RunPod lists"),
        ),
        _accelerator(
            "mi250x", "AMD MI250X, one die of two, 64 GB", Sourced(65520 * _MIB, "rocm-smi VRAM total", "2022"),
            (1.6 * _TERA, _MI250X, "2021-11"), _peaks(_MI250X, "2021-11", fp64=47.9, fp32=47.9, bf16=191.5),
            _like(0.51, "MI300X"), 280, _rent(0.7, "assumed: half of what clouds list for both dies"),
        ),
        _accelerator(
            "mi300x", "AMD MI300X 192 GB", Sourced(196592 * _MIB, "rocm-smi VRAM total", "2024"),
            (5.3 * _TERA, _MI300X, "2023-12"), _MI300X_PEAKS, Sourced(0.51, _SWEEP, "2025"), 750,
            _rent(2.0, "assumed: a little below MI325X"),
        ),
        _accelerator(
            "mi325x", "AMD MI325X 256 GB", Sourced(256 * _GIGA, _MI325X, "2024-10"), (6.0 * _TERA, _MI325X, "2024-10"),
            _MI300X_PEAKS, _like(0.51, "MI300X, the same chip; its higher limit may raise it"), 1000,
            _rent(2.25, "awesomeagents.ai: 2.00 to 2.25 a hour", "2026"),
        ),
        _accelerator(
            "mi355x", "AMD MI355X 288 GB", Sourced(288 * _GIGA, _MI355X, "2025-06"), (8 * _TERA, _MI355X, "2025-06"),
            _peaks(_MI355X, "2025-06", fp64=78.6, fp32=157.3, bf16=2516.6, fp8=5033.2), _like(0.51, "MI300X"), 1400,
            _rent(3.5, "assumed: between MI325X and B200"),
        ),
    )
}  # fmt: skip
