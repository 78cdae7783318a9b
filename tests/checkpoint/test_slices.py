"""Slices: parts of tensors over pipelines, tensor-parallel ranks and FSDP2 at once, from any cut to any other, bit for bit."""

from __future__ import annotations

import random
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError, Slice

F32, BF16, F64, I64 = torch.float32, torch.bfloat16, torch.float64, torch.int64
TENSORS = {
    "embed": ((13, 6), F32), "column": ((7, 5), F32), "row": ((6, 9), BF16), "experts": ((5, 4, 6), F32), "norm": ((5,), BF16),
    "few rows": ((3, 2), F64), "scalar": ((), F32), "count": ((), I64), "nothing": ((0, 3), F32), "bias": ((4,), F32),
}  # fmt: skip
TIED = "embed"
"""Both ends of a pipeline have it."""


class Cut(NamedTuple):
    """Ranks along each axis, tp the fastest; `replicate` and `shard` are FSDP2's."""

    pp: int
    replicate: int
    shard: int
    tp: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


SOURCES = 9
"""Of the 19 cuts, to keep the test short, each loads so many. All were tried."""
CUTS = [Cut(*sizes) for sizes in product(range(1, 5), repeat=4) if prod(sizes) <= 4]


def numbers(name: str) -> torch.Tensor:
    """The whole tensor: random bits without NaNs."""
    shape, dtype = TENSORS[name]
    found = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(list(TENSORS).index(name)))
    return found.to(dtype) / 3 if dtype.is_floating_point else found


def box_of(name: str, cut: Cut, tp_rank: int) -> tuple[slice, ...]:
    """What tensor parallelism leaves this rank: whole, cut along some dimension, or that with two ranks each to a part."""
    shape, _ = TENSORS[name]
    box = [slice(0, size) for size in shape]
    drawn = random.Random(f"{name} {cut}")
    dim, copies = drawn.randrange(-1, len(shape)), 2 if cut.tp % 2 == 0 and drawn.random() < 0.3 else 1
    if dim >= 0:
        size, longer = divmod(shape[dim], cut.tp // copies)
        part = tp_rank // copies
        first = part * size + min(part, longer)
        box[dim] = slice(first, first + size + (part < longer))
    return tuple(box)


def tensors_of(rank: int, cut: Cut, mesh: DeviceMesh, *, filled: bool) -> dict[str, list[Slice]]:
    """What a rank holds: the names of its stages, each cut by tp, then perhaps by FSDP2 along dim 0."""
    stage, in_stage = divmod(rank, cut.replicate * cut.shard * cut.tp)
    held: dict[str, list[Slice]] = {}
    for place, name in enumerate(TENSORS):
        ends = [0, cut.pp - 1] if name == TIED else [place % cut.pp]
        box = box_of(name, cut, in_stage % cut.tp)
        for _ in range(ends.count(stage)):
            local = numbers(name)[box].clone(memory_format=torch.contiguous_format)
            local = local if filled else torch.zeros_like(local)
            if local.dim() and name != "bias":
                local = distribute_tensor(local, mesh["replicate", "shard"], [Replicate(), Shard(0)], src_data_rank=None)
            held.setdefault(name, []).append(Slice(local, TENSORS[name][0], tuple(side.start for side in box)))
    return held


def mesh_of(cut: Cut) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(cut), mesh_dim_names=cut._fields)


def wrong(found: dict[str, list[Slice]], expected: dict[str, list[Slice]]) -> list[str]:
    """Names of slices of which this rank's own part has other bits."""

    def bits(one: Slice) -> bytes:
        local = one.tensor.to_local() if isinstance(one.tensor, DTensor) else one.tensor
        return local.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    return [name for name in expected if [bits(one) for one in found[name]] != [bits(one) for one in expected[name]]]


def save_cuts(rank: int, cuts: list[Cut], root: Path) -> None:
    for cut in cuts:
        tensors = tensors_of(rank, cut, mesh_of(cut), filled=True)
        checkpoint.save(root / cut.name, 1, tensors, {"cut": list(cut)}, compare_copies=True)


def load_cuts(rank: int, cuts: list[Cut], root: Path) -> list[tuple[Cut, Cut, list[str]]]:
    bad = []
    for cut in cuts:
        mesh = mesh_of(cut)
        expected = tensors_of(rank, cut, mesh, filled=True)
        for source in random.Random(cut.name).sample(CUTS, SOURCES):
            targets = tensors_of(rank, cut, mesh, filled=False)
            assert checkpoint.load(root / source.name / "step-00000001", targets) == {"cut": list(source)}
            bad += [(source, cut, names)] if (names := wrong(targets, expected)) else []
    return bad


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("cuts")
    for world in range(1, 5):
        run_ranks(world, save_cuts, [cut for cut in CUTS if prod(cut) == world], root)
    return root


@pytest.mark.catalogue(46)
@pytest.mark.parametrize("world", range(1, 5))
def test_every_cut_loads_others_bitwise(saved, world):
    assert len(CUTS) == 19
    assert run_ranks(world, load_cuts, [cut for cut in CUTS if prod(cut) == world], saved) == [[]] * world


def test_one_process_reads_the_same_whole_tensors_from_every_cut(saved):
    for cut in CUTS:
        found, _ = checkpoint.load_full(saved / cut.name / "step-00000001")
        assert found.keys() == TENSORS.keys()
        for name, tensor in found.items():
            assert tensor.dtype == TENSORS[name][1] and torch.equal(tensor, numbers(name)), (cut, name)


def save_columns(rank: int, root: Path) -> list[int]:
    """Ranks (dp, tp) of 2 x 2 with 40 matrices cut by columns: each pair of replicas has the same."""
    whole = torch.arange(64 * 64.0).reshape(64, 64)
    columns = slice(32 * (rank % 2), 32 * (rank % 2) + 32)
    tensors = {f"w{i}": Slice(whole[:, columns], (64, 64), (0, columns.start)) for i in range(40)}
    folder = checkpoint.save(root, 1, tensors, {})
    return [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]


def test_copies_of_slices_are_written_once_and_evenly(tmp_path):
    sizes, data = run_ranks(4, save_columns, tmp_path)[0], 40 * 64 * 64 * 4
    assert len(sizes) == 4 and data < sum(sizes) < 1.02 * data
    assert max(sizes) - min(sizes) < 0.01 * max(sizes)


# --- mistakes -------------------------------------------------------------------------------------------------------------

WHOLE = torch.arange(12.0).reshape(6, 2)
MISTAKES: dict[str, tuple[list[tuple[int, int]], str]] = {
    "one shard off": ([(0, 0), (3, 0)], "w [6, 2]: 6 of 12 elements are on some rank"),
    "one row off": ([(0, 0), (3, 2)], "overlap"),
    "a part missing": ([(0, 0), (4, 4)], "w [6, 2]: 10 of 12 elements are on some rank"),
    "the whole and a part of it": ([(0, 0), (0, 0)], "overlap"),
}
"""Of each rank the row its slice begins at, and the row it says."""
LENGTHS = {"one shard off": (3, 3), "one row off": (3, 3), "a part missing": (3, 2), "the whole and a part of it": (6, 3)}


def save_with_a_mistake(rank: int, root: Path, mistake: str) -> str:
    first, claimed = MISTAKES[mistake][0][rank]
    rows = WHOLE[first : first + LENGTHS[mistake][rank]]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(root, 1, {"w": Slice(rows, (6, 2), (claimed, 0))}, {})
    return str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_slices_that_do_not_make_up_the_whole_are_refused_and_nothing_is_written(tmp_path, mistake):
    first, second = run_ranks(2, save_with_a_mistake, tmp_path, mistake)
    assert first == second
    assert "do not fit together" in first and MISTAKES[mistake][1] in first
    assert list(tmp_path.iterdir()) == []


def load_the_same_half(rank: int, root: Path) -> tuple[str, float]:
    folder = checkpoint.save(root, 1, {"w": WHOLE + 1}, {})
    target = torch.zeros(3, 2)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder, {"w": Slice(target, (6, 2), (0, 0))})
    return str(caught.value), target.sum().item()


def test_ranks_that_ask_for_one_slice_where_each_should_have_its_own_are_told(tmp_path):
    for text, total in run_ranks(2, load_the_same_half, tmp_path):
        assert "w [6, 2]: 6 of 12 elements are on some rank" in text and total == 0


def load_by_stages(rank: int, root: Path, names: list[list[str]]) -> str:
    folder = checkpoint.save(root, 1, {name: torch.ones(2) for name in "ab"}, {})
    targets = {name: torch.zeros(2) for name in names[rank]}
    try:
        checkpoint.load(folder, targets)
    except CheckpointError as error:
        assert all(target.sum() == 0 for target in targets.values())
        return str(error)
    return " ".join(f"{name}={int(target.sum())}" for name, target in targets.items())


def test_ranks_load_different_names_as_long_as_every_name_is_loaded_somewhere(tmp_path):
    assert run_ranks(2, load_by_stages, tmp_path, [["a"], ["b"]]) == ["a=2", "b=2"]
    for text in run_ranks(2, load_by_stages, tmp_path, [["a"], ["a"]]):
        assert "b: only in the checkpoint" in text
    for text in run_ranks(2, load_by_stages, tmp_path, [["a"], ["b", "c"]]):
        assert "rank 1 of 2: 1 tensors do not match" in text and "c: not in the checkpoint" in text


def save_copies(rank: int, root: Path, compare: bool) -> str:
    """Ranks 0 and 2 hold the first half, 1 and 3 the second; rank 2's copy has one bit that differs."""
    part = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
    rows = WHOLE[part].clone()
    rows[2, 1] += (rank == 2) * torch.finfo(torch.float32).eps * 8
    try:
        checkpoint.save(root, 1, {"w": Slice(rows, (6, 2), (part.start, 0))}, {}, compare_copies=compare)
    except CheckpointError as error:
        return str(error)
    return ""


def test_copies_that_differ_in_a_bit_are_found_when_asked_for(tmp_path):
    assert run_ranks(4, save_copies, tmp_path / "trusting", False) == [""] * 4
    for text in run_ranks(4, save_copies, tmp_path / "comparing", True):
        assert "w at [0, 0]: ranks [0] and ranks [2] hold different numbers, expected copies" in text
    assert not (tmp_path / "comparing").exists()


@pytest.mark.parametrize(
    ("shape", "offsets"), [((6, 2), (4, 0)), ((6, 2), (-1, 0)), ((6, 2), (0,)), ((12,), (0,)), ((6, 1), (0, 0))]
)
def test_a_slice_that_is_no_part_of_its_whole_is_refused(tmp_path, shape, offsets):
    with pytest.raises(CheckpointError, match=r"w: a slice of shape .* is no part of"):
        checkpoint.save(tmp_path, 1, {"w": Slice(WHOLE[:3], shape, offsets)}, {})


def test_loading_counts_as_a_change_for_those_who_keep_copies_of_parameters(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"w": WHOLE}, {})
    parameter = torch.nn.Parameter(torch.zeros(6, 2))
    before = parameter._version
    checkpoint.load(folder, {"w": parameter.detach()})
    assert parameter._version > before and torch.equal(parameter, WHOLE)
