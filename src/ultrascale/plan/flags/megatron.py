"""A plan as a script that starts Megatron-LM: arguments for model and layout, and those that the user sets."""

from __future__ import annotations

from typing import Any

from ultrascale.description.layout import NARROW, Layout
from ultrascale.description.recomputed import is_modules, megatron_modules
from ultrascale.plan.flags.megatron_model import WRITTEN, arguments, unwritten
from ultrascale.plan.flags.written import LEARNING_RATE, LEAST_RATE, STEPS, YOURS, TrainerPlan, shell_array, unwritten_fields
from ultrascale.plan.time.stages import chunk_layers_of
from ultrascale.work.fp8_slots import is_delayed

RELEASE = "Megatron-LM, core_r0.16.0 (pretrain_gpt.py)"
MEGATRON_CP = {"ring": "p2p", "all-gather": "all_gather", "all-to-all": "a2a", "ring+all-to-all": "a2a+p2p"}


def write(plan: TrainerPlan) -> str:
    """A bash script. With tensor or context parallelism CUDA uses one queue, so that sends start beside computation."""
    yours = {
        "train-iters": STEPS, "lr": LEARNING_RATE, "min-lr": LEAST_RATE, "lr-decay-style": "cosine",
        "lr-warmup-iters": STEPS // 10, "weight-decay": 0.1, "adam-beta2": 0.95, "clip-grad": 1.0, "data-path": "DATA_PREFIX",
        "split": "99,1,0", "tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "TOKENIZER",
        "save": "checkpoints", "save-interval": 500, "log-interval": 10, "eval-interval": 500, "eval-iters": 10,
    }  # fmt: skip
    layout, workload = plan.layout, plan.workload
    model = workload.model
    start = "this script on every node, with NODE_RANK and MASTER_ADDR set"
    lines = ["#!/usr/bin/env bash", *plan.head(RELEASE, start, unwritten_fields(model, WRITTEN, unwritten(model)))]
    if layout.tp > 1 or layout.cp > 1:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1  # collectives of tp and cp start in the order they are launched")
    words = arguments(model, workload.sequence_length, workload.stack.dispatcher) | _layout(plan)
    mark = f"# {YOURS}; vocab_size = {model.vocab_size} is the tokenizer's"
    lines += ["", *shell_array("PLAN", words), "", mark, *shell_array("YOURS", yours), ""]
    torchrun = f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.ranks_per_node}"
    where = '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"'
    return "\n".join([*lines, f"{torchrun} {where} \\", '  pretrain_gpt.py "${PLAN[@]}" "${YOURS[@]}"'])


def _fp8_recipe(layout: Layout) -> str:
    """Recipe of fp8 scales; Megatron's default is delayed."""
    if layout.precision == "mxfp8":
        return "mxfp8"
    return "tensorwise" if layout.precision == "fp8" and layout.fp8_scaling != "delayed" else ""


def _layout(plan: TrainerPlan) -> dict[str, Any]:
    layout = plan.layout
    places, swap = layout.cp_grid
    words: dict[str, Any] = {
        "micro-batch-size": layout.micro_batch_size,
        "global-batch-size": plan.workload.sequences_per_batch,
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": layout.tp > 1 and layout.sequence_parallel,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "cp-comm-type": MEGATRON_CP[layout.cp_method] if layout.cp > 1 else "",
        "hierarchical-context-parallel-sizes": f"{swap} {places}" if swap > 1 and places > 1 else "",
        "expert-model-parallel-size": layout.ep if plan.workload.model.num_experts else "",
        "expert-tensor-parallel-size": layout.expert_tp if plan.workload.model.num_experts else "",
        "use-distributed-optimizer": layout.zero_stage == 1,
        "num-distributed-optimizer-instances": layout.dp_replicate if layout.zero_stage and layout.dp_replicate > 1 else "",
        "overlap-grad-reduce": layout.dp > 1,
        "overlap-param-gather": layout.zero_stage == 1,
        "cross-entropy-loss-fusion": plan.workload.stack.kernels.cross_entropy == "fused",
        "tp-comm-overlap": layout.tp > 1 and plan.workload.stack.overlaps_tensor_parallel,
        **_stages(plan),
        "bf16": layout.precision in ("bf16", *NARROW),
        "fp16": layout.precision == "fp16",
        "fp8-format": {"fp8": "hybrid", "mxfp8": "e4m3"}.get(layout.precision, ""),
        "fp8-recipe": _fp8_recipe(layout),
        "fp4-format": "e2m1" if layout.precision == "nvfp4" else "",
        "fp4-recipe": "nvfp4" if layout.precision == "nvfp4" else "",
        **_delayed(layout),
        "optimizer-cpu-offload": layout.offload_optimizer,
        "use-precision-aware-optimizer": layout.offload_optimizer,  # which offloading requires; its dtypes are fp32 by default
    }
    if plan.workload.stack.optimizer == "adamw-bf16":
        words |= {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}
    if layout.recompute == "full":
        words |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    if layout.recompute == "selective":
        words |= {"recompute-granularity": "selective"}
    elif is_modules(layout.recompute):
        words |= {"recompute-granularity": "selective", "recompute-modules": " ".join(megatron_modules(layout.recompute))}
    return words


def _stages(plan: TrainerPlan) -> dict[str, Any]:
    """Virtual stages if blocks are split evenly; else each stage: E embedding, t block, m prediction block, L loss."""
    layout, predicted = plan.layout, plan.workload.model.num_nextn_predict_layers
    words: dict[str, Any] = {"mtp-num-layers": predicted or ""}
    if layout.pp == 1:
        return words
    chunks = chunk_layers_of(plan.workload, layout.num_stages, layout.layers_per_stage)
    if len(set(chunks)) == 1 and not predicted:
        return words | {"num-virtual-stages-per-pipeline-rank": layout.virtual_stages if layout.virtual_stages > 1 else ""}
    chunks[-1] -= predicted
    stages = ["t" * count for count in chunks]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}{'m' * predicted}L"
    return words | {"pipeline-model-parallel-layout": f"'{'|'.join(stages)}'"}


def _delayed(layout: Layout) -> dict[str, Any]:
    if not is_delayed(layout):
        return {}
    history = {"fp8-amax-history-len": layout.fp8_amax_history_len, "fp8-amax-compute-algo": layout.fp8_amax_compute_algo}
    return {"fp8-recipe": "delayed", **history}
