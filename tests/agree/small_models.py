"""Small models of every family, and a step of the trainer's parts under the memory counter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models.families
import torch

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.data.data_parallel import prepare_action
from ultrascale.parallel.mesh import Ranks
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Kind
from ultrascale.train.optimizers.optimizer import build_optimizer

_SIZES = {"vocab_size": 512, "num_hidden_layers": 2}


def _dense(family: str, **changes: Any) -> Model:
    model = models.families.FAMILIES[family]
    changes |= {"initializer_range": 0.02, "intermediate_size": 80, "sliding_window": model.sliding_window and 16}
    return replace(model, **_SIZES, **changes)


LLAMA, GPT2 = _dense("llama", name="small-llama"), _dense("gpt2")
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": _dense("qwen3", tie_word_embeddings=True),
    "window": _dense("mistral"),
    "mixed-window": _dense("qwen2-window"),
    "post-norm": _dense("olmo2"),
    "post-norm, windows": _dense("olmo3"),
    "gemma": _dense("gemma3"),
    "no-rope": _dense("smollm3"),
}
WITH_EXPERTS = {name: replace(model, **_SIZES) for name, model in models.families.EXPERT_FAMILIES.items()}
LATENT = replace(  # attention of DeepSeek without its experts
    WITH_EXPERTS["deepseek-v3"], num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, first_k_dense_replace=0,
    shared_expert_intermediate_size=0, topk_method="greedy", scoring_func="softmax", n_group=1, topk_group=1,
    routed_scaling_factor=1.0,
)  # fmt: skip
DEMO = replace(
    LLAMA, vocab_size=4096, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_key_value_heads=4, head_dim=32,
    max_position_embeddings=256, name="demo",
)  # fmt: skip


def batch_of(model: Model, micro_batch_size: int, length: int, *, documents: bool) -> dict[str, Any]:
    """Arguments of the decoder for a micro-batch of random tokens; with documents, two of them in every sequence."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch_size, length))
    extra: dict[str, Any] = {}
    if documents:
        ids = (torch.arange(length) >= length // 2).long().expand(micro_batch_size, length).contiguous()
        positions = (torch.arange(length) % (length // 2)).expand(micro_batch_size, length).contiguous()
        extra = {"document_ids": ids, "positions": positions}
    return {"inputs": tokens, "targets": tokens.clone(), **extra}


def measured_peak(
    rank: int,
    model: Model,
    layout: Layout,
    length: int,
    num_micro_batches: int,
    documents: bool,
    optimizer_name: Any = "adamw",
) -> dict[str, int]:
    """Bytes by category at the peak of the second step of a rank."""
    share = build_share(model, layout, Ranks(rank, layout.world_size, torch.device("cpu")), seed=0)
    decoder, optimizer = share.decoder, build_optimizer(share, Optimizer(name=optimizer_name))
    memory = LiveMemory(decoder, optimizer)
    with memory:
        for step in range(2):
            batches = [batch_of(model, layout.micro_batch_size, length, documents=documents) for _ in range(num_micro_batches)]
            losses: dict[int, torch.Tensor] = {}
            for action in accumulate(num_micro_batches, layout.zero_stage):
                prepare_action(decoder, action)
                memory.mark("forward" if action.kind is Kind.FORWARD else "backward", step)
                if action.kind is Kind.FORWARD:
                    losses[action.micro_batch] = decoder(**batches[action.micro_batch]) / 1000
                else:
                    losses.pop(action.micro_batch).backward()
            memory.mark("optimizer")
            optimizer.step()
            if share.amax_history is not None:
                share.amax_history.agree(layout.world_size)
                share.amax_history.accept()
            optimizer.zero_grad(set_to_none=True)
    return max((sample for sample in memory.samples if sample.step == 1), key=lambda sample: sample.total).by_category
