"""A small random-weight model of every family, shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import replace

from ultrascale.spec.model import Model, RopeScaling

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
}
