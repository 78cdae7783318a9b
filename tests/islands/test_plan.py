"""What is planned of islands is what they send and keep; what cannot be is refused in a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from islands.runs import ONE, island, run_of, trained
from train.small_runs import MODEL, make_corpus, rows

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.config.resolve import resolve, run_from_toml, to_toml
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch
from ultrascale.description.sections.islands import Islands, Outer
from ultrascale.plan.islands import host_bytes, plan_islands, sent_by_rank
from ultrascale.plan.report import plan_run
from ultrascale.trace.planned import planned_rank
from ultrascale.trace.rank import trace_rank

EXPERTS = replace(
    MODEL, model_type="mixtral", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, router_aux_loss_coef=0.01,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.parametrize("degrees", [(), (2, 3)])
def test_what_islands_send_is_what_is_planned(tmp_path: Path, degrees: tuple[int, ...]) -> None:
    make_corpus(tmp_path / "tokens")
    islands = Islands(2, every_steps=3, fragments=2, overlap_steps=1, dtype="int8", dp=degrees)
    run = run_of(tmp_path, "sends", replace(ONE, dp=2), islands=islands, batch=Batch(11, 20))
    trained(run)
    # Of 12 steps each fragment is due after every third one, and both once more after the last if they are not.
    times = [sum(fragment in islands.due(step, run.steps) for step in range(1, run.steps + 1)) for fragment in (0, 1)]
    for number, dp in enumerate(run.degrees):
        one = replace(run, layout=replace(run.layout, dp=dp))
        each = [sum(sent_by_rank(one, rank)[fragment] for rank in range(dp)) for fragment in (0, 1)]
        own = island(run, number) if number else run
        assert rows(own, "outer/sent_bytes")[-1] == (times[0] * each[0] + times[1] * each[1],)
        assert plan_islands(one).sent_bytes == sum(each)
        assert rows(own, "outer/steps")[-1] == (sum(times),)
        assert rows(own, "progress/tokens", "progress/tokens_per_batch")[-1] == (12 * 220, 220 * dp // sum(run.degrees))


@pytest.mark.parametrize(("model", "layout"), [
    (MODEL, Layout()),
    (MODEL, Layout(dp=4, zero_stage=3, dp_shard=2)),
    (MODEL, Layout(dp=3, zero_stage=2)),
    (MODEL, Layout(tp=2, pp=2)),
    (replace(MODEL, tie_word_embeddings=True), Layout(pp=2)),
    (EXPERTS, Layout(dp=4, ep=2, zero_stage=1)),
])  # fmt: skip
@pytest.mark.parametrize("islands", [
    Islands(3, 10), Islands(2, 10, fragments=2, overlap_steps=3, dtype="int4"), Islands(2, 10, dp=(2, 1)),
    Islands(2, 10, dp=(2, 1), quorum=1), Islands(2, 10, fragments=2, dtype="int8", quorum=1),
])  # fmt: skip
def test_a_traced_rank_sends_and_keeps_what_is_planned(model: Model, layout: Layout, islands: Islands) -> None:
    if islands.dp:
        islands = replace(islands, dp=(layout.dp, layout.dp + (layout.dp_shard or 1)))
    for rank in {0, layout.world_size - 1}:
        base = resolve(None, {"model.preset": "tiny-llama"}).run
        batch = replace(base.batch, sequence_length=8, sequences_per_batch=sum(islands.degrees(layout.dp)))
        run = replace(base, model=model, layout=layout, islands=islands, batch=batch)
        assert trace_rank(run, rank, device="cpu").outer == (sum(sent_by_rank(run, rank).values()), host_bytes(run, rank))
        planned = planned_rank(run, rank, "cpu")
        assert planned is None or planned.outer == (sum(sent_by_rank(run, rank).values()), host_bytes(run, rank))


def test_a_plan_is_of_one_island_with_its_share_of_the_batch() -> None:
    words = {"model.preset": "tiny-llama", "layout.dp": 2, "batch.sequences_per_batch": 8}
    whole = resolve(None, words | {"islands.count": 2, "islands.every_steps": 20}).run
    alone = resolve(None, words | {"batch.sequences_per_batch": 4}).run
    cluster = parse_cluster("2xh100")
    found, expected = (plan_run(run, cluster, save_seconds=7).to_json() for run in (whole, alone))
    traffic = found.pop("islands")
    assert found == expected
    # Two replicas of an island cut the model between them, and of two islands each half goes to the other and back.
    assert traffic["sent_bytes"] == pytest.approx(num_parameters(whole.model) * 4, rel=1e-3)
    assert traffic["sent_bytes_per_step"] * 20 == traffic["sent_bytes"]
    assert traffic["host_bytes"] == 2 * 4 * num_parameters(whole.model)


def test_islands_are_written_and_read_again() -> None:
    islands = Islands(4, 50, Outer("sgd", lr=0.5, momentum=0.0), fragments=2, overlap_steps=5, dtype="int4")
    run = replace(resolve(None, {"model.preset": "tiny-llama"}).run, islands=islands)
    assert run_from_toml(to_toml(run)).islands == islands


@pytest.mark.parametrize(("words", "said"), [
    ({"islands.count": 3}, "batch.sequences_per_batch must be a multiple of layout.dp x layout.micro_batch_size x islands"),
    ({"islands.count": 2, "islands.overlap_steps": 100}, "islands.overlap_steps must be below islands.every_steps = 100"),
    ({"islands.count": 2, "islands.quorum": 1, "islands.every_steps": 10, "islands.fragments": 2, "islands.overlap_steps": 5},
     "islands.overlap_steps must be below the 5 steps between two outer steps where there is a quorum, is 5"),
    ({"islands.count": 2, "islands.quorum": 3}, "islands.quorum must be at most islands.count = 2, is 3"),
    ({"islands.count": 2, "islands.meet": "head:1"}, "islands.meet must be file:///FOLDER or tcp://HOST:PORT, is 'head:1'"),
    ({"islands.count": 2, "islands.fragments": 9}, "islands.fragments must be at most the model's 2 layers, is 9"),
    ({"islands.count": 2, "faults.on_anomaly": "rewind"}, "faults.on_anomaly is rewind, but an island that goes back alone"),
    ({"islands.count": 2, "islands.outer.lr": 0.0}, "islands.outer.lr must be above 0 and at most 10, is 0"),
    ({"islands.count": 2, "islands.dp": [1]}, "islands.dp must be a degree of 1 or more for each of islands.count = 2, is [1]"),
    ({"islands.count": 2, "islands.dp": [2, 3], "batch.sequences_per_batch": 10}, "layout.dp is 1, and of islands.dp = [2, 3]"),
    ({"islands.count": 2, "islands.dp": [1, 2], "batch.sequences_per_batch": 4},
     "batch.sequences_per_batch must be a multiple of the sum of islands.dp x layout.micro_batch_size = 3, is 4"),
    ({"islands.count": 2, "islands.dp": [2, 3], "layout.dp": 2, "layout.zero_stage": 1, "layout.dp_shard": 2,
      "batch.sequences_per_batch": 5}, "islands.dp 3: layout.dp_shard must divide dp = 3, is 2"),
    ({"islands.count": 0}, "islands.count must be at least 1, is 0"),
    ({"islands.count": 2000}, "islands.count must be from 1 to 1024, is 2000"),
    ({"islands.outer.momentum": 1.0}, "islands.outer.momentum must be at least 0 and below 1, is 1.0"),
    ({"islands.dtype": "int2"}, "islands.dtype must be one of 'fp32', 'bf16', 'int8', 'int4', is 'int2'"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(words: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve(None, {"model.preset": "tiny-llama"} | words)
    (problem,) = refused.value.problems
    assert f"{problem.key} {problem.rule}".startswith(said)
    assert problem.remedy


def test_processes_that_islands_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecError, match=r"3 processes are not a multiple of islands.count = 2"):
        resolve(None, {"model.preset": "tiny-llama", "islands.count": 2}, processes=3)


def test_a_plan_with_islands_is_json() -> None:
    run = resolve(None, {"model.preset": "tiny-llama", "islands.count": 2}).run
    assert json.loads(json.dumps(plan_run(run, parse_cluster("1xh100")).to_json()))["islands"]["count"] == 2
