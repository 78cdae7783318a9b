"""What each budget of activations costs in time, by the planner: recompute = "auto" beside none, selective and full.

    python benchmarks/plan/recompute_budget.py [--model llama-3-8b] [--gpus 8xh100] [--seq-len 8192] [--micro-batch-size 2]

Predictions, the same on every machine; the last column alone is measured here: seconds to choose.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.units import format_bytes
from ultrascale.plan.search.recompute_choice import choose, recompute_options
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.work import Shape

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Of the way from the least bytes to those without recomputation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--gpus", default="8xh100")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    asked = parser.parse_args()
    model, cluster = preset(asked.model), parse_cluster(asked.gpus)
    workload = Workload(model, cluster, asked.seq_len, cluster.num_accelerators * asked.micro_batch_size * 4)
    layout = Layout(
        dp=cluster.num_accelerators, zero_stage=3, precision="bf16", micro_batch_size=asked.micro_batch_size, recompute="auto"
    )
    print("one block, by the way it is recomputed")
    ways = recompute_options(workload, 0, Shape(asked.micro_batch_size, asked.seq_len, "bf16", device="cuda"))
    for way in ways:
        print(f"  {way.mode:<36} keeps {format_bytes(way.kept_bytes):>10}, adds {way.seconds * 1e3:6.2f} ms a micro-batch")
    print("\nall blocks")
    least, most = (model.num_hidden_layers * way.kept_bytes for way in (ways[-1], ways[0]))
    for way in ("none", "selective", "full"):
        _row(workload, replace(layout, recompute=way), way, "")
    for share in SHARES:
        budget = round(least + share * (most - least))
        started = time.perf_counter()
        chosen = choose(workload, replace(layout, recompute_budget=budget))
        _row(workload, chosen, format_bytes(budget), f"{time.perf_counter() - started:.3f} s")


def _row(workload: Workload, layout: Layout, budget: str, seconds: str) -> None:
    found = predict(workload, layout)
    told = ", ".join(layout.recompute_blocks)
    peak = format_bytes(round(float(found.memory.allocated)))
    print(f"  {budget:<10} peak {peak:>9}, step {found.step_seconds:6.3f} s  {seconds:>8}  {told}")


if __name__ == "__main__":
    main()
