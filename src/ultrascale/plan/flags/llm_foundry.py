"""A plan as llm-foundry's YAML: Composer's FSDP."""

from __future__ import annotations

from typing import Any

from ultrascale.description.architecture.model import Model
from ultrascale.plan.flags.written import LEARNING_RATE, STEPS, TrainerPlan, Yours, unwritten_fields, yaml

RELEASE = "llm-foundry 0.22.0"
WRITTEN = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "norm", "norm_eps", "gated_mlp", "hidden_act", "position_embedding", "rope_theta",
    "qkv_bias", "attention_output_bias", "mlp_bias", "tie_word_embeddings", "initializer_range", "dropout",
})  # fmt: skip
"""Fields that its MPTConfig has, except those of `_unwritten`."""
ACTIVATIONS = {"silu": {"name": "silu"}, "gelu_pytorch_tanh": {"name": "gelu", "approximate": "tanh"}}
"""Its names of functions, which are those of torch.nn.functional."""
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
    return "\n".join([*plan.head(RELEASE, start, _unwritten(plan.workload.model, sequence)), yaml(settings)])


def _unwritten(model: Model, sequence: int) -> list[str]:
    notes = {}
    if model.head_dim * model.num_attention_heads != model.hidden_size and model.position_embedding == "rotary":
        notes["head_dim"] = "RoPE turns hidden_size / num_attention_heads dimensions"
    if model.activation not in ACTIVATIONS:
        notes["hidden_act"] = "silu here"
    if len({model.qkv_bias, model.attention_output_bias, model.mlp_bias}) > 1:
        notes |= dict.fromkeys(("qkv_bias", "attention_output_bias"), "one switch with mlp_bias")
    if model.position_embedding == "learned" and model.max_position_embeddings != sequence:
        notes["max_position_embeddings"] = "the sequence length here"
    if model.rope_theta != round(model.rope_theta):
        notes["rope_theta"] = "rounded"
    return unwritten_fields(model, WRITTEN, notes)


def _model(model: Model, sequence: int) -> dict[str, Any]:
    """MPT configuration of these sizes, on the meta device until FSDP has sharded it."""
    grouped = model.num_key_value_heads != model.num_attention_heads
    attention: dict[str, Any] = {"attn_type": "grouped_query_attention" if grouped else "multihead_attention"}
    attention |= {"kv_n_heads": model.num_key_value_heads} if grouped else {}
    attention |= {"attn_impl": "flash"}
    attention |= {"rope": True, "rope_theta": round(model.rope_theta)} if model.position_embedding == "rotary" else {}
    glu = "mptglu" if model.gated_mlp else "mptmlp"
    feed_forward = {
        "ffn_type": glu, "ffn_hidden_size": model.intermediate_size,
        "ffn_act_fn": ACTIVATIONS.get(model.activation, ACTIVATIONS["silu"]),
    }  # fmt: skip
    return {
        "name": "mpt_causal_lm", "init_device": "meta", "d_model": model.hidden_size, "n_heads": model.num_attention_heads,
        "head_dim": model.head_dim, "n_layers": model.num_hidden_layers, "max_seq_len": sequence,
        "vocab_size": model.vocab_size, "no_bias": not model.mlp_bias,
        "norm_type": "rmsnorm" if model.norm == "rmsnorm" else "low_precision_layernorm", "norm_eps": model.norm_eps,
        "init_config": {"name": "baseline_", "init_std": model.initializer_range},
        "resid_pdrop": model.dropout, "emb_pdrop": model.dropout,
        "learned_pos_emb": model.position_embedding == "learned", "tie_word_embeddings": model.tie_word_embeddings,
        "attn_config": attention, "ffn_config": feed_forward,
    }  # fmt: skip
