"""`config.json` to `Model` and back, without transformers and without torch.

Reading follows what transformers 4.56 to 5 would build, defaults included; a key that would change the computation in a way
`Model` cannot say is refused by name. Keys that change nothing here (token ids, caches, dropout, which pretraining leaves off)
are listed below, and only those are passed over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ultrascale.spec.families import export_problems, family
from ultrascale.spec.model import Model
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.rope_config import read_rope, write_rope

_HARMLESS = {
    "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "_attn_implementation",
    "attn_implementation", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "tokenizer_class",
    "prefix", "chunk_size_feed_forward", "is_llama_config", "pretraining_tp", "attention_dropout", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "hidden_dropout", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "n_ctx", "return_dict", "output_hidden_states", "output_attentions",
    "model_type", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "gradient_checkpointing",
    "transformers.js_config",
}  # fmt: skip
# transformers' own defaults, where a key may be missing from the file; families differ only where named.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
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
}  # fmt: skip
# n_embd and friends are GPT-2's own words for the same things; transformers accepts both.
_GPT2_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def from_hf(path: str | Path) -> Model:
    """The model of a folder with a `config.json`, or of that file.

    Raises SpecError naming the file and every key it refuses.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "Give a folder with a config.json (a Hugging Face model that is already on this machine)."
        raise SpecError([Problem("model.path", f"there is no {file}", remedy)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem(str(file), f"cannot be read: {error}", "Check the file.")]) from None
    except json.JSONDecodeError as error:
        raise SpecError([Problem(f"{file}:{error.lineno}", f"is not JSON: {error.msg}", "Repair the file.")]) from None
    if not isinstance(config, dict):
        raise SpecError([Problem(str(file), "must hold a JSON object", "Give a model's config.json.")])
    return model_from_config(config, where=str(file), name=file.resolve().parent.name)


def model_from_config(config: dict[str, Any], *, where: str = "config.json", name: str = "") -> Model:
    """The model a `config.json` dictionary describes. Raises SpecError with every key that cannot be represented."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILY_DEFAULTS:
        rule = f"{kind!r} is not supported; supported are {', '.join(_FAMILY_DEFAULTS)}"
        raise SpecError([Problem("model_type", rule, "Choose a model of one of these families.", where)])
    reader = _Reader(config, _DEFAULTS | _FAMILY_DEFAULTS[kind], where)
    fields: dict[str, Any] = dict(family(kind).fixed) | {"model_type": kind, "name": name}
    fields |= _read_gpt2(reader) if kind == "gpt2" else _read_llama_like(reader, kind)
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

    Token ids are None: whoever exports sets those of the tokenizer. Raises SpecError if the family cannot express the model.
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


class _Reader:
    """Takes keys out of a config, remembering which were read and what was wrong."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any], where: str):
        self.config, self.defaults, self.where = config, defaults, where
        self.read: set[str] = set(_HARMLESS)
        self.problems: list[Problem] = []

    def take(self, key: str, kind: type, *, optional: bool = False) -> Any:
        """The value of `key`, else the default; a wrong type is a problem."""
        self.read.add(key)
        value: Any = self.config.get(key, self.defaults.get(key))
        if value is None and optional:
            return None
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            self.problem(key, f"must be of type {kind.__name__}, is {value!r}", "Repair the file.")
            return {int: 1, float: 1.0, bool: False, list: []}[kind]
        return float(value or 0) if kind is float else value

    def must_be(self, key: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Refuses `key` unless it is missing or one of `allowed`."""
        self.read.add(key)
        if key in self.config and self.config[key] not in allowed:
            rule = f"{self.config[key]!r} is not supported: {reason}"
            self.problem(key, rule, f"Only {' or '.join(repr(a) for a in allowed)} can be trained here.")

    def problem(self, key: str, rule: str, remedy: str) -> None:
        self.problems.append(Problem(key, rule, remedy, self.where))

    def refuse_unread(self) -> None:
        """Keys nobody read are refused, unless they are switched off."""
        for key in sorted(set(self.config) - self.read):
            if self.config[key] not in (None, False, [], {}, ""):
                rule = f"is not known for model_type {self.config['model_type']!r}, so its effect would be lost"
                self.problem(key, rule, "Remove it from the file if it changes nothing.")


def _read_gpt2(reader: _Reader) -> dict[str, Any]:
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


def _read_llama_like(reader: _Reader, kind: str) -> dict[str, Any]:
    reader.must_be("hidden_act", ("silu",), "the feed-forward layer is SwiGLU")
    take = reader.take
    hidden, heads, layers = (take(k, int) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if not 1 <= layers <= 10_000:  # said here, before lists of this length are made
        reader.problem("num_hidden_layers", f"must be from 1 to 10000, is {layers}", "Repair the file.")
        layers = 1
    positions = take("max_position_embeddings", int)
    fields = {
        "vocab_size": take("vocab_size", int), "hidden_size": hidden, "intermediate_size": take("intermediate_size", int),
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": take("num_key_value_heads", int, optional=True) or heads,
        "head_dim": take("head_dim", int, optional=True) or hidden // max(1, heads),
        "max_position_embeddings": positions, "norm_eps": take("rms_norm_eps", float),
        "initializer_range": take("initializer_range", float), "tie_word_embeddings": take("tie_word_embeddings", bool),
    }  # fmt: skip
    if kind in ("llama", "qwen3", "smollm3"):
        fields["qkv_bias"] = fields["attention_output_bias"] = take("attention_bias", bool)
    if kind in ("llama", "smollm3"):
        fields["mlp_bias"] = take("mlp_bias", bool)
    if kind == "smollm3":
        fields["no_rope_layer_interval"] = _read_no_rope_interval(reader, layers)
    theta, scaling, problems = read_rope(reader.config, reader.defaults.get("rope_theta", 1e4), positions, reader.where)
    reader.read |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    reader.must_be("rope_interleaved", (False, None), "rotary dimensions are paired by halves")
    reader.problems += problems
    return fields | {"rope_theta": theta, "rope_scaling": scaling} | _read_window(reader, kind, layers)


def _read_window(reader: _Reader, kind: str, layers: int) -> dict[str, Any]:
    """The sliding window: Mistral's is on all layers; Qwen's on those from `max_window_layers` on, when it is switched on."""
    types = reader.take("layer_types", list, optional=True) if kind != "llama" else None
    if kind in ("llama", "smollm3"):
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


def _read_no_rope_interval(reader: _Reader, layers: int) -> int | None:
    """SmolLM 3: a list of 1 (rotary) and 0 (none) per layer; only "every n-th has none" can be said."""
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
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


def _llama_like_config(model: Model) -> dict[str, Any]:
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings",
    )  # fmt: skip
    config: dict[str, Any] = {name: getattr(model, name) for name in names}
    config |= {"rms_norm_eps": model.norm_eps, "hidden_act": "silu", "attention_dropout": 0.0} | write_rope(model)
    kind, layers = model.model_type, model.num_hidden_layers
    if kind in ("llama", "qwen3", "smollm3"):
        config["attention_bias"] = model.qkv_bias
    if kind in ("llama", "smollm3"):
        config["mlp_bias"] = model.mlp_bias
    if kind == "mistral":
        config["sliding_window"] = model.sliding_window
    if kind in ("qwen2", "qwen3"):
        windowed = model.sliding_window is not None
        config |= {"use_sliding_window": windowed, "sliding_window": model.sliding_window}
        config["max_window_layers"] = model.max_window_layers if windowed else layers
    if kind == "smollm3":
        config["no_rope_layers"] = [int(model.uses_rotary(layer)) for layer in range(layers)]
        config["no_rope_layer_interval"] = model.no_rope_layer_interval or layers + 1
        config |= {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * layers}
    return config
