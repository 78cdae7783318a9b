"""What goes in comes out, bit for bit, and what does not fit is refused by name."""

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError, saving
from ultrascale.checkpoint.disk.dtypes import DTYPES

METADATA = {"step": 3, "loss": 2.5, "words": ["a", None, True], "rng": {"cpu": "00ff"}}


def one_of_each_dtype() -> dict[str, torch.Tensor]:
    """Random bytes in every dtype on disk, so NaNs and denormals too; and tensors of odd shapes and strides."""
    found = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (5, 8 * dtype.itemsize), dtype=torch.uint8)
        found[f"weights.{name}"] = data.view(dtype)
    strided = torch.arange(12.0).reshape(3, 4).t()
    return found | {"scalar": torch.tensor(7), "empty": torch.empty(0, 3), "transposed": strided, "row": strided[1]}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def test_every_dtype_and_shape_comes_back_bitwise(tmp_path):
    tensors = one_of_each_dtype()
    folder = checkpoint.save(tmp_path, 3, tensors, METADATA)
    assert folder == tmp_path / "step-00000003"
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert checkpoint.load(folder, targets) == METADATA
    full, metadata = checkpoint.load_full(folder)
    assert metadata == METADATA == checkpoint.read_metadata(folder)
    assert full.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(targets[name], tensor), name
        assert same_bits(full[name], tensor), name


def test_loading_into_strided_views_leaves_the_rest_alone(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.arange(6.0).reshape(2, 3)}, {})
    canvas = torch.full((4, 6), -1.0)
    checkpoint.load(folder, {"w": canvas[1:3, ::2]})
    assert torch.equal(canvas[1:3, ::2], torch.arange(6.0).reshape(2, 3))
    assert (canvas == -1).sum() == 18


def test_parameters_that_require_gradients_are_loaded_in_place(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.nn.Parameter(torch.ones(3))}, {})
    parameter = torch.nn.Parameter(torch.zeros(3))
    checkpoint.load(folder, {"w": parameter})
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.is_leaf


def test_a_shard_is_a_safetensors_file_that_others_read(tmp_path):
    tensors = one_of_each_dtype()
    folder = checkpoint.save(tmp_path, 3, tensors, {})
    theirs = load_file(folder / "rank-00000.safetensors")
    assert all(same_bits(theirs[name], tensor) for name, tensor in tensors.items())
    assert json.loads((folder / "manifest.json").read_text())["step"] == 3


@pytest.mark.catalogue(48)
def test_names_shapes_and_dtypes_that_do_not_match_are_all_listed_and_nothing_changes(tmp_path):
    saved = {"kept": torch.ones(2), "gone": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(2)}
    folder = checkpoint.save(tmp_path, 1, saved, {})
    targets = {"kept": torch.zeros(2), "new": torch.zeros(2), "shape": torch.zeros(3, 2), "dtype": torch.zeros(2).double()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder, targets)
    for line in (
        "4 tensors do not match",
        "gone: only in the checkpoint",
        "new: not in the checkpoint",
        "shape: shape [2, 3] in the checkpoint, [3, 2] here",
        "dtype: dtype F32 in the checkpoint, F64 here",
        "layout.precision",
    ):
        assert line in str(caught.value)
    assert targets["kept"].tolist() == [0, 0]


def test_strict_false_loads_what_both_have(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"kept": torch.ones(2), "gone": torch.ones(2)}, {})
    targets = {"kept": torch.zeros(2), "new": torch.full((2,), 5.0)}
    checkpoint.load(folder, targets, strict=False)
    assert targets["kept"].tolist() == [1, 1]
    assert targets["new"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"loss": math.nan}, "not JSON compliant"),
        ({"a": (1, 2)}, r"\['a'\] would change"),
        ({"b": {1: 2}}, r"\['b'\] would change"),
        ({"c": torch.ones(1)}, "not JSON serializable"),
        ([1], "is list"),
    ],
)
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata, told):
    with pytest.raises(CheckpointError, match=told):
        checkpoint.save(tmp_path, 1, {}, metadata)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"a": 3.0}, "a: is float"),
        ({"": torch.ones(1)}, "'' cannot name"),
        ({"a\n": torch.ones(1)}, "cannot name"),
        ({"__metadata__": torch.ones(1)}, "cannot name"),
        ({"c": torch.ones(1, dtype=torch.complex64)}, "c: dtype torch.complex64"),
        ({"m": torch.ones(1, device="meta")}, "m: on meta"),
    ],
)
def test_what_no_file_can_hold_is_refused_by_name(tmp_path, tensors, told):
    with pytest.raises(CheckpointError, match=told):
        checkpoint.save(tmp_path, 1, tensors, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.catalogue(30)
def test_saving_a_step_again_replaces_it_and_leaves_nothing_else(tmp_path):
    checkpoint.save(tmp_path, 1, {"w": torch.zeros(2)}, {"life": 1})
    (tmp_path / "step-00000001" / "rank-00007.safetensors").write_bytes(b"from an earlier life")
    folder = checkpoint.save(tmp_path, 1, {"w": torch.ones(2)}, {"life": 2})
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert checkpoint.load_full(folder)[0]["w"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def save_replicas(rank: int, root: Path) -> list[int]:
    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(8, 16) for i in range(30)}
    folder = checkpoint.save(root, 1, tensors, {})
    dist.barrier()
    targets = {name: torch.zeros(8, 16) for name in tensors}
    checkpoint.load(folder, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
    return [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]


def test_replicas_are_written_once_and_evenly(tmp_path):
    sizes = run_ranks(3, save_replicas, tmp_path)[0]
    data = 30 * 8 * 16 * 4
    assert data < sum(sizes) < data * 1.3
    assert max(sizes) - min(sizes) < 0.05 * sum(sizes)


def save_disagreeing(rank: int, root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(root, 1, {"w": torch.zeros(2 + rank)}, {})
    return str(caught.value)


def test_ranks_that_disagree_about_a_shape_are_told_so(tmp_path):
    messages = run_ranks(2, save_disagreeing, tmp_path)
    assert messages[0] == messages[1]
    assert "w: rank 1 has F32 [3], a lower rank ('F32', [2])" in messages[0]
    assert list(tmp_path.iterdir()) == []


def save_in_halves(rank: int, root: Path) -> list[float]:
    groups: list[Any] = [dist.new_group([0, 2]), dist.new_group([1])]
    half = rank % 2
    tensors = {"w": torch.full((2,), float(half))}
    folder = checkpoint.save(root / str(half), 1, tensors, {}, process_group=groups[half])
    targets = {"w": torch.zeros(2)}
    checkpoint.load(folder, targets, process_group=groups[half])
    return targets["w"].tolist()


def test_a_group_of_some_ranks_saves_and_loads_alone(tmp_path):
    assert run_ranks(3, save_in_halves, tmp_path) == [[0, 0], [1, 1], [0, 0]]


def save_and_load_without_pickle(rank: int, root: Path) -> float:
    def refuse(*_, **__):
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load"):
        setattr(pickle, name, refuse)
    for name in ("_pickler", "_unpickler"):
        setattr(dist.distributed_c10d, name, refuse)
    folder = checkpoint.save(root, 1, {"w": torch.full((3,), 5.0)}, METADATA)
    dist.barrier()
    targets = {"w": torch.zeros(3)}
    assert checkpoint.newest_valid(root) == folder
    assert checkpoint.load(folder, targets) == METADATA
    os._exit(int(targets["w"].sum().item()))


def test_nothing_is_pickled_neither_to_disk_nor_between_ranks(tmp_path):
    outcomes = run_ranks(2, save_and_load_without_pickle, tmp_path, failures="return")
    assert [outcome.exitcode for outcome in outcomes] == [15, 15], outcomes


def test_a_shard_that_is_not_all_there_when_it_is_looked_at_is_not_published(tmp_path, monkeypatch):
    """As where folders are shared over a network, and another rank's file is not seen whole."""
    write = saving.write_shard

    def cut_short(folder, file, pieces, **about):
        shard, begins = write(folder, file, pieces, **about)
        os.truncate(folder / file, shard.bytes - 1)
        return shard, begins

    monkeypatch.setattr(saving, "write_shard", cut_short)
    with pytest.raises(CheckpointError, match="bytes long, expected"):
        checkpoint.save(tmp_path, 1, {"w": torch.arange(10.0)}, {})
    assert list(tmp_path.iterdir()) == []
