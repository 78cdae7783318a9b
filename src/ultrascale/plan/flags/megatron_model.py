"""A model as Megatron-LM's arguments, and the parts of it that no argument gives.

What its release's code does with them: `pretrain_gpt.py` builds Llama 3.1's RoPE scaling with its default factor, whatever
`--rope-scaling-factor` says; `--disable-bias-linear` is one switch for all biases but those of queries, keys and values; a
group of experts scores as the sum of its best `topk / group_topk`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.rope_scaling import RopeScaling

WRITTEN = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "norm", "zero_centered_norm", "norm_eps", "gated_mlp", "hidden_act",
    "position_embedding", "rope_theta", "rope_scaling", "no_rope_layer_interval", "qkv_bias", "attention_output_bias",
    "mlp_bias", "qk_norm", "attention_sinks", "partial_rotary_factor", "sliding_window", "max_window_layers",
    "sliding_window_interval", "full_attention_interval", "tie_word_embeddings", "initializer_range", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "first_k_dense_replace",
    "scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
    "router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate",
    "expert_capacity_factor", "num_nextn_predict_layers", "dropout", "mtp_loss_coef", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
})  # fmt: skip
"""Fields that the arguments give, except those of `unwritten`. The vocabulary is the tokenizer's."""
BALANCE = {"sequence": "seq_aux_loss", "micro-batch": "aux_loss", "global": "global_aux_loss"}
LLAMA3 = RopeScaling("llama3", 8.0, 8192)
"""The only llama3 scaling that `pretrain_gpt.py` builds."""
CLAMP = 7.0
"""GPT-OSS's limit of the clamped SwiGLU."""


def arguments(model: Model, sequence_length: int, dispatcher: str) -> dict[str, Any]:
    """Arguments by name, for `shell_array`."""
    words = _sizes(model) | {"seq-length": sequence_length} | _positions(model) | _attention(model) | _feed_forward(model)
    if model.num_experts:
        words |= _experts(model, dispatcher) | _router(model)
    if model.num_nextn_predict_layers:
        words["mtp-loss-scaling-factor"] = str(model.mtp_loss_coef)
    return words


def unwritten(model: Model) -> dict[str, str]:
    """Fields in `WRITTEN` that the arguments cannot give for this model, and what Megatron-LM has instead."""
    return _unwritten_biases(model) | _unwritten_functions(model) | (_unwritten_routing(model) if model.num_experts else {})


def _sizes(model: Model) -> dict[str, Any]:
    latent = model.latent_attention
    return {
        "num-layers": model.num_hidden_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "group-query-attention": model.num_key_value_heads != model.num_attention_heads and not latent,
        "num-query-groups": "" if latent else model.num_key_value_heads,
        "kv-channels": model.head_dim,
        "max-position-embeddings": model.max_position_embeddings,
        "attention-dropout": "0.0",  # Megatron's defaults are 0.1; ours has none on attention weights
        "hidden-dropout": str(model.dropout),
        "init-method-std": model.initializer_range,
        "norm-epsilon": model.norm_eps,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "apply-layernorm-1p": model.zero_centered_norm,
        "untie-embeddings-and-output-weights": not model.tie_word_embeddings,
    }


def _positions(model: Model) -> dict[str, Any]:
    if model.position_embedding != "rotary":
        return {"position-embedding-type": "learned_absolute"}
    layers, interval, scaling = model.num_hidden_layers, model.no_rope_layer_interval, model.rope_scaling
    words: dict[str, Any] = {
        "position-embedding-type": "rope",
        "rotary-base": round(model.rope_theta),
        "rotary-percent": "" if model.partial_rotary_factor == 1 else model.partial_rotary_factor,
    }
    if interval is not None:
        skipped = [not model.uses_rotary(layer) for layer in range(layers)]
        words["no-rope-freq"] = _pattern(skipped) if layers % interval else interval
    if model.latent_attention:  # it uses YaRN, which a factor of 1 makes plain RoPE
        yarn = scaling if scaling is not None and scaling.rope_type == "yarn" else None
        words |= {"rope-type": "yarn", "rotary-scaling-factor": yarn.factor if yarn else 1.0}
        words |= {"mscale": yarn.mscale, "mscale-all-dim": yarn.mscale_all_dim} if yarn else {}
    elif scaling is not None and scaling.rope_type == "llama3":
        words |= {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}
    return words


def _attention(model: Model) -> dict[str, Any]:
    windows = [model.window(layer) is not None for layer in range(model.num_hidden_layers)]
    words: dict[str, Any] = {
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "qk-layernorm": model.qk_norm or model.latent_attention,  # latent: the norms of its narrow projections
        "softmax-type": "learnable" if model.attention_sinks else "",
    }
    if any(windows):
        assert model.sliding_window is not None
        words["window-size"] = f"{model.sliding_window - 1},0"
        words["window-attn-skip-freq"] = "" if all(windows) else _window_frequency(windows)
    if model.latent_attention:
        words |= {
            "multi-latent-attention": True, "q-lora-rank": model.q_lora_rank, "kv-lora-rank": model.kv_lora_rank,
            "qk-head-dim": model.qk_nope_head_dim, "qk-pos-emb-head-dim": model.qk_rope_head_dim,
            "v-head-dim": model.v_head_dim,
        }  # fmt: skip
    return words


def _feed_forward(model: Model) -> dict[str, Any]:
    """A gate with another activation than these stays a gate, so that the sizes are the model's."""
    if model.activation == "swigluoai":
        return {"quick-geglu": True, "glu-linear-offset": 1.0, "activation-func-clamp-value": CLAMP}
    squared = model.activation == "relu2" and not model.gated_mlp
    return {"swiglu": model.gated_mlp, "squared-relu": squared, "no-bias-gelu-fusion": squared and model.mlp_bias}


def _experts(model: Model, dispatcher: str) -> dict[str, Any]:
    dense, sparse = model.first_k_dense_replace, model.num_hidden_layers - model.first_k_dense_replace
    return {
        "num-experts": model.num_experts,
        "moe-ffn-hidden-size": model.moe_intermediate_size,
        "moe-shared-expert-intermediate-size": model.shared_expert_intermediate_size,
        "moe-layer-freq": f"'([0]*{dense}+[1]*{sparse})'",
        "moe-grouped-gemm": True,
        "no-bias-dropout-fusion": model.mlp_bias,  # which grouped products with biases lack
        "moe-expert-capacity-factor": model.expert_capacity_factor or "",
        "moe-token-dispatcher-type": "alltoall" if dispatcher == "alltoall" else "flex",
        "moe-flex-dispatcher-backend": "" if dispatcher == "alltoall" else dispatcher,
    }


def _router(model: Model) -> dict[str, Any]:
    """Without --moe-router-pre-softmax the scores of the chosen experts sum to one, as with `norm_topk_prob`."""
    softmax, groups = model.scoring_func == "softmax", model.n_group > 1
    words: dict[str, Any] = {
        "moe-router-topk": model.num_experts_per_tok,
        "moe-router-score-function": model.scoring_func,
        "moe-router-pre-softmax": softmax and (not model.norm_topk_prob or model.num_experts_per_tok == 1),
        "moe-router-num-groups": model.n_group if groups else "",
        "moe-router-group-topk": model.topk_group if groups else "",
        "moe-router-topk-scaling-factor": "" if model.routed_scaling_factor == 1 else model.routed_scaling_factor,
        "moe-router-load-balancing-type": BALANCE[model.router_aux_loss_scope] if model.balance_loss_coef else "none",
        "moe-aux-loss-coeff": model.balance_loss_coef,
        "moe-z-loss-coeff": model.router_z_loss_coef,
    }
    if model.topk_method == "noaux_tc" and not softmax:
        words |= {"moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": str(model.router_bias_update_rate)}
    return words


def _unwritten_biases(model: Model) -> dict[str, str]:
    notes = {}
    if model.attention_output_bias != model.mlp_bias:
        notes["attention_output_bias"] = "one switch with mlp_bias"
    if model.mlp_bias and not model.qkv_bias:
        notes["qkv_bias"] = "one switch with mlp_bias"
    return notes


def _unwritten_functions(model: Model) -> dict[str, str]:
    notes, scaling = {}, model.rope_scaling
    if model.gated_mlp and model.activation not in ("silu", "swigluoai"):
        notes["hidden_act"] = "--swiglu stands for the gate"
    if not model.gated_mlp and model.activation == "gelu_pytorch_tanh" and not model.mlp_bias:
        notes["hidden_act"] = "without biases its GELU is the exact one"
    if model.qk_norm and model.norm != "rmsnorm":
        notes["qk_norm"] = "a LayerNorm here"
    if model.rope_theta != round(model.rope_theta):
        notes["rope_theta"] = "rounded"
    if scaling is not None:
        notes |= _unwritten_scaling(scaling, model.latent_attention)
    return notes


def _unwritten_scaling(scaling: RopeScaling, latent: bool) -> dict[str, str]:
    if latent and scaling.rope_type == "yarn":
        both = (scaling.mscale is None) == (scaling.mscale_all_dim is None)
        usual = RopeScaling("yarn", scaling.factor, 4096, mscale=scaling.mscale, mscale_all_dim=scaling.mscale_all_dim)
        known = "beta_fast 32, beta_slow 1 and 4096 positions here"
        return {} if scaling == usual and both else {"rope_scaling": known}
    if not latent and scaling.rope_type == "llama3":
        return {} if scaling == LLAMA3 else {"rope_scaling": "pretrain_gpt.py builds factor 8 over 8192 positions"}
    return {"rope_scaling": ""}


def _unwritten_routing(model: Model) -> dict[str, str]:
    notes, choices, softmax = {}, model.num_experts_per_tok, model.scoring_func == "softmax"
    if model.topk_method == "noaux_tc" and softmax:
        notes["topk_method"] = "a bias needs sigmoid scores"
    if (choices == 1 or not softmax) and model.norm_topk_prob != (choices > 1):
        notes["norm_topk_prob"] = "one expert's score is never normalized, several sigmoid scores always"
    if model.n_group > 1:
        best = choices // model.topk_group
        if best != (2 if model.topk_method == "noaux_tc" else 1):
            notes["topk_method"] = f"a group scores as the sum of its best {best}"
    if model.expert_capacity_factor is not None:
        notes["expert_capacity_factor"] = "counted over a rank's micro-batch, not over each sequence"
    return notes


def _window_frequency(windows: list[bool]) -> int | str:
    """Interval of layers without a window, if there is one, else a pattern."""
    for interval in range(2, len(windows) + 1):
        if windows == [(layer + 1) % interval != 0 for layer in range(len(windows))]:
            return interval
    return _pattern(windows)


def _pattern(layers: list[bool]) -> str:
    """Python list of a 1 or 0 per layer, which Megatron-LM evaluates."""
    runs = [(int(value), len(list(group))) for value, group in groupby(layers)]
    return "'" + "+".join(f"[{value}]*{count}" for value, count in runs) + "'"
