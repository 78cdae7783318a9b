"""Single lines of the program, each changed as an audit once did without the proof's seeing it; now it sees all of them."""

from __future__ import annotations
import __future__

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.cases import cases
from ultrascale.check.compare import Verdict
from ultrascale.check.faults.all_faults import PLANTS
from ultrascale.check.prove import Case, prove_all, shrink_model
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Run
from ultrascale.models import router
from ultrascale.models.router import choose
from ultrascale.parallel import share
from ultrascale.parallel.context import context_masks, context_ring
from ultrascale.parallel.data import collectives
from ultrascale.parallel.pipeline import pipeline_messages
from ultrascale.parallel.tensor import tensor_loss
from ultrascale.train import trainer
from ultrascale.train.optimizers import gradients
from ultrascale.train.trainer import Trainer


@dataclass(frozen=True)
class Line:
    """A line of a function or method, what it is changed to, and the run in which that matters."""

    owners: tuple[Any, ...]
    """Modules or classes that have the function, the one that defines it first."""
    function: str
    old: str
    new: str
    layout: dict[str, Any] = field(default_factory=lambda: {"dp": 2})
    preset: str = "tiny-llama"
    waits: bool = False
    """Whether it is a wait that is missing."""


LOSS = (tensor_loss,)
ZERO = {"dp": 2, "zero_stage": 3}
WINDOW = {"layout": {"cp": 2}, "preset": "tiny-mistral"}
LINES = {
    "last row of a vocabulary no target": Line(LOSS, "_sweep", "first + len(weight))", "first + len(weight) - 1)", {"tp": 2}),
    "first row of a vocabulary no target": Line(LOSS, "_sweep", "targets >= first)", "targets > first)", {"tp": 2}),
    "window of one more": Line((context_masks,), "_visible", "keys > queries - window", "keys >= queries - window", **WINDOW),
    "keys travel one too few": Line((context_masks,), "_needs", "- reach + 1)", "- reach + 2)", **WINDOW),
    "clipped above twice the limit": Line((gradients, trainer), "clip_gradients", "norm > limit", "norm > 2 * limit"),
    "clipped always": Line((gradients, trainer), "clip_gradients", " and norm > limit", ""),
    "clipped by another norm": Line((gradients, trainer), "clip_gradients", "(norm + 1e-6)", "(0.75 * norm + 1e-6)"),
    "keys not waited for": Line(
        (context_ring.RingKeys,), "hops", "            messages.wait()\n", "", {"cp": 2}, waits=True),
    "gradients of keys not waited for": Line(
        (context_ring.RingGradients,), "received", "self.messages.wait()", "pass", {"cp": 2}, waits=True),
    "one message of many not waited for": Line(
        (collectives.PendingExchange,), "wait", "while self.under_way:", "while len(self.under_way) > 1:", ZERO, waits=True),
    "a stage's input not waited for": Line(
        (pipeline_messages.Mailbox,), "take", 'self._wait(work, f"waited for {message}")', "pass", {"pp": 2}, waits=True),
    "a stage's output let go before it has left": Line(
        (pipeline_messages.Mailbox,), "_release", 'self._wait(leaving.popleft()[2], "sent")', "leaving.popleft()", {"pp": 2},
        waits=True),
    "a tied gradient not waited for": Line(
        (share.Share,), "_add_received", "wait_for(work, group)", "pass", {"pp": 2}, waits=True),
}  # fmt: skip


def changed(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """`function` with a part of its source replaced."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    plain = inspect.unwrap(function)
    code = compile(textwrap.dedent(source.replace(old, new)), "<planted>", "exec", __future__.annotations.compiler_flag)
    found: dict[str, Any] = {}
    exec(code, plain.__globals__, found)
    return found[plain.__name__]


def case_of(line: Line) -> Case:
    layout = Layout(**line.layout)
    model = PRESETS[line.preset]
    if line.preset != "tiny-mistral":  # that one is proven whole, where windows that are not made small would not act
        model = replace(shrink_model(model, layout), tie_word_embeddings=line.preset == "tiny-llama")
    run = Run(model, layout=layout, device="cpu", batch=Batch(sequence_length=256, sequences_per_batch=8))
    return list(cases(run, own_layout=True))[-1]


def plant_of(line: Line) -> Callable[[Trainer], AbstractContextManager[None]]:
    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        function = changed(inspect.getattr_static(line.owners[0], line.function), line.old, line.new)
        with ExitStack() as stack:
            for owner in line.owners:
                stack.enter_context(patch.object(owner, line.function, function))
            yield

    return plant


@cache
def proven() -> dict[str, Verdict]:
    """The verdict on each line, and on each run without a change."""
    planted = [replace(case_of(line), name=name, fault=name) for name, line in LINES.items()]
    controls = {repr(case.run): Case(repr(case.run), case.run) for case in planted}.values()
    with patch.dict(PLANTS, {name: plant_of(line) for name, line in LINES.items()}):
        todo = sorted([*planted, *controls], key=lambda case: repr(case.run))  # what one process computes is computed once
        return {verdict.case: verdict for verdict in prove_all(todo, steps=2, go_on=True)}


@pytest.mark.parametrize("name", LINES)
def test_a_changed_line_is_seen_and_the_run_without_it_is_exact(name):
    assert proven()[repr(case_of(LINES[name]).run)].holds
    verdict = proven()[name]
    assert not verdict.holds
    if LINES[name].waits:  # by name, and not because somebody waited until a time was up
        assert any("never waited for a" in str(difference) for difference in verdict.beyond), verdict.failure


def test_experts_that_are_chosen_otherwise_where_two_are_exactly_as_good_are_seen(monkeypatch):
    def last_of_equals(scores: Tensor, model: Model, bias: Tensor | None) -> Tensor:
        return model.num_experts - 1 - choose(scores.flip(-1), model, bias)

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        with patch.object(router, "choose", last_of_equals):
            yield

    monkeypatch.setitem(PLANTS, "ties", plant)
    case = case_of(Line((), "", "", "", {"dp": 2, "ep": 2}, "tiny-mixtral"))
    bare, planted = prove_all([case, replace(case, fault="ties")], steps=1)
    assert bare.holds and {"experts", "gradient"} <= {difference.quantity for difference in planted.beyond}


def test_a_rank_that_waits_for_ever_is_told_by_rank_and_by_what_it_waits_for(monkeypatch):
    finish = share.Share.finish_gradients
    monkeypatch.setattr(share.Share, "finish_gradients", lambda self: self.mesh.rank or finish(self))
    (verdict,) = prove_all([case_of(LINES["a tied gradient not waited for"])], steps=1, go_on=True, step_seconds=3.0)
    told = verdict.failure.splitlines()[-1]
    assert re.search(r"rank (0 waited for rank 1 in the sum of a tied|1 waited for rank 0 in the norm of the)", told)
