"""How fast checkpoints are saved and loaded, beside the bare disk, torch.save and torch's own distributed checkpoints (DCP).

    python benchmarks/cpu/checkpoint_speed.py [--mib 512] [--ranks 2] [--rounds 7] [--ours] [--folder .] [--json FILE]

Every round times each contestant once, in a fresh folder, over the same sharded fp32 tensors; all processes start together and
the slowest counts. Reported: GB/s of all ranks together, median and lowest to highest, and of the rounds' ratios to the first
line of its part the median and the middle half. What is read is dropped from memory before each contestant, so that it comes
from the disk (`--warm` leaves it there). `--ours` leaves torch.save and DCP out: more rounds in the time, and the bare disk
just before or after. What the lines do differs: torch.save and DCP take no checksum and do not rename;
`bare` only moves bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ultrascale import checkpoint
from ultrascale.checkpoint.disk.checksum import crc32

BLOCK_BYTES = 4 << 20
WRITING = ("bare write + fsync", "ours: save", "torch.save + fsync", "DCP save")
READING = ("bare read", "ours: verify", "ours: load (verify + read)", "torch.load", "DCP load", "crc32 alone, in memory")
OTHERS = ("torch.save + fsync", "DCP save", "torch.load", "DCP load")


class Contest:
    """One rank's part of every contestant."""

    def __init__(self, rank: int, folder: Path, mib: int):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        rows = torch.randn(mib * 1024 * 1024 // 4 // 16 // 1024, 1024)
        self.tensors = {f"layers.{i}.weight": distribute_tensor(rows + i, mesh, [Shard(0)]) for i in range(16)}
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.rank, self.folder = rank, folder
        self.bare, self.saved = folder / f"bare-{rank}", folder / f"torch-{rank}.pt"

    def local(self) -> list[torch.Tensor]:
        return [tensor.to_local() for tensor in self.tensors.values()]

    def views(self) -> list[memoryview]:
        return [memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in self.local()]  # type: ignore[arg-type]

    def clear(self) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            os.sync()
        dist.barrier()

    def forget(self) -> None:
        """Have the kernel drop what it keeps of the files, so that reading goes to the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def work(self) -> dict[str, Callable[[], Any]]:
        """What is timed, by the names in WRITING and READING."""
        return {
            "bare write + fsync": self.bare_write,
            "ours: save": lambda: checkpoint.save(self.folder / "ours", 1, self.tensors, {}),
            "torch.save + fsync": self.torch_save,
            "DCP save": lambda: dcp_save(dict(self.tensors), checkpoint_id=self.folder / "dcp"),
            "bare read": self.bare_read,
            "ours: verify": lambda: checkpoint.verify(self.folder / "ours/step-00000001", process_group=dist.group.WORLD),
            "ours: load (verify + read)": lambda: checkpoint.load(self.folder / "ours/step-00000001", self.targets),
            "torch.load": lambda: torch.load(self.saved, weights_only=True),
            "DCP load": lambda: dcp_load(dict(self.targets), checkpoint_id=self.folder / "dcp"),
            "crc32 alone, in memory": lambda: [crc32(view) for view in self.views()],
        }

    def bare_write(self) -> None:
        fd = os.open(self.bare, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
        for view in self.views():
            for at in range(0, len(view), BLOCK_BYTES):
                os.write(fd, view[at : at + BLOCK_BYTES])
        os.fsync(fd)
        os.close(fd)

    def bare_read(self) -> None:
        buffer = bytearray(BLOCK_BYTES)
        with self.bare.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def torch_save(self) -> None:
        with self.saved.open("wb") as file:
            torch.save(self.local(), file)
            file.flush()
            os.fsync(file.fileno())


def parts(ours: bool) -> list[list[str]]:
    """Who writes and who reads; the bare disk first."""
    return [[name for name in part if not (ours and name in OTHERS)] for part in (WRITING, READING)]


def in_turn(turn: int, ours: bool) -> list[str]:
    """The order of a round: who goes first finds an idle disk, so everybody does once, but reading comes after writing."""
    return [name for part in parts(ours) for name in part[turn % len(part) :] + part[: turn % len(part)]]


def rank_main(rank: int, world: int, folder: str, options: argparse.Namespace, results: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    contest = Contest(rank, Path(folder) / "round", options.mib)
    for turn in range(options.rounds + 1):
        contest.clear()
        contestants = contest.work()
        for name in in_turn(turn, options.ours):
            if rank == 0:
                os.sync()
                if name in READING and not options.warm:
                    contest.forget()
            dist.barrier()
            start = time.perf_counter()
            contestants[name]()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if rank == 0 and turn > 0:  # The first round warms caches and imports.
                results.put((name, slowest.item()))
    contest.clear()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ours", action="store_true", help="without torch.save and DCP")
    parser.add_argument("--folder", default=".", help="where to write")
    parser.add_argument("--warm", action="store_true", help="read what was just written from memory")
    parser.add_argument("--json", type=Path, help="write every time here")
    options = parser.parse_args()
    seconds = run(options)
    report(seconds, options)
    if options.json:
        about = {
            "date": time.strftime("%Y-%m-%d"), "mib": options.mib, "ranks": options.ranks, "rounds": options.rounds,
            "warm": options.warm, "torch": torch.__version__, "machine": platform.machine(), "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        ratios = {name: ratio_to(names[0], name, seconds) for names in parts(options.ours) for name in names}
        options.json.write_text(json.dumps({"about": about, "ratios": ratios, "seconds": seconds}, indent=1) + "\n")


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every round by contestant."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=os.path.abspath(options.folder)) as folder:
        arguments = (options.ranks, folder, options, results)
        processes = [context.Process(target=rank_main, args=(rank, *arguments), daemon=True) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for _ in range(options.rounds * len(in_turn(0, options.ours))):
            while results.empty():
                if any(process.exitcode for process in processes):
                    raise SystemExit("a process failed; its error stands above")
                time.sleep(0.05)
            name, taken = results.get()
            seconds.setdefault(name, []).append(taken)
        for process in processes:
            process.join()
    return seconds


def report(seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Two tables, of writing and of reading."""
    gigabytes = options.mib * 2**20 / 1e9
    print(
        f"{options.mib} MiB, {options.ranks} ranks, {options.rounds} rounds, {os.cpu_count()} CPUs, torch {torch.__version__}"
    )
    for names in parts(options.ours):
        first = names[0]
        print(f"\n{'':28}{'GB/s':>6}{'lowest':>8}{'highest':>9}{'of ' + first:>28}{'middle half':>15}")
        for name in names:
            rates = sorted(gigabytes / taken for taken in seconds[name])
            low, middle, high = ratio_to(first, name, seconds)
            print(f"{name:28}{median(rates):6.2f}{rates[0]:8.2f}{rates[-1]:9.2f}{middle:28.2f}{f'{low:.2f}-{high:.2f}':>15}")


def ratio_to(first: str, name: str, seconds: dict[str, list[float]]) -> tuple[float, float, float]:
    """Quartiles of the rounds' ratios of speed to that of `first`."""
    ratios = [bare / taken for bare, taken in zip(seconds[first], seconds[name], strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    return round(low, 3), round(middle, 3), round(high, 3)


if __name__ == "__main__":
    main()
