"""A plan as the settings of the trainer it was made for, under that trainer's own names, ready to paste.

    ultrascale    [layout] and [batch] of a run's TOML           nanotron      YAML: parallelism, tokens, optimizer
    megatron      Megatron-LM arguments, the model's with them   llm-foundry   YAML: Composer's fsdp_config, batch
    torchtitan    TOML: parallelism, training, checkpointing     deepspeed     JSON config, and Megatron-DeepSpeed arguments

Names as in Megatron-LM core 0.14, torchtitan 0.2, nanotron 0.5, llm-foundry 0.22 and DeepSpeed 0.18.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.plan.time.stages import chunk_layers_of
from ultrascale.plan.workload import Workload
from ultrascale.spec.fp8_slots import is_delayed
from ultrascale.spec.layout import NARROW, Layout
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.recomputed import is_modules, megatron_modules, modules_named
from ultrascale.spec.stack import Stack
from ultrascale.spec.stack_files import abilities, stack_file, stack_names

MEGATRON_CP = {"ring": "p2p", "all-gather": "all_gather", "all-to-all": "a2a", "ring+all-to-all": "a2a+p2p"}
TORCHTITAN_CP = {"ring": "alltoall", "all-gather": "allgather"}
TORCHTITAN_SCHEDULES = {
    "1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
COMPOSER_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
COMPOSER_HYBRIDS = {2: "_HYBRID_SHARD_ZERO2", 3: "HYBRID_SHARD"}
TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class _Plan:
    """What is written out."""

    workload: Workload
    layout: Layout

    @property
    def accumulation(self) -> int:
        return num_micro_batches(self.layout, self.workload.sequences_per_batch)


def trainer_flags(workload: Workload, layout: Layout) -> str:
    """`layout` as the settings of the workload's stack. Raises SpecError if that trainer has no setting for a part of it."""
    name = workload.stack.name
    if stack_file(name).writes not in _WRITERS:
        known = ", ".join(stack for stack in stack_names() if stack_file(stack).writes in _WRITERS)
        raise SpecError([Problem("stack", f"{name} has no settings that could be printed", f"There are those of {known}.")])
    problems = cannot_express(workload, layout)
    if problems:
        raise SpecError(problems)
    return _WRITERS[stack_file(workload.stack.name).writes](_Plan(workload, layout))


def cannot_express(workload: Workload, layout: Layout) -> list[Problem]:
    """What of `layout` the workload's trainer has no setting for."""
    can, name = abilities(workload.stack), workload.stack.name
    stages = can.zero_stages_with_pipeline if layout.pp > 1 else can.zero_stages
    checks = [
        ("zero_stage", layout.zero_stage in stages, f"ZeRO stages {', '.join(map(str, stages))}"),
        ("tp", layout.tp == 1 or can.tensor, "no tensor parallelism"),
        (
            "cp_method",
            layout.cp == 1 or layout.cp_method in can.cp_methods,
            f"{', '.join(can.cp_methods) or 'no context parallelism'}",
        ),
        ("schedule", layout.pp == 1 or layout.schedule in can.schedules, f"{', '.join(can.schedules) or 'no pipeline'}"),
        ("ep", layout.ep == 1 or can.experts, "no expert parallelism"),
        ("expert_tp", layout.expert_tp == 1 or can.expert_tensor, "no tensor parallelism of experts"),
        (
            "recompute",
            layout.recompute in can.recompute
            or (is_modules(layout.recompute) and modules_named(layout.recompute) <= {*can.modules}),
            f"recompute {', '.join([*can.recompute, *sorted(can.modules)])}",
        ),
        ("dp_shard", layout.dp_replicate in (1, layout.dp) or can.hybrid, "no hybrid sharding"),
    ]
    found = [
        Problem(f"layout.{key}", f"{name} has {has}, the plan wants {getattr(layout, key)}", f"Search for it: --stack {name}.")
        for key, holds, has in checks
        if not holds
    ]
    return found + not_searched(workload.stack, layout) + _uneven_stages(workload, layout)


def not_searched(stack: Stack, layout: Layout) -> list[Problem]:
    """What `stack` has no setting for, of what a search takes as it is given: dtype, optimizer, offload."""
    can, name, found = abilities(stack), stack.name, []
    if layout.precision not in can.precisions:
        rule = f"{name} trains in {', '.join(can.precisions)}, the plan wants {layout.precision}"
        found.append(Problem("layout.precision", rule, f"Use --precision {can.precisions[-1]}, or another --stack."))
    if stack.optimizer not in can.optimizers:
        rule = f"{name} has {', '.join(can.optimizers)}, the plan wants {stack.optimizer}"
        found.append(Problem("--optimizer", rule, "Leave it out, or use another --stack."))
    for key, able in (("offload_optimizer", can.offloads_optimizer), ("offload_activations", can.offloads_activations)):
        if getattr(layout, key) and not able:
            what = key.removeprefix("offload_")
            found.append(Problem(f"layout.{key}", f"{name} has no offload of {what} that is planned", "Leave it out."))
    return found


def _uneven_stages(workload: Workload, layout: Layout) -> list[Problem]:
    """Stages that a number of layers a stage does not make."""
    layers, stages = workload.model.num_hidden_layers, layout.num_stages
    if layout.pp == 1 or abilities(workload.stack).cuts(layers, stages):
        return []
    per_stage = -(-layers // stages)
    made = f"{layers} layers, {per_stage} a stage, into {-(-layers // per_stage)} stages"
    rule = f"{workload.stack.name} cuts {made}, the plan wants {stages}"
    return [Problem("layout.pp", rule, "Choose pp x virtual stages that divide the layers.")]


def _ultrascale(plan: _Plan) -> str:
    usual = Layout()
    chosen = {f.name: getattr(plan.layout, f.name) for f in fields(Layout)}
    said = {name: value for name, value in chosen.items() if name == "dp" or value != getattr(usual, name)}
    batch = {"sequence_length": plan.workload.sequence_length, "sequences_per_batch": plan.workload.sequences_per_batch}
    return _toml({"layout": said, "batch": batch})


def _megatron(plan: _Plan) -> str:
    words = _megatron_model(plan) | _megatron_layout(plan)
    return " \\\n".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in words.items() if value)


def _megatron_model(plan: _Plan) -> dict[str, Any]:
    model = plan.workload.model
    words: dict[str, Any] = {
        "num-layers": model.num_hidden_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "group-query-attention": model.num_key_value_heads != model.num_attention_heads and not model.latent_attention,
        "num-query-groups": "" if model.latent_attention else model.num_key_value_heads,
        "kv-channels": model.head_dim,
        "seq-length": plan.workload.sequence_length,
        "max-position-embeddings": model.max_position_embeddings,
        "swiglu": model.gated_mlp,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position-embedding-type": "rope" if model.position_embedding == "rotary" else "learned_absolute",
        "rotary-base": round(model.rope_theta) if model.position_embedding == "rotary" else "",
        "untie-embeddings-and-output-weights": not model.tie_word_embeddings,
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "qk-layernorm": model.qk_norm,
    }
    if model.num_experts:
        dispatcher = plan.workload.stack.dispatcher
        dense, sparse = model.first_k_dense_replace, model.num_hidden_layers - model.first_k_dense_replace
        words |= {
            "num-experts": model.num_experts,
            "moe-router-topk": model.num_experts_per_tok,
            "moe-ffn-hidden-size": model.moe_intermediate_size,
            "moe-shared-expert-intermediate-size": model.shared_expert_intermediate_size,
            "moe-layer-freq": f"'([0]*{dense}+[1]*{sparse})'",
            "moe-grouped-gemm": True,
            "moe-token-dispatcher-type": "alltoall" if dispatcher == "alltoall" else "flex",
            "moe-flex-dispatcher-backend": "" if dispatcher == "alltoall" else dispatcher,
        }
    if model.latent_attention:
        words |= {
            "multi-latent-attention": True, "q-lora-rank": model.q_lora_rank, "kv-lora-rank": model.kv_lora_rank,
            "qk-head-dim": model.qk_nope_head_dim, "qk-pos-emb-head-dim": model.qk_rope_head_dim,
            "v-head-dim": model.v_head_dim,
        }  # fmt: skip
    return words


def _megatron_layout(plan: _Plan) -> dict[str, Any]:
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
        **_megatron_stages(plan),
        "bf16": layout.precision in ("bf16", *NARROW),
        "fp16": layout.precision == "fp16",
        "fp8-format": {"fp8": "hybrid", "mxfp8": "e4m3"}.get(layout.precision, ""),
        "fp8-recipe": "mxfp8" if layout.precision == "mxfp8" else "",
        "fp4-format": "e2m1" if layout.precision == "nvfp4" else "",
        "fp4-recipe": "nvfp4" if layout.precision == "nvfp4" else "",
        **_megatron_delayed(layout),
        "optimizer-cpu-offload": layout.offload_optimizer,
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


def _megatron_stages(plan: _Plan) -> dict[str, Any]:
    """Virtual stages where blocks are cut evenly; else each stage: E embedding, t block, m prediction block, L loss."""
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


def _torchtitan(plan: _Plan) -> str:
    layout, piped = plan.layout, plan.layout.pp > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.shard_size,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.expert_tp,
    }
    if layout.cp > 1:
        parallelism["context_parallel_rotate_method"] = TORCHTITAN_CP[layout.cp_method]
    if piped:
        parallelism["pipeline_parallel_schedule"] = TORCHTITAN_SCHEDULES[layout.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch_size
        parallelism["pipeline_parallel_layers_per_stage"] = -(-plan.workload.model.num_hidden_layers // layout.num_stages)
        parallelism["pipeline_parallel_first_stage_less_layers"] = 0
        parallelism["pipeline_parallel_last_stage_less_layers"] = 0
    training = {
        # A pipeline cuts the local batch into micro-batches; without one the trainer accumulates up to the global batch.
        "local_batch_size": layout.micro_batch_size * (plan.accumulation if piped else 1),
        "global_batch_size": plan.workload.sequences_per_batch,
        "seq_len": plan.workload.sequence_length,
        "mixed_precision_param": TORCH_DTYPE.get(layout.precision, "bfloat16"),
        "mixed_precision_reduce": TORCH_DTYPE.get(layout.gradient_reduce_dtype, "float32"),
        "enable_cpu_offload": layout.offload_optimizer,
    }
    mode = "selective" if layout.recompute == "every-k" else layout.recompute
    checkpointing: dict[str, Any] = {"mode": mode}
    if mode == "selective":
        checkpointing["selective_ac_option"] = str(layout.recompute_every) if layout.recompute == "every-k" else "op"
    sections: dict[str, dict[str, Any]] = {"training": training, "parallelism": parallelism}
    sections["activation_checkpoint"] = checkpointing
    if layout.precision == "fp8":
        sections["model"] = {"converters": ["quantize.linear.float8"]}
        narrow, one_scale = layout.fp8_all_gather, layout.fp8_scaling == "tensor"
        sections["quantize.linear.float8"] = {
            "enable_fsdp_float8_all_gather": narrow, "precompute_float8_dynamic_scale_for_fsdp": narrow and one_scale,
        }  # fmt: skip
    if layout.precision == "mxfp8":
        sections["model"] = {"converters": ["quantize.linear.mx"]}
        sections["quantize.linear.mx"] = {"recipe_name": "mxfp8_cublas"}
    return _toml(sections)


def _megatron_delayed(layout: Layout) -> dict[str, Any]:
    if not is_delayed(layout):
        return {}
    kept = {"fp8-amax-history-len": layout.fp8_amax_history_len, "fp8-amax-compute-algo": layout.fp8_amax_compute_algo}
    return {"fp8-recipe": "delayed", **kept}


def _nanotron(plan: _Plan) -> str:
    layout = plan.layout
    return _yaml({
        "parallelism": {
            "dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "expert_parallel_size": layout.ep,
            "pp_engine": layout.schedule if layout.pp > 1 else "1f1b",
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": layout.sequence_parallel,
            "recompute_layer": layout.recompute == "full",
        },
        "tokens": {
            "micro_batch_size": layout.micro_batch_size, "batch_accumulation_per_replica": plan.accumulation,
            "sequence_length": plan.workload.sequence_length,
        },
        "optimizer": {"zero_stage": layout.zero_stage, "accumulate_grad_in_fp32": True},
        "model": {"dtype": TORCH_DTYPE.get(layout.precision, "bfloat16")},
    })  # fmt: skip


def _llm_foundry(plan: _Plan) -> str:
    layout = plan.layout
    hybrid = 1 < layout.shard_size < layout.dp
    strategy = COMPOSER_STRATEGIES[layout.zero_stage]
    fsdp: dict[str, Any] = {
        "sharding_strategy": COMPOSER_HYBRIDS[layout.zero_stage] if hybrid else strategy,
        "mixed_precision": "PURE" if layout.gradient_reduce_dtype == "bf16" else "DEFAULT",
        "activation_checkpointing": layout.recompute == "full",
        "activation_checkpointing_reentrant": False,
        "activation_cpu_offload": layout.offload_activations,
        "limit_all_gathers": True,
    }
    if hybrid:
        fsdp["data_parallel_shard_degree"] = layout.shard_size
    return _yaml({
        "max_seq_len": plan.workload.sequence_length, "global_train_batch_size": plan.workload.sequences_per_batch,
        "device_train_microbatch_size": layout.micro_batch_size,
        "precision": "fp32" if layout.precision == "fp32" else f"amp_{layout.precision}", "fsdp_config": fsdp,
    })  # fmt: skip


def _deepspeed(plan: _Plan) -> str:
    layout = plan.layout
    zero: dict[str, Any] = {"stage": layout.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if 1 < layout.shard_size < layout.dp:
        zero["mics_shard_size"] = layout.shard_size
    if layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": plan.workload.sequences_per_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": zero,
    }
    if layout.precision in ("bf16", "fp16"):
        config[layout.precision] = {"enabled": True}
    words = {
        "tensor-model-parallel-size": layout.tp, "pipeline-model-parallel-size": layout.pp,
        "ds-sequence-parallel-size": layout.cp, "moe-expert-parallel-size": layout.ep,
    }  # fmt: skip
    said = [f"--{name} {value}" for name, value in words.items() if value > 1]
    said += ["--checkpoint-activations --deepspeed-activation-checkpointing"] if layout.recompute == "full" else []
    return "\n".join([json.dumps(config, indent=2), *(["", " ".join(said)] if said else [])])


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""]
    return "\n".join(lines).rstrip()


def _yaml(values: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", _yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value) if isinstance(value, bool) else value}")
    return "\n".join(lines)


_WRITERS: dict[str, Callable[[_Plan], str]] = {
    "ultrascale": _ultrascale, "megatron": _megatron, "torchtitan": _torchtitan, "nanotron": _nanotron,
    "llm-foundry": _llm_foundry, "deepspeed": _deepspeed,
}  # fmt: skip
