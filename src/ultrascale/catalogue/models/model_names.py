"""Names of models as people and hubs write them, mapped to those of the presets.

`meta-llama/Meta-Llama-3-8B-Instruct`, `Llama 3 8B`, `llama3-8b` and `Llama-3-8B-hf` are all `llama-3-8b`: a fine-tuned model
has the same shape, though perhaps another number of positions. Only dates of releases that are known to have the same shape are
dropped: Qwen 3's of 2507 and Kimi K2's of 0905 have other RoPE settings. Nothing else is guessed: any other name that is not a
preset's is refused.
"""

from __future__ import annotations

import re

_OWNER = re.compile(r"^.*/")
_TUNED = re.compile(r"-(?:instruct|base|chat|it|pt|hf|preview|pretrain)(?=-|$)")
_DATE = re.compile(r"(?<=deepseek-v3)-0324$|(?<=deepseek-r1)-0528$|(?<=deepseek-v2)-0628$|(?<=kimi-k2)-0711$|"
                   r"(?<=olmoe-1b-7b)-(?:0924|0125)$|(?<=mistral-nemo)-2407$|(?<=mistral-small-24b)-2501$")  # fmt: skip
_JOINED = re.compile(r"\b(llama|gpt|olmo|gemma|glm|phi)(?=\d)")
"""Names that presets separate from the number behind them."""
_SCALE = {"m": 1e6, "b": 1e9, "t": 1e12}


def normal_name(text: str) -> str:
    """A name in lower case, without its owner and the suffix of fine-tuning."""
    name = re.sub(r"[\s_]+", "-", _OWNER.sub("", text.strip().lower().rstrip("/")))
    name = re.sub(r"^meta-", "", _DATE.sub("", _TUNED.sub("", name)))
    return _JOINED.sub(r"\1-", re.sub(r"(\bsmollm(?=-\d)|qwen(?=-2\.5|-3))-", r"\1", name))


def parameters_in_name(text: str) -> float | None:
    """Number of parameters, if a name is nothing but that number: `40B`, `7b`, `8030000000`."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([mbt])?", text.strip().lower())
    if match is None:
        return None
    size = float(match[1]) * _SCALE.get(match[2] or "", 1.0)
    return size if size >= min(_SCALE.values()) else None
