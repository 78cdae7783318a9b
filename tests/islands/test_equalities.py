"""What islands compute, held to runs that compute the same in another way, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from islands.runs import ONE, island, run_of, trained, weights
from train.small_runs import MODEL, curve, largest_error, make_corpus, same

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Optimizer, Run
from ultrascale.description.sections.islands import Islands, Outer
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.corpora import build_loader
from ultrascale.train.trainer import Trainer

AVERAGE = Outer("sgd", lr=1.0, momentum=0.0)
TOLERANCE = 1e-11
NOBODY: dict[int, int] = {}
SEQUENCE = 11
FEW = 4
"""Steps where each of them is followed by an outer step that makes islands equal: what is wrong in one is seen after it."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("islands")
    make_corpus(folder / "tokens")
    return folder


HUGE = 1e14
PLAIN_SGD = Optimizer(
    learning_rate=0.05 * HUGE, eps=HUGE, beta1=0.0, beta2=0.0, weight_decay=0.0, warmup_steps=3, schedule="constant",
    clip_grad_norm=None,
)  # fmt: skip
"""AdamW without a memory, whose step 0.05 eps g / (|g| + eps) is 0.05 g to the last digits."""


@pytest.mark.parametrize("layout", [ONE, replace(ONE, dp=2), replace(ONE, dp=2, zero_stage=3), replace(ONE, tp=2)])
def test_averaging_after_every_step_of_sgd_is_data_parallelism(home: Path, layout: Layout) -> None:
    whole = run_of(home, "whole", optimizer=PLAIN_SGD, steps=FEW)
    if not (home / "whole").exists():
        trained(whole)
    apart = run_of(home, f"apart-{layout.dp}-{layout.zero_stage}-{layout.tp}", layout,
                   islands=Islands(2, every_steps=1, outer=AVERAGE), optimizer=PLAIN_SGD, steps=FEW)  # fmt: skip
    trained(apart)
    assert largest_error(weights(apart), weights(whole)) < TOLERANCE
    assert same(weights(apart), weights(island(apart, 1)))


DIFFER = [
    ((2, 1), replace(ONE, zero_stage=1)), ((1, 2, 1), ONE), ((2, 4), replace(ONE, zero_stage=3, dp_shard=2)),
    ((1, 2), replace(ONE, tp=2, zero_stage=3)),
]  # fmt: skip
"""Degrees of data parallelism of islands, and the layout of each."""


EXPERTS = replace(
    MODEL, model_type="mixtral", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, num_key_value_heads=2
)  # fmt: skip
DIFFER_IN_EXPERTS = [
    ((2, 4), replace(ONE, ep=2, zero_stage=3)), ((1, 2), replace(ONE, tp=2, ep=2)),
    ((1, 2), replace(ONE, tp=2, expert_tp=2, zero_stage=1)), ((2, 1, 2), replace(ONE, tp=2)),
]  # fmt: skip
AT_NIGHT = [
    ((1, 2), ONE, MODEL), ((1, 2), replace(ONE, zero_stage=3), MODEL), ((2, 4), replace(ONE, ep=2), EXPERTS),
]  # fmt: skip
"""Each is in one of the others with something more."""


@pytest.mark.parametrize(("degrees", "layout", "model"), [
    *((*one, MODEL) for one in DIFFER), *((*one, EXPERTS) for one in DIFFER_IN_EXPERTS),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in AT_NIGHT),
])  # fmt: skip
def test_islands_that_differ_in_dp_are_data_parallelism_over_all_of_them(
    home: Path, degrees: tuple[int, ...], layout: Layout, model: Model
) -> None:
    """Shares of the batch and weights in the mean are in proportion to dp."""
    batch = Batch(SEQUENCE, 12 if sum(degrees) in (3, 4, 6) else 10)
    whole = run_of(home, f"whole-of-{batch.sequences_per_batch}-{model.num_experts}", batch=batch, model=model,
                   optimizer=PLAIN_SGD, steps=FEW)  # fmt: skip
    if not (home / whole.name).exists():
        trained(whole)
    cut = (*degrees, layout.zero_stage, layout.tp, layout.ep, layout.expert_tp, model.num_experts)
    name = f"differ-{'-'.join(map(str, cut))}"
    run = run_of(home, name, replace(layout, dp=degrees[0]), batch=batch, model=model,
                 islands=Islands(len(degrees), 1, AVERAGE, dp=degrees), optimizer=PLAIN_SGD, steps=FEW)  # fmt: skip
    trained(run)
    assert largest_error(weights(run), weights(whole)) < TOLERANCE
    assert all(same(weights(run), weights(island(run, number))) for number in range(1, len(degrees)))


@pytest.mark.parametrize(("settings", "outer"), [
    (Islands(2, every_steps=4), "nesterov"),
    (Islands(2, every_steps=3, outer=Outer("sgd", lr=0.5, momentum=0.8)), "sgd"),
    (Islands(2, every_steps=4, overlap_steps=2), "nesterov"),
    (Islands(2, every_steps=4, dp=(1, 2)), "nesterov"),
])  # fmt: skip
def test_outer_steps_are_torchs_sgd_on_the_mean_of_moves(home: Path, settings: Islands, outer: str) -> None:
    name = f"outer-{outer}-{settings.overlap_steps}-{len(settings.dp)}"
    run = run_of(home, name, islands=settings, batch=Batch(SEQUENCE, 12))
    trained(run)
    expected = by_hand(run)
    found = weights(run)
    assert found.keys() == expected.keys()
    assert largest_error(found, expected) < TOLERANCE


def by_hand(run: Run, left_out: dict[int, int] = NOBODY) -> dict[str, torch.Tensor]:
    """The weights after `run`, of trainers side by side in this process, and torch's own SGD. `left_out`: islands and the outer
    step from which on they take no part; not the first."""
    settings, outer = run.islands, run.islands.outer
    device, count = torch.device("cpu"), run.islands.count
    both = [Trainer(run, Ranks(0, 1, device, island=i), build_loader(run, run.data.sources)) for i in range(count)]
    anchors = [p.detach().clone().requires_grad_() for p in both[0].share.parameters()]
    sgd = torch.optim.SGD(anchors, outer.lr, outer.momentum, nesterov=outer.optimizer == "nesterov")
    sent: dict[int, list[list[torch.Tensor]]] = {}

    def apply(weights: list[list[torch.Tensor]]) -> None:
        for anchor, *moved in zip(anchors, *weights, strict=True):
            degrees = [run.degrees[trainer.ranks.island] for trainer in both]
            anchor.grad = sum(dp * (anchor.detach() - one) for dp, one in zip(degrees, moved, strict=True)) / sum(degrees)
        sgd.step()
        for trainer, before in zip(both, weights, strict=True):
            for parameter, anchor, old in zip(trainer.share.parameters(), anchors, before, strict=True):
                parameter.data.copy_(anchor.detach() + (parameter.detach() - old))

    for step in range(1, run.steps + 1):
        both = [trainer for trainer in both if step < left_out.get(trainer.ranks.island, run.steps + 1)]
        for trainer in both:
            trainer.train_step()
        if step in sent:
            apply(sent.pop(step))
        if step == run.steps:
            for late in sent.values():
                apply(late)
        if step % settings.every_steps == 0 or step == run.steps:
            now = [[p.detach().clone() for p in trainer.share.parameters()] for trainer in both]
            if settings.overlap_steps and step < run.steps:
                sent[step + settings.overlap_steps] = now
            else:
                apply(now)
    return {f"model.{name}": p.detach() for name, p in both[0].share.named()}


def test_fragments_all_at_once_are_the_unfragmented(home: Path) -> None:
    settings = Islands(2, every_steps=1)
    whole, parts = run_of(home, "one-part", islands=settings), run_of(home, "parts", islands=replace(settings, fragments=2))
    assert same(trained(parts), trained(whole))


def test_one_island_is_the_run_without_islands(home: Path) -> None:
    plain, alone = run_of(home, "plain"), run_of(home, "alone", islands=Islands(1, every_steps=3, overlap_steps=2))
    assert same(trained(alone), trained(plain))
    assert curve(alone) == curve(plain)
