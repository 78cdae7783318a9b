import json

import pytest

from ultrascale.catalogue.machines import ACCELERATORS, NODES
from ultrascale.catalogue.models.model_presets import ALIASES, PRESETS
from ultrascale.cli.show.show_command import command
from ultrascale.description.problems import SpecError
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv

RUN = 'name = "demo"\n[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\n'


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "run.toml").write_text(RUN)
    return str(tmp_path / "run.toml")


def test_values_that_are_not_defaults_are_shown_with_their_origins(path, capsys):
    assert command([path, "--layout.dp", "2"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["name"] == ["demo", f"{path}:1"]
    assert rows["layout.dp"] == ["2", "flag"]
    assert rows["model"] == ["tiny-llama,", "656k", "parameters", "preset", "tiny-llama"]
    assert "seed" not in rows


def test_resolved_shows_every_value(path, capsys):
    command([path, "--resolved"])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert (rows["seed"], rows["optimizer.schedule"]) == (["0", "default"], ["cosine", "default"])
    assert rows["model.hidden_size"] == ["128", "preset", "tiny-llama"]


def test_json_holds_the_run_and_its_origins(path, capsys):
    command([path, "--json", "--steps=9"])
    got = json.loads(capsys.readouterr().out)
    assert (got["run"]["steps"], got["provenance"]["steps"]) == (9, "flag")


def test_catalogues_list_everything(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command(["models"])
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows.keys() >= set(PRESETS)
    assert rows["deepseek-v3"][1:4] == ["671B", "37.6B", "61"]
    assert rows["llama-3-8b"][1:3] == ["8.03B", "32"]
    assert all(len(" ".join(row)) <= 80 and "…" not in "".join(row) for row in rows.values())
    command(["clusters", "--resolved"])
    out = capsys.readouterr().out
    assert all(name in out for name in [*ACCELERATORS, *NODES, "datasheet"])
    command(["clusters", "--json"])
    assert json.loads(capsys.readouterr().out)["accelerators"]["h200"]["peak_flops"]["bf16"]["value"] == 989.4e12
    command(["models", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["mixtral-8x7b"]["num_active_parameters"], found["mixtral-8x7b"]["trainable"]) == (12_879_925_248, True)


@pytest.mark.parametrize(("width", "title"), [("80", ""), ("120", "NVIDIA V100 SXM 16 GB")])
def test_an_accelerator_is_one_line_at_any_width(capsys, monkeypatch, width: str, title: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    command(["clusters"])
    head, first, second = capsys.readouterr().out.splitlines()[:3]
    assert head.startswith("accelerator") and first.startswith("v100-16") and second.startswith("v100-32")
    assert title in first and "125 TFLOP/s" in first


def test_a_catalogue_is_filtered_by_a_word(capsys):
    command(["models", "Mixtral", "--json"])
    assert json.loads(capsys.readouterr().out).keys() == {name for name in PRESETS if "mixtral" in name}
    alias, name = next(iter(ALIASES.items()))
    command(["models", alias, "--json"])
    assert name in json.loads(capsys.readouterr().out)
    command(["clusters", "aws-p5", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "aws-p5" in found["nodes"] and "h100-sxm" in found["accelerators"] and "a100-80" not in found["accelerators"]
    command(["clusters", "cpu"])
    assert "h100" not in capsys.readouterr().out.partition("Peaks are dense")[0]
    for what, word, meant in (("models", "mixtrall-8x7b", "mixtral-8x7b"), ("clusters", "aws-p55", "aws-p5")):
        with pytest.raises(SpecError, match=f"no name contains '{word}'(.|\n)*{meant}"):
            command([what, word])


def test_a_catalogue_takes_no_settings():
    with pytest.raises(SpecError, match="takes no settings"):
        command(["models", "--steps", "3"])


def test_a_wrong_description_raises_all_its_mistakes(path):
    with pytest.raises(SpecError, match=r"layout\.dpp(.|\n)*stepz"):
        command([path, "--layout.dpp", "2", "--stepz", "3"])


def test_settings_without_effect_are_noted(path, capsys):
    assert command([str(path), "--layout.dp", "1", "--layout.zero-stage", "3"]) == 0
    assert "note: layout.zero_stage = 3 has no effect" in " ".join(capsys.readouterr().out.split())


def test_a_schedule_from_a_file_must_be_there_and_suit_the_run(path, tmp_path, capsys):
    file, words = tmp_path / "mine.csv", [path, "--layout.pp", "2", "--batch.sequences-per-batch", "4", "--layout.schedule"]
    with pytest.raises(SpecError, match="there is no such file"):
        command([*words, str(file)])
    file.write_text(to_csv(build_schedule("1f1b", 2, 3)))
    with pytest.raises(SpecError, match="has 3 micro-batches, not 4"):
        command([*words, str(file)])
    file.write_text(to_csv(build_schedule("1f1b", 2, 4)))
    assert command([*words, str(file)]) == 0
    assert "layout.schedule" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("zigzag", "layout.cp_method"), ("ring attention", "layout.cp_method"), ("ulysses", "layout.cp_method"),
        ("fsdp", "layout.zero_stage"), ("gradient accumulation", "layout.micro_batch_size"), ("bubble", "layout.schedule"),
        ("mixed", "layout.precision"), ("gqa", "model.num_key_value_heads"), ("hsdp", "layout.dp_shard"),
        ("bucket", "layout.layers_per_bucket"), ("checkpointing", "layout.recompute"), ("flash", "layout.attention"),
    ],
)  # fmt: skip
def test_the_playbook_s_words_find_their_key(word, key, capsys):
    assert command(["keys", word]) == 0
    assert any(line.startswith(f"{key}  ") for line in capsys.readouterr().out.splitlines())
