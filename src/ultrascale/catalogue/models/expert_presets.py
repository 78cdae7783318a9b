"""Models with experts known by name, and others that are only planned so far. Numbers are those of the published `config.json`.

Sources: the Hugging Face repositories of mistralai, Qwen, allenai, deepseek-ai, moonshotai, zai-org, openai and nvidia; Grok-1:
its repository of xai-org on GitHub (two further norms a block, a millionth of its weights, and a cap on scores are not
modelled); Nemotron-4: Parmar et al. 2024 and NVIDIA 2024, tables 1. DeepSeek-V3's bias that balances load is not learned by
gradients, so it is no weight.

Coefficients of balance losses are the published ones too (GLM-4.5's: Zeng et al. 2025), and applied over each sequence: 1e-4 to
0.05 are usual sizes of that loss. GPT-OSS's 0.9 is not, and nobody has said that it was trained with it, so it is kept for
export only.
"""

from __future__ import annotations

from typing import Any

from ultrascale.description.architecture.model import Model, RopeScaling

#    name               vocabulary hidden    ffn layers heads kv head_dim positions theta experts chosen  each shared
_SIZES = """
     mixtral-8x7b            32000   4096  14336     32    32  8      128     32768   1e6       8      2 14336      0
     mixtral-8x22b           32000   6144  16384     56    48  8      128     65536   1e6       8      2 16384      0
     qwen3-30b-a3b          151936   2048   6144     48    32  4      128     40960   1e6     128      8   768      0
     qwen3-235b-a22b        151936   4096  12288     94    64  4      128     40960   1e6     128      8  1536      0
     olmoe-1b-7b             50304   2048   1024     16    16 16      128      4096   1e4      64      8  1024      0
     deepseek-v2-lite       102400   2048  10944     27    16 16      192    163840   1e4      64      6  1408   2816
     deepseek-v2            102400   5120  12288     60   128 128     192    163840   1e4     160      6  1536   3072
     deepseek-v3            129280   7168  18432     61   128 128     192    163840   1e4     256      8  2048   2048
     kimi-k2                163840   7168  18432     61    64 64      192    131072   5e4     384      8  2048   2048
     glm-4.5                151552   5120  12288     92    96  8      128    131072   1e6     160      8  1536   1536
     glm-4.5-air            151552   4096  10944     46    96  8      128    131072   1e6     128      8  1408   1408
     gpt-oss-20b            201088   2880   2880     24    64  8       64    131072 1.5e5      32      4  2880      0
     gpt-oss-120b           201088   2880   2880     36    64  8       64    131072 1.5e5     128      4  2880      0
     grok-1                 131072   6144  32768     64    48  8      128      8192   1e4       8      2 32768      0
     nemotron-4-15b         256000   6144  24576     32    48  8      128      4096   1e4       0      0     0      0
     nemotron-4-340b        256000  18432  73728     96    96  8      192      4096   1e4       0      0     0      0
     tiny-nemotron            2048    128    512      2     4  2       32      1024   1e4       0      0     0      0
     tiny-mixtral             2048    128    192      2     4  2       32      1024   1e4       4      2   192      0
     tiny-qwen3-moe           2048    128    384      2     4  2       32      1024   1e4       8      2    96      0
     tiny-olmoe               2048    128     96      2     4  4       32      1024   1e4       8      2    96      0
     tiny-deepseek-v2         2048    128    384      3     4  4       48      1024   1e4       8      2    96     96
     tiny-deepseek-v3         2048    128    384      3     4  4       48      1024   1e4       8      2    96     96
     tiny-glm4-moe            2048    128    384      3     4  2       32      1024   1e4       8      2    96     96
     tiny-gpt-oss             2048    128     96      2     4  2       32      1024   1e4       4      2    96      0
"""

_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_TINY_MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_DEEPSEEK_V2 = _MLA | {
    "model_type": "deepseek_v2", "norm_eps": 1e-6, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "rope_scaling": RopeScaling("yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
}  # fmt: skip
_DEEPSEEK_V3 = _MLA | {
    "model_type": "deepseek_v3", "norm_eps": 1e-6, "first_k_dense_replace": 3, "q_lora_rank": 1536, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1,
    "router_aux_loss_coef": 0.001,
    "rope_scaling": RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_act": "swigluoai", "attention_sinks": True, "qkv_bias": True, "mlp_bias": True,
    "attention_output_bias": True, "sliding_window": 128, "sliding_window_interval": 2, "router_aux_loss_coef": 0.9,
    "router_aux_loss_scope": "none",
}  # fmt: skip
_GLM = {
    "model_type": "glm4_moe", "qkv_bias": True, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "router_aux_loss_coef": 0.0001,
}  # fmt: skip
_NEMOTRON = {
    "model_type": "nemotron", "norm": "layernorm", "gated_mlp": False, "hidden_act": "relu2", "partial_rotary_factor": 0.5,
    "initializer_range": 0.0134,
}  # fmt: skip
_QWEN3 = {"model_type": "qwen3_moe", "norm_eps": 1e-6, "qk_norm": True, "router_aux_loss_coef": 0.001}
_OLMOE = {
    "model_type": "olmoe", "qk_norm": True, "qk_norm_whole": True, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
}  # fmt: skip

# What a family, or one size of it, does differently from Llama with softmax-routed experts; a later line that matches wins.
_DIFFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"model_type": "mixtral", "router_aux_loss_coef": 0.02}),
    ("mixtral-8x22b", {"router_aux_loss_coef": 0.001}),
    ("qwen3", _QWEN3),
    ("olmoe", _OLMOE),
    ("deepseek-v2", _DEEPSEEK_V2),
    (
        "deepseek-v2",
        {
            "q_lora_rank": 1536, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
    ),
    (
        "deepseek-v2-lite",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    ),
    ("deepseek-v3", _DEEPSEEK_V3),
    (
        "kimi-k2",
        _DEEPSEEK_V3 | {
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "rope_scaling": RopeScaling("yarn", 32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    ("glm-4.5", _GLM | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "qk_norm": True}),
    ("glm-4.5-air", {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "qk_norm": False}),
    ("gpt-oss", _GPT_OSS | {"rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False)}),
    (
        "grok-1",
        {"model_type": "grok", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "router_aux_loss_coef": 0.0},
    ),
    ("nemotron-4", _NEMOTRON),
    ("nemotron-4-340b", {"initializer_range": 0.0063}),
    ("tiny-nemotron", _NEMOTRON),
    ("tiny-mixtral", {"model_type": "mixtral"}),
    ("tiny-qwen3-moe", _QWEN3),
    ("tiny-olmoe", _OLMOE),
    ("tiny-deepseek-v2", _DEEPSEEK_V2 | _TINY_MLA | {"rope_scaling": None}),
    (
        "tiny-deepseek-v3",
        _DEEPSEEK_V3 | _TINY_MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rope_scaling": None},
    ),
    ("tiny-glm4-moe", _GLM | {"routed_scaling_factor": 2.5, "qk_norm": True}),
    ("tiny-gpt-oss", _GPT_OSS | {"sliding_window": 64}),
]  # fmt: skip


def _model(row: str) -> Model:
    name, *numbers = row.split()
    vocabulary, hidden, ffn, layers, heads, kv, head_dim, positions = map(int, numbers[:8])
    experts, chosen, each, shared = map(int, numbers[9:])
    differences: dict[str, Any] = {}
    for prefix, fields in _DIFFERENCES:
        if name.startswith(prefix):
            differences.update(fields)
    return Model(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=head_dim, max_position_embeddings=positions, name=name, rope_theta=float(numbers[8]),
        num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=each, shared_expert_intermediate_size=shared,
        **differences,
    )  # fmt: skip


EXPERT_PRESETS: dict[str, Model] = {model.name: model for model in map(_model, _SIZES.strip().splitlines())}
