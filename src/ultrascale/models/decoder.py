"""One decoder for the families of `description.architecture.families`: blocks of causal attention and a feed-forward layer.

Parameter names and shapes are those of `description.architecture.weights`. A decoder may be one pipeline stage: some of the
blocks, with the embedding if it is the first and the head if it is the last. The model contains no parallel code; parallelism
replaces these attributes, which hold functions:

    where        attribute        here, on one rank
    attention    column_linear    several projections of one input    row_linear    the projection back to the residual stream
    MLP          column_linear    the same                            row_linear    the same
    attention    core             attention itself                    gather_sequence    of latent attention: an all-gather
    experts      dispatch         tokens to experts and back (`models.experts`)
    router       sum_counts       choices of other ranks' tokens      keep     choices that fit the experts' capacity
    decoder      look_up          rows of the embedding               sequence_shard    the part of a sequence that norms and
    decoder      make_mask        the mask for `core`                                   residuals work on: here, all of it
    decoder      loss             head and loss in one                shift_targets    each position's next target

Multi-token prediction (DeepSeek-V3, section 2.2) runs on the last stage, in training only. At position i, its k-th block reads
the previous block's output and the embedding of token i + k, and predicts token i + k + 1. Future tokens are taken from the
targets, which the last stage has; where one is ignored, nothing is predicted from it or past it. The returned loss is the
model's own; the predictions' loss only joins it in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.model import Model
from ultrascale.kernels.attention.attention_core import attention_mask
from ultrascale.kernels.attention.attention_spans import PackedIds
from ultrascale.kernels.dropout import dropout
from ultrascale.kernels.loss.cross_entropy import IGNORED, linear_cross_entropy
from ultrascale.kernels.rotary import Angles, rotary_angles
from ultrascale.models.attention import Attention, KeyValues, LatentAttention
from ultrascale.models.experts import MoE
from ultrascale.models.feed_forward import MLP
from ultrascale.models.initialise import build_embedding
from ultrascale.models.norms import build_norm, build_rms_norm, norm_of_sum, unchanged


class Cache(Protocol):
    """Keys and values of earlier tokens (KV cache), so that only new tokens are computed."""

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values all layers have."""
        ...

    @property
    def layers(self) -> Sequence[KeyValues]: ...


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sequence_shard(hidden: Tensor) -> Tensor:
    """The whole sequence: without parallelism nothing is sharded."""
    return hidden


def shift_targets(targets: Tensor) -> Tensor:
    """Targets of the next position, [B, S] from [B, S]; ignored for the last, and where this position's target is ignored."""
    later = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
    return later.masked_fill(targets == IGNORED, IGNORED)


class Drops(NamedTuple):
    """Dropout in training."""

    rate: float
    keys: Tensor
    """[B, S] int64, for the positions of the local residual stream (`kernels.dropout.token_keys`)."""
    site: int = 0
    """Dropout site: the first of a block's two, or the embedding's."""

    def of(self, layer: int) -> Drops:
        """The dropout of one block."""
        return self._replace(site=1 + 2 * layer)


class Block(nn.Module):
    """One decoder block: each half reads the residual stream and adds to it; `Model.block_norms` places the norms."""

    def __init__(self, model: Model, layer: int):
        super().__init__()
        self.norm_names = names = model.block_norms
        self._add_norm(names.before_attention, model)
        self.self_attn = LatentAttention(model) if model.latent_attention else Attention(model)
        self._add_norm(names.after_attention, model)
        self._add_norm(names.before_mlp, model)
        self.mlp = MoE(model) if model.is_moe(layer) else MLP(model, model.intermediate_size)
        self._add_norm(names.after_mlp, model)

    def _add_norm(self, name: str, model: Model) -> None:
        if name:
            self.add_module(name, build_norm(model))

    def forward(
        self,
        hidden: Tensor,
        angles: Angles | None,
        mask: Any,
        earlier: KeyValues | None = None,
        drops: Drops | None = None,
    ) -> Tensor:
        """[B, S, D] to [B, S, D]; `angles` None: no rotary positions; `mask`: from the decoder's `make_mask`."""
        before, after, before_mlp, after_mlp = map(self.norm_called, self.norm_names)
        # No variables for attention's result and the norm of the sum: they would stay in memory after their last use.
        between = [
            *norm_of_sum(before_mlp, hidden, _dropped(after(self.self_attn(before(hidden), angles, mask, earlier)), drops, 0))
        ]
        hidden = between.pop()
        return hidden + _dropped(after_mlp(self.mlp(between.pop())), drops, 1)

    def norm_called(self, name: str) -> Callable[[Tensor], Tensor]:
        """The norm of this name; the identity if there is none."""
        return getattr(self, name) if name else unchanged


class SharedHead(nn.Module):
    """The norm before the head; the head's matrix is the model's."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm = build_rms_norm(model, model.hidden_size)


class PredictionBlock(Block):
    """Multi-token prediction block: reads a future token's embedding together with the previous block's output."""

    def __init__(self, model: Model, layer: int):
        super().__init__(model, layer)
        self.enorm = build_rms_norm(model, model.hidden_size)
        self.hnorm = build_rms_norm(model, model.hidden_size)
        self.eh_proj = nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False)
        self.shared_head = SharedHead(model)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, angles: Angles | None, mask: Any, coming: Tensor | None = None, drops: Drops | None = None
    ) -> Tensor:
        """Previous output [B, S, D] and `coming`, embeddings [B, S, D] of future tokens, to [B, S, D]."""
        assert coming is not None
        joined = self.eh_proj(torch.cat((self.enorm(coming), self.hnorm(hidden)), dim=-1))
        return super().forward(joined, angles, mask, None, drops)


class View(NamedTuple):
    """A micro-batch's positions and masks, as blocks use them."""

    spec: Model
    angles: dict[bool, Angles]
    """RoPE angles by `Model.is_rope_local`; empty without rotary positions."""
    masks: dict[int | None, Any]
    drops: Drops | None = None

    def of(self, layer: int) -> tuple[Angles | None, Any]:
        """The angles and the mask of a block."""
        angles = self.angles[self.spec.is_rope_local(layer)] if self.spec.uses_rotary(layer) else None
        return angles, self.masks[self.spec.window(layer)]

    def drops_of(self, layer: int) -> Drops | None:
        """The dropout of a block."""
        return None if self.drops is None else self.drops.of(layer)


class Decoder(nn.Module):
    """The model that `model` describes, or its pipeline stage with these `layers`.

    Names are those of the whole model: `layers` is keyed by global block numbers; on the last stage, multi-token prediction
    blocks follow. Built under `torch.device("meta")` it takes no memory. Raises SpecError for a model that can be planned but
    not run.
    """

    def __init__(self, model: Model, *, layers: range | None = None, is_first: bool = True, is_last: bool = True):
        expect_trainable(model)
        super().__init__()
        self.spec, self.is_first, self.is_last = model, is_first, is_last
        self.embed_tokens: nn.Embedding | None = None
        if is_first or (is_last and (model.tie_word_embeddings or model.num_nextn_predict_layers)):
            self.embed_tokens = build_embedding(model.vocab_size, model.hidden_size)
        learned = is_first and model.position_embedding == "learned"
        self.embed_positions = build_embedding(model.max_position_embeddings, model.hidden_size) if learned else None
        numbers = range(model.num_hidden_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): Block(model, number) for number in numbers})
        if is_last:
            for number in range(model.num_hidden_layers, model.num_hidden_layers + model.num_nextn_predict_layers):
                self.layers[str(number)] = PredictionBlock(model, number)
        self.norm = build_norm(model) if is_last else None
        self.lm_head: nn.Linear | None = None
        if is_last and not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.look_up, self.sequence_shard, self.make_mask = F.embedding, sequence_shard, attention_mask
        self.loss, self.shift_targets = linear_cross_entropy, shift_targets
        root = torch.tensor(model.hidden_size**0.5, dtype=torch.float64, device="cpu")
        self.embedding_scale = {dtype: root.to(dtype).item() for dtype in _DTYPES} if model.scale_embedding else {}

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Every block, with its number in the whole model."""
        for number, block in self.layers.items():
            yield int(number), cast(Block, block)

    def forward(
        self,
        inputs: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | PackedIds | None = None,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The loss summed over targets != -100 (0-d, fp32 or fp64); without targets the logits [B, S, V]; on a stage before the
        last, the next stage's input.

        inputs: tokens [B, S] int64, or [B, S, D] from the stage before; targets [B, S] int64; positions [S] or [B, S], by
        default counted from the cached tokens on; document_ids [B, S] int: a token sees only its own document;
        dropout_keys [B, S] int64 (`kernels.dropout.token_keys`), read if the model drops anything: without them it drops
        nothing. With a cache, tokens follow the cached ones, whose keys and values are kept.
        Raises ValueError if document ids and a cache are given together.
        """
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids cannot be given with a cache: its earlier tokens carry no document ids")
        start = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(start, start + inputs.shape[1], device=inputs.device)
        drops = self._drops(dropout_keys)
        hidden = _dropped(self._embed(inputs, positions), drops, 0) if self.is_first else inputs
        view = self._view(hidden, positions, document_ids, cache)._replace(drops=drops)
        for number, block in self.blocks():  # not in a helper: its caller would keep the first block's input alive
            if number < self.spec.num_hidden_layers:
                earlier = None if cache is None else cache.layers[number]
                hidden = block(hidden, *view.of(number), earlier, view.drops_of(number))
        if not self.is_last:
            return hidden
        assert self.norm is not None
        hidden, head = self.norm(hidden), self.head_weight
        if targets is None:
            return F.linear(hidden, head)
        loss = self.loss(hidden, head, targets)
        if self.spec.num_nextn_predict_layers and torch.is_grad_enabled():
            loss = cast(Tensor, _JoinBackward.apply(loss, self._predict(hidden, view, targets)))
        return loss

    @property
    def head_weight(self) -> Tensor:
        """Head weight [V, D]; the embedding's if they are tied."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        return head.weight

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        hidden = self._scaled(self.look_up(tokens, self.embed_tokens.weight))  # [B, S, D]
        if self.embed_positions is not None:
            hidden = hidden + self.sequence_shard(self.embed_positions(positions).expand(len(tokens), -1, -1))
        return hidden

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows * self.embedding_scale[rows.dtype] if self.spec.scale_embedding else rows

    def _drops(self, keys: Tensor | None) -> Drops | None:
        if keys is None or not self.spec.dropout:
            return None
        return Drops(self.spec.dropout, self.sequence_shard(keys))

    def _view(self, hidden: Tensor, positions: Tensor, document_ids: Tensor | PackedIds | None, cache: Cache | None) -> View:
        spec, length = self.spec, positions.shape[-1]
        num_keys = length if cache is None else cache.length + length
        masks = {
            window: self.make_mask(
                length, num_keys, document_ids=document_ids, window=window, dtype=hidden.dtype, device=hidden.device
            )
            for window in {spec.window(number) for number, _ in self.blocks()}
        }
        kinds = {spec.is_rope_local(number) for number, _ in self.blocks()} if spec.position_embedding == "rotary" else set()
        angles = {kind: rotary_angles(spec, positions, hidden.dtype, is_local=kind) for kind in kinds}
        return View(spec, angles, masks)

    def _predict(self, hidden: Tensor, view: View, targets: Tensor) -> Tensor:
        """Weighted mean of the prediction blocks' losses, each summed over its targets, 0-d."""
        assert self.embed_tokens is not None
        first, count = self.spec.num_hidden_layers, self.spec.num_nextn_predict_layers
        losses = []
        for number in range(first, first + count):
            block = cast(PredictionBlock, self.layers[str(number)])
            coming = self._scaled(self.look_up(targets.clamp(min=0), self.embed_tokens.weight))
            hidden = block(hidden, *view.of(number), coming, view.drops_of(number))
            targets = self.shift_targets(targets)
            losses.append(self.loss(block.shared_head.norm(hidden), self.head_weight, targets))
        return torch.stack(losses).sum() * (self.spec.mtp_loss_coef / count)


def _dropped(x: Tensor, drops: Drops | None, half: int) -> Tensor:
    return x if drops is None else dropout(x, drops.rate, drops.keys, drops.site + half)


class _JoinBackward(torch.autograd.Function):
    """Returns the first of two losses; in the backward pass both get the gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor) -> Tensor:
        return loss.clone()  # not a view: FSDP2 would warn that its hooks are lost on in-place writes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]
