"""With dropout every layout drops the same elements, in the forward pass and when it is done again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agree.small_models import WITH_EXPERTS
from models.families import FAMILIES

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.oracle.reference import Reference
from ultrascale.check.prove import Case, prove_all, shrink_model
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Log, Optimizer, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.trainer import Trainer

LIMIT = 1e-11
LAYOUTS = {
    "one rank": Layout(),
    "dp, ZeRO 3, full recomputation": Layout(dp=2, zero_stage=3, recompute="full"),
    "tp with sequence parallelism": Layout(tp=2),
    "tp, selective": Layout(tp=2, sequence_parallel=False, recompute="selective"),
    "a ring": Layout(cp=2),
    "a pipeline, full recomputation": Layout(pp=2, recompute="full"),
    "zero bubble": Layout(pp=2, schedule="zb-h1"),
    "heads for sequences, tp": Layout(cp=2, tp=2, cp_method="all-to-all"),
}
LLAMA, GPT2 = (
    replace(shrink_model(FAMILIES[name], LAYOUTS["heads for sequences, tp"]), dropout=0.2) for name in ("llama", "gpt2")
)


def run_of(model: Model, layout: Layout) -> Run:
    return Run(
        model, device="cpu", layout=replace(layout, precision="fp64", micro_batch_size=2), log=Log(memory_steps=0),
        batch=Batch(29, 4 * layout.dp), optimizer=Optimizer(learning_rate=1e-2, clip_grad_norm=0.5),
    )  # fmt: skip


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_axis_drops_the_same_elements(model):
    verdicts = prove_all([Case(name, run_of(model, layout)) for name, layout in LAYOUTS.items()], steps=2)
    worst = {verdict.case: max(d.error for d in verdict.worst.values()) for verdict in verdicts}
    assert worst.keys() == LAYOUTS.keys()
    assert {name: error for name, error in worst.items() if not error <= LIMIT} == {}


def test_models_with_experts_drop_the_same_elements_where_tokens_are_looked_up_in_whole_sequences():
    layouts = {"cp": Layout(cp=2, ep=2), "tp, recomputed": Layout(tp=2, recompute="full")}
    todo = []
    for name, layout in layouts.items():
        model = replace(shrink_model(WITH_EXPERTS["mixtral"], layout), dropout=0.2, expert_capacity_factor=1.0)
        todo.append(Case(name, run_of(model, layout)))
    worst = {verdict.case: max(d.error for d in verdict.worst.values()) for verdict in prove_all(todo, steps=2)}
    assert worst.keys() == layouts.keys() and max(worst.values()) <= LIMIT


def test_dropping_changes_the_loss_of_training_by_rate_and_seed():
    """The control: equality above is not for want of effect."""
    run = run_of(LLAMA, Layout())
    loader = RandomDocuments(sequence_length=29, vocab_size=LLAMA.vocab_size, seed=1)
    runs = [run, replace(run, model=replace(LLAMA, dropout=0.0)), replace(run, model=replace(LLAMA, dropout=0.4))]
    losses = [Reference(one, loader).train_step().loss for one in runs]
    assert len(set(losses)) == 3


def test_evaluation_drops_nothing():
    run = run_of(LLAMA, Layout())
    loader = RandomDocuments(sequence_length=29, vocab_size=LLAMA.vocab_size, seed=1)
    trainer = Trainer(run, Ranks(0, 1, torch.device("cpu")), loader)
    batch = trainer.to_device(loader.read(range(2)))
    dropping = float(trainer.passes.forward(batch).detach())
    (evaluated,) = trainer.passes.evaluate([batch])
    bare = trainer.passes.evaluate([replace(batch, dropout_keys=None)])[0]
    assert float(evaluated) == float(bare) != dropping
