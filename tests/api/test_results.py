"""What a result shows of itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from api.questions import CHECKS, PLANS, SCHEDULES, TRACES

import ultrascale as us

RESULTS = {question.name: question.call for question in (*PLANS, *SCHEDULES, *TRACES, *CHECKS)}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_one_line_and_a_table(name):
    found = RESULTS[name]()
    assert "\n" not in repr(found) and len(repr(found)) < 250
    shown = found._repr_html_()
    assert shown.count("<table") == shown.count("</table>") and ("<td" in shown or "<svg" in shown)
    assert found.rows() and all(isinstance(row, dict) for row in found.rows())


@pytest.mark.parametrize("name", RESULTS)
def test_a_picture_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    figure = RESULTS[name]().plot()
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_a_plan_s_numbers_are_there_by_name():
    found = us.plan("tiny-llama", "8xh100", tp=1, pp=1)
    document = found.to_dict()
    assert found.step_seconds == document["time"]["seconds_per_step"]
    assert list(found.step_interval or ()) == document["time"]["seconds_per_step_interval"]
    assert found.needed_bytes + found.headroom_bytes + found.reserve_bytes == document["memory"]["capacity_bytes"]
    assert sum(row["value"] for row in found.rows() if row["of"] == "step") == pytest.approx(found.step_seconds)


def test_a_search_is_a_ranking_of_predictions():
    found = us.search("tiny-llama", "8xh100", pp=1)
    assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)
    assert [row["rank"] for row in found.rows()] == list(range(1, len(found) + 1))
    assert found.plan.layout == next(iter(found)).layout


def test_a_comparison_names_what_differs_and_by_how_much():
    a, b = (us.plan("tiny-llama", "8xh100", tp=tp, pp=1, zero_stage=1) for tp in (1, 2))
    found = us.compare(a, b)
    assert {"name": "layout.tp", "a": 1, "b": 2} in found.settings()
    step = next(row for row in found.rows() if row["name"] == "step")
    assert step["b_over_a"] == pytest.approx((b.step_seconds or 0) / (a.step_seconds or 1))
    assert us.compare(a, a).settings() == [] and all(row["b_over_a"] in (None, 1) for row in us.compare(a, a).rows())


def test_a_frame_is_made_by_pandas_of_the_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))
    found = us.schedule(pp=2)
    assert found.to_frame() == ("frame", found.rows())


@pytest.mark.parametrize("method, package", [("to_frame", "pandas"), ("plot", "matplotlib")])
def test_a_package_that_is_not_installed_is_named_with_the_remedy(method, package, monkeypatch):
    found = us.schedule(pp=2)
    for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{method}\\(\\) needs {package}, which is not installed: pip install"):
        getattr(found, method)()


def test_without_pandas_a_report_names_its_own_method_for_the_same_rows(tmp_path, monkeypatch):
    from ultrascale.api.report import Report
    from ultrascale.measure.summary import logged_rows, summarise

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"; metrics\(\) has the same"):
        Report(tmp_path, summarise(tmp_path, logged_rows(tmp_path)), ()).to_frame()


def test_names_in_a_table_cannot_be_html():
    from ultrascale.api.displays import html

    assert "<script" not in html("<script>", [{"<script>": "<script>"}])
