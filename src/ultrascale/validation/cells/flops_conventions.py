"""FLOPs per token by the conventions of published reports: an MFU is meaningless without its convention.

With P_lay the parameters that a token's GEMMs use in all layers (with experts, the active ones and the router), P_head = V h, a
query heads of dimension d, s the sequence length:

    model_full             6 (P_lay + P_head) + 12 L a d s        Korthikanti et al. 2022, torchtitan from mid 2024, nanotron
    model_full_allparams   the same + 6 V h if embeddings are untied; llm-foundry, Aleph Alpha
    model_causal           model_full with half the attention     Megatron-Bridge, NeMo AutoModel
    hw_full                8 P_lay + 6 P_head + 16 L a d s        hardware FLOPs of full recomputation: Megatron SC'21, MT-NLG
    hw_full_layers_only    96 L h^2                               BigScience, first months

Latent attention counts a (d_query + d_value) / 2 where others count a d. Blocks of multi-token prediction count as layers, plus
the head once for each.
"""

from __future__ import annotations

from functools import lru_cache

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights

CONVENTIONS = ("model_full", "model_full_allparams", "model_causal", "hw_full", "hw_full_layers_only")


@lru_cache(maxsize=1024)
def flops_per_token(model: Model, sequence_length: int, convention: str) -> float:
    """FLOPs per token, forward and backward, by a convention of the table above; other names count as `model_full`."""
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    if convention == "hw_full_layers_only":
        return 96.0 * layers * model.hidden_size**2
    in_layers = sum(_layer_parameters(model, layer) for layer in range(layers))
    table = model.vocab_size * model.hidden_size
    head = table * (1 + model.num_nextn_predict_layers)
    width = model.num_attention_heads * (model.head_dim + model.value_head_dim) / 2
    # Forward GEMMs of scores and values are 2 FLOPs each, three times for forward and backward.
    attention = 12.0 * width * sum(_seen(model, layer, sequence_length) for layer in range(layers))
    if convention == "hw_full":
        return 8.0 * in_layers + 6.0 * head + attention * 4 / 3
    if convention == "model_causal":
        attention /= 2
    elif convention == "model_full_allparams" and not model.tie_word_embeddings:
        head += table
    return 6.0 * (in_layers + head) + attention


def _layer_parameters(model: Model, layer: int) -> float:
    """Parameters that one token's GEMMs use in a layer."""
    active = model.num_experts_per_tok / model.num_experts if model.num_experts else 0.0
    return sum(
        weight.numel * (active if weight.is_expert else 1.0)
        for weight in layer_weights(model, layer)
        if weight.part in ("attention", "mlp", "router") and len(weight.shape) > 1
    )


def _seen(model: Model, layer: int, sequence_length: int) -> int:
    """Positions over which a token's scores are counted: all, or twice a window, which is the mean under causal masks."""
    window = model.window(layer) if layer < model.num_hidden_layers else None
    return sequence_length if window is None else min(sequence_length, 2 * window)
