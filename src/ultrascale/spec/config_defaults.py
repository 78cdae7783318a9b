"""transformers' own defaults, where a key may be missing from a `config.json`; families differ only where named."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32}
_DEEPSEEK = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama": {},
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": _QWEN | {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": _QWEN | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "smollm3": {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "nemotron": {
        "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48, "norm_eps": 1e-5,
        "max_position_embeddings": 4096, "initializer_range": 0.0134,
    },
    "mixtral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001, "norm_topk_prob": False,
    },
    "olmoe": {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_local_experts": 64, "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01, "norm_topk_prob": False,
    },
    "deepseek_v2": _DEEPSEEK | {
        "vocab_size": 102400, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy",
    },
    "deepseek_v3": _DEEPSEEK | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001,
        "sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip
