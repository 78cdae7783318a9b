"""Foreign pickles become safetensors in a confined process, or are refused; nothing that they say is done."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from api.validator import wrong
from drawn import initial_value

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.cli.main import main
from ultrascale.description.architecture.huggingface import from_hf
from ultrascale.description.architecture.weights import weights
from ultrascale.description.problems import SpecError
from ultrascale.models.files import unpickle
from ultrascale.models.files.convert import convert
from ultrascale.models.files.huggingface import export_folder, import_folder

MODEL = PRESETS["tiny-llama"]


@pytest.fixture
def state():
    return {weight.name: initial_value(weight, 0) for weight in weights(MODEL)}


@pytest.fixture
def exported(tmp_path, state) -> Path:
    return export_folder(state, MODEL, tmp_path / "export")


@pytest.fixture
def pickled(tmp_path, exported) -> Path:
    """The exported folder as it was years ago: two .bin shards and an index."""
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    folder.mkdir()
    tensors = load_file(exported / "model.safetensors")
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, held in shards.items():
        torch.save({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_bytes((exported / "config.json").read_bytes())
    return folder


def test_a_folder_of_pickles_becomes_one_that_is_imported_to_the_same_bits(pickled, state, tmp_path, capsys):
    assert main(["convert", str(pickled), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert f"{len(state)} tensors of 2 pickles" in told and "confined by: " in told
    _, found = import_folder(tmp_path / "out")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_one_file_with_weights_behind_a_key_is_taken_and_the_rest_is_named(tmp_path, capsys):
    shared = torch.arange(6.0)
    torch.save({"epoch": 3, "state_dict": {"a": shared, "b": shared.view(2, 3).t(), "note": "x"}}, tmp_path / "old.ckpt")
    assert main(["convert", str(tmp_path / "old.ckpt"), str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tensors"], told["left_out"], told["has_config"]) == (2, ["note"], False) and wrong(told) == []
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["b"], shared.view(2, 3).t())


class Payload:
    """What a hostile pickle does when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.mark.parametrize("form", ["plain pickle", "torch", "inside a tensor's place"])
def test_a_program_in_a_pickle_does_not_run_and_is_refused(tmp_path, form):
    mark, file = tmp_path / "ran", tmp_path / "bad.bin"
    content = {"w": torch.zeros(2), "x": Payload(mark)} if form != "inside a tensor's place" else {"w": Payload(mark)}
    if form == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file)
    with pytest.raises(SpecError, match=r"bad\.bin.*is refused: UnpicklingError") as caught:
        convert(file, tmp_path / "out")
    assert "weights_only" not in str(caught.value), "torch's advice to read it without care is not passed on"
    assert not mark.exists() and not (tmp_path / "out").exists()
    if form == "plain pickle":
        pickle.loads(file.read_bytes())
    else:
        torch.load(file, weights_only=False)
    assert mark.exists(), "control: read without care, it runs"


@pytest.mark.parametrize("name", ["empty.bin", "noise.pt", "list.pth", "cut.bin", "text.bin"])
def test_what_holds_no_tensors_is_refused_in_a_sentence(tmp_path, name):
    file = tmp_path / name
    torch.save([1, 2], file)
    whole = {"empty.bin": b"", "noise.pt": os.urandom(500), "cut.bin": file.read_bytes()[:-40], "text.bin": b"hello\x1b[2J\n"}
    file.write_bytes(whole.get(name, file.read_bytes()))
    told = "is refused: it is no pickle, or a damaged one" if name in ("empty.bin", "text.bin") else "is refused"
    with pytest.raises(SpecError, match=told) as caught:
        convert(file, tmp_path / "out")
    assert "\x1b" not in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.nightly
def test_a_file_that_unpacks_to_far_more_than_itself_is_refused_without_taking_the_memory(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "small.bin")
    packed = zipfile.ZipFile(tmp_path / "bomb.bin", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with zipfile.ZipFile(tmp_path / "small.bin") as small, packed as bomb:
        for name in small.namelist():
            with bomb.open(name, "w", force_zip64=True) as entry:
                if "/data/" not in name:
                    entry.write(small.read(name))
                    continue
                for _ in range(24):
                    entry.write(bytes(64 << 20))
    assert (tmp_path / "bomb.bin").stat().st_size < 16 << 20
    with pytest.raises(SpecError, match="is refused"):
        convert(tmp_path / "bomb.bin", tmp_path / "out")


def test_a_sparse_tensor_is_refused_by_name(tmp_path):
    torch.save({"w": torch.ones(3), "q": torch.ones(2).to_sparse()}, tmp_path / "odd.pt")
    with pytest.raises(SpecError, match="q: sparse or quantized"):
        convert(tmp_path / "odd.pt", tmp_path / "out")


def test_an_index_that_points_elsewhere_is_refused(pickled, tmp_path):
    for name in ("../export/model.bin", "/etc/passwd", "a\0b", 7, ""):
        (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(SpecError, match="is no index of shards"):
            convert(pickled, tmp_path / "out")


def test_pickles_are_refused_elsewhere_with_the_command_named(pickled, tmp_path):
    for read in (import_folder, from_hf):
        with pytest.raises(SpecError, match="ultrascale convert"):
            read(pickled / "pytorch_model-1.bin")
    (pickled / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(SpecError, match="ultrascale convert"):
        import_folder(pickled)


CONFINED = """
import json, os, sys
sys.path.append(FOLDER)
import unpickle

def tries(work):
    try:
        work()
        return True
    except (OSError, MemoryError):
        return False

unpickle.isolate_network()
unpickle.drop_privileges(1000)
print(json.dumps({
    "uid": os.getuid(), "takes 4 GiB": tries(lambda: bytearray(4 << 30)), "forks": tries(lambda: os.fork() or os._exit(0)),
    "reads /etc/shadow": tries(lambda: open("/etc/shadow").close()), "is root again": tries(lambda: os.setuid(0)),
}))
"""


def test_limits_and_a_change_of_user_hold_without_any_filter():
    script = CONFINED.replace("FOLDER", repr(str(Path(unpickle.__file__).parent)))
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["takes 4 GiB"] is False
    if os.getuid() == 0:
        assert told["uid"] == 65534 and not (told["is root again"] or told["reads /etc/shadow"] or told["forks"])
