"""How nanotron cuts a model over a pipeline's ranks, and when its pipeline cannot run at all.

Its model is a row of parts: embedding, blocks, norm, head, cast and loss. Blocks cost their matrices, the head its own, the
rest nothing; a rank takes parts until its share of the whole is used up, then the next rank begins (`build_model` in
nanotron.models.base, 2025). A costly head uses up the shares of several ranks at once, and with few blocks a rank none is left
for the last ranks:

    16 blocks, head of 4, 16 ranks    2 1 1 2 1 1 1 2 1 1 1 2 +head, cast, loss and nothing

Its 1F1B asserts that there are pp - 1 micro-batches at least.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultrascale.spec.model import Model

WITHOUT_COST = 2
"""Parts after the head: the cast of its logits to fp32, and the loss."""


def ranks_by_share(model: Model, num_ranks: int) -> list[int]:
    """The rank of every part: embedding, blocks, norm, head, cast, loss."""
    attention = 4 * model.num_attention_heads * model.head_dim * model.hidden_size
    block = attention + 3 * model.intermediate_size * model.hidden_size
    blocks = [block] * (model.num_hidden_layers + model.num_nextn_predict_layers)
    costs = [0, *blocks, 0, model.vocab_size * model.hidden_size, *[0] * WITHOUT_COST]
    total, done, rank, found = sum(costs), 0, 0, []
    for cost in costs:
        done += cost
        found.append(rank)
        rank += done * num_ranks > total * (rank + 1)
    return found


def layers_by_share(model: Model, num_ranks: int) -> list[int]:
    """Blocks of every rank."""
    of_blocks = ranks_by_share(model, num_ranks)[1 : -2 - WITHOUT_COST]
    return [of_blocks.count(rank) for rank in range(num_ranks)]


def cannot_run(model: Model, pp: int, micro_batches: Sequence[int] = ()) -> str:
    """Why nanotron's pipeline of `pp` ranks would fail with every one of these numbers of micro-batches, or nothing."""
    if pp == 1:
        return ""
    used = ranks_by_share(model, pp)[-1] + 1
    if used < pp:
        return f"nanotron's cut leaves {pp - used} of {pp} ranks without a part of the model"
    if micro_batches and max(micro_batches) < pp - 1:
        return "nanotron's 1F1B needs pp - 1 micro-batches at least"
    return ""
