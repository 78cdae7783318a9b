"""The architecture of a decoder, under Hugging Face `config.json` names.

Shape legend, used everywhere:

    B  micro-batch (sequences)     H  query heads        F  ffn (intermediate) size
    S  sequence length             K  key/value heads    V  vocabulary
    D  hidden size                 E  head dim           L  layers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ultrascale.spec.problems import Problem

RANGES = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), (1, 10_000)) | dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"), (1, 2**31 - 1)
)
"""Lowest and highest value of whole numbers. The highest are far above any model: they catch slips of the finger."""
ModelType = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length they were trained for."""

    rope_type: Literal["llama3", "yarn"]
    factor: float
    """Context is stretched by this factor."""
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original / low_freq_factor are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original / high_freq_factor are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original length are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by `factor`."""
    attention_factor: float | None = None
    """yarn: scale of cos and sin; None means 0.1 ln(factor) + 1."""

    def problems(self) -> list[Problem]:
        """Every rule the fields break, with keys relative to `model.rope_scaling`."""
        found: list[Problem] = []

        def expect(holds: bool, key: str, rule: str, remedy: str) -> None:
            if not holds:
                found.append(Problem(f"model.rope_scaling.{key}", rule, remedy))

        expect(self.factor >= 1, "factor", f"must be at least 1, is {self.factor}", "A factor of 1 changes nothing.")
        original = self.original_max_position_embeddings
        expect(original >= 1, "original_max_position_embeddings", f"must be at least 1, is {original}", "Llama 3 has 8192.")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            rule = f"must be above 0 and below {high} = {getattr(self, high)}, is {getattr(self, low)}"
            expect(0 < getattr(self, low) < getattr(self, high), low, rule, "1.0 is usual.")
        positive = self.attention_factor is None or self.attention_factor > 0
        expect(positive, "attention_factor", f"must be above 0, is {self.attention_factor}", 'Leave it out, or "none".')
        for key, default in _UNREAD_ROPE_FIELDS[self.rope_type].items():
            expect(getattr(self, key) == default, key, f"has no effect for rope_type = {self.rope_type}", "Leave it out.")
        return found


# Fields that a type of scaling does not read, and their defaults.
_UNREAD_ROPE_FIELDS: dict[str, dict[str, float | None]] = {
    "llama3": {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    "yarn": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. Defaults are Llama's choices."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    model_type: ModelType = "llama"
    """The Hugging Face family it is exported as."""
    name: str = ""
    """The preset's name, or the folder it was read from; for printing only."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    gated_mlp: bool = True
    """SwiGLU, down(silu(gate(x)) * up(x)); otherwise down(gelu_tanh(up(x)))."""
    position_embedding: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    no_rope_layer_interval: int | None = None
    """SmolLM 3: every n-th layer (n, 2n, ... counted from one) has no rotary positions."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before rotary (Qwen 3)."""
    sliding_window: int | None = None
    """A token sees at most this many positions, itself included."""
    max_window_layers: int = 0
    """Layers below this index use full attention even when `sliding_window` is set (Qwen)."""
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def norm_bias(self) -> bool:
        return self.norm == "layernorm"

    @property
    def query_size(self) -> int:
        """Width of all query heads together, H*E."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key (or value) heads together, K*E."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer (counted from zero), or None for full attention."""
        return self.sliding_window if layer >= self.max_window_layers else None

    def uses_rotary(self, layer: int) -> bool:
        """Whether a layer (counted from zero) turns its queries and keys by position."""
        if self.position_embedding != "rotary":
            return False
        return self.no_rope_layer_interval is None or (layer + 1) % self.no_rope_layer_interval != 0

    def problems(self) -> list[Problem]:
        """Every rule the fields break, with keys relative to `model`."""
        found: list[Problem] = []

        def expect(holds: bool, key: str, rule: str, remedy: str) -> None:
            if not holds:
                found.append(Problem(f"model.{key}", rule, remedy))

        for key, (low, high) in RANGES.items():
            value = getattr(self, key)
            expect(low <= value <= high, key, f"must be from {low} to {high}, is {value}", "Give a number in this range.")
        if not found:
            heads, groups = self.num_attention_heads, self.num_key_value_heads
            expect(
                heads % groups == 0, "num_key_value_heads",
                f"must divide num_attention_heads = {heads}, is {groups}",
                f"Choose one of {[g for g in range(1, heads + 1) if heads % g == 0]}.",
            )  # fmt: skip
            expect(
                self.position_embedding != "rotary" or self.head_dim % 2 == 0, "head_dim",
                f"must be even for rotary positions, is {self.head_dim}",
                f"Use {self.head_dim + 1}, or position_embedding = \"learned\".",
            )  # fmt: skip
        expect(
            self.sliding_window is None or self.sliding_window >= 1, "sliding_window",
            f"must be at least 1, is {self.sliding_window}", "Leave it out for full attention.",
        )  # fmt: skip
        expect(
            self.max_window_layers >= 0, "max_window_layers",
            f"must be at least 0, is {self.max_window_layers}", "0 puts the window on every layer.",
        )  # fmt: skip
        expect(
            self.no_rope_layer_interval is None or self.no_rope_layer_interval >= 1, "no_rope_layer_interval",
            f"must be at least 1, is {self.no_rope_layer_interval}", 'Leave it out, or "none".',
        )  # fmt: skip
        if self.position_embedding == "learned":
            for key, default in (("rope_theta", 10000.0), ("rope_scaling", None), ("no_rope_layer_interval", None)):
                holds = getattr(self, key) == default
                expect(holds, key, "has no effect with learned positions", 'Leave it out, or position_embedding = "rotary".')
        elif self.rope_scaling is not None:
            found += self.rope_scaling.problems()
        expect(self.norm_eps > 0, "norm_eps", f"must be above 0, is {self.norm_eps}", "1e-5 is usual.")
        expect(self.rope_theta > 0, "rope_theta", f"must be above 0, is {self.rope_theta}", "10000 is usual.")
        expect(
            self.initializer_range > 0, "initializer_range",
            f"must be above 0, is {self.initializer_range}", "0.02 is usual.",
        )  # fmt: skip
        return found
