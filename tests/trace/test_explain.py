"""What is offered where a rank runs out of memory: one change of the layout, or as few at once as are enough."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from agree.layouts import MODEL
from rich.console import Console

from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.trace.views import explain
from ultrascale.trace.views.explain import Edit, edits
from ultrascale.trace.views.view import show_parts

RUN = Run(MODEL, layout=Layout(dp=8, micro_batch_size=4), batch=Batch(64, 32), data=Data(document_mask=False))


def needed(layout: Layout) -> int:
    """100 for each sequence of a micro-batch, each part of the state that is whole, and what is not recomputed."""
    return 100 * (layout.micro_batch_size + 3 - layout.zero_stage + (layout.recompute == "none"))


def offered(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[Edit]:
    """With a planner that has `needed`, on devices of `limit`."""

    def plan(run: Run, cluster: Cluster) -> SimpleNamespace:
        return SimpleNamespace(needed_bytes=needed(run.layout), fits=needed(run.layout) <= limit, prediction=None)

    monkeypatch.setattr(explain, "plan_run", plan)
    return edits(RUN, parse_cluster("8xh100"))


@pytest.mark.parametrize("limit, at_once", [(500, 1), (300, 2), (200, 3)])
def test_as_few_changes_at_once_as_make_it_fit_are_offered_before_single_ones(limit, at_once, monkeypatch) -> None:
    found = offered(limit, monkeypatch)
    assert len(found) == 3
    best = found[0]
    assert (best.fits, best.at_once, best.needed_bytes, best.saved_bytes) == (True, at_once, limit, 800 - limit)
    assert best.setting.count("--layout.") >= min(at_once, 2)
    assert [one.at_once for one in found[1:]] == [1, 1]


def test_where_three_at_once_are_not_enough_the_best_is_told_and_that_it_is_not(monkeypatch, capsys) -> None:
    found = offered(100, monkeypatch)
    assert (found[0].needed_bytes, found[0].at_once, found[0].fits) == (200, 3, False)
    show_parts([], found, 800, Console())
    told = " ".join(capsys.readouterr().out.split())
    assert "no single change makes it fit: the first line is the best of 3 at once, and does not either" in told


def test_what_fits_already_is_offered_single_changes_alone(monkeypatch) -> None:
    assert [one.at_once for one in offered(800, monkeypatch)] == [1, 1, 1]


def test_what_the_trainer_has_against_memory_is_offered_and_what_it_refuses_is_not() -> None:
    def settings(layout: Layout) -> set[str]:
        run = Run(MODEL, layout=layout, batch=Batch(64, 32), data=Data(document_mask=False))
        found, now = explain.PlanCache(run, parse_cluster("8xh100")), explain.plan_run(run, parse_cluster("8xh100"))
        return {edit.setting for change in explain._changes(layout, run) if (edit := found.edit((change,), now))}

    ours = {"--layout.recompute auto", "--layout.offload-optimizer true", "--layout.offload-activations true"}
    assert settings(Layout(dp=8)) >= {*ours, "--layout.mlp-chunks 4"}
    cut = settings(Layout(dp=4, tp=2, recompute="selective"))
    assert not cut & {"--layout.mlp-chunks 4", "--layout.offload-activations true"}
    assert "--layout.offload-optimizer true" in cut
