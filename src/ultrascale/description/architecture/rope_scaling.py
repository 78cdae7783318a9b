"""RoPE scaled beyond the context length that it was trained for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ultrascale.description.problems import Problem


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequencies scaled beyond the context length that they were trained for."""

    rope_type: Literal["llama3", "yarn", "linear"]
    """Rule of scaling: Llama 3.1's, YaRN (Peng et al. 2023), or linear, all frequencies alike (Chen et al. 2023)."""
    factor: float
    """Factor by which the context length is extended."""
    original_max_position_embeddings: int
    """Original context length in tokens; linear: not read."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original / low_freq_factor are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original / high_freq_factor are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this over the original length are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are divided by `factor`."""
    attention_factor: float | None = None
    """yarn: scale of cos and sin; None means 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: the bounds of `beta_fast` and `beta_slow` are rounded to whole dimensions (GPT-OSS: they are not)."""
    mscale: float | None = None
    """yarn, DeepSeek: cos and sin are scaled by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) ..."""
    mscale_all_dim: float | None = None
    """... and scores by (0.1 mscale_all_dim ln(factor) + 1)^2."""

    def problems(self) -> list[Problem]:
        """Every broken rule, with keys relative to `model.rope_scaling`."""
        rule_problems: list[Problem] = []

        def expect(holds: bool, key: str, rule: str, remedy: str) -> None:
            if not holds:
                rule_problems.append(Problem(f"model.rope_scaling.{key}", rule, remedy))

        expect(self.factor >= 1, "factor", f"must be at least 1, is {self.factor}", "A factor of 1 changes nothing.")
        original = self.original_max_position_embeddings
        expect(original >= 1, "original_max_position_embeddings", f"must be at least 1, is {original}", "Llama 3 has 8192.")
        rule = f"must be above 0 and below high_freq_factor = {self.high_freq_factor}, is {self.low_freq_factor}"
        expect(0 < self.low_freq_factor < self.high_freq_factor, "low_freq_factor", rule, "1.0 is usual.")
        rule = f"must be above 0 and at most beta_fast = {self.beta_fast}, is {self.beta_slow}"
        expect(0 < self.beta_slow <= self.beta_fast, "beta_slow", rule, "1.0 is usual.")
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, key)
            expect(value is None or value > 0, key, f"must be above 0, is {value}", 'Leave it out, or "none".')
        for key, default in _UNREAD_ROPE_FIELDS[self.rope_type].items():
            expect(getattr(self, key) == default, key, f"has no effect for rope_type = {self.rope_type}", "Leave it out.")
        return rule_problems


# Fields that a type of scaling does not read, and their defaults.
_OF_LLAMA3: dict[str, float | None] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_OF_YARN: dict[str, float | None] = {
    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "truncate": True, "mscale": None, "mscale_all_dim": None,
}  # fmt: skip
_UNREAD_ROPE_FIELDS = {"llama3": _OF_YARN, "yarn": _OF_LLAMA3, "linear": _OF_LLAMA3 | _OF_YARN}
