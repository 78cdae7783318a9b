"""What each module that recomputation can name keeps and costs, of one block: a table for docs/memory-for-speed.md.

python benchmarks/plan/modules.py llama-3-8b qwen3-30b-a3b deepseek-v3 [--ep 8] [--stack megatron] [--gpus 8xh100]
"""

from __future__ import annotations

import argparse

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.plan.columns.block_memory import block_memory
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.time.recompute_prices import forward_seconds
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Shape
from ultrascale.work.recompute import available_modules, recompute_of_mode, recomputed_ops, reruns_last, selective_words
from ultrascale.work.work import block_work

TOKENS = 4096


def rows(name: str, ep: int, stack: str, gpus: str) -> list[tuple[str, float, float]]:
    """(way, MiB that the model's last block keeps of a sequence, ms that it adds) with the block's forward pass first."""
    model, kernels = PRESETS[name], STACKS[stack].kernels
    workload = Workload(model, parse_cluster(gpus), TOKENS, 64, STACKS[stack])
    shape = Shape(1, TOKENS, "bf16", device="cuda", ep=ep if model.num_experts else 1, kernels=kernels)
    layer = model.num_hidden_layers - 1
    ops = block_work(model, layer, shape)
    found = []
    for way in ("none", *available_modules(model), "selective", "full"):
        again = recompute_of_mode(way, model, layer, shape, workload.stack)
        run = recomputed_ops(again, ops, reruns_last=reruns_last(ops, tp=1, splits=False))
        if again is not None and not run:
            continue
        seconds = float(forward_seconds(workload, shape, tuple(run) if run else ops, CONSTANTS).sum())
        kept = block_memory(model, layer, shape, recompute=way, stack=workload.stack).saved_bytes
        found.append((way, kept / 2**20, 1e3 * seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--stack", default="ultrascale")
    parser.add_argument("--gpus", default="8xh100")
    asked = parser.parse_args()
    for name in asked.models:
        (_, _, forward), *_ = table = rows(name, asked.ep, asked.stack, asked.gpus)
        print(f"\n{name}, ep {asked.ep}; forward pass of the block {forward:.2f} ms; ", end="")
        shape = Shape(1, TOKENS, ep=asked.ep)
        print(f"selective: {selective_words(PRESETS[name], shape)}\n\n| way | kept | adds |\n|---|---|---|")
        for way, kept, added in table:
            print(f"| `{way}` | {kept:.0f} MiB | {'' if way == 'none' else f'{added:.2f} ms'} |")


if __name__ == "__main__":
    main()
