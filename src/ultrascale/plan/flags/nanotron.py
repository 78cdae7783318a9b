"""A plan as nanotron's YAML."""

from __future__ import annotations

from typing import Any

from ultrascale.description.architecture.model import Model
from ultrascale.description.schedules import USUAL
from ultrascale.plan.flags.written import (
    LEARNING_RATE,
    LEAST_RATE,
    STEPS,
    TORCH_DTYPE,
    TrainerPlan,
    Yours,
    unwritten_fields,
    yaml,
)

RELEASE = "nanotron's main of 2025 (0.5)"
WRITTEN = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "norm_eps", "hidden_act", "rope_theta", "tie_word_embeddings", "initializer_range",
})  # fmt: skip
"""Fields that its LlamaConfig has, except those of `_unwritten`."""


def write(plan: TrainerPlan) -> str:
    """YAML for run_train.py."""
    start = f"torchrun --nnodes {plan.nodes} --nproc_per_node {plan.ranks_per_node} run_train.py --config-file THIS.yaml"
    return "\n".join([*plan.head(RELEASE, start, _unwritten(plan.workload.model)), yaml(_settings(plan))])


def _settings(plan: TrainerPlan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "general": {"project": Yours("planned"), "run": Yours("planned"), "seed": Yours(42)},
        "model": {
            "dtype": TORCH_DTYPE.get(layout.precision, "bfloat16"),
            "init_method": {"std": plan.workload.model.initializer_range},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(plan.workload.model),
        },
        "parallelism": {
            "dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "expert_parallel_size": layout.ep,
            "pp_engine": layout.schedule if layout.pp > 1 else USUAL,
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": layout.sequence_parallel,
            "recompute_layer": layout.recompute == "full",
        },
        "tokens": {
            "sequence_length": plan.workload.sequence_length, "train_steps": Yours(STEPS),
            "micro_batch_size": layout.micro_batch_size, "batch_accumulation_per_replica": plan.accumulation,
        },
        "optimizer": {
            "zero_stage": layout.zero_stage, "accumulate_grad_in_fp32": True,
            "clip_grad": Yours(1.0), "weight_decay": Yours(0.1),
            "optimizer_factory": {
                "name": "adamW", "adam_beta1": Yours(0.9), "adam_beta2": Yours(0.95), "adam_eps": Yours(1e-8),
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": {
                "learning_rate": Yours(LEARNING_RATE), "lr_warmup_steps": Yours(STEPS // 10),
                "lr_warmup_style": Yours("linear"), "lr_decay_style": Yours("cosine"),
                "min_decay_lr": Yours(LEAST_RATE),
            },
        },
        "tokenizer": {"tokenizer_name_or_path": Yours("TOKENIZER")},
        "checkpoints": {"checkpoints_path": Yours("checkpoints"), "checkpoint_interval": Yours(500)},
        "logging": {"iteration_step_info_interval": Yours(1)},
        "data_stages": [{
            "name": Yours("all"), "start_training_step": 1,
            "data": {
                "dataset": {"dataset_folder": Yours("TOKENIZED_FOLDER")},
                "num_loading_workers": Yours(1), "seed": Yours(42),
            },
        }],
    }  # fmt: skip


def _unwritten(model: Model) -> list[str]:
    usual_head = model.head_dim * model.num_attention_heads == model.hidden_size
    notes = {} if usual_head else {"head_dim": "hidden_size / num_attention_heads here"}
    if not model.gated_mlp or model.activation == "swigluoai":
        notes["hidden_act"] = "of a gate here" if not model.gated_mlp else "silu here"
    return unwritten_fields(model, WRITTEN | {"head_dim"}, notes)


def _model(model: Model) -> dict[str, Any]:
    """Its LlamaConfig; families for which it has another class need that class's own switch."""
    return {
        "is_llama_config": True,
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads, "max_position_embeddings": model.max_position_embeddings,
        "vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_word_embeddings, "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps, "hidden_act": "silu" if model.activation == "swigluoai" else model.activation,
        "bos_token_id": Yours(1), "eos_token_id": Yours(2),
    }  # fmt: skip
