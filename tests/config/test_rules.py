from dataclasses import is_dataclass, replace

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.run_rules import RULES, TRAINING_RULES, run_notes
from ultrascale.config.rules.trainable import LAYOUT_RULES
from ultrascale.config.schema import leaves
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Evaluation, Run
from ultrascale.description.sections.islands import Islands
from ultrascale.description.sections.trackers import Log

TINY = {"model.preset": "tiny-llama", "batch.sequence_length": 128}


def problems(*, require_data=False, **given):
    """The problems of a tiny run with some keys changed (`__` for `.`), by key."""
    with pytest.raises(SpecError) as caught:
        resolve(None, TINY | {key.replace("__", "."): value for key, value in given.items()}, require_data=require_data)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.catalogue(61)
def test_a_global_batch_that_ranks_cannot_share_is_refused_with_the_nearest_that_they_can():
    found = problems(layout__dp=4, layout__micro_batch_size=3, batch__sequences_per_batch=100)["batch.sequences_per_batch"]
    assert "= 12, is 100" in found.rule
    assert "96 or 108" in found.remedy


def test_every_stage_of_the_ramp_must_divide_too():
    ramp = [{"until_tokens": "1M", "sequences_per_batch": 6}, {"until_tokens": "2M", "sequences_per_batch": 4}]
    assert list(problems(layout__dp=4, batch__ramp=ramp)) == ["batch.ramp[0].sequences_per_batch"]


def test_a_ramp_must_go_up_in_tokens():
    ramp = [{"until_tokens": "2M", "sequences_per_batch": 4}, {"until_tokens": "1M", "sequences_per_batch": 8}]
    assert "must be above that of the stage before, 2000000" in problems(batch__ramp=ramp)["batch.ramp[1].until_tokens"].rule


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_a_sequence_is_no_longer_than_the_positions(model):
    found = problems(model__preset=model, batch__sequence_length=2048)["batch.sequence_length"]
    assert "must be at most model.max_position_embeddings" in found.rule


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("optimizer.warmup_steps", {"steps": 10, "optimizer__warmup_steps": 10}),
        ("optimizer.decay_steps", {"optimizer__decay_steps": 10}),
        ("optimizer.decay_steps", {"optimizer__schedule": "wsd", "optimizer__warmup_steps": 5, "optimizer__decay_steps": 96}),
        ("optimizer.beta2", {"optimizer__beta2": 1.0}),
        ("optimizer.learning_rate", {"optimizer__learning_rate": -1e-3}),
        ("optimizer.min_learning_rate_ratio", {"optimizer__min_learning_rate_ratio": 1.5}),
        ("optimizer.clip_grad_norm", {"optimizer__clip_grad_norm": 0.0}),
        ("steps", {"steps": 0}),
        ("seed", {"seed": -1}),
        ("collective_timeout_seconds", {"collective_timeout_seconds": 0.0}),
        ("checkpoint.keep_every_steps", {"checkpoint__keep_every_steps": 150}),
        ("checkpoint.keep_every_steps", {"checkpoint__keep_every_steps": 100, "checkpoint__every_steps": None}),
        ("evaluation.every_steps", {"evaluation__every_steps": 10}),
        ("data.validation", {"data__validation": ["held-out"]}),
        ("layout.recompute_every", {"layout__recompute_every": 3}),
        ("layout.recompute_every", {"layout__recompute_every": 3, "layout__recompute": "full"}),
        ("data.sources", {"data__sources": ["a", "a"]}),
        ("data.sources[0].weight", {"data__sources": [{"path": "a", "weight": 0.0}]}),
        ("log.gradient_noise_scale", {"log__gradient_noise_scale": True, "batch__sequences_per_batch": 1}),
        ("log.gradient_noise_scale", {"log__gradient_noise_scale": True, "layout__tp": 2, "layout__cp": 2}),
        ("log.gradient_noise_scale", {"log__gradient_noise_scale": True, "layout__pp": 2}),
        ("log.sinks", {"log__sinks": ["wandb", "wandb"]}),
        ("cluster", {"cluster": "8xh1000"}),
        ("layout.dp", {"cluster": "4xh100", "layout__dp": 8}),
        ("layout.dp_shard", {"layout__dp": 8, "layout__zero_stage": 3, "layout__dp_shard": 3}),
        ("model.num_key_value_heads", {"model__num_key_value_heads": 3}),
        ("model.rope_theta", {"model__rope_theta": 0.0}),
        ("model.rope_scaling.beta_fast", {"model__preset": "llama-3.1-8b", "model__rope_scaling.beta_fast": 16.0}),
        ("model.rope_scaling.factor", {"model__preset": "llama-3.1-8b", "model__rope_scaling.factor": 0.5}),
    ],
)  # fmt: skip
def test_a_run_that_cannot_work_is_refused_by_key(key, given):
    found = problems(**given)
    assert list(found) == [key]
    assert found[key].where == "flag"
    assert found[key].remedy


@pytest.mark.parametrize("name", ["", ".hidden", "a b", "a/b", "x" * 65, "é", "a\n"])
def test_a_name_that_is_no_good_folder_is_refused(name):
    assert list(problems(name=name)) == ["name"]


def test_a_model_that_could_not_be_exported_at_the_end_is_refused_at_the_start_unless_export_is_off():
    assert "checkpoint.export = false" in problems(model__qk_norm=True)["model.qk_norm"].remedy
    assert resolve(None, TINY | {"model.qk_norm": True, "checkpoint.export": False}).run.model.qk_norm


def test_an_evaluation_without_a_corpus_names_the_folders_in_which_held_out_text_was_looked_for():
    found = problems(evaluation__every_steps=10, data__sources=["missing", "s3://bucket/web"])
    assert found["evaluation.every_steps"].rule.endswith("names no corpus, and there is no missing/validation")


@pytest.mark.catalogue(60)
def test_numbers_out_of_range_in_several_sections_are_all_told_at_once():
    found = problems(layout__dp=0, model__num_hidden_layers=10**30, steps=0, model__norm_eps="x")
    assert set(found) == {"layout.dp", "model.num_hidden_layers", "steps", "model.norm_eps"}


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ({"zero_stage": 3}, ["zero_stage"]),
        ({"layers_per_bucket": 2, "reduce_dtype": "bf16"}, ["layers_per_bucket", "reduce_dtype"]),
        ({"dp": 2, "zero_stage": 2, "dp_shard": 1}, ["zero_stage"]),
        ({"recompute": "full"}, []),
        ({"reduce_dtype": "fp32"}, []),
        ({"zero_stage": 3, "precision": "bf16"}, ["zero_stage"]),
        ({"layers_per_bucket": 2, "reduce_dtype": "bf16", "precision": "bf16"}, ["layers_per_bucket", "reduce_dtype"]),
        ({"reduce_dtype": "fp32", "precision": "bf16"}, []),  # gradients are summed in it all the same
        ({"dp": 2, "zero_stage": 3, "layers_per_bucket": 2, "reduce_dtype": "bf16"}, []),
    ],
)
def test_a_setting_without_effect_in_this_layout_is_noted_and_one_with_an_effect_is_not(layout, keys):
    run = resolve(None, TINY | {f"layout.{key}": value for key, value in layout.items()}).run
    notes = run_notes(run)
    assert [note.partition(" = ")[0] for note in notes] == [f"layout.{key}" for key in keys]
    assert all(note.endswith((" (layout.dp = 1).", " (layout.dp_shard = 1).")) for note in notes)


@pytest.mark.parametrize(
    "key, settings",
    [
        ("optimizer.min_learning_rate_ratio", {"optimizer.schedule": "constant", "optimizer.min_learning_rate_ratio": 0.5}),
        ("islands", {"islands.every_steps": 7}),
        ("islands", {"islands.outer.lr": 0.1}),
    ],
)
def test_a_setting_of_another_schedule_or_of_islands_that_a_run_has_not_is_noted(key, settings):
    (note,) = run_notes(resolve(None, TINY | settings).run)
    assert note.startswith(f"{key} has no effect: ")


def test_a_note_counts_replicas_and_not_processes():
    run = resolve(None, TINY | {"layout.tp": 2, "layout.pp": 2, "layout.zero_stage": 3}).run
    (note,) = run_notes(run)
    assert run.layout.world_size == 4 and "process" not in note
    assert note.startswith("layout.zero_stage = 3 has no effect: there is a single replica")


def test_every_kth_block_is_a_setting_of_its_own():
    run = resolve(None, TINY | {"layout.recompute": "every-k", "layout.recompute_every": 3}).run
    assert [layer for layer in range(7) if run.layout.is_fully_recomputed(layer)] == [0, 3, 6]


@pytest.mark.parametrize("more", [{"device": "cpu"}, {"compile": True}, {"layout.precision": "fp64"}])
def test_triton_kernels_are_refused_where_they_would_not_run(more) -> None:
    for form in ("triton", "liger"):
        with pytest.raises(SpecError, match=f'kernels .*: "{form}"'):
            resolve(None, TINY | {"kernels": form} | more)
    assert resolve(None, TINY | {"kernels": "triton"}).run.kernels == "triton"


@pytest.mark.catalogue(60)
@pytest.mark.parametrize(
    ("key", "given", "rule"),
    [
        ("steps", {"steps": 10**26}, "must be at most 9,007,199,254,740,992, is 100000000000000000000000000"),
        ("steps", {"steps": 2**53}, "all 9007199254740992 steps must come to at most 2^53 tokens, are 9220000T"),
        (
            "batch.sequences_per_batch",
            {"batch__sequences_per_batch": 4 * 10**21},
            "must be at most 9,007,199,254,740,992, is 4000000000000000000000",
        ),
        (
            "batch.sequences_per_batch",
            {"batch__sequences_per_batch": 4 * 10**7, "layout__dp": 4},
            "must be at most 65536 micro-batches on each rank, is 10000000 (40000000 sequences)",
        ),
        (
            "evaluation.sequences",
            {"evaluation__sequences": 10**9},
            "must be at most 65536 micro-batches on each rank, 65536 sequences, is 1000000000",
        ),
        ("collective_timeout_seconds", {"collective_timeout_seconds": 1e300}, "must be at most 2000000 seconds, is 1e+300"),
        ("faults.hang_seconds", {"faults__hang_seconds": 1e12}, "must be at most 2000000 seconds, is 1000000000000.0"),
        ("checkpoint.keep", {"checkpoint__keep": 10**30}, "must be at most 9,007,199,254,740,992, is 1" + "0" * 30),
    ],
)  # fmt: skip
def test_a_number_beyond_all_use_is_refused_with_its_bound(key, given, rule):
    assert problems(require_data=True, **given)[key].rule == rule


def test_a_job_larger_than_its_cluster_is_told_the_cluster_to_name():
    with pytest.raises(SpecError) as caught:
        resolve(None, {"model.preset": "llama-3-8b", "cluster": "8xa100-80", "layout.dp": 16, "batch.sequences_per_batch": 16})
    (remedy,) = [problem.remedy for problem in caught.value.problems]
    named = remedy.partition("--cluster ")[2].partition(",")[0]
    assert parse_cluster(named).num_accelerators == 16
    words = {"model.preset": "llama-3-8b", "cluster": named, "layout.dp": 16, "batch.sequences_per_batch": 16}
    assert resolve(None, words).run.layout.dp == 16


def test_a_budget_of_bytes_has_a_unit():
    words = {"model.preset": "llama-3-8b", "layout.recompute": "auto", "layout.recompute_budget": "20GiB"}
    assert resolve(None, words).run.layout.recompute_budget == 20 * 2**30
    with pytest.raises(SpecError, match=r"expected bytes, such as 20GiB, 16GB or 16000000000, found '20G'"):
        resolve(None, words | {"layout.recompute_budget": "20G"})


class Noted:
    """A value whose fields, and those of the dataclasses in it, are noted by key as they are read."""

    def __init__(self, value, path, read):
        self.__dict__.update(_value=value, _path=path, _read=read)

    def __getattr__(self, name):
        value, key = getattr(self._value, name), f"{self._path}.{name}".lstrip(".")
        if is_dataclass(value):
            return Noted(value, key, self._read)
        self._read.add(key)
        return value


PLAIN = Run(PRESETS["tiny-mixtral"], batch=Batch(128, 64))
JUDGED = [
    replace(run, layout=layout)
    for run in (
        PLAIN,
        replace(PLAIN, compile=True, device="cuda", log=Log(gradient_noise_scale=True), evaluation=Evaluation(5),
                islands=Islands(count=2)),
    )
    for layout in (
        Layout(), Layout(dp=2, zero_stage=3, ep=2), Layout(tp=2, cp=2, pp=2, schedule="interleaved", virtual_stages=2),
        Layout(tp=2, precision="fp8", recompute="selective", mlp_chunks=2, offload_optimizer=True, offload_activations=True,
               partition_checkpoints=True),
    )
]  # fmt: skip


@pytest.mark.parametrize("rule", [*RULES, *TRAINING_RULES, *LAYOUT_RULES], ids=lambda rule: rule.check.__name__)
def test_a_rule_names_every_key_that_it_reads_and_no_other_word(rule):
    """A rule is left out if a key that it reads could not be read: else a mistake is told a second time, of a value that nobody
    gave."""
    keys, read = {*leaves()}, set()
    of_layout = rule in LAYOUT_RULES
    for run in JUDGED:
        list(rule.check(Noted(run.layout, "layout", read) if of_layout else Noted(run, "", read)))
    assert all(any(f"{key}.".startswith(f"{name}.") for key in keys) for name in rule.reads)
    assert {key for key in read & keys if not any(f"{key}.".startswith(f"{name}.") for name in rule.reads)} == set()
