from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.ranges import LONGEST_WAIT
from ultrascale.config.resolve import resolve, run_from_toml, to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Checkpoint, Data, Evaluation, Log, Optimizer, RampStage, Run, Source

positive = st.floats(1e-12, 1e12)
share = st.floats(0, 1)
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # what no file and no folder may be called
text = st.text(characters, min_size=1).filter(lambda word: word != "none")
sources = st.lists(st.builds(Source, text, positive), max_size=3, unique_by=lambda source: source.path).map(tuple)


@st.composite
def layouts(draw):
    shard, replicas, stage = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    recompute = draw(st.sampled_from(["none", "selective", "full", "every-k"]))
    return Layout(
        dp=shard * replicas, zero_stage=stage, dp_shard=draw(st.sampled_from([None, 1 if stage == 0 else shard])),
        micro_batch_size=draw(st.integers(1, 4)), recompute=recompute,
        recompute_every=draw(st.integers(1, 9)) if recompute == "every-k" else 2,
        precision=draw(st.sampled_from(["fp64", "fp32", "bf16"])), layers_per_bucket=draw(st.integers(1, 4)),
    )  # fmt: skip


@st.composite
def runs(draw):
    layout, model = draw(layouts()), PRESETS[draw(st.sampled_from(list(PRESETS)))]
    size = st.integers(1, 5).map(lambda n: n * layout.dp * layout.micro_batch_size)
    ends = draw(st.lists(st.integers(1, 10**13), max_size=3, unique=True).map(sorted))
    steps, length = draw(st.integers(3, 10**6)), draw(st.integers(1, model.max_position_embeddings))
    schedule = draw(st.sampled_from(["cosine", "linear", "wsd", "constant"]))
    every, evaluate = draw(st.sampled_from([None, 1, 100])), draw(st.none() | st.integers(1, 9))
    return Run(
        model=replace(model, norm_eps=draw(positive), initializer_range=draw(positive)), layout=layout, steps=steps,
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)), folder=draw(text),
        seed=draw(st.integers(0, 2**63 - 1)), device=draw(st.sampled_from(["auto", "cpu", "cuda"])),
        cluster=draw(st.sampled_from(["auto", "64xh100", "8xcpu"])), compile=draw(st.booleans()),
        collective_timeout_seconds=min(draw(positive), LONGEST_WAIT),
        batch=Batch(length, draw(size), tuple(RampStage(end, draw(size)) for end in ends)),
        data=Data(draw(sources), (Source("held-out"),) if evaluate else (), draw(st.booleans()), draw(st.none() | text)),
        optimizer=Optimizer(
            draw(st.sampled_from(["adamw", "adamw-bf16", "adamw-8bit", "muon"])),
            draw(positive), schedule, draw(st.integers(0, steps // 3)),
            draw(st.none() | st.integers(1, steps // 3)) if schedule == "wsd" else None, draw(share),
            0.95, 0.9, draw(st.floats(0, 0.999)), draw(positive), draw(share), draw(st.none() | positive),
        ),
        checkpoint=Checkpoint(every, draw(st.integers(0, 9)), None if every is None else every * 3, draw(st.booleans())),
        evaluation=Evaluation(evaluate, draw(st.integers(1, 99))),
        log=Log(draw(st.integers(1, 9)), draw(st.sampled_from([(), ("wandb",), ("tensorboard", "wandb")]))),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(runs())
def test_a_run_written_as_toml_is_read_back_as_the_same_run(run):
    assert run_from_toml(to_toml(run)) == run


def test_the_file_of_a_resolved_run_is_that_run_and_says_where_each_value_is(tmp_path):
    run = resolve(None, {"model.preset": "llama-3.1-8b", "layout.dp": 8}).run
    (tmp_path / "run.toml").write_text(to_toml(run))
    again = resolve(tmp_path / "run.toml")
    assert again.run == run
    of_run = {key: origin for key, origin in again.provenance.items() if not key.startswith("launch.")}
    assert {origin.rpartition(":")[0] for origin in of_run.values()} == {str(tmp_path / "run.toml")}
    assert {again.provenance[key] for key in again.provenance if key not in of_run} == {"default"}  # no part of the run


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_file(name):
    run = Run(model=PRESETS[name], batch=Batch(sequence_length=64))
    assert run_from_toml(to_toml(run)) == run


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [("steps = 3\nsteps = 4\n", "steps", (1, 2)), ("[batch]\nramp = 1\n[layout]\ndp = 1\n\ndp = 2\n", "layout.dp", (4, 6))],
)
def test_a_key_that_is_there_twice_is_named_with_its_first_line(text, key, lines, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=rf"run\.toml:{lines[1]}: .*: {key} is there already, in line {lines[0]}\."):
        resolve(file, [])
