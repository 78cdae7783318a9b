"""A run that changes its layout on the way is the run that does not: weights, moments and biases of experts, over five axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models.families import FAMILIES
from models.test_huggingface import random_decoder, state_of
from train.small_runs import (
    MODEL,
    BeforeStep,
    curve,
    largest_error,
    rows,
    same,
    small_run,
    state,
    stop_at,
    train_here,
    train_in_turn,
    train_ranks,
)

from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.architecture.weights import score_biases
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run
from ultrascale.models.files.huggingface import export_folder, import_folder
from ultrascale.models.generate import Sampling, generate
from ultrascale.train.start.trained import import_as_first_checkpoint, open_trained

ONE = Layout(precision="fp64")
TIED_MODEL = replace(MODEL, tie_word_embeddings=True)
"""One head of keys and values: with tp = 2 both ranks hold it. 61 words: the larger half of the vocabulary is on one rank."""
EXPERTS = replace(
    MODEL, model_type="deepseek_v3", num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
    shared_expert_intermediate_size=12, first_k_dense_replace=1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=2,
    topk_group=1,
)  # fmt: skip

CHAINS: dict[str, tuple[Model, list[Layout]]] = {
    "dense": (
        TIED_MODEL,
        [
            ONE,
            replace(ONE, tp=2),
            replace(ONE, dp=2, zero_stage=3),
            replace(ONE, pp=2),
            replace(ONE, cp=2, zero_stage=1),
            replace(ONE, pp=2, schedule="zb-v", virtual_stages=2),
            replace(ONE, pp=2, schedule="dualpipe"),
            replace(ONE, dp=2, tp=2, zero_stage=2),
            ONE,
        ],
    ),
    "experts": (
        EXPERTS,
        [
            ONE,
            replace(ONE, dp=2, ep=2),
            ONE,
            replace(ONE, tp=2, ep=2),
            replace(ONE, pp=2),
            replace(ONE, pp=2, schedule="dualpipe"),
            replace(ONE, tp=2, dp=2, ep=2, expert_tp=2, zero_stage=3),
            ONE,
        ],
    ),
}


def run_of(home: Path, model: Model, layout: Layout, name: str, **changes: object) -> Run:
    return small_run(home, model=replace(model, num_hidden_layers=4), layout=layout, name=name, **changes)


@pytest.mark.catalogue(46)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_whose_layout_changes_again_and_again_stays_the_same_to_rounding(home, chain):
    model, layouts = CHAINS[chain]
    whole = run_of(home, model, ONE, "whole", steps=len(layouts))
    train_here(whole)
    for done, layout in enumerate(layouts, 1):
        run = run_of(home, model, layout, "moved", steps=len(layouts))
        outcomes = train_ranks(run, before_step=stop_at(done))
        assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [done] * layout.world_size, layout
    found, expected = (np.array(rows(r, "train/loss", "train/grad_norm")) for r in (run, whole))
    assert np.abs(found / expected - 1).max() < 1e-11
    assert largest_error(state(run), state(whole)) < 1e-11


SAME = {
    "tp": (TIED_MODEL, Layout(tp=2, sequence_parallel=False)),
    "pp, both ends on one rank": (TIED_MODEL, Layout(pp=2, schedule="zb-v", virtual_stages=2, precision="bf16")),
    "cp": (TIED_MODEL, Layout(cp=2, zero_stage=3, precision="bf16")),
    "ep": (EXPERTS, Layout(dp=2, ep=2, zero_stage=1)),
    "rows of experts": (replace(EXPERTS, num_experts=6), Layout(dp=4, zero_stage=3, precision="bf16")),
}


@pytest.mark.catalogue(40, 54)
@pytest.mark.parametrize("case", SAME)
def test_a_run_stopped_on_any_axis_goes_on_to_the_same_bits(home, case):
    model, layout = SAME[case]
    whole, run = (run_of(home, model, layout, name, steps=5) for name in ("whole", "stopped"))
    trainings: list[tuple[Run, BeforeStep | None]] = [(whole, None), (run, stop_at(3, rank=layout.world_size - 1)), (run, None)]
    assert [outcome["steps_done"] for outcome in train_in_turn(trainings)] == [5, 3, 5]
    assert curve(run) == curve(whole)
    assert same(state(run), state(whole))


def test_a_run_cut_by_tensors_and_stages_is_exported_and_generates(home):
    run = run_of(home, TIED_MODEL, replace(ONE, tp=2, pp=2), "cut", steps=2, optimizer=Optimizer(warmup_steps=1))
    train_ranks(replace(run, checkpoint=replace(run.checkpoint, export=True)))
    trained = open_trained(home / "cut")
    _, exported = import_folder(home / "cut" / "export")
    assert exported.keys() == trained.weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in trained.weights.items())
    decoder, prompt = trained.decoder(dtype=torch.float64), [1, 2, 3]
    logits = decoder(torch.tensor([prompt]))[0, -1]
    found = next(iter(generate(decoder, prompt, Sampling(max_new_tokens=1, temperature=0.0))))
    assert found == logits.argmax().item()


def test_imported_experts_go_on_with_the_biases_that_balance_them(home):
    trained = run_of(home, EXPERTS, ONE, "trained", steps=3)  # odd: one step up and one down would leave nothing
    train_here(replace(trained, checkpoint=replace(trained.checkpoint, export=True)))
    model, weights = import_folder(home / "trained" / "export")
    biases = [bias.name for bias in score_biases(model)]
    assert len(biases) == 3 and all(weights[name].abs().max() > 0 for name in biases)
    run = replace(run_of(home, EXPERTS, replace(ONE, dp=2, ep=2), "imported", steps=0), model=model)
    import_as_first_checkpoint(home / "trained" / "export", run)
    assert train_ranks(replace(run, steps=1))[0].get("steps_done") == 1
    assert all((state(run)[f"model.{name}"] - weights[name]).abs().max() < 0.002 for name in biases)
    narrow = open_trained(home / "trained" / "export").decoder(dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(narrow[name], weights[name]) for name in biases)


@pytest.mark.parametrize(
    "unread",
    [
        {"rope_scaling": RopeScaling("linear", 8.0, 16)},
        {"query_pre_attn_scalar": FAMILIES["gemma3"].head_dim},
        {"full_attention_interval": FAMILIES["gemma3"].num_hidden_layers + 1},
    ],
    ids=lambda unread: next(iter(unread)),
)
def test_weights_are_taken_from_an_export_that_does_not_keep_a_value_without_effect(home, unread):
    model = replace(FAMILIES["gemma3"], vocab_size=61, **unread)
    folder = export_folder(state_of(random_decoder(model, torch.float32)), model, home / "export")
    found, _ = import_folder(folder)
    assert replace(found, name="") != model
    assert import_as_first_checkpoint(folder, small_run(home, model=model)).name == "step-00000000"
