"""The architecture of a decoder, under Hugging Face `config.json` names.

Shape legend, used everywhere:

    B  micro-batch (sequences)     H  query heads        F  ffn (intermediate) size
    S  sequence length             K  key/value heads    V  vocabulary
    D  hidden size                 E  head dim           L  layers
    X  experts

Three kinds of block are supported. Dense: attention, then one feed-forward layer. Experts (Shazeer et al. 2017): a router sends
each token to `num_experts_per_tok` of `num_experts` feed-forward layers, optionally beside a shared one for every token. Latent
attention (DeepSeek-V2, section 2.1): queries, keys and values are made from narrow projections of width `q_lora_rank` and
`kv_lora_rank`. `config.rules.trainable` lists which of these the trainer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ultrascale.description.architecture.rope_scaling import RopeScaling as RopeScaling
from ultrascale.description.problems import Problem

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "sliding_window_interval")
_OPTIONAL_SIZES = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
MOST_LAYERS = 2048
"""A plan simulates every block in up to a millisecond. The deepest published model has 1,000 (Wang et al. 2022, DeepNet)."""
_LIMITS = (
    (("num_hidden_layers",), (1, MOST_LAYERS)),
    (("num_attention_heads", "num_key_value_heads"), (1, 10_000)),
    ((*_SIZES, "q_lora_rank", "kv_lora_rank", "n_group", "topk_group", "query_pre_attn_scalar"), (1, 2**31 - 1)),
    (_OPTIONAL_SIZES, (0, 2**31 - 1)),
    (("first_k_dense_replace",), (0, MOST_LAYERS)),
    (("num_nextn_predict_layers",), (0, 100)),
)
RANGES = {key: limits for keys, limits in _LIMITS for key in keys}
"""Lowest and highest value of whole numbers. The upper bounds are far above any model: they catch typing errors."""
ModelType = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3", "gemma3_text", "mixtral", "qwen3_moe", "olmoe",
    "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "nemotron", "grok", "other",
]  # fmt: skip
NormPlacement = Literal["pre", "post", "both"]


class BlockNorms(NamedTuple):
    """Names of a block's norms over the hidden size; empty if there is none."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


BLOCK_NORMS: dict[NormPlacement, BlockNorms] = {
    "pre": BlockNorms("input_layernorm", "", "post_attention_layernorm", ""),
    "post": BlockNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": BlockNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}
"""Names in Hugging Face, which refer to the position of a norm, not to its input."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. Defaults are Llama's choices."""

    vocab_size: int
    """Vocabulary size, V."""
    hidden_size: int
    """Width of the residual stream, D."""
    intermediate_size: int
    """Width of the feed-forward layer, F."""
    num_hidden_layers: int
    """Number of blocks, L."""
    num_attention_heads: int
    """Number of query heads, H."""
    num_key_value_heads: int
    """Number of key/value heads, K: fewer than H in grouped-query attention (GQA). If the file has none: H."""
    head_dim: int
    """Dimension of a head, E. If the file has none: `hidden_size` / `num_attention_heads`."""
    max_position_embeddings: int
    """Longest sequence that the model is made for, in tokens."""
    model_type: ModelType = "llama"
    """Hugging Face model type of exports."""
    name: str = ""
    """Name of the preset, or of the folder it was read from; only printed."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization of each half of a block (attention, feed-forward layer)."""
    norm_placement: NormPlacement = "pre"
    """Position of the norms of a block. "pre": on the input of each half; "post": on its output, before the residual add (OLMo
    2, 3); "both": on both (Gemma 3)."""
    zero_centered_norm: bool = False
    """RMSNorms multiply by 1 + weight, with weights initialized to zero (Gemma)."""
    scale_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to their dtype (Gemma)."""
    norm_eps: float = 1e-5
    """Epsilon, added to the mean square, or variance, before the root."""
    gated_mlp: bool = True
    """down(act(gate(x)) * up(x)); if false, down(act(up(x)))."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "relu2", "swigluoai"] | None = None
    """Activation function `act`. None: silu if `gated_mlp`, else gelu_pytorch_tanh. relu2: squared ReLU (Nemotron); swigluoai:
    GPT-OSS's clamped SwiGLU, (up + 1) * gate * sigmoid(1.702 gate)."""
    position_embedding: Literal["rotary", "learned"] = "rotary"
    """Position encoding: RoPE on queries and keys, or learned embeddings (GPT-2)."""
    rope_theta: float = 10000.0
    """Base of the wavelengths of RoPE."""
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None
    """Base of RoPE's wavelengths in layers with a sliding window, to which `rope_scaling` does not apply (Gemma 3). None: as in
    the other layers."""
    no_rope_layer_interval: int | None = None
    """SmolLM 3: every n-th layer (n, 2n, ... counted from one) has no RoPE."""
    qkv_bias: bool = False
    """The projections to queries, keys and values have a bias."""
    attention_output_bias: bool = False
    """The output projection of attention has a bias."""
    mlp_bias: bool = False
    """The projections of the feed-forward layer have biases."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before RoPE (Qwen 3)."""
    qk_norm_whole: bool = False
    """The norm of `qk_norm` is over all heads together instead (OLMoE)."""
    attention_sinks: bool = False
    """Attention sinks: one learned logit per head joins the softmax and attends to nothing (GPT-OSS)."""
    query_pre_attn_scalar: int | None = None
    """Attention scores are divided by the root of this (Gemma). None: the root of `head_dim`."""
    partial_rotary_factor: float = 1.0
    """Fraction of a head's dimensions that RoPE rotates (Nemotron, GLM-4.5: a half)."""
    sliding_window: int | None = None
    """Sliding window: a token attends to at most this many positions, itself included."""
    max_window_layers: int = 0
    """Layers below this index use full attention even if `sliding_window` is set (Qwen)."""
    sliding_window_interval: int = 1
    """Every n-th layer (0, n, 2n, ... counted from zero) has the window, the others use full attention (GPT-OSS: 2)."""
    full_attention_interval: int | None = None
    """Interval of layers without the window: every n-th (n, 2n, ... counted from one) uses full attention (Gemma 3: 6)."""
    tie_word_embeddings: bool = False
    """The weight of the head is that of the embedding."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    num_experts: int = 0
    """Number of experts per layer, X. 0: a dense model, and none of the fields down to `expert_capacity_factor` may be set."""
    num_experts_per_tok: int = 0
    """Experts per token (top-k)."""
    moe_intermediate_size: int = 0
    """Width of one expert, F."""
    shared_expert_intermediate_size: int = 0
    """Width of the shared experts together. 0: there are none."""
    first_k_dense_replace: int = 0
    """Number of first layers with a dense feed-forward layer of width `intermediate_size` (DeepSeek)."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    """Selection of experts: by score; group-limited (DeepSeek-V2); by score plus a bias that balances load (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Normalize the scores of the chosen experts to sum to one."""
    routed_scaling_factor: float = 1.0
    """Factor applied to the weights of the chosen experts; shared experts are not scaled."""
    n_group: int = 1
    """Number of groups of experts ..."""
    topk_group: int = 1
    """... of which a token may use at most this many (node-limited routing)."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss: 1 per layer if all experts are chosen equally often (Fedus et al. 2022)."""
    router_aux_loss_scope: Literal["none", "sequence", "micro-batch", "global"] = "sequence"
    """Tokens over which the load is to be balanced: each sequence (DeepSeek), a micro-batch, or the micro-batches of all
    data-parallel ranks (Qiu et al. 2025). Only the first is the same for every layout. "none": the coefficient is kept for
    export and not applied, as with every model that was read from a `config.json`."""
    router_z_loss_coef: float = 0.0
    """Weight of the router z-loss: the mean squared log-sum-exp of router logits (Zoph et al. 2022)."""
    router_bias_update_rate: float = 0.001
    """Step size of the bias that balances load: after an update, up for an expert that was chosen less often than the mean,
    else down (Wang et al. 2024). Read only if topk_method = "noaux_tc"."""
    expert_capacity_factor: float | None = None
    """Capacity factor: an expert takes at most this many times its even share of a sequence's tokens; the tokens with the
    lowest scores are dropped, among equal scores the later ones. None: nothing is dropped."""
    num_nextn_predict_layers: int = 0
    """Multi-token prediction: additional blocks that predict the tokens after the next (DeepSeek-V3, section 2.2)."""
    dropout: float = 0.0
    """Dropout probability of the embedding, and of the output of each half of a block (GPT-2's `embd_pdrop` and `resid_pdrop`).
    Attention weights are never dropped: fused kernels draw random bits of their own, which no other layout could repeat."""
    mtp_loss_coef: float = 0.3
    """Weight of the mean multi-token prediction loss (DeepSeek-V3: 0.3, then 0.1 for the last third)."""
    q_lora_rank: int | None = None
    """Latent attention: width from which queries are made. None: they are projected directly from the hidden states."""
    kv_lora_rank: int | None = None
    """Latent attention: width from which keys and values are made. None: ordinary attention."""
    qk_nope_head_dim: int = 0
    """Latent attention: dimensions of a query or key head without RoPE; `head_dim` is this plus `qk_rope_head_dim`."""
    qk_rope_head_dim: int = 0
    """Latent attention: dimensions of a query or key head with RoPE; all heads share one such key."""
    v_head_dim: int = 0
    """Latent attention: dimensions of a value head."""

    @property
    def block_norms(self) -> BlockNorms:
        """Norms of a block over the hidden size."""
        return BLOCK_NORMS[self.norm_placement]

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
        """Dimension of a value head: `head_dim`, except in latent attention."""
        return self.v_head_dim if self.latent_attention else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.qk_rope_head_dim if self.latent_attention else int(self.head_dim * self.partial_rotary_factor)

    @property
    def latent_attention(self) -> bool:
        """True if keys and values come from one low-rank projection (DeepSeek's multi-head latent attention, MLA)."""
        return self.kv_lora_rank is not None

    @property
    def activation(self) -> str:
        """Activation function of the feed-forward layers."""
        return self.hidden_act or ("silu" if self.gated_mlp else "gelu_pytorch_tanh")

    @property
    def balance_loss_coef(self) -> float:
        """Weight of the load-balancing loss in training; 0 if it is not applied."""
        return 0.0 if self.router_aux_loss_scope == "none" else self.router_aux_loss_coef

    def is_moe(self, layer: int) -> bool:
        """True if the feed-forward layer of block `layer` (counted from zero) is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer (counted from zero), or None for full attention."""
        windowed = layer >= self.max_window_layers and layer % self.sliding_window_interval == 0
        sees_all = self.full_attention_interval is not None and (layer + 1) % self.full_attention_interval == 0
        return self.sliding_window if windowed and not sees_all else None

    def is_rope_local(self, layer: int) -> bool:
        """True if RoPE in block `layer` (counted from zero) uses `rope_local_base_freq`."""
        return self.rope_local_base_freq is not None and self.window(layer) is not None

    def uses_rotary(self, layer: int) -> bool:
        """True if block `layer` (counted from zero) applies RoPE to queries and keys."""
        if self.position_embedding != "rotary":
            return False
        return self.no_rope_layer_interval is None or (layer + 1) % self.no_rope_layer_interval != 0

    def problems(self) -> list[Problem]:
        """Every broken rule, with keys relative to `model`."""
        rule_problems: list[Problem] = []

        def expect(holds: bool, key: str, rule: str, remedy: str) -> None:
            if not holds:
                rule_problems.append(Problem(f"model.{key}", f"{rule}, is {getattr(self, key)}", remedy))

        for key, (low, high) in RANGES.items():
            value = getattr(self, key)
            holds = value is None or low <= value <= high
            expect(holds, key, f"must be from {low} to {high}", "Give a number in this range.")
        if not rule_problems:
            _expect_heads(self, expect)
            _expect_experts(self, expect)
            _expect_latent_attention(self, expect)
        window = self.sliding_window
        expect(window is None or window >= 1, "sliding_window", "must be at least 1", "Leave it out for full attention.")
        expect(self.max_window_layers >= 0, "max_window_layers", "must be at least 0", "0 puts the window on every layer.")
        alone = self.sliding_window_interval == 1 or window is not None
        expect(alone, "sliding_window_interval", "has no effect without sliding_window", "Leave it out, or set both.")
        for key in ("full_attention_interval", "rope_local_base_freq"):
            alone = getattr(self, key) is None or window is not None
            expect(alone, key, "has no effect without sliding_window", "Leave it out, or set both.")
        full = self.full_attention_interval
        expect(full is None or full >= 2, "full_attention_interval", "must be at least 2", "Leave sliding_window out instead.")
        local = self.rope_local_base_freq
        expect(local is None or local > 0, "rope_local_base_freq", "must be above 0", "10000 is usual.")
        centered = not self.zero_centered_norm or self.norm == "rmsnorm"
        expect(centered, "zero_centered_norm", "has no effect with layernorm", 'Leave it out, or norm = "rmsnorm".')
        interval = self.no_rope_layer_interval
        expect(interval is None or interval >= 1, "no_rope_layer_interval", "must be at least 1", 'Leave it out, or "none".')
        _expect_positions(self, expect)
        if self.position_embedding == "rotary" and self.rope_scaling is not None:
            rule_problems += self.rope_scaling.problems()
        norm_holds = self.qk_norm or not self.qk_norm_whole
        expect(norm_holds, "qk_norm_whole", "has no effect without qk_norm", "Leave it out, or set both.")
        gate_holds = self.gated_mlp or self.hidden_act not in ("silu", "swigluoai")
        expect(gate_holds, "hidden_act", "must be gelu_pytorch_tanh or relu2 without a gate", "Leave it out.")
        expect(
            0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1", "0.1 is GPT-2's; pretraining leaves it at 0."
        )
        expect(self.mtp_loss_coef >= 0, "mtp_loss_coef", "must be at least 0", "0.3 is usual.")
        for key, usual in (("norm_eps", "1e-5"), ("rope_theta", "10000"), ("initializer_range", "0.02")):
            expect(getattr(self, key) > 0, key, "must be above 0", f"{usual} is usual.")
        return rule_problems


_Expect = Callable[[bool, str, str, str], None]
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_EXPERTS = (
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "first_k_dense_replace", "scoring_func",
    "topk_method", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "router_aux_loss_coef",
    "router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate", "expert_capacity_factor",
)  # fmt: skip


def _expect_heads(model: Model, expect: _Expect) -> None:
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    options = [g for g in range(1, heads + 1) if heads % g == 0]
    expect(
        heads % groups == 0, "num_key_value_heads", f"must divide num_attention_heads = {heads}", f"Choose one of {options}."
    )
    turning, share = model.rotary_dim, model.partial_rotary_factor
    remedy = f'Use {model.head_dim + 1}, or position_embedding = "learned".'
    if share == 1:
        expect(
            model.position_embedding != "rotary" or turning % 2 == 0, "head_dim", "must be even for rotary positions", remedy
        )
    else:
        holds = 0 < share < 1 and turning >= 2 and turning % 2 == 0
        rule = f"must be above 0, at most 1, and turn an even number of the {model.head_dim} dimensions of a head"
        expect(holds, "partial_rotary_factor", rule, "Use 0.5, or leave it out.")


def _expect_positions(model: Model, expect: _Expect) -> None:
    if model.position_embedding == "learned":
        unread = (
            ("rope_theta", 10000.0),
            ("rope_scaling", None),
            ("rope_local_base_freq", None),
            ("no_rope_layer_interval", None),
            ("partial_rotary_factor", 1.0),
        )
        for key, default in unread:
            holds = getattr(model, key) == default
            expect(holds, key, "has no effect with learned positions", 'Leave it out, or position_embedding = "rotary".')


def _expect_experts(model: Model, expect: _Expect) -> None:
    """Fields of experts: all are set, or none."""
    if not model.num_experts:
        for key in _OF_EXPERTS:
            holds = getattr(model, key) == getattr(Model, key)
            expect(holds, key, "has no effect without experts (num_experts = 0)", "Leave it out, or set num_experts.")
        return
    count, groups, chosen = model.num_experts, model.n_group, model.topk_group
    top_k = model.num_experts_per_tok
    expect(1 <= top_k <= count, "num_experts_per_tok", f"must be from 1 to num_experts = {count}", "2 to 8 are usual.")
    expect(
        model.moe_intermediate_size >= 1, "moe_intermediate_size", "must be at least 1 with experts", "Give an expert's width."
    )
    last = model.num_hidden_layers - 1
    rule = f"must leave a layer with experts, so be at most {last}"
    expect(model.first_k_dense_replace <= last, "first_k_dense_replace", rule, "0 puts experts into every layer.")
    expect(count % groups == 0, "n_group", f"must divide num_experts = {count}", "1 makes no groups.")
    expect(chosen <= groups, "topk_group", f"must be at most n_group = {groups}", f"Use {groups}.")
    grouped = groups == 1 or model.topk_method != "greedy"
    expect(grouped, "n_group", 'has no effect with topk_method = "greedy"', "Leave it out, or choose another topk_method.")
    eligible = chosen * count // groups
    if chosen <= groups and count % groups == 0 and top_k <= count:
        rule = f"must be at most the {eligible} experts of topk_group = {chosen} groups"
        expect(top_k <= eligible, "num_experts_per_tok", rule, "Raise topk_group, or choose fewer.")
    expect(model.routed_scaling_factor > 0, "routed_scaling_factor", "must be above 0", "1 is usual.")
    for key in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        expect(getattr(model, key) >= 0, key, "must be at least 0", "0.001 is usual.")
    capacity = model.expert_capacity_factor
    holds = capacity is None or capacity > 0
    expect(holds, "expert_capacity_factor", "must be above 0", 'Leave it out, or "none", so that no token is dropped.')


def _expect_latent_attention(model: Model, expect: _Expect) -> None:
    """Fields of latent attention: all are set, or none."""
    if not model.latent_attention:
        for key in ("q_lora_rank", *_LATENT):
            holds = getattr(model, key) == getattr(Model, key)
            expect(holds, key, "has no effect without kv_lora_rank", "Leave it out, or set kv_lora_rank.")
        return
    for key in _LATENT:
        expect(getattr(model, key) >= 1, key, "must be at least 1 with latent attention", "128, 64 and 128 are usual.")
    width, heads = model.qk_nope_head_dim + model.qk_rope_head_dim, model.num_attention_heads
    expect(model.head_dim == width, "head_dim", "must be qk_nope_head_dim + qk_rope_head_dim", f"Use {width}.")
    rule = f"must be num_attention_heads = {heads} with latent attention"
    expect(model.num_key_value_heads == heads, "num_key_value_heads", rule, f"Use {heads}.")
    expect(model.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "must be even", "64 is usual.")
    scalar = model.query_pre_attn_scalar is None
    expect(scalar, "query_pre_attn_scalar", "cannot be combined with latent attention", "Leave it out.")
    expect(not model.qk_norm, "qk_norm", "cannot be combined with latent attention", "Leave it out.")
    expect(model.partial_rotary_factor == 1, "partial_rotary_factor", "is said by qk_rope_head_dim here", "Leave it out.")
    rotary = model.position_embedding == "rotary"
    expect(rotary, "position_embedding", "must be rotary with latent attention", 'Use "rotary".')
