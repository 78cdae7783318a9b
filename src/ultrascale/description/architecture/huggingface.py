"""Conversion between `config.json` and `Model`, without transformers and without torch.

Reading follows transformers 4.56 to 5, defaults included; a key that changes the computation in a way that `Model` cannot
represent is refused by name. Keys without effect here (token ids, caches, and dropout, which pretraining does not use) are
listed in `description.architecture.config_reader`, and only those are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ultrascale.description.architecture.config_reader import Reader
from ultrascale.description.architecture.expert_config import read_experts, write_experts
from ultrascale.description.architecture.families import DEFAULTS, KNOWN, WITH_EXPERTS, WITH_LOCAL_ROPE, export_problems, family
from ultrascale.description.architecture.model import MOST_LAYERS, Model
from ultrascale.description.architecture.rope_config import Rope, read_rope, write_rope
from ultrascale.description.parsing import MOST_JSON, RepeatedKeyError, line_of, parse_json, read_bounded
from ultrascale.description.problems import Problem, SpecError, mistake

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Extensions of files that may execute code when they are read."""
CONVERT = "Pickles are read by `ultrascale convert SOURCE FOLDER` alone, which makes safetensors of them in a confined process."
_SAME_AS = {"kimi_k2": "deepseek_v3"}  # another name for the same computation
# n_embd and similar are GPT-2's own names; transformers accepts both.
_GPT2_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def from_hf(path: str | Path) -> Model:
    """Model of a folder with a `config.json`, or of that file.

    Raises SpecError that names the file and every refused key.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if file.suffix in PICKLES:
        raise mistake(str(file), "is a pickle, and pickles are not read here", CONVERT)
    try:
        config = parse_json(read_bounded(file, MOST_JSON), unique_keys=True)
    except FileNotFoundError:
        remedy = "Give a folder with a config.json (a Hugging Face model that is already on this machine)."
        if (exported := file.parent / "export" / "config.json").is_file():
            remedy = f"Give {exported.parent}, the model that this run exported."
        raise mistake("model.path", f"there is no {file}", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise mistake(str(file), f"cannot be read: {why}", "Give a model's config.json.") from None
    except RepeatedKeyError as error:
        raise mistake(str(file), str(error), "Keep one of the two.") from None
    except ValueError as error:
        raise mistake(line_of(error, file), f"is not JSON: {error}", "Repair the file.") from None
    if not isinstance(config, dict):
        raise mistake(str(file), "must hold a JSON object", "Give a model's config.json.")
    return model_from_config(config, where=str(file), name=file.resolve().parent.name)


def model_from_config(config: dict[str, Any], *, where: str = "config.json", name: str = "") -> Model:
    """Model of a `config.json` dictionary. Raises SpecError with every key that cannot be represented."""
    kind = config.get("model_type")
    kind = _SAME_AS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KNOWN:
        rule = f"{kind!r} is not supported; supported are {', '.join(KNOWN)}"
        raise mistake("model_type", rule, "Choose a model of one of these families.", where)
    reader = Reader(config | {"model_type": kind}, DEFAULTS | family(kind).defaults, where)
    fields: dict[str, Any] = dict(family(kind).fixed) | {"model_type": kind, "name": name}
    fields |= _read_gpt2(reader) if kind == "gpt2" else _read_llama_like(reader, kind)
    if fields.get("router_aux_loss_coef"):  # transformers defines this loss differently, and adds it only on request
        fields["router_aux_loss_scope"] = "none"
    model = None
    if not reader.problems:
        model = Model(**fields)
        reader.problems += [Problem(p.key, p.rule, p.remedy, where) for p in model.problems()]
    reader.refuse_unread()
    if reader.problems or model is None:
        raise SpecError(reader.problems)
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The `config.json` of `model`, in the form that transformers 4 and 5, vLLM and llama.cpp all read.

    Token ids are None: the exporter sets those of the tokenizer. Raises SpecError if the family cannot represent the model.
    """
    problems = export_problems(model)
    if problems:
        raise SpecError(problems)
    config: dict[str, Any] = {
        "architectures": [family(model.model_type).architecture], "model_type": model.model_type,
        "vocab_size": model.vocab_size, "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "use_cache": True,
    }  # fmt: skip
    return config | (_gpt2_config(model) if model.model_type == "gpt2" else _llama_like_config(model))


def _read_gpt2(reader: Reader) -> dict[str, Any]:
    reader.must_be("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "the feed-forward layer uses GELU in tanh form")
    reader.must_be("scale_attn_weights", (True,), "attention is scaled by 1/sqrt(head_dim)")
    take = reader.take
    for plain, short in _GPT2_NAMES.items():
        if plain in reader.config:
            reader.read.add(plain)
            reader.defaults[short] = reader.config[plain]
    hidden, heads = take("n_embd", int), take("n_head", int)
    if heads < 1 or hidden % heads:
        reader.problem("n_head", f"must divide n_embd = {hidden}, is {heads}", "Repair the file.")
        heads = 1
    return {
        "vocab_size": take("vocab_size", int), "hidden_size": hidden, "num_hidden_layers": take("n_layer", int),
        "intermediate_size": take("n_inner", int, optional=True) or 4 * hidden, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": hidden // heads, "max_position_embeddings": take("n_positions", int),
        "norm_eps": take("layer_norm_epsilon", float), "initializer_range": take("initializer_range", float),
        "tie_word_embeddings": take("tie_word_embeddings", bool),
    }  # fmt: skip


def _read_llama_like(reader: Reader, kind: str) -> dict[str, Any]:
    if kind == "nemotron":
        reader.must_be("hidden_act", ("relu2",), "the feed-forward layer has a squared ReLU")
    elif "hidden_activation" in reader.defaults:
        reader.must_be("hidden_activation", ("gelu_pytorch_tanh",), "the feed-forward layer is GeGLU")
    else:
        reader.must_be("hidden_act", ("silu",), "the feed-forward layer is SwiGLU")
    take = reader.take
    hidden, heads, layers = (take(k, int) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if not 1 <= layers <= MOST_LAYERS:  # checked here, before lists of this length are made
        reader.problem("num_hidden_layers", f"must be from 1 to {MOST_LAYERS}, is {layers}", "Repair the file.")
        layers = 1
    positions = take("max_position_embeddings", int)
    fields = {
        "vocab_size": take("vocab_size", int), "hidden_size": hidden, "intermediate_size": take("intermediate_size", int),
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": take("num_key_value_heads", int, optional=True) or heads,
        "head_dim": take("head_dim", int, optional=True) or hidden // max(1, heads),
        "max_position_embeddings": positions, "norm_eps": take("norm_eps" if kind == "nemotron" else "rms_norm_eps", float),
        "initializer_range": take("initializer_range", float), "tie_word_embeddings": take("tie_word_embeddings", bool),
    }  # fmt: skip
    fixed = family(kind).fixed
    if "qkv_bias" not in fixed:
        fields["qkv_bias"] = take("attention_bias", bool)
        fields["attention_output_bias"] = fixed.get("attention_output_bias", fields["qkv_bias"])
    if "mlp_bias" not in fixed:
        fields["mlp_bias"] = take("mlp_bias", bool)
    if "use_qk_norm" in reader.defaults:
        fields["qk_norm"] = take("use_qk_norm", bool)
    if kind == "smollm3":
        fields["no_rope_layer_interval"] = _read_no_rope_interval(reader, layers)
    if "query_pre_attn_scalar" not in fixed:
        scalar = take("query_pre_attn_scalar", int)
        fields["query_pre_attn_scalar"] = None if scalar == fields["head_dim"] else scalar
    if kind in WITH_LOCAL_ROPE:
        fields["rope_local_base_freq"] = _read_local_base(reader, fixed.get("rope_local_base_freq"))
    rope = _read_rope(reader, kind, positions)
    fields |= {"rope_theta": rope.theta, "rope_scaling": rope.scaling, "partial_rotary_factor": rope.partial_factor}
    fields |= _read_window(reader, kind, layers)
    return fields | read_experts(reader, kind, fields) if kind in WITH_EXPERTS else fields


def _read_local_base(reader: Reader, fixed: float | None) -> float:
    """RoPE base of layers with a sliding window; of transformers 5's two tables, the other one is left in the config.

    `fixed`: the only base that files with a single one may have (OLMo 3), since transformers 4 and 5 read another differently.
    """
    tables = reader.config.get("rope_parameters")
    if isinstance(tables, dict) and isinstance(local := tables.get("sliding_attention"), dict):
        if {*local} - {"rope_theta", "rope_type"} or local.get("rope_type", "default") != "default":
            rule, remedy = "must be of type 'default'", "Choose a model whose windowed layers are not stretched."
            reader.problem("rope_parameters.sliding_attention", rule, remedy)
        moved = {"rope_local_base_freq": local.get("rope_theta"), "rope_parameters": tables.get("full_attention")}
        reader.config = reader.config | {key: value for key, value in moved.items() if value is not None}
    elif fixed is not None:
        reader.must_be("rope_theta", (fixed,), "transformers 5 does not read it for layers with a sliding window")
        return fixed
    return reader.take("rope_local_base_freq", float)


def _read_rope(reader: Reader, kind: str, positions: int) -> Rope:
    config = reader.config
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = config | {key: value for key, value in reader.defaults.items() if key == "rope_parameters"}
    rope = read_rope(config, reader.defaults.get("rope_theta", 1e4), positions, reader.where)
    reader.read |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    if kind in ("deepseek_v2", "deepseek_v3"):
        reader.must_be("rope_interleave", (True, None), "rotary dimensions are neighbours")
    reader.must_be("rope_interleaved", (False, None), "rotary dimensions are paired by halves")
    reader.problems += rope.problems
    return rope


def _read_window(reader: Reader, kind: str, layers: int) -> dict[str, Any]:
    """Sliding window: Mistral's is on all layers; Qwen's on those from `max_window_layers` on, if enabled."""
    # transformers reads no layer_types of these two, so that a file's are refused as unread.
    types = reader.take("layer_types", list, optional=True) if kind not in ("llama", "mixtral") else None
    if kind in WITH_LOCAL_ROPE:
        return _read_full_interval(reader, types, layers)
    if kind == "gpt_oss":
        return _read_alternating_window(reader, types, layers)
    if "sliding_window" in family(kind).fixed:
        reader.must_be("use_sliding_window", (False, None), "this family has no sliding window here")
        reader.read.add("sliding_window")
        reader.read.add("max_window_layers")
        window, first = None, layers
    else:
        window, first = reader.take("sliding_window", int, optional=True), 0
        if kind in ("qwen2", "qwen3"):
            first = reader.take("max_window_layers", int)
            window = window if reader.take("use_sliding_window", bool, optional=True) else None
    if types:
        full = types.index("sliding_attention") if "sliding_attention" in types else layers
        if types != ["full_attention"] * full + ["sliding_attention"] * (layers - full) or (full < layers and not window):
            reader.problem(
                "layer_types", "is not full attention first, then a sliding window to the end, with use_sliding_window on",
                "Such a mixture cannot be trained here.",
            )  # fmt: skip
        first = full
    return {"sliding_window": window, "max_window_layers": first} if window and first < layers else {}


def _read_alternating_window(reader: Reader, types: list[Any] | None, layers: int) -> dict[str, Any]:
    """GPT-OSS: alternating layers with a window and with full attention."""
    expected = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    if types not in (None, expected):
        rule = "must be sliding_attention and full_attention by turns, sliding first"
        reader.problem("layer_types", rule, "Such a pattern cannot be planned here.")
    return {"sliding_window": reader.take("sliding_window", int), "sliding_window_interval": 2}


def _read_full_interval(reader: Reader, types: list[Any] | None, layers: int) -> dict[str, Any]:
    """Gemma 3, OLMo 3: every n-th layer has full attention, the others a window."""
    interval: int | None = reader.take_first(("_sliding_window_pattern", "sliding_window_pattern"), int)
    if types is not None:
        interval = types.index("full_attention") + 1 if "full_attention" in types else None
        if interval == 1 or types != _layer_types(layers, interval):
            rule = "must be full_attention at every n-th layer, n at least 2, and sliding_attention elsewhere"
            reader.problem("layer_types", rule, "Such a pattern cannot be trained here.")
    interval = interval if interval is None or interval <= layers else None
    return {"sliding_window": reader.take("sliding_window", int), "full_attention_interval": interval}


def _layer_types(layers: int, interval: int | None) -> list[str]:
    full = range(interval - 1, layers, interval) if interval else range(0)
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]


def _read_no_rope_interval(reader: Reader, layers: int) -> int | None:
    """SmolLM 3: a list of 1 (RoPE) and 0 (none) per layer; only "every n-th has none" can be represented."""
    interval = reader.take("no_rope_layer_interval", int, optional=True)
    rotary = reader.take("no_rope_layers", list, optional=True)
    if rotary is None:
        return interval if interval and interval <= layers else None
    rotary = rotary[:layers]
    if 0 not in rotary:
        return None
    interval = rotary.index(0) + 1
    if rotary != [int((layer + 1) % interval != 0) for layer in range(layers)]:
        reader.problem(
            "no_rope_layers", "must be 0 at every n-th layer and 1 elsewhere", "Such a pattern cannot be trained here."
        )
    return interval


def _gpt2_config(model: Model) -> dict[str, Any]:
    fields = {short: getattr(model, plain) for plain, short in _GPT2_NAMES.items()}
    return fields | {
        "n_inner": model.intermediate_size, "layer_norm_epsilon": model.norm_eps, "activation_function": "gelu_new",
        "resid_pdrop": model.dropout, "embd_pdrop": model.dropout, "attn_pdrop": 0.0,
    }  # fmt: skip


def _llama_like_config(model: Model) -> dict[str, Any]:
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings",
    )  # fmt: skip
    kind, layers, fixed = model.model_type, model.num_hidden_layers, family(model.model_type).fixed
    config: dict[str, Any] = {name: getattr(model, name) for name in names}
    config |= {"rms_norm_eps": model.norm_eps, "hidden_act": "silu", "attention_dropout": 0.0} | write_rope(model)
    if kind == "nemotron":
        config |= {"norm_eps": config.pop("rms_norm_eps"), "hidden_act": "relu2"}
    if "hidden_activation" in family(kind).defaults:
        config.pop("hidden_act")
        config["hidden_activation"] = model.activation
    if "query_pre_attn_scalar" not in fixed:
        config["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_dim
    if kind in WITH_LOCAL_ROPE:
        interval = model.full_attention_interval
        config |= {"sliding_window": model.sliding_window, "layer_types": _layer_types(layers, interval)}
        if "rope_local_base_freq" not in fixed:
            config |= {"rope_local_base_freq": model.rope_local_base_freq, "sliding_window_pattern": interval or layers + 1}
    if "partial_rotary_factor" not in fixed:
        config["partial_rotary_factor"] = model.partial_rotary_factor
    if "qkv_bias" not in fixed:
        config["attention_bias"] = model.qkv_bias
    if "mlp_bias" not in fixed:
        config["mlp_bias"] = model.mlp_bias
    if "use_qk_norm" in family(kind).defaults:
        config["use_qk_norm"] = model.qk_norm
    if kind in ("mistral", "mixtral", "gpt_oss"):
        config["sliding_window"] = model.sliding_window
    if kind == "gpt_oss":
        config["layer_types"] = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if kind in WITH_EXPERTS:
        config |= write_experts(model)
    if kind in ("qwen2", "qwen3"):
        windowed = model.sliding_window is not None
        config |= {"use_sliding_window": windowed, "sliding_window": model.sliding_window}
        config["max_window_layers"] = model.max_window_layers if windowed else layers
    if kind == "smollm3":
        config["no_rope_layers"] = [int(model.uses_rotary(layer)) for layer in range(layers)]
        config["no_rope_layer_interval"] = model.no_rope_layer_interval or layers + 1
        config |= {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * layers}
    return config
