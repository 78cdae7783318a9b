"""Tokens per second of `ultrascale data prepare` beside `tokenizers.encode_batch`, on the same text and all cores.

    python benchmarks/cpu/tokenize_speed.py [--megabytes 16] [--repetitions 5]

The text is Python's standard library. Both sides use the same byte-level BPE of 8,192 ids. `encode_batch` gets the
texts in memory, 1,024 at a time, and keeps nothing; `prepare` also starts its processes, reads the files, writes shards and
checksums them. The two take turns, so that what else the machine does hits both; the ratio of each pair is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import tokenizers

from ultrascale.catalogue.machines import usable_cores
from ultrascale.data.preparing.prepare import Recipe, prepare
from ultrascale.data.tokenizer import load_tokenizer, train_tokenizer


def read_texts(folder: Path, limit_bytes: int) -> list[tuple[str, str]]:
    """Name and text of the standard library's modules, up to a size."""
    texts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or size >= limit_bytes:
            continue
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        if text:
            texts.append((path.relative_to(folder).as_posix().replace("/", "-"), text))
            size += len(text)
    return texts


def time_encode_batch(tokenizer_path: Path, texts: list[str]) -> tuple[int, float]:
    """Tokens and seconds of the library alone."""
    tokenizer = load_tokenizer(tokenizer_path)
    start = time.perf_counter()
    tokens = 0
    for first in range(0, len(texts), 1024):
        encodings = tokenizer.encode_batch(texts[first : first + 1024], add_special_tokens=False)
        tokens += sum(len(encoding) for encoding in encodings)
    return tokens, time.perf_counter() - start


def time_prepare(tokenizer_path: Path, source: Path, cores: int) -> tuple[int, float]:
    """Tokens (without ends of documents) and seconds of preparing a folder."""
    with tempfile.TemporaryDirectory() as output:
        start = time.perf_counter()
        made = prepare([source], output=output, recipe=Recipe(tokenizer=tokenizer_path), workers=cores).manifest
        return made.tokens - made.documents, time.perf_counter() - start


def measure(megabytes: int, repetitions: int) -> dict[str, object]:
    """Runs both sides in turn; medians and extremes."""
    texts = read_texts(Path(sysconfig.get_paths()["stdlib"]), megabytes << 20)
    cores = usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        for name, text in texts:
            (source / name).write_bytes(text.encode())
        tokenizer_path = Path(folder, "tokenizer.json")
        train_tokenizer([text for _, text in texts], 8192).save(str(tokenizer_path))
        library, ours, ratios = [], [], []
        for _ in range(repetitions):
            tokens, seconds = time_encode_batch(tokenizer_path, [text for _, text in texts])
            library.append(tokens / seconds)
            same, seconds = time_prepare(tokenizer_path, source, cores)
            assert same == tokens, "both sides must make the same tokens"
            ours.append(same / seconds)
            ratios.append(ours[-1] / library[-1])
    return {
        "cores": cores,
        "tokens": tokens,
        "documents": len(texts),
        "encode_batch_tokens_per_second": _spread(library),
        "prepare_tokens_per_second": _spread(ours),
        "prepare_over_encode_batch": _spread(ratios),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repetitions": len(values)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16, help="text to tokenize")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(measure(options.megabytes, options.repetitions), indent=1))
