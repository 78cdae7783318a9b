"""Findings about this machine, and problems that would stop a run on it.

Works without torch, and reports that it is missing. Reads only the environment variables named in `VARIABLES`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ultrascale import __version__
from ultrascale.catalogue.machines import usable_cores
from ultrascale.description.units import count_of

TORCH_RANGE = ((2, 11), (2, 15))
"""Releases of torch this version is tested with: from the first, below the second. Also stated in pyproject.toml."""
TORCH_REMEDY = "pip install 'ultrascale[train]'"
PACKAGES = {
    "train": ("numpy", "safetensors", "tokenizers"),
    "data": ("pyarrow", "zstandard"),
    "plot": ("matplotlib",),
}
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One fact about the machine."""

    part: str
    name: str
    value: str
    state: Literal["good", "note", "stop"] = "good"
    """note: a run works but something is missing or slow; stop: a training run would fail."""
    remedy: str = ""


def examine(folder: Path, *, gpus: int | None) -> list[Finding]:
    """All findings, in the order of a report. `folder`: where runs are written; `gpus`: required number of GPUs. Takes seconds
    if torch is installed."""
    findings = [*software(), *processor(), *memory(), *disk(folder)]
    if any(finding.name == "torch" and finding.state == "good" for finding in findings):
        findings += [gloo_loopback(), *accelerators()]
    num_gpus = sum(finding.name.startswith("device ") for finding in findings)
    if gpus is not None and num_gpus < gpus:
        remedy = "Leave this machine out until somebody has looked at it; nvidia-smi and dmesg may say more."
        findings.append(Finding("accelerators", "GPUs", f"{num_gpus} answer, {gpus} are expected", "stop", remedy))
    return findings


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of its installed dependencies, for reports."""
    installed = {"python": platform.python_version(), "ultrascale": __version__}
    for package in ("torch", *(name for names in PACKAGES.values() for name in names), "transformers"):
        if (version := installed_version(package)) is not None:
            installed[package] = version
    return installed


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def software() -> Iterator[Finding]:
    """Python, torch, and the packages of each extra."""
    yield Finding("software", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding("software", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("software", "ultrascale", __version__)
    yield torch_installed()
    for extra, packages in PACKAGES.items():
        for package in packages:
            version = installed_version(package)
            if version is not None:
                yield Finding("software", package, version)
            else:
                remedy = f"pip install 'ultrascale[{extra}]'"
                yield Finding("software", package, "not installed", "stop" if extra == "train" else "note", remedy)


def torch_installed() -> Finding:
    """Finding whether torch is installed, can be imported, and is a release that this version is tested with."""
    if (version := installed_version("torch")) is None:
        return Finding("software", "torch", "not installed; planning works without", "stop", TORCH_REMEDY)
    try:
        import torch
    except Exception as error:  # a broken binary raises anything: OSError, ImportError, RuntimeError
        return Finding("software", "torch", f"{version} does not import: {error}", "stop", TORCH_REMEDY)
    return torch_release(torch.__version__)


def torch_release(version: str) -> Finding:
    """Finding whether this release of torch is one that this version is tested with."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    oldest, first_too_new = TORCH_RANGE
    if not oldest <= release < first_too_new:
        wanted = f"{'.'.join(map(str, oldest))} up to, not including, {'.'.join(map(str, first_too_new))}"
        return Finding("software", "torch", f"{version}; tested with {wanted}", "stop", TORCH_REMEDY)
    return Finding("software", "torch", version)


def processor() -> Iterator[Finding]:
    """Processor, the cores that this process may use, and the features that determine their speed."""
    facts = cpu_facts()
    cores = usable_cores()
    yield Finding("processor", "name", facts.get("model name", platform.processor() or "unknown"))
    quota = Path("/sys/fs/cgroup/cpu.max")
    limited = quota.exists() and (share := quota.read_text().split())[0] != "max"
    container = f", {int(share[0]) / int(share[1]):.1f} by the container's limit" if limited else ""
    yield Finding("processor", "cores", f"{cores} usable{container}")
    flags = facts.get("flags", "").split()
    if platform.machine() == "x86_64" and flags:
        fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        state = "good" if {"avx512_bf16", "amx_bf16"} & set(fast) else "note"
        yield Finding(
            "processor", "vector units", " ".join(fast) or "none", state, "" if state == "good" else "bf16 is emulated: slow."
        )
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if compiler:
        yield Finding("processor", "C++ compiler", compiler)
    else:
        yield Finding("processor", "C++ compiler", "none", "note", "compile = true needs one on CPU: apt install g++")
    for name in VARIABLES:
        if name in os.environ:
            yield Finding("processor", name, os.environ[name])
    if "OMP_NUM_THREADS" not in os.environ:
        yield Finding("processor", "OMP_NUM_THREADS", f"unset: each process uses {count_of(cores, 'thread')}")


def cpu_facts() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def memory() -> Iterator[Finding]:
    """Memory of the machine, the container's limit, and shared memory, in GiB."""
    try:
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
    except OSError:
        return
    available = sizes["MemAvailable"]
    short = available < 2 * GIB
    text = f"{available / GIB:.1f} GiB available of {sizes['MemTotal'] / GIB:.1f}"
    yield Finding("memory", "memory", text, "note" if short else "good", "Each process needs about 0.5 GiB." if short else "")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (value := limit.read_text().strip()) != "max":
        yield Finding("memory", "container limit", f"{int(value) / GIB:.1f} GiB")
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").total
        tight = shared < GIB
        remedy = "NCCL needs more between processes: docker run --shm-size=8g" if tight else ""
        yield Finding("memory", "/dev/shm", f"{shared / GIB:.1f} GiB", "note" if tight else "good", remedy)


def disk(folder: Path) -> Iterator[Finding]:
    """Free space of the folder of runs (or of the one that will contain it), and whether it is writable."""
    elsewhere = "Run from a folder you may write, or set `folder`."
    folder = folder.absolute()
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not existing.is_dir():
        yield Finding("disk", "folder", f"{existing} is no folder", "stop", "Remove the file, or name another folder.")
        return
    if existing != folder:
        yield Finding("disk", "folder", f"{folder} is not there yet; looked at {existing}", "note", "A run makes it.")
    try:
        free = shutil.disk_usage(existing).free
        tight = free < 2 * GIB
        remedy = "A checkpoint takes 12 bytes a parameter." if tight else ""
        yield Finding("disk", "free", f"{free / GIB:.1f} GiB in {existing.resolve()}", "note" if tight else "good", remedy)
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("disk", "writable", f"no: {error.strerror}", "stop", elsewhere)


def gloo_loopback() -> Finding:
    """Finding whether two processes on this machine can all-reduce over gloo, which training with --processes 2 needs."""
    import multiprocessing

    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "fork")
    with tempfile.TemporaryDirectory() as place:
        ranks = [context.Process(target=sum_over_gloo, args=(rank, f"{place}/store"), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        good = all(process.exitcode == 0 for process in ranks)
        for process in ranks:
            process.kill()
    if good:
        return Finding("processes", "gloo", "two processes summed a tensor")
    remedy = "If this host's name does not resolve, try: export GLOO_SOCKET_IFNAME=lo"
    return Finding("processes", "gloo", "two processes could not reach each other", "stop", remedy)


def sum_over_gloo(rank: int, store: str) -> None:
    """One of the two ranks of `gloo_loopback`."""
    import signal
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and ends us
    wait = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    sys.exit(0 if total.item() == 2 else 1)


def accelerators() -> Iterator[Finding]:
    """CUDA devices with their memory, and whether NCCL is available."""
    import torch

    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda} finds none"
        yield Finding("accelerators", "CUDA devices", f"none: {why}; runs use the CPU")
        return
    yield Finding("accelerators", "CUDA", f"{torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        text = (
            f"{device.name}, {free / GIB:.1f} GiB free of {total / GIB:.1f}, compute capability {device.major}.{device.minor}"
        )
        remedy = "Another process uses it: nvidia-smi says which." if busy else ""
        yield Finding("accelerators", f"device {index}", text, "note" if busy else "good", remedy)
    if not torch.distributed.is_nccl_available():
        yield Finding("accelerators", "NCCL", "not in this torch", "stop", "Several GPUs need it; install torch's CUDA build.")
