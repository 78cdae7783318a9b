"""Experts and latent attention in `config.json`: read and written per family, since each has its own keys."""

from __future__ import annotations

from typing import Any

from ultrascale.description.architecture.config_reader import Reader
from ultrascale.description.architecture.families import IN_DEEPSEEKS_WORDS, WITH_LATENT_ATTENTION
from ultrascale.description.architecture.model import Model

_COUNT = ("num_experts", "n_routed_experts", "num_local_experts")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK = ("num_experts_per_tok", "first_k_dense_replace", "routed_scaling_factor", "moe_intermediate_size", "norm_topk_prob")
# DeepSeek's keys: how ranks share the work, sizes given elsewhere too, and how weights are stored. Its loss is per sequence.
_DEEPSEEK_HARMLESS = {"ep_size", "qk_head_dim", "quantization_config", "seq_aux"}
# GPT-OSS's keys: other names for the same numbers, and how weights are stored.
_GPT_OSS_HARMLESS = {"initial_context_length", "experts_per_token", "quantization_config"}


def read_experts(reader: Reader, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Model` for experts and latent attention, in addition to `fields` that have been read already."""
    take = reader.take
    reader.read.add("output_router_logits")
    values: dict[str, Any] = {"num_experts_per_tok": take("num_experts_per_tok", int)}
    if kind in IN_DEEPSEEKS_WORDS:
        latent = _read_latent(reader, fields) if kind in WITH_LATENT_ATTENTION else {}
        return values | latent | _read_deepseek(reader, kind)
    values |= {"num_experts": _read_count(reader), "router_aux_loss_coef": take("router_aux_loss_coef", float)}
    values["moe_intermediate_size"] = fields["intermediate_size"]
    if kind in ("qwen3_moe", "olmoe"):
        values["norm_topk_prob"] = take("norm_topk_prob", bool)
    if kind == "qwen3_moe":
        values |= {"moe_intermediate_size": take("moe_intermediate_size", int), "first_k_dense_replace": _read_dense(reader)}
    elif kind == "gpt_oss":
        reader.read |= _GPT_OSS_HARMLESS
        reader.must_be("swiglu_alpha", (1.702,), "the activation is silu with this factor")
        reader.must_be("swiglu_limit", (7.0,), "gate and up are clamped there")
    return values


def write_experts(model: Model) -> dict[str, Any]:
    """Keys that `read_experts` reads."""
    kind = model.model_type
    if kind in IN_DEEPSEEKS_WORDS:
        return _write_deepseek(model)
    count = "num_experts" if kind in ("qwen3_moe", "olmoe") else "num_local_experts"
    config = {
        count: model.num_experts, "num_experts_per_tok": model.num_experts_per_tok,
        "router_aux_loss_coef": model.router_aux_loss_coef,
    }  # fmt: skip
    if kind in ("qwen3_moe", "olmoe"):
        config["norm_topk_prob"] = model.norm_topk_prob
    if kind == "qwen3_moe":
        config["moe_intermediate_size"] = model.moe_intermediate_size
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(model.first_k_dense_replace))}
    return config


def _read_count(reader: Reader) -> int:
    reader.defaults.setdefault("num_local_experts", reader.defaults.get("n_routed_experts"))
    return reader.take_first(_COUNT, int)


def _read_dense(reader: Reader) -> int:
    """Qwen 3: a list of layers without experts; only "the first n layers" can be represented."""
    reader.must_be("decoder_sparse_step", (1,), "every layer has experts, but for the first ones")
    dense = reader.take("mlp_only_layers", list, optional=True) or []
    if dense != list(range(len(dense))):
        reader.problem("mlp_only_layers", "must be the first layers, 0, 1, ...", "Such a pattern cannot be planned here.")
    return len(dense)


def _read_latent(reader: Reader, fields: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {key: reader.take(key, int, optional=key == "q_lora_rank") for key in _LATENT}
    values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    values["num_key_value_heads"] = fields["num_attention_heads"]
    return values


def _read_deepseek(reader: Reader, kind: str) -> dict[str, Any]:
    take = reader.take
    reader.read |= _DEEPSEEK_HARMLESS
    reader.must_be("moe_layer_freq", (1,), "every layer has experts, but for the first ones")
    width, shared = take("moe_intermediate_size", int), take("n_shared_experts", int, optional=True) or 0
    values: dict[str, Any] = {"num_experts": _read_count(reader), "moe_intermediate_size": width}
    values |= {"shared_expert_intermediate_size": shared * width, "first_k_dense_replace": take("first_k_dense_replace", int)}
    values |= {key: take(key, int, optional=True) or 1 for key in ("n_group", "topk_group")}
    values["routed_scaling_factor"] = take("routed_scaling_factor", float)
    values["router_aux_loss_coef"] = take("aux_loss_alpha", float, optional=True) or 0.0
    if kind == "deepseek_v2":
        reader.must_be("scoring_func", ("softmax",), "this family scores by softmax")
        reader.must_be("norm_topk_prob", (False, None), "transformers never normalises scores of this family")
        values["topk_method"] = take("topk_method", str)
        if values["topk_method"] not in ("greedy", "group_limited_greedy"):
            reader.problem(
                "topk_method", f"{values['topk_method']!r} is not supported", "Only greedy and group_limited_greedy are."
            )
    else:
        reader.must_be("scoring_func", ("sigmoid",), "this family scores by sigmoid")
        values["norm_topk_prob"] = take("norm_topk_prob", bool)
        reader.must_be("topk_method", ("noaux_tc",), "this family balances by a bias")
        names = ("num_mtp_layers", "num_nextn_predict_layers")
        values["num_nextn_predict_layers"] = reader.take_first(names, int, optional=True) or 0
    return values


def _write_deepseek(model: Model) -> dict[str, Any]:
    names = (*_DEEPSEEK, "n_group", "topk_group", "scoring_func", "topk_method")
    config = {name: getattr(model, name) for name in names}
    config |= {"n_routed_experts": model.num_experts, "moe_layer_freq": 1, "aux_loss_alpha": model.router_aux_loss_coef}
    config["n_shared_experts"] = model.shared_expert_intermediate_size // model.moe_intermediate_size
    if model.latent_attention:
        config |= {name: getattr(model, name) for name in _LATENT}
        config["head_dim"] = model.qk_rope_head_dim  # transformers' name for the part with RoPE
    if model.model_type != "deepseek_v2":
        config["num_nextn_predict_layers"] = model.num_nextn_predict_layers
    return config
