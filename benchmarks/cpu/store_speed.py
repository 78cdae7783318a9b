"""How fast checkpoints go to an S3 server and come back, beside the server's own rate.

    python benchmarks/cpu/store_speed.py [--mib 256] [--rounds 5] [--apart] [--json FILE]

The server is moto's on this machine, in memory, in Python: it is the slowest part, and its own rate is what plain requests
(http.client, as many at once, of the same sizes) get of it. Every round times each line once, in turns; reported are MB/s,
median and lowest to highest, and two medians of the rounds' ratios to the server's own line: of rates, and of processor seconds
of client and server together, which others on the machine do not change. With `--apart` the server has one processor and the
client another, as on two machines; else each takes from the other what it uses. Ours reads the file, takes CRC-32 of each part,
and SHA-256 for the server to compare; loading checks every part and fsyncs the file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from s3_server import BUCKET, environment, s3_server

from ultrascale import checkpoint
from ultrascale.checkpoint.stored.fetch import fetch, verify_stored
from ultrascale.checkpoint.stored.index import Index
from ultrascale.checkpoint.stored.publish import files_of, publish_stored, upload_files
from ultrascale.storage import Store, open_store
from ultrascale.storage.parts import PART_BYTES, STREAMS

T = TypeVar("T")
OWN = {
    "ours: upload and publish": "the server's own, PUT", "ours: fetch onto the disk": "the server's own, GET to disk",
    "ours: verify": "the server's own, GET",
}  # fmt: skip
"""What each line of ours is told of."""
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=AKIATEST/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
}
"""The server looks who asks, and compares no signature."""


def plainly(server: str, method: str, prefix: str, sizes: list[int], body: bytes, folder: Path | None = None) -> None:
    """One request a size, `STREAMS` at a time, each on a connection of its own; keys are under `prefix`. Answers are written to
    files of `folder`, and fsynced."""

    def request(index: int) -> None:
        connection = http.client.HTTPConnection(server.removeprefix("http://"))
        sent = memoryview(body)[: sizes[index]]
        connection.request(method, f"/{BUCKET}/{prefix}/plain/{index}", sent if method == "PUT" else None, SIGNED)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if folder is not None:
            with open(folder / str(index), "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
        assert answer.status == 200 and (method == "PUT" or len(data) == sizes[index]), answer.status

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(request, range(len(sizes))))


def processor_seconds() -> float:
    """Seconds of this process and its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = [Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split() for child in children]
    ticks = sum(int(one[11]) + int(one[12]) for one in fields)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def keep_apart() -> None:
    """The server on the first processor, this process on the second."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for processor, process in ((first, child), (second, str(os.getpid()))):
        for thread in os.listdir(f"/proc/{process}/task"):
            os.sched_setaffinity(int(thread), {processor})


def measure(server: str, mib: int, rounds: int, scratch: Path) -> dict[str, list[tuple[float, float]]]:
    """MB/s, and processor seconds per GB, of every line in every round."""
    tensors = {f"w{i}": torch.randn(mib * (1 << 20) // 4 // 8) for i in range(8)}
    folder = checkpoint.save(scratch / "disk", 1, tensors, {})
    manifest = checkpoint.verify(folder)
    size = sum(shard.bytes for shard in manifest.shards.values())
    sizes = [min(PART_BYTES, size - at) for at in range(0, size, PART_BYTES)]
    body = os.urandom(PART_BYTES)
    found: dict[str, list[tuple[float, float]]] = {}

    def line(name: str, work: Callable[[], T]) -> T:
        used, started = processor_seconds(), time.perf_counter()
        result = work()
        seconds = time.perf_counter() - started
        found.setdefault(name, []).append((size / seconds / 1e6, (processor_seconds() - used) / size * 1e9))
        return result

    for _ in range(rounds):
        prefix = uuid.uuid4().hex
        store = open_store(f"s3://{BUCKET}/{prefix}")

        def save(store: Store = store) -> Index:
            return publish_stored(store, manifest, upload_files(store, folder, files_of(manifest)), before=None)

        def empty(store: Store = store) -> None:  # memory that it has at hand costs the server less than new
            store.remove(one.key for one in store.walk(""))

        line("the server's own, PUT", partial(plainly, server, "PUT", prefix, sizes, body))
        line("the server's own, GET", partial(plainly, server, "GET", prefix, sizes, body))
        plain = scratch / "plain"
        plain.mkdir()
        line("the server's own, GET to disk", partial(plainly, server, "GET", prefix, sizes, body, plain))
        shutil.rmtree(plain)
        empty()
        index = line("ours: upload and publish", save)
        line("ours: fetch onto the disk", partial(fetch, store, index, scratch / "back"))
        line("ours: verify", partial(verify_stored, store, index))
        empty()
        shutil.rmtree(scratch / "back")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="store-speed-"))
    try:
        with s3_server() as server:
            os.environ.update(environment(server))
            if asked.apart:
                keep_apart()
            rates = measure(server, asked.mib, asked.rounds, scratch)
    finally:
        shutil.rmtree(scratch)
    rows = []
    for name, found in rates.items():
        own = rates[OWN.get(name, name)]
        ratio = median(ours / theirs for (ours, _), (theirs, _) in zip(found, own, strict=True))
        work = median(theirs / ours for (_, ours), (_, theirs) in zip(found, own, strict=True))
        speeds = [one for one, _ in found]
        rows.append({"line": name, "mb_per_s": median(speeds), "lowest": min(speeds), "highest": max(speeds), "ratio": ratio,
                     "processor_ratio": work})  # fmt: skip
        told = f"{median(speeds):7.0f} MB/s  ({min(speeds):.0f} to {max(speeds):.0f})"
        print(f"{name:29} {told}  {ratio:.2f}  by processor seconds {work:.2f}")
    if asked.json:
        facts = {
            "mib": asked.mib,
            "rounds": asked.rounds,
            "apart": asked.apart,
            "processor_count": os.cpu_count(),
            "platform": platform.platform(),
        }
        asked.json.write_text(json.dumps({**facts, "lines": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
