"""Memory and time of a dense decoder by hand: a back-of-the-envelope estimate (the playbook's first chapters).

    state          master weights 4, gradients 4, Adam's two moments 8: 16 bytes a parameter, and 2 of bf16 weights. ZeRO 1
                   shards master weights and moments, 2 gradients too, 3 all: bf16 weights are then gathered block by block
    activations    2 bytes per token and layer for every value that the backward pass reads: 34 h for Llama's shapes
    compute        6 FLOPs per token and GEMM parameter, 6 per token, layer, head dimension and visible position, and the
                   memory traffic of element-wise work
    bubble         (p - 1) / m of the time, for m micro-batches through p pipeline stages
    tensor         2 all-gathers and 2 reduce-scatters of [tokens, h] per layer and pass, over the node's links

The planner (`plan.report`) replays every operation instead; tests hold this within 15 percent of it on dense presets.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.catalogue.cluster import Cluster
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout

ATTENTION_OVER_PRODUCTS = 0.65
"""FLOPs per second of flash attention, including recomputed scores in its backward pass, over those of large GEMMs."""
MOVED_PER_HIDDEN = 1000
"""Bytes of memory traffic, except GEMMs', per token, layer and hidden dimension, forward and backward: norms, residuals, rotary
positions, activation functions, and additional reads and writes of GEMMs' operands. Fitted to the planner."""
LINK = 0.5
"""Fraction of a link's nominal rate that all-gathers and reduce-scatters of tp reach, waiting included."""


@dataclass(frozen=True)
class Estimate:
    """One step on the fullest rank."""

    state_bytes: float
    activation_bytes: float
    compute_seconds: float
    bubble_seconds: float
    tensor_seconds: float

    @property
    def memory_bytes(self) -> float:
        """Bytes at the peak."""
        return self.state_bytes + self.activation_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step; traffic of data parallelism is taken as hidden behind compute."""
        return self.compute_seconds + self.bubble_seconds + self.tensor_seconds


def estimate(model: Model, layout: Layout, cluster: Cluster, *, sequence_length: int, sequences_per_batch: int) -> Estimate:
    """One step of `sequences_per_batch` sequences in bf16. Dense models with flash attention, without context parallelism.

    Raises ValueError for other models and layouts.
    """
    if model.num_experts or layout.cp > 1 or layout.virtual_stages > 1:
        raise ValueError("by hand only dense models are estimated, with dp, tp, pp and ZeRO")
    micro_batches = sequences_per_batch // (layout.dp * layout.micro_batch_size)
    tokens = layout.micro_batch_size * sequence_length
    compute = _compute_seconds(model, layout, cluster, sequence_length, tokens) * micro_batches
    tensor = _tensor_seconds(model, layout, cluster, tokens) * micro_batches
    bubble = (compute + tensor) * (layout.pp - 1) / micro_batches
    in_flight = min(micro_batches, layout.pp)  # 1F1B: the first stage holds one micro-batch for each stage
    return Estimate(_state_bytes(model, layout), in_flight * _activation_bytes(model, layout, tokens), compute, bubble, tensor)


def _state_bytes(model: Model, layout: Layout) -> float:
    """Bytes of training state on the first rank: its blocks, the embedding, and the head if pp is 1."""
    ends = model.vocab_size * model.hidden_size / layout.tp * (2 if layout.pp == 1 and not model.tie_word_embeddings else 1)
    blocks = (
        num_parameters(model) - (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    ) / layout.tp
    block, local = blocks / model.num_hidden_layers, blocks / layout.pp + ends
    shard = layout.shard_size
    masters_and_moments = 12 * local / (shard if layout.zero_stage else 1)
    if layout.zero_stage < 2:
        return masters_and_moments + (2 + 4) * local  # bf16 weights and fp32 gradients, unsharded
    if layout.zero_stage == 2:
        return masters_and_moments + 2 * local + 4 * local / shard + 2 * (block + ends)
    return masters_and_moments + 4 * local / shard + 2 * (block + ends) + 2 * (block + ends)  # gathered, and their gradients


def _activation_bytes(model: Model, layout: Layout, tokens: int) -> float:
    """Bytes of activations that one micro-batch saves on the first stage for its backward pass."""
    h, q, kv = model.hidden_size, model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    layers = model.num_hidden_layers / layout.pp
    mlp = (3 if model.gated_mlp else 2) * model.intermediate_size
    block = 2 * tokens * (4 * h + 2 * q + 2 * kv + mlp) / layout.tp  # residuals and norms 4, projections and their output
    if layout.recompute == "full":
        return layers * 2 * tokens * h / layout.tp + block / layout.pp
    return layers * block


def _compute_seconds(model: Model, layout: Layout, cluster: Cluster, length: int, tokens: int) -> float:
    """Compute seconds of one micro-batch's forward and backward pass on one rank."""
    accelerator = cluster.accelerator
    fraction = accelerator.matmul_fraction.value if accelerator.matmul_fraction is not None else 0.7
    rate = accelerator.peak_flops_per_second("bf16") * fraction
    products = num_parameters(model) - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)
    attention = model.num_hidden_layers * model.num_attention_heads * model.head_dim * length
    recompute_factor = 4 / 3 if layout.recompute == "full" else 1.0
    moved = MOVED_PER_HIDDEN * model.hidden_size * model.num_hidden_layers * tokens
    flops = 6 * tokens * (products + attention / ATTENTION_OVER_PRODUCTS)
    memory = accelerator.memory_bytes_per_second
    beside = moved / memory.value / layout.tp**0.7 if memory is not None else 0.0  # narrow products read as much for less
    return recompute_factor * (flops / rate / layout.tp + beside) / layout.pp


def _tensor_seconds(model: Model, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Seconds of one micro-batch's all-gathers and reduce-scatters over tp: 2 of each per layer and pass."""
    if layout.tp == 1 or cluster.node.intra_link is None:
        return 0.0
    moved = 2 * tokens * model.hidden_size * (layout.tp - 1) / layout.tp
    passes = 3 if layout.recompute == "full" else 2
    return passes * 4 * model.num_hidden_layers / layout.pp * moved / (cluster.node.intra_link.bytes_per_second.value * LINK)
