"""Hugging Face model families, one row each: what its `config.json` fixes, its defaults, and whether it can be trained.

Reading and writing, the trainer, the proofs and the tests support a family through its row: a field that it does not fix is
read from `config.json`, and a trained one is proven by its preset `tiny-NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ultrascale.description.architecture.model import Model, ModelType
from ultrascale.description.problems import Problem

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
"""Defaults of transformers for keys that a `config.json` omits; families list only their differences."""

_ROTARY: dict[str, Any] = {"norm": "rmsnorm", "gated_mlp": True, "position_embedding": "rotary"}
_NO_BIAS: dict[str, Any] = {"attention_output_bias": False, "mlp_bias": False}
# Features that most families do not have. If one of them is fixed, the rules of `Model` fix the related fields.
_WITHOUT: dict[str, Any] = {
    "hidden_act": None, "attention_sinks": False, "partial_rotary_factor": 1.0, "sliding_window_interval": 1,
    "norm_placement": "pre", "qk_norm_whole": False, "kv_lora_rank": None, "num_nextn_predict_layers": 0,
    "zero_centered_norm": False, "scale_embedding": False, "query_pre_attn_scalar": None, "rope_local_base_freq": None,
    "full_attention_interval": None,
}  # fmt: skip
_DENSE = _WITHOUT | {"num_experts": 0}
_ALL_SEEN: dict[str, Any] = {"sliding_window": None, "no_rope_layer_interval": None}
_SOFTMAX_ROUTER: dict[str, Any] = {
    "scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0, "shared_expert_intermediate_size": 0,
}  # fmt: skip
_BIASED_ROUTER: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _without(*free: str) -> dict[str, Any]:
    """Values that disable the features that most families lack, except for the fields in `free`."""
    return {key: value for key, value in _WITHOUT.items() if key not in free}


_LATENT = _without("kv_lora_rank", "num_nextn_predict_layers")
_OLMO: dict[str, Any] = {"norm_placement": "post", "qk_norm": True, "qk_norm_whole": True, "mlp_bias": False}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
_DEEPSEEK = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type."""

    architecture: str
    """Class name written into `config.json`; empty if transformers has none."""
    fixed: dict[str, Any]
    """Fields of `Model` that always have this value; the others are in `config.json`."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of transformers where they differ from `DEFAULTS`, by the keys of `config.json`."""
    trained: bool = True
    """True if the trainer implements every part of the family."""


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _DENSE | _ALL_SEEN | {
            "norm": "layernorm", "gated_mlp": False, "position_embedding": "learned", "qkv_bias": True, "mlp_bias": True,
            "attention_output_bias": True, "qk_norm": False,
        },
        {
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "llama": Family("LlamaForCausalLM", _ROTARY | _DENSE | _ALL_SEEN | {"qk_norm": False}),
    "mistral": Family(
        "MistralForCausalLM",
        _ROTARY | _DENSE | _NO_BIAS | {
            "qkv_bias": False, "qk_norm": False, "max_window_layers": 0, "no_rope_layer_interval": None,
        },
        {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _ROTARY | _DENSE | _NO_BIAS | {"qkv_bias": True, "qk_norm": False, "no_rope_layer_interval": None},
        _QWEN | _QWEN_WINDOW,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _ROTARY | _DENSE | {"qk_norm": True, "mlp_bias": False, "no_rope_layer_interval": None},
        _QWEN | _QWEN_WINDOW | {"head_dim": 128},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _ROTARY | _DENSE | {"qk_norm": False, "sliding_window": None},
        {
            "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _ROTARY | _DENSE | _ALL_SEEN | _OLMO,
        {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _ROTARY | _without("full_attention_interval") | _OLMO | {
            "num_experts": 0, "max_window_layers": 0, "no_rope_layer_interval": None,
            "rope_theta": 5e5, "rope_local_base_freq": 5e5,  # transformers 5 takes no other from a file for both kinds of layer
        },
        {"vocab_size": 50304, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _ROTARY | _without("query_pre_attn_scalar", "rope_local_base_freq", "full_attention_interval") | {
            "num_experts": 0, "norm_placement": "both", "zero_centered_norm": True, "scale_embedding": True,
            "hidden_act": "gelu_pytorch_tanh", "qk_norm": True, "mlp_bias": False, "max_window_layers": 0,
            "no_rope_layer_interval": None,
        },
        {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
            "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
            "sliding_window": 4096, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _without("partial_rotary_factor") | {"num_experts": 0} | _ALL_SEEN | {
            "norm": "layernorm", "gated_mlp": False, "position_embedding": "rotary", "hidden_act": "relu2", "qk_norm": False,
        },
        {
            "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
            "norm_eps": 1e-5, "max_position_embeddings": 4096, "initializer_range": 0.0134, "partial_rotary_factor": 0.5,
        },
        trained=False,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _ROTARY | _WITHOUT | _NO_BIAS | _SOFTMAX_ROUTER | {
            "qkv_bias": False, "qk_norm": False, "max_window_layers": 0, "no_rope_layer_interval": None,
            "first_k_dense_replace": 0, "norm_topk_prob": True,
        },
        {
            "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _ROTARY | _WITHOUT | _ALL_SEEN | _SOFTMAX_ROUTER | {"qk_norm": True, "mlp_bias": False},
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "num_local_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "router_aux_loss_coef": 0.001, "norm_topk_prob": False,
        },
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _ROTARY | _WITHOUT | _ALL_SEEN | _SOFTMAX_ROUTER | {
            "qk_norm": True, "qk_norm_whole": True, "mlp_bias": False, "first_k_dense_replace": 0,
        },
        {
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_local_experts": 64,
            "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "norm_topk_prob": False,
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _ROTARY | _LATENT | _ALL_SEEN | {
            "qk_norm": False, "mlp_bias": False, "scoring_func": "softmax", "num_nextn_predict_layers": 0,
            "norm_topk_prob": False,
        },
        _DEEPSEEK | {
            "vocab_size": 102400, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
            "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy",
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _ROTARY | _LATENT | _ALL_SEEN | _BIASED_ROUTER | {"qk_norm": False, "mlp_bias": False},
        _DEEPSEEK | {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _ROTARY | _NO_BIAS | _without("partial_rotary_factor", "num_nextn_predict_layers") | _ALL_SEEN | _BIASED_ROUTER,
        {
            "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "use_qk_norm": False, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _ROTARY | _WITHOUT | _SOFTMAX_ROUTER | {
            "qk_norm": False, "mlp_bias": True, "hidden_act": "swigluoai", "attention_sinks": True, "max_window_layers": 0,
            "sliding_window_interval": 2, "no_rope_layer_interval": None, "first_k_dense_replace": 0, "norm_topk_prob": True,
        },
        {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001,
            "sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "grok": Family("", {}, trained=False),
    "other": Family("", {}, trained=False),  # shapes that are planned only
}  # fmt: skip
KNOWN = tuple(kind for kind, family in FAMILIES.items() if family.architecture)
"""Model types in transformers."""
TRAINED = tuple(kind for kind, family in FAMILIES.items() if family.trained)
WITH_EXPERTS = tuple(kind for kind in KNOWN if FAMILIES[kind].fixed.get("num_experts") != 0)
WITH_LOCAL_ROPE = tuple(kind for kind in KNOWN if "full_attention_interval" not in FAMILIES[kind].fixed)
"""Model types whose layers have full attention or a window, each kind with RoPE of its own."""
WITH_LATENT_ATTENTION = tuple(kind for kind in KNOWN if "kv_lora_rank" not in FAMILIES[kind].fixed)
IN_DEEPSEEKS_WORDS = tuple(kind for kind in KNOWN if "n_routed_experts" in FAMILIES[kind].defaults)
"""Model types whose `config.json` has DeepSeek's keys for experts, such as `n_routed_experts`."""


def family(model_type: ModelType | str) -> Family:
    """Family of a valid `model_type`."""
    return FAMILIES[model_type]


def export_problems(model: Model) -> list[Problem]:
    """Reasons why transformers could not load `model` as its `model_type`; empty if it could."""
    kind = model.model_type
    if not FAMILIES[kind].architecture:
        rule = f"is {kind}, which transformers does not know"
        return [Problem("model.model_type", rule, "Choose another family, or set checkpoint.export = false.")]
    export_issues: list[Problem] = []

    def expect(key: str, value: Any) -> None:
        if getattr(model, key) != value:
            rule = f"is {getattr(model, key)!r}, but a Hugging Face {kind} model always has {value!r}"
            export_issues.append(Problem(f"model.{key}", rule, _export_remedy(model, key, value)))

    fixed = FAMILIES[kind].fixed
    for key, value in fixed.items():
        expect(key, value)
    if kind == "gpt2":
        expect("num_key_value_heads", model.num_attention_heads)
    if "attention_output_bias" not in fixed:
        expect("attention_output_bias", model.qkv_bias)
    if kind in ("mixtral", "olmoe", "gpt_oss"):
        expect("intermediate_size", model.moe_intermediate_size)
    export_issues += _parts_problems(model)
    if kind in ("gpt2", "llama") and model.num_attention_heads and model.hidden_size % model.num_attention_heads:
        rule = f"must divide hidden_size = {model.hidden_size} to be exported as {kind}, is {model.num_attention_heads}"
        export_issues.append(
            Problem("model.num_attention_heads", rule, "Change one of the two, or set checkpoint.export = false.")
        )
    elif kind == "gpt2":
        expect("head_dim", model.hidden_size // max(1, model.num_attention_heads))
    return export_issues


def _parts_problems(model: Model) -> list[Problem]:
    """Parts that a family requires, or has in whole numbers only."""
    kind, problems = model.model_type, []
    remedy = "Choose another model_type, or set checkpoint.export = false."
    needed = (
        ("num_experts", WITH_EXPERTS), ("kv_lora_rank", WITH_LATENT_ATTENTION), ("rope_local_base_freq", WITH_LOCAL_ROPE),
        ("sliding_window", WITH_LOCAL_ROPE),
    )  # fmt: skip
    for key, kinds in needed:
        if kind in kinds and not getattr(model, key):
            problems.append(Problem(f"model.{key}", f"is missing, but a Hugging Face {kind} model always has it", remedy))
    if model.moe_intermediate_size and model.shared_expert_intermediate_size % model.moe_intermediate_size:
        rule = f"must be a multiple of moe_intermediate_size = {model.moe_intermediate_size}"
        problems.append(Problem("model.shared_expert_intermediate_size", rule, remedy))
    return problems


def _export_remedy(model: Model, key: str, value: Any) -> str:
    current = getattr(model, key)
    other_families = [name for name, other in FAMILIES.items() if key in other.fixed and other.fixed[key] == current]
    also = f", model_type = {' or '.join(other_families)}" if other_families else ""
    return f"Set it to {value!r}{also}, or set checkpoint.export = false."
