"""Reads keys of a Hugging Face `config.json` one by one, so that none is ignored unnoticed."""

from __future__ import annotations

import math
from typing import Any

from ultrascale.description.problems import MOST_PROBLEMS, Problem

HARMLESS = {
    "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "_attn_implementation",
    "attn_implementation", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "tokenizer_class",
    "prefix", "chunk_size_feed_forward", "is_llama_config", "pretraining_tp", "attention_dropout", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "hidden_dropout", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "n_ctx", "return_dict", "output_hidden_states", "output_attentions",
    "model_type", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "gradient_checkpointing",
    "transformers.js_config", "cache_implementation",
}  # fmt: skip
"""Keys without effect here: token ids, caches, and dropout, which pretraining does not use."""


class Reader:
    """Reads keys of a config, and records which were read and which were invalid."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any], where: str):
        self.config, self.defaults, self.where = config, defaults, where
        self.read: set[str] = set(HARMLESS)
        self.problems: list[Problem] = []

    def take(self, key: str, kind: type, *, optional: bool = False) -> Any:
        """Value of `key`, or the default; a wrong type is recorded as a problem."""
        self.read.add(key)
        value: Any = self.config.get(key, self.defaults.get(key))
        if value is None and optional:
            return None
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            self.problem(key, f"must be of type {kind.__name__}, is {value!r}", "Repair the file.")
            return {int: 1, float: 1.0, bool: False, list: []}[kind]
        if kind is not float or value is None:
            return value
        if not math.isfinite(value):
            self.problem(key, f"must be finite, is {value!r}", "Repair the file.")
            return 1.0
        return float(value)

    def must_be(self, key: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Refuse `key` unless it is missing or one of `allowed`."""
        self.read.add(key)
        if key in self.config and self.config[key] not in allowed:
            rule = f"{self.config[key]!r} is not supported: {reason}"
            self.problem(key, rule, f"Only {' or '.join(repr(a) for a in allowed)} can be trained here.")

    def take_first(self, keys: tuple[str, ...], kind: type, *, optional: bool = False) -> Any:
        """Value under the first of several synonymous names that the file has, or the default of the last name."""
        self.read |= set(keys)
        return self.take(next((key for key in keys if self.config.get(key) is not None), keys[-1]), kind, optional=optional)

    def problem(self, key: str, rule: str, remedy: str) -> None:
        self.problems.append(Problem(key, rule, remedy, self.where))

    def refuse_unread(self) -> None:
        """Refuse keys that were not read, unless they are disabled."""
        unread = [key for key in sorted(set(self.config) - self.read) if self.config[key] not in (None, False, [], {}, "")]
        most = max(1, MOST_PROBLEMS - 1 - len(self.problems))
        for key in unread[:most]:
            rule = f"is not known for model_type {self.config['model_type']!r}, so its effect would be lost"
            self.problem(key, rule, "Remove it from the file if it changes nothing.")
        if (more := len(unread) - most) > 0:
            self.problem(f"{more:,} more keys", "are not known either", "Give a model's config.json.")
