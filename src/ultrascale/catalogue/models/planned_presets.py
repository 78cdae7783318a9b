"""Models of other families, known by name and planned only: their shapes, in the parts that `Model` has.

Sources: the `config.json` of EleutherAI, tiiuae, databricks and google. What costs next to nothing is left out: Gemma 2's two
further norms a block (`norm_placement = "both"` has them), its scaled embedding, and caps on scores. What runs side by side in
a block of GPT-NeoX or Falcon runs one after the other here.
"""

from __future__ import annotations

from typing import Any

from ultrascale.description.architecture.model import Model

#    name               vocabulary hidden    ffn layers heads  kv head_dim positions theta experts chosen  each shared
_SIZES = """
     gpt-neox-20b            50432   6144  24576     44    64  64       96      2048   1e4       0      0     0      0
     falcon-7b               65024   4544  18176     32    71   1       64      2048   1e4       0      0     0      0
     falcon-40b              65024   8192  32768     60   128   8       64      2048   1e4       0      0     0      0
     falcon-180b             65024  14848  59392     80   232   8       64      2048   1e4       0      0     0      0
     dbrx                   100352   6144  10752     40    48   8      128     32768   5e5      16      4 10752      0
     gemma-2-2b             256000   2304   9216     26     8   4      256      8192   1e4       0      0     0      0
     gemma-2-9b             256000   3584  14336     42    16   8      256      8192   1e4       0      0     0      0
     gemma-2-27b            256000   4608  36864     46    32  16      128      8192   1e4       0      0     0      0
"""
_CLASSIC = {"norm": "layernorm", "gated_mlp": False, "hidden_act": "gelu_pytorch_tanh"}

# What a family, or one size of it, does differently from Llama; a later line that matches wins.
_DIFFERENCES: list[tuple[str, dict[str, Any]]] = [
    (
        "gpt-neox",
        _CLASSIC | {"partial_rotary_factor": 0.25, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ),
    ("falcon", _CLASSIC | {"tie_word_embeddings": True}),
    ("falcon-7b", {"tie_word_embeddings": False}),
    ("falcon-180b", {"tie_word_embeddings": False}),
    ("dbrx", {"norm": "layernorm", "router_aux_loss_coef": 0.05}),
    (
        "gemma-2",
        {
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "norm_eps": 1e-6, "sliding_window": 4096,
            "sliding_window_interval": 2,
        },
    ),
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
        model_type="other", **differences,
    )  # fmt: skip


PLANNED_PRESETS: dict[str, Model] = {model.name: model for model in map(_model, _SIZES.strip().splitlines())}
