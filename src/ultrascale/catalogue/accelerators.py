"""The catalogue of accelerators, from accelerators.toml: every number with its source and date."""

from __future__ import annotations

from ultrascale.catalogue.cluster import Accelerator, Sourced
from ultrascale.catalogue.tables import Entry, entries, read_tables, with_aliases

_FILE = "accelerators.toml"
_KEYS = (
    "title", "aliases", "machine", "memory_mib", "memory_gbytes_per_second", "tflops", "tflops_from", "matmul_fraction",
    "watts", "dollars_per_hour",
)  # fmt: skip
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")


def _accelerator(name: str, entry: Entry) -> Accelerator:
    return Accelerator(
        name,
        entry.get("title", str),
        entry.sourced("memory_mib", 2**20),
        entry.sourced("memory_gbytes_per_second", 1e9),
        _peaks(entry),
        entry.sourced("matmul_fraction"),
        entry.sourced("watts"),
        entry.sourced("dollars_per_hour"),
    )


def _peaks(entry: Entry) -> dict[str, Sourced]:
    """Peak FLOPs per second by dtype, the widest first; fp16 is as fast as bf16."""
    table = Entry(f"{entry.where}.tflops", entry.get("tflops", dict))
    table.expect_only(*_DTYPES)
    source, date = entry.get("tflops_from", list)
    tera = {"fp16": table.values["bf16"], **table.values} if "bf16" in table.values else table.values
    return {dtype: Sourced(tera[dtype] * 1e12, source, date) for dtype in _DTYPES if dtype in tera}


_ENTRIES = dict(entries(_FILE, read_tables(_FILE), *_KEYS))
ACCELERATORS = {name: _accelerator(name, entry) for name, entry in _ENTRIES.items()}
USUAL_NODE: dict[str, str] = {name: entry.get("machine", str) for name, entry in _ENTRIES.items()}
"""Node type for a bare number of accelerators."""
ALIASES = with_aliases(_ENTRIES)
"""Other names used by people, clouds and tables."""
