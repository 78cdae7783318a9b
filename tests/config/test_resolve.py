import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.resolve import resolve, run_from_toml, sequences_for_tokens, to_toml
from ultrascale.config.schema import leaves
from ultrascale.description.problems import SpecError
from ultrascale.description.run import RampStage, Source
from ultrascale.description.units import UnitError

TINY = {"model.preset": "tiny-llama", "batch.sequence_length": 128}


def write(folder, name, text):
    path = folder / name
    path.write_text(dedent(text))
    return path


def problems(path=None, overrides=(), **options):
    """The problems of a description, by key."""
    with pytest.raises(SpecError) as caught:
        resolve(path, overrides, **options)
    return {problem.key: problem for problem in caught.value.problems}


def test_a_file_over_its_base_under_flags_each_with_its_origin(tmp_path):
    base = write(tmp_path, "base.toml", """
        steps = 50
        seed = 3
        [model]
        preset = "tiny-llama"
        [layout]
        dp = 2
        [batch]
        sequence_length = 128
    """)  # fmt: skip
    path = write(tmp_path, "run.toml", """
        extends = "base.toml"
        seed = 4
        [layout]
        micro_batch_size = 4
    """)  # fmt: skip
    got = resolve(path, ["--layout.dp", "1", "--model.rope-theta=5e5"])
    run, origin = got.run, got.provenance
    assert (run.steps, run.seed, run.layout.dp, run.layout.micro_batch_size, run.model.rope_theta) == (50, 4, 1, 4, 5e5)
    assert origin["steps"] == f"{base}:2"
    assert origin["seed"] == f"{path}:3"
    assert (origin["layout.dp"], origin["layout.zero_stage"], origin["model.rope_theta"]) == ("flag", "default", "flag")
    assert origin["model.hidden_size"] == "preset tiny-llama"
    assert list(origin) == list(leaves())


def test_the_default_sequence_length_fits_the_model_and_a_given_one_must():
    found = resolve(None, {"model.preset": "tiny-gpt2"})
    assert found.run.batch.sequence_length == 512
    assert found.provenance["batch.sequence_length"] == "derived from model.max_position_embeddings"
    assert resolve(None, {"model.preset": "llama-3-8b"}).run.batch.sequence_length == 1024
    assert list(problems(None, {"model.preset": "tiny-gpt2", "batch.sequence_length": 1024})) == ["batch.sequence_length"]


def test_defaults_of_a_caller_stand_below_file_and_flags(tmp_path):
    path = write(tmp_path, "run.toml", 'steps = 7\n[model]\npreset = "tiny-llama"\n')
    got = resolve(path, ["--layout.dp", "4"], defaults={"steps": 9, "layout.dp": 2, "batch.sequences_per_batch": 8})
    assert (got.run.steps, got.run.layout.dp, got.run.batch.sequences_per_batch) == (7, 4, 8)
    assert got.provenance["batch.sequences_per_batch"] == "default"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[batch]\ntokens_per_batch = 1{'0' * 400}", "batch.tokens_per_batch must be a number of at most 40 digits"),
        (f"steps = 0x{'f' * 5000}", "steps must be a number of at most 40 digits"),
        (f"[batch]\ntokens_per_batch = 1{'0' * 30}", "must be at most 2^53 tokens"),
        ('[batch]\ntokens_per_batch = "1e300"', "must be at most 2^53 tokens"),
        ('extends = "\\u0000"', "must be text without NUL"),
        ('folder = "a\\u0000b"', "must be text without NUL"),
        ('[data]\nsources = ["a\\u0000b"]', "must be text without NUL"),
        ("steps = " + "[" + "7, " * 100_000 + "]", "must be a whole number, is the list [7, 7,"),
    ],
)  # fmt: skip
def test_what_no_float_no_path_and_no_terminal_holds_is_refused_in_a_sentence(tmp_path, text, said):
    with pytest.raises(SpecError) as caught:
        resolve(write(tmp_path, "run.toml", text))
    assert said in str(caught.value) and len(str(caught.value)) < 3000


def test_a_run_folder_stands_for_its_run_toml(tmp_path):
    write(tmp_path, "run.toml", 'steps = 7\n[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 8\n')
    assert resolve(tmp_path).run.steps == 7


def test_a_later_preset_replaces_the_model_below_it_and_keeps_the_fields_beside_it(tmp_path):
    path = write(tmp_path, "run.toml", '[model]\npreset = "llama-3-8b"\nnum_hidden_layers = 3\n')
    assert resolve(path).run.model.num_hidden_layers == 3
    got = resolve(path, ["--model.preset", "tiny-llama", "--model.hidden_size", "64"]).run.model
    assert (got.num_hidden_layers, got.hidden_size, got.vocab_size) == (2, 64, PRESETS["tiny-llama"].vocab_size)


def test_a_model_can_be_a_folder(tmp_path):
    import json

    from ultrascale.description.architecture.huggingface import to_hf

    (tmp_path / "config.json").write_text(json.dumps(to_hf(PRESETS["tiny-qwen3"])))
    got = resolve(None, {"model.path": str(tmp_path), "batch.sequence_length": 64})
    assert got.run.model.qk_norm
    assert got.provenance["model.qk_norm"] == f"config.json of {tmp_path}"


def test_a_model_written_field_by_field_takes_the_rest_from_its_family():
    fields = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = {f"model.{name}": value for name, value in fields.items()} | {"model.max_position_embeddings": 64}
    got = resolve(None, given | {"model.model_type": "gpt2", "batch.sequence_length": 64})
    model = got.run.model
    assert (model.norm, model.qkv_bias, model.num_key_value_heads, model.head_dim) == ("layernorm", True, 4, 16)
    assert got.provenance["model.norm"] == "derived from model_type gpt2"
    assert got.provenance["model.head_dim"] == "derived from hidden_size / num_attention_heads"


def test_none_is_also_written_as_the_descriptions_write_it():
    words = ["--model.preset", "tiny-llama-4m", "--optimizer.clip_grad_norm", "None", "--checkpoint.every-steps", "None"]
    run = resolve(None, words).run
    assert run.optimizer.clip_grad_norm is None and run.checkpoint.every_steps is None


def test_rope_scaling_can_be_changed_in_part_and_switched_off():
    some = resolve(None, {"model.preset": "llama-3.1-8b", "model.rope_scaling.factor": 16.0}).run.model.rope_scaling
    assert some is not None
    assert (some.factor, some.original_max_position_embeddings) == (16.0, 8192)
    assert resolve(None, ["--model.preset", "llama-3.1-8b", "--model.rope_scaling", "none"]).run.model.rope_scaling is None


def test_flags_are_read_as_their_fields_types():
    words = ["--model.preset=tiny-llama", "--batch.sequence_length", "64", "--compile", "--checkpoint.export", "false"]
    words += ["--layout.zero-stage", "2", "--optimizer.clip_grad_norm", "none", "--data.sources", "a, b", "--log.sinks=wandb"]
    run = resolve(None, words).run
    assert (run.compile, run.checkpoint.export, run.layout.zero_stage) == (True, False, 2)
    assert (run.optimizer.clip_grad_norm, run.log.sinks) == (None, ("wandb",))
    assert run.data.sources == (Source("a"), Source("b"))
    weighted = resolve(None, [*words[:3], "--data.sources", '[{path = "x", weight = 2}, "y"]']).run.data.sources
    assert weighted == (Source("x", 2.0), Source("y"))


def test_tokens_of_a_batch_become_sequences_that_divide_among_ranks():
    got = resolve(
        None, {"model.preset": "llama-3-8b", "batch.sequence_length": 8192, "batch.tokens_per_batch": "4M", "layout.dp": 64}
    )
    assert got.run.batch.sequences_per_batch == 512
    assert got.provenance["batch.sequences_per_batch"] == "derived from tokens_per_batch 4M (flag): 4,194,304 tokens"


def test_counts_and_times_take_units_in_a_file_as_on_the_command_line(tmp_path):
    text = """
    steps = "10k"
    model = {preset = "tiny-llama"}
    batch = {sequence_length = "1k", sequences_per_batch = "4Ki"}
    checkpoint = {every_steps = "1.5k"}
    faults = {hang_seconds = "1m30s"}
    """
    file = tmp_path / "run.toml"
    file.write_text(text)
    run = resolve(file, []).run
    assert (run.steps, run.batch.sequence_length, run.batch.sequences_per_batch) == (10_000, 1024, 4096)
    assert (run.checkpoint.every_steps, run.faults.hang_seconds) == (1500, 90.0)
    file.write_text(text.replace('"1.5k"', '"1.5x"').replace('"1m30s"', '"soon"').replace('"10k"', '"10"'))
    with pytest.raises(SpecError) as error:
        resolve(file, [])
    told = {problem.key: problem.remedy for problem in error.value.problems}
    assert told == {
        "steps": "Write 10.",
        "checkpoint.every_steps": 'Write digits, such as 8 or "10k".', "faults.hang_seconds": 'Write it as 90, or as "30m".',
    }  # fmt: skip


@pytest.mark.parametrize("written, remedy", [
    ('"1e3"', "Write 1000."), ("1e3", "Write 1000."), ("8.0", "Write 8."), ("8.5", "Write it without a decimal point."),
    ('"8.5"', "Write it without quotes and without a decimal point."), ('"1.2.3"', "Write digits"),
])  # fmt: skip
@pytest.mark.parametrize("key, text", [("steps", "steps = {}"), ("islands.dp[0]", "islands.dp = [{}]")])
def test_what_a_whole_number_is_written_as_instead_is_read(tmp_path, key, text, written, remedy):
    file = write(tmp_path, "run.toml", text.format(written))
    told = problems(file)[key].remedy
    assert told.startswith(remedy)
    if (number := told.removeprefix("Write ").rstrip(".")).isdigit():
        file.write_text(text.format(number))
        assert key not in problems(file)


def test_a_ramp_is_given_in_tokens():
    ramp = '[{until_tokens = "1B", tokens_per_batch = "1Mi"}, {until_tokens = "69B", sequences_per_batch = 256}]'
    batch = ["--batch.sequence_length", "8192", "--batch.ramp", ramp, "--batch.sequences_per_batch", "512"]
    run = resolve(None, ["--model.preset", "llama-3-8b", "--layout.dp", "64", *batch]).run
    assert run.batch.ramp == (RampStage(10**9, 128), RampStage(69 * 10**9, 256))


def test_exact_tokens_must_fit_and_the_nearest_that_do_are_named():
    assert sequences_for_tokens(4_194_304, 8192, multiple=64) == 512
    with pytest.raises(UnitError, match="nearest: 3670016 or 4194304 tokens"):
        sequences_for_tokens(4_000_000, 8192, multiple=64)
    with pytest.raises(UnitError, match="nearest: 8192 tokens"):
        sequences_for_tokens("1k", 8192)


def test_of_two_ways_to_give_the_batch_the_later_layer_counts_and_one_layer_may_not_use_both(tmp_path):
    path = write(
        tmp_path, "run.toml", '[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\ntokens_per_batch = 640\n'
    )
    assert resolve(path).run.batch.sequences_per_batch == 10
    assert resolve(path, ["--batch.sequences_per_batch", "3"]).run.batch.sequences_per_batch == 3
    found = problems(path, ["--batch.tokens_per_batch", "nan"])["batch.tokens_per_batch"]
    assert found.remedy == "Write 4M, 4Mi or 4194304."  # and not one of the nearest sizes: there are none
    both = ["--batch.sequences_per_batch", "3", "--batch.tokens_per_batch", "640"]
    assert "say the same thing twice" in problems(path, both)["batch.tokens_per_batch"].rule


@pytest.mark.catalogue(60)
def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path):
    path = write(tmp_path, "run.toml", """\
        stpes = 5
        seed = true
        [model]
        preset = "tiny-lama"
        [layout]
        tpp = 4
        zero_stage = "3"
        [optimizer]
        warmup_steps = "10"
        learning_rate = nan
        schedule = "cosin"
        [data]
        sources = [{path = "x", wieght = 2.0}, {weight = 1.0}]
        [loging]
        every_steps = 3
    """)  # fmt: skip
    found = problems(path, ["--dp", "4", "extra", "--steps"])
    lines = {
        "stpes": 1, "seed": 2, "model.preset": 4, "layout.tpp": 6, "layout.zero_stage": 7, "optimizer.warmup_steps": 9,
        "optimizer.learning_rate": 10, "optimizer.schedule": 11, "data.sources[0].wieght": 13, "data.sources[1].path": 13,
        "loging": 14,
    }  # fmt: skip
    assert {k: p.where for k, p in found.items()} == {k: f"{path}:{n}" for k, n in lines.items()} | {
        "dp": "flag", "extra": "flag", "steps": "flag"
    }  # fmt: skip
    assert all(problem.rule and problem.remedy for problem in found.values())


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("stepz", "steps"), ("layout.zero_stag", "layout.zero_stage"), ("dp", "layout.dp"),
        ("learning_rate", "optimizer.learning_rate"), ("optimizer.lr", "optimizer.learning_rate"),
        ("islands.lr", "islands.outer.lr"),
        ("layout.learning_rate", "optimizer.learning_rate"), ("optimiser.beta1", "optimizer.beta1"),
        ("tp", "layout.tp"), ("layout.tensor_parallel", "layout.tp"), ("layout.sp", "layout.sequence_parallel"),
        ("model.n_routed_experts", "model.num_experts"),
        ("model.rope_scaling.facto", "model.rope_scaling.factor"),
        ("layout.xyz", "Keys of [layout] are dp, zero_stage"), ("lyout", "layout"), ("loging", "log"),
        ("batch.sequences", "Did you mean batch.sequences_per_batch?"), ("batch.size", "Keys of [batch] are"),
        ("model.layers", "model.num_hidden_layers"), ("optimizer.type", "Keys of [optimizer] are name"),
        ("data.path", "Did you mean model.path?"),
        ("checkpoint.every", "Did you mean checkpoint.every_steps or checkpoint.keep_every_steps?"),
        ("launch.slurm.size", "launch.kubernetes.size"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered_with_the_nearest_thing_that_works(key, answer):
    assert answer in problems(None, TINY | {key: 1})[key].remedy


@pytest.mark.catalogue(60)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 2.0), ("steps", True), ("steps", "ten"), ("steps", []), ("optimizer.learning_rate", float("inf")),
        ("optimizer.learning_rate", False), ("optimizer.learning_rate", 10**400), ("compile", 1), ("name", 3),
        ("layout.zero_stage", 4),
        ("layout.zero_stage", True), ("layout.precision", "fp4"), ("layout.layers_per_stage", ["x"]),
        ("data.sources", 3), ("log.sinks", ["neptune"]),
        ("model.norm", None),
        ("batch.ramp", [{"until_tokens": "soon", "sequences_per_batch": 1}]), ("layout", 3), ("batch.tokens_per_batch", -4),
        ("batch.tokens_per_batch", "many"), ("model.rope_scaling.factor", "x"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(key, value):
    assert any(found.startswith(key) for found in problems(None, TINY | {key: value}))


@pytest.mark.catalogue(60)
def test_flags_given_twice_or_without_a_value_are_refused():
    found = problems(
        None, ["--model.preset", "tiny-llama", "--seed", "1", "--seed=2", "--steps", "--batch.sequence_length", "64"]
    )
    assert {key: problem.rule for key, problem in found.items()} == {"seed": "is given twice", "steps": "has no value"}


def test_one_wrong_value_does_not_make_others_look_wrong():
    assert set(problems(None, TINY | {"batch.sequences_per_batch": "x", "layout.dp": 3, "steps": 0})) == {
        "batch.sequences_per_batch", "steps"
    }  # fmt: skip


def test_a_missing_model_is_one_problem_and_a_partial_one_names_every_missing_field():
    assert list(problems(None, ["--steps", "3"])) == ["model"]
    assert len(problems(None, {"model.hidden_size": 64})) == 5


def test_files_that_extend_in_a_circle_or_are_missing_are_named(tmp_path):
    a = write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    write(tmp_path, "b.toml", 'extends = "a.toml"\n')
    assert "a.toml -> " in problems(a)["extends"].rule
    c = write(tmp_path, "c.toml", 'extends = "d.toml"\n[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\n')
    assert problems(c)[str(tmp_path / "d.toml")].where == f"{c}, extends"
    assert "there is no such file" in problems(tmp_path / "no.toml")[str(tmp_path / "no.toml")].rule
    assert "ultrascale plan --model llama-3-8b" in problems(Path("llama-3-8b"))["llama-3-8b"].remedy


@pytest.mark.catalogue(60)
def test_broken_toml_is_named_with_its_line(tmp_path):
    path = write(tmp_path, "run.toml", "steps = 3\nsteps = 4\n")
    assert "is not TOML" in problems(path)[f"{path}:2"].rule


def test_a_text_is_read_like_a_file_and_points_at_its_lines():
    assert run_from_toml('[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\n').model == PRESETS["tiny-llama"]
    with pytest.raises(SpecError, match=r"checkpoint:1\): must be a whole number"):
        run_from_toml('steps = "x"\n[model]\npreset = "tiny-llama"\n', where="checkpoint")


def test_a_corpus_is_asked_for_only_where_training_needs_it():
    assert resolve(None, TINY).run.data.sources == ()
    assert "data.sources" in problems(None, TINY, require_data=True)


def test_resolving_imports_neither_torch_nor_numpy():
    heavy = "torch", "numpy", "transformers", "rich", "tyro"
    code = f"import sys, ultrascale.config.resolve; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("words", [["--layout.layers-per-stage", "1,1"], ["--layout.layers_per_stage=[1, 1]"]])
def test_layers_of_stages_are_given_as_a_list_and_written_back(words):
    run = resolve(None, ["--model.preset", "tiny-llama", "--batch.sequence_length", "64", "--layout.pp", "2", *words]).run
    assert run.layout.layers_per_stage == (1, 1)
    assert run_from_toml(to_toml(run)) == run


@pytest.mark.parametrize("words, dp", [([], 8), (["--layout.tp", "2"], 4), (["--layout.pp=2", "--layout.cp", "2"], 2)])
def test_processes_that_other_axes_leave_are_data_parallel(words, dp):
    resolved = resolve(None, ["--batch.sequences_per_batch", "64", "--model.preset", "tiny-llama", *words], processes=8)
    assert resolved.run.layout.dp == dp and resolved.run.layout.world_size == 8
    assert resolved.provenance["layout.dp"] == "--processes 8"


@pytest.mark.parametrize("asked, nearest", [("fp4", "fp8"), ("fp128", "fp64"), ("bf8", "bf16"), ("pf16", "fp16")])
def test_of_precisions_the_one_of_the_nearest_size_is_suggested(asked: str, nearest: str) -> None:
    with pytest.raises(SpecError, match=f"Did you mean '{nearest}'"):
        resolve(None, ["--model.preset", "tiny-llama", "--layout.precision", asked])
