"""A small random-weight model of every family, shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import replace

from ultrascale.description.architecture.model import Model, RopeScaling

LLAMA = Model(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.1,
)  # fmt: skip
GPT2 = replace(
    LLAMA, model_type="gpt2", intermediate_size=128, num_key_value_heads=4, norm="layernorm", gated_mlp=False,
    position_embedding="learned", qkv_bias=True, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True,
)  # fmt: skip
LLAMA3_SCALING = RopeScaling("llama3", factor=8.0, original_max_position_embeddings=16)
YARN_SCALING = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=16)
QWEN2 = replace(LLAMA, model_type="qwen2", qkv_bias=True, norm_eps=1e-6, rope_theta=1e6)

FAMILIES: dict[str, Model] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama-biases": replace(LLAMA, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "llama3-scaling": replace(LLAMA, rope_scaling=LLAMA3_SCALING, rope_theta=5e5),
    "llama-yarn": replace(LLAMA, rope_scaling=YARN_SCALING),
    "llama-wide-heads": replace(LLAMA, head_dim=16, num_key_value_heads=1, tie_word_embeddings=True),
    "mistral": replace(LLAMA, model_type="mistral", sliding_window=7),
    "qwen2": QWEN2,
    "qwen2-tied": replace(QWEN2, tie_word_embeddings=True),
    "qwen2-window": replace(QWEN2, sliding_window=7, max_window_layers=1),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=16, norm_eps=1e-6),
    "smollm3": replace(LLAMA, model_type="smollm3", no_rope_layer_interval=2, tie_word_embeddings=True, num_hidden_layers=4),
    "olmo2": replace(LLAMA, model_type="olmo2", norm_placement="post", qk_norm=True, qk_norm_whole=True, rope_theta=5e5),
    "olmo3": replace(
        LLAMA,
        model_type="olmo3",
        norm_placement="post",
        qk_norm=True,
        qk_norm_whole=True,
        rope_theta=5e5,
        rope_local_base_freq=5e5,
        rope_scaling=RopeScaling("yarn", 8.0, 16, attention_factor=1.2),
        sliding_window=7,
        full_attention_interval=2,
    ),
    "gemma3": replace(
        LLAMA,
        model_type="gemma3_text",
        norm_placement="both",
        zero_centered_norm=True,
        scale_embedding=True,
        hidden_act="gelu_pytorch_tanh",
        qk_norm=True,
        tie_word_embeddings=True,
        head_dim=16,
        query_pre_attn_scalar=24,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=RopeScaling("linear", 8.0, 64),
        sliding_window=7,
        full_attention_interval=2,
    ),
}

MIXTRAL = replace(
    LLAMA, model_type="mixtral", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
)  # fmt: skip
QWEN3_MOE = replace(
    LLAMA, model_type="qwen3_moe", qk_norm=True, head_dim=16, norm_eps=1e-6, num_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=16, first_k_dense_replace=1, norm_topk_prob=False,
)  # fmt: skip
OLMOE = replace(
    LLAMA, model_type="olmoe", qk_norm=True, qk_norm_whole=True, intermediate_size=24, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=24, norm_topk_prob=False,
)  # fmt: skip
_MLA = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 12,
    "num_key_value_heads": 4,
}
DEEPSEEK_V2 = replace(
    LLAMA, model_type="deepseek_v2", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=False,
    shared_expert_intermediate_size=32, first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4, topk_group=2,
    routed_scaling_factor=4.0, rope_scaling=RopeScaling("yarn", 4.0, 16, mscale=0.707, mscale_all_dim=0.5), **_MLA,
)  # fmt: skip
DEEPSEEK_V3 = replace(
    LLAMA, model_type="deepseek_v3", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, q_lora_rank=20,
    shared_expert_intermediate_size=16, first_k_dense_replace=1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=4,
    topk_group=2, routed_scaling_factor=2.5, rope_scaling=RopeScaling("yarn", 4.0, 16, mscale=1.0, mscale_all_dim=1.0), **_MLA,
)  # fmt: skip
GLM4_MOE = replace(
    LLAMA, model_type="glm4_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, qkv_bias=True, qk_norm=True,
    partial_rotary_factor=0.5, shared_expert_intermediate_size=16, first_k_dense_replace=1, topk_method="noaux_tc",
    scoring_func="sigmoid", routed_scaling_factor=2.5,
)  # fmt: skip
GPT_OSS = replace(
    LLAMA, model_type="gpt_oss", hidden_act="swigluoai", attention_sinks=True, qkv_bias=True, mlp_bias=True,
    attention_output_bias=True, sliding_window=7, sliding_window_interval=2, num_experts=4, num_experts_per_tok=2,
    intermediate_size=24, moe_intermediate_size=24, rope_scaling=RopeScaling("yarn", 4.0, 16, truncate=False),
)  # fmt: skip

EXPERT_FAMILIES: dict[str, Model] = {
    "mixtral": MIXTRAL,
    "mixtral-window": replace(MIXTRAL, sliding_window=7, tie_word_embeddings=True),
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-normed": replace(QWEN3_MOE, norm_topk_prob=True, first_k_dense_replace=0),
    "olmoe": OLMOE,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-lite": replace(
        DEEPSEEK_V2, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, rope_scaling=None
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-plain-queries": replace(DEEPSEEK_V3, q_lora_rank=None, norm_topk_prob=False, rope_scaling=None),
    "glm4-moe": GLM4_MOE,
    "glm4-moe-air": replace(GLM4_MOE, qk_norm=False, n_group=4, topk_group=2, norm_topk_prob=False, rope_theta=1e6),
    "gpt-oss": GPT_OSS,
    "gpt-oss-no-window": replace(GPT_OSS, sliding_window=128, rope_scaling=None),
}
