"""How fast checkpoints go to an S3 server and come back, beside the server's own rate.

    python benchmarks/cpu/store_speed.py [--mib 256] [--rounds 5] [--json FILE]

The server is moto's on this machine, in memory, in Python: it is the slowest part, and its own rate is what plain requests
(http.client, as many streams and bytes a request as ours) get of it. Every round times each line once, in turns; reported are
MB/s, median and lowest to highest, and the median of the rounds' ratios to the server's own rate. Ours reads the file, takes
CRC-32 of each part and of the whole, and SHA-256 for the server to compare; loading checks every part and fsyncs the file.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from s3_server import BUCKET, environment, s3_server

from ultrascale import checkpoint
from ultrascale.checkpoint.stored import fetch, publish_stored, upload_files, verify_stored
from ultrascale.checkpoint.stored.publish import files_of
from ultrascale.storage import open_store
from ultrascale.storage.parts import PART_BYTES, STREAMS

SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=AKIATEST/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
}
"""The server looks who asks, and compares no signature."""


def plainly(server: str, method: str, keys: list[str], body: bytes) -> None:
    """One request a key, `STREAMS` at a time, each on a connection of its own."""

    def request(key: str) -> None:
        connection = http.client.HTTPConnection(server.removeprefix("http://"))
        connection.request(method, f"/{BUCKET}/{key}", body if method == "PUT" else None, SIGNED)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        assert answer.status == 200 and (method == "PUT" or len(data) == len(body)), answer.status

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(request, keys))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(server: str, mib: int, rounds: int, scratch: Path) -> dict[str, list[float]]:
    """MB/s of every line in every round."""
    tensors = {f"w{i}": torch.randn(mib * (1 << 20) // 4 // 8) for i in range(8)}
    folder = checkpoint.save(scratch / "disk", 1, tensors, {})
    manifest = checkpoint.verify(folder)
    size = sum(shard.bytes for shard in manifest.shards.values())
    body = os.urandom(PART_BYTES)
    keys = [f"plain/{i}" for i in range(-(-size // PART_BYTES))]
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
        save = timed(lambda: plainly(server, "PUT", keys, body))
        started = time.perf_counter()
        files = upload_files(store, folder, files_of(manifest))
        index = publish_stored(store, folder, files, before=None)
        ours = time.perf_counter() - started
        load = timed(lambda: plainly(server, "GET", keys, body))
        fetched = timed(partial(fetch, store, index, scratch / "back"))
        verified = timed(partial(verify_stored, store, index))
        shutil.rmtree(scratch / "back")
        store.remove(one.key for one in store.walk(""))
        plain = len(keys) * PART_BYTES
        for name, count, seconds in (
            ("the server's own, PUT", plain, save), ("ours: upload and publish", size, ours),
            ("the server's own, GET", plain, load), ("ours: fetch onto the disk", size, fetched),
            ("ours: verify", size, verified),
        ):  # fmt: skip
            rates.setdefault(name, []).append(count / seconds / 1e6)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="store-speed-"))
    try:
        with s3_server() as server:
            os.environ.update(environment(server))
            rates = measure(server, asked.mib, asked.rounds, scratch)
    finally:
        shutil.rmtree(scratch)
    rows = []
    for name, found in rates.items():
        own = rates["the server's own, PUT" if "PUT" in name or "upload" in name else "the server's own, GET"]
        ratio = median(ours / theirs for ours, theirs in zip(found, own, strict=True))
        rows.append({"line": name, "mb_per_s": median(found), "lowest": min(found), "highest": max(found), "ratio": ratio})
        print(f"{name:28} {median(found):7.0f} MB/s  ({min(found):.0f} to {max(found):.0f})  {ratio:.2f}")
    if asked.json:
        facts = {"mib": asked.mib, "rounds": asked.rounds, "processor_count": os.cpu_count(), "platform": platform.platform()}
        asked.json.write_text(json.dumps({**facts, "lines": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
