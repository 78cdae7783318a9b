"""The architecture of a decoder, under Hugging Face `config.json` names.

Shape legend, used everywhere:

    B  micro-batch (sequences)     H  query heads        F  ffn (intermediate) size
    S  sequence length             K  key/value heads    V  vocabulary
    D  hidden size                 E  head dim           L  layers
    X  experts

Three kinds of block can be said. Dense: attention, then one feed-forward layer. Experts (Shazeer et al. 2017): a router sends
each token to `num_experts_per_tok` of `num_experts` feed-forward layers, beside which a shared one may see every token. Latent
attention (DeepSeek-V2, section 2.1): queries, keys and values are made from narrow projections, `q_lora_rank` and
`kv_lora_rank` wide. `spec.trainable` says which of these the trainer runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ultrascale.spec.problems import Problem

RANGES = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), (1, 10_000)) | dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"), (1, 2**31 - 1)
)
"""Lowest and highest value of whole numbers. The highest are far above any model: they catch slips of the finger."""
ModelType = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3",
    "gpt_oss", "nemotron", "grok",
]  # fmt: skip


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
    truncate: bool = True
    """yarn: the bounds of `beta_fast` and `beta_slow` are rounded to whole dimensions (GPT-OSS: they are not)."""
    mscale: float | None = None
    """yarn, DeepSeek: cos and sin are scaled by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) ..."""
    mscale_all_dim: float | None = None
    """... and scores by (0.1 mscale_all_dim ln(factor) + 1)^2."""

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
    "llama3": {
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "truncate": True, "mscale": None,
        "mscale_all_dim": None,
    },
    "yarn": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip


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
    """down(act(gate(x)) * up(x)); otherwise down(act(up(x)))."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "relu2", "swigluoai"] | None = None
    """`act`. None: silu if `gated_mlp`, else gelu_pytorch_tanh. relu2: squared ReLU (Nemotron); swigluoai: GPT-OSS's clamped
    SwiGLU, (up + 1) * gate * sigmoid(1.702 gate)."""
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
    qk_norm_whole: bool = False
    """That norm runs over all heads together instead (OLMoE)."""
    attention_sinks: bool = False
    """One learned number a head joins the softmax and attends to nothing (GPT-OSS)."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that turn (Nemotron: a half)."""
    sliding_window: int | None = None
    """A token sees at most this many positions, itself included."""
    max_window_layers: int = 0
    """Layers below this index use full attention even when `sliding_window` is set (Qwen)."""
    sliding_window_interval: int = 1
    """Every n-th layer (0, n, 2n, ... counted from zero) is windowed, the others see everything (GPT-OSS: 2)."""
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    num_experts: int = 0
    """Experts a layer, X. 0: a dense model, and none of the fields down to `num_nextn_predict_layers` may be set."""
    num_experts_per_tok: int = 0
    """Experts that each token visits."""
    moe_intermediate_size: int = 0
    """F of one expert."""
    shared_expert_intermediate_size: int = 0
    """F of the experts that every token visits, all of them together. 0: there are none."""
    first_k_dense_replace: int = 0
    """Leading layers with a dense feed-forward layer, `intermediate_size` wide (DeepSeek)."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    """How experts are chosen: by score; group-limited (DeepSeek-V2); by score plus a bias that balances load (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """The scores of the chosen experts are made to sum to one."""
    routed_scaling_factor: float = 1.0
    """Their sum is multiplied by this."""
    n_group: int = 1
    """Experts are in this many groups ..."""
    topk_group: int = 1
    """... of which a token visits at most this many (node-limited routing)."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss."""
    num_nextn_predict_layers: int = 0
    """Multi-token prediction: further blocks that predict the tokens after the next (DeepSeek-V3, section 2.2)."""
    q_lora_rank: int | None = None
    """Latent attention: width from which queries are made. None: they come straight from the hidden states."""
    kv_lora_rank: int | None = None
    """Latent attention: width from which keys and values are made. None: ordinary attention."""
    qk_nope_head_dim: int = 0
    """Latent attention: dimensions of a query's or key's head that do not turn; `head_dim` is this plus `qk_rope_head_dim`."""
    qk_rope_head_dim: int = 0
    """Latent attention: those that turn; one such key is shared by all heads."""
    v_head_dim: int = 0
    """Latent attention: dimensions of a value's head."""

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

    @property
    def value_head_dim(self) -> int:
        """Width of one head of values: `head_dim`, but for latent attention."""
        return self.v_head_dim if self.latent_attention else self.head_dim

    @property
    def latent_attention(self) -> bool:
        """Whether keys and values are made from one narrow projection (DeepSeek's MLA)."""
        return self.kv_lora_rank is not None

    @property
    def activation(self) -> str:
        """The activation function of the feed-forward layers."""
        return self.hidden_act or ("silu" if self.gated_mlp else "gelu_pytorch_tanh")

    def is_moe(self, layer: int) -> bool:
        """Whether the feed-forward layer of block `layer` (counted from zero) is made of experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer (counted from zero), or None for full attention."""
        windowed = layer >= self.max_window_layers and layer % self.sliding_window_interval == 0
        return self.sliding_window if windowed else None

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
