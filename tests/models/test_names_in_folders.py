"""Names inside a stranger's model folder are names of files in it, never paths to somebody else's."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from drawn import initial_value
from safetensors.torch import load_file

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.cli.main import main
from ultrascale.data.tokenizer import train_tokenizer
from ultrascale.description.architecture.weights import weights
from ultrascale.description.problems import SpecError
from ultrascale.models.files.convert import PICKLE_INDEX, convert
from ultrascale.models.files.huggingface import INDEX_FILE, export_folder, import_folder
from ultrascale.train.start.trained import open_trained

MODEL = PRESETS["tiny-llama"]
NAMES = ["../secret/{}", "./../secret/{}", "/{home}/secret/{}", "in/../../secret/{}", "in/{}", "..", ".", ""]
"""Each would be read, but for the last three, which are folders."""


@pytest.fixture
def home(tmp_path) -> Path:
    """A folder `secret` with weights, as safetensors and as a pickle, and beside it `model`, which has none of its own."""
    secret = export_folder({w.name: initial_value(w, 0) for w in weights(MODEL)}, MODEL, tmp_path / "secret")
    torch.save(load_file(secret / "model.safetensors"), secret / "pytorch_model.bin")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((secret / "config.json").read_bytes())
    copytree(secret, tmp_path / "model" / "in")
    return tmp_path


def put_index(home: Path, index: str, file: str, name: str) -> Path:
    """An index in `model` of which one shard is `name`, the rest a file there."""
    named = name.format(file, home=str(home).strip("/"))
    (home / "model" / index).write_text(json.dumps({"weight_map": {weight.name: named for weight in weights(MODEL)}}))
    return home / "model"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("read", [import_folder, open_trained])
def test_an_index_of_safetensors_names_no_file_elsewhere(home, name, read):
    with pytest.raises(SpecError, match="names what is no file beside it"):
        read(put_index(home, INDEX_FILE, "model.safetensors", name))


@pytest.mark.parametrize("name", NAMES)
def test_an_index_of_pickles_names_no_file_elsewhere(home, name):
    with pytest.raises(SpecError, match="names what is no file beside it"):
        convert(put_index(home, PICKLE_INDEX, "pytorch_model.bin", name), home / "out")
    assert not (home / "out").exists()


def test_import_and_export_refuse_such_an_index_too_and_take_it_when_the_file_is_there(home, capsys):
    (home / "run.toml").write_text(f'name = "r"\nfolder = "{home}/out"\n[model]\npath = "{home}/model"\n'
                                   f'[data]\nsources = ["{home}/none"]\n')  # fmt: skip
    put_index(home, INDEX_FILE, "model.safetensors", NAMES[0])
    assert main(["import", str(home / "model"), str(home / "run.toml")]) == 2
    assert main(["export", str(home / "model"), str(home / "again")]) == 2
    assert capsys.readouterr().err.count("names what is no file beside it") == 2
    (home / "model" / "model.safetensors").write_bytes((home / "secret" / "model.safetensors").read_bytes())
    put_index(home, INDEX_FILE, "model.safetensors", "{}")
    assert main(["export", str(home / "model"), str(home / "again")]) == 0


def test_files_that_a_tokenizers_configuration_names_are_not_followed(home):
    """transformers' `tokenizer_file` and friends are passed on as they are; what is copied and read lies in the folder."""
    train_tokenizer(["the model says"], 280).save(str(home / "model" / "tokenizer.json"))
    train_tokenizer(["SECRET words"], 290).save(str(home / "secret" / "tokenizer.json"))
    for name in ("vocab.json", "merges.txt", "chat_template.jinja", "special_tokens_map.json"):
        (home / "secret" / name).write_text('{"SECRET": 1}')
    elsewhere = {
        f"{kind}_file": f"../secret/{file}"
        for kind, file in (("tokenizer", "tokenizer.json"), ("vocab", "vocab.json"), ("merges", "merges.txt"))
    }
    (home / "model" / "tokenizer_config.json").write_text(json.dumps(elsewhere | {"chat_template": "../secret/vocab.json"}))
    (home / "model" / "model.safetensors").write_bytes((home / "secret" / "model.safetensors").read_bytes())
    trained = open_trained(home / "model")
    assert trained.tokenizer == home / "model" / "tokenizer.json"
    out = export_folder(trained.weights, trained.model, home / "out", tokenizer=trained.tokenizer)
    written = {file.name: file.read_bytes() for file in out.iterdir()}
    assert written["tokenizer.json"] == (home / "model" / "tokenizer.json").read_bytes()
    assert not any(b"SECRET" in content for content in written.values())
