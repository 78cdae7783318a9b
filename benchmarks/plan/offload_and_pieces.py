"""What offload of activations, and feed-forward layers in pieces, save and cost Llama-3 8B on 8 devices, by the planner.

    python benchmarks/plan/offload_and_pieces.py

Predictions, the same on every machine: the tables of docs/memory-for-speed.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.units import format_bytes
from ultrascale.plan.memory.replay import plan_memory
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload

ZERO_3 = Layout(dp=8, zero_stage=3, precision="bf16")
WAYS = (ZERO_3, replace(ZERO_3, recompute="full"))


def main() -> None:
    usual = [replace(way, micro_batch_size=2) for way in WAYS]
    away = [replace(way, offload_activations=offload) for way in usual for offload in (False, True)]
    for gpus in ("8xh100", "8xgh200", "8xa100-80"):
        _table(gpus, 8192, 64, away)
    _table("8xh100", 65536, 8, [replace(way, mlp_chunks=pieces) for way in WAYS for pieces in (1, 4, 16, 64)])


def _table(gpus: str, length: int, sequences: int, layouts: Iterable[Layout]) -> None:
    workload = Workload(preset("llama-3-8b"), parse_cluster(gpus), length, sequences)
    print(f"\n{gpus}, sequences of {length}")
    for layout in layouts:
        price = predict(workload, layout)
        memory = plan_memory(workload.model, layout, sequence_length=length, sequences_per_batch=sequences)
        words = [f"recompute {layout.recompute}", *(["offload_activations"] if layout.offload_activations else [])]
        words += [f"mlp_chunks {layout.mlp_chunks}"] if layout.mlp_chunks > 1 else []
        peak, host = format_bytes(memory.peak.total), format_bytes(memory.host_bytes)
        fits = "" if price.memory.fits else "  does not fit"
        print(f"  {', '.join(words):<36} peak {peak:>9}, host {host:>9}, step {price.step_seconds:6.2f} s{fits}")


if __name__ == "__main__":
    main()
