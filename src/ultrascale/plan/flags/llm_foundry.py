"""A plan as llm-foundry's YAML: Composer's FSDP."""

from __future__ import annotations

from typing import Any

from ultrascale.description.architecture.model import Model
from ultrascale.plan.flags.written import LEARNING_RATE, STEPS, TrainerPlan, Yours, yaml

RELEASE = "llm-foundry 0.22.0"
COMPOSER_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
COMPOSER_HYBRIDS = {2: "_HYBRID_SHARD_ZERO2", 3: "HYBRID_SHARD"}


def write(plan: TrainerPlan) -> str:
    """YAML for scripts/train/train.py."""
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
    sequence = plan.workload.sequence_length
    settings = {
        "max_seq_len": sequence, "global_train_batch_size": plan.workload.sequences_per_batch,
        "device_train_microbatch_size": layout.micro_batch_size, "device_eval_batch_size": layout.micro_batch_size,
        "precision": "fp32" if layout.precision == "fp32" else f"amp_{layout.precision}",
        "model": _model(plan.workload.model, sequence), "fsdp_config": fsdp,
        "tokenizer": {"name": Yours("TOKENIZER"), "kwargs": {"model_max_length": sequence}},
        "train_loader": {
            "name": "text", "num_workers": Yours(8), "drop_last": True,
            "dataset": {"local": Yours("MDS_FOLDER"), "split": Yours("train"), "shuffle": True, "max_seq_len": sequence},
        },
        "optimizer": {
            "name": "decoupled_adamw", "lr": Yours(LEARNING_RATE), "betas": Yours("[0.9, 0.95]"), "weight_decay": Yours(0.1),
        },
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": Yours(f"{STEPS // 10}ba"), "alpha_f": Yours(0.1)},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": Yours(1.0)}},
        "max_duration": Yours(f"{STEPS}ba"), "eval_interval": Yours("500ba"), "save_folder": Yours("checkpoints"),
        "seed": Yours(17),
    }  # fmt: skip
    start = f"composer -n {plan.ranks_per_node} --world_size {layout.world_size} scripts/train/train.py THIS.yaml"
    return "\n".join([*plan.head(RELEASE, start), yaml(settings)])


def _model(model: Model, sequence: int) -> dict[str, Any]:
    """MPT configuration of these sizes, on the meta device until FSDP has sharded it."""
    grouped = model.num_key_value_heads != model.num_attention_heads
    attention: dict[str, Any] = {"attn_type": "grouped_query_attention" if grouped else "multihead_attention"}
    attention |= {"kv_n_heads": model.num_key_value_heads} if grouped else {}
    attention |= {"attn_impl": "flash"}
    attention |= {"rope": True, "rope_theta": round(model.rope_theta)} if model.position_embedding == "rotary" else {}
    glu = "mptglu" if model.gated_mlp else "mptmlp"
    return {
        "name": "mpt_causal_lm", "init_device": "meta", "d_model": model.hidden_size, "n_heads": model.num_attention_heads,
        "n_layers": model.num_hidden_layers, "max_seq_len": sequence, "vocab_size": model.vocab_size,
        "no_bias": not model.mlp_bias, "norm_type": "rmsnorm" if model.norm == "rmsnorm" else "low_precision_layernorm",
        "learned_pos_emb": model.position_embedding == "learned", "tie_word_embeddings": model.tie_word_embeddings,
        "attn_config": attention, "ffn_config": {"ffn_type": glu, "ffn_hidden_size": model.intermediate_size},
    }  # fmt: skip
