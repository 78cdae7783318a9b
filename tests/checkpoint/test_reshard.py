"""A checkpoint written by one layout loads into every other, parameters and AdamW's moments alike, bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.boxes import Offer, share_out
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.manifest import MANIFEST_NAME

LAYOUTS = {
    "one": (1, None),
    "zero-2": (2, None),
    "zero-3": (3, None),
    "zero-4": (4, None),
    "hybrid-2x2": (4, 2),
    "replicas-2": (2, 1),
}
"""Processes, and how many of them share one copy (None: all; 1: plain tensors, nothing cut)."""

State = dict[str, torch.Tensor]


def train_two_steps(layout: str, seed: int) -> State:
    """Parameters and moments of a small fp64 model after two steps. 53, 7, 3 and 2 rows on 4 ranks: uneven, some empty."""
    world, shard = LAYOUTS[layout]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(53, 7), nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    if shard != 1:
        sizes, names = ((world,), ("shard",)) if shard is None else ((world // shard, shard), ("replicate", "shard"))
        fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.arange(53)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state: State = {}
    for name, parameter in model.named_parameters():
        state[name] = parameter
        state |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def whole(state: State) -> State:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}


def save_layout(rank: int, layout: str, root: Path) -> State:
    state = train_two_steps(layout, seed=1)
    checkpoint.save(root / layout, 2, state, {"layout": layout})
    return whole(state)


def load_layouts(rank: int, layout: str, root: Path) -> dict[str, State]:
    found = {}
    for source in LAYOUTS:
        state = train_two_steps(layout, seed=2)
        metadata = checkpoint.load(root / source / "step-00000002", state)
        assert metadata == {"layout": source}
        found[source] = whole(state)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, State]]:
    root = tmp_path_factory.mktemp("layouts")
    return root, {layout: run_ranks(LAYOUTS[layout][0], save_layout, layout, root)[0] for layout in LAYOUTS}


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def load_from_own_files(rank: int, layout: str, root: Path) -> dict[str, State]:
    """As `load_layouts`, each rank from a folder with the shards alone that it is said to read."""
    found = {}
    for source in LAYOUTS:
        state, folder = train_two_steps(layout, seed=2), root / source / "step-00000002"
        files = checkpoint.shards_read(read_manifest(folder), state)
        own = root / f"{source}-for-{layout}-{rank}" / folder.name
        own.mkdir(parents=True)
        for file in (MANIFEST_NAME, *files):
            shutil.copy(folder / file, own)
        checkpoint.load(own, state, verified=True)
        found[source] = whole(state)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_needs_no_other_shards_than_it_is_said_to_read(saved, layout):
    root, expected = saved
    for found in run_ranks(LAYOUTS[layout][0], load_from_own_files, layout, root):
        for source in LAYOUTS:
            assert_equal(found[source], expected[source])


@pytest.mark.catalogue(46, 47)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_other_layout_bitwise(saved, layout):
    root, expected = saved
    for found in run_ranks(LAYOUTS[layout][0], load_layouts, layout, root):
        for source in LAYOUTS:
            assert_equal(found[source], expected[source])


def test_one_process_without_torch_distributed_loads_every_layout_whole(saved):
    root, expected = saved
    for layout in LAYOUTS:
        tensors, metadata = checkpoint.load_full(root / layout / "step-00000002")
        assert metadata == {"layout": layout}
        assert_equal(tensors, expected[layout])


def test_hybrid_sharding_writes_each_shard_once_and_evenly(saved):
    root, _ = saved
    sizes = [path.stat().st_size for path in sorted((root / "hybrid-2x2" / "step-00000002").glob("*.safetensors"))]
    whole_size = (root / "one" / "step-00000002" / "rank-00000.safetensors").stat().st_size
    headers = 4 * 2500
    assert len(sizes) == 4
    assert sum(sizes) < whole_size + headers


def save_a_partial_sum(rank: int, root: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(root, 1, {"g": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, {})
    return str(caught.value)


def test_a_sum_still_spread_over_ranks_is_refused(tmp_path):
    assert "g: a sum still spread over ranks" in run_ranks(2, save_a_partial_sum, tmp_path)[1]


def cut_both_ways(rank: int, root: Path) -> State:
    mesh = init_device_mesh("cpu", (2, 2))
    numbers = torch.arange(35.0).reshape(5, 7)
    folder = checkpoint.save(root, 1, {"w": distribute_tensor(numbers, mesh, [Shard(0), Shard(1)])}, {})
    columns = distribute_tensor(torch.zeros(5, 7), init_device_mesh("cpu", (4,)), [Shard(1)])
    checkpoint.load(folder, {"w": columns})
    return {"found": columns.full_tensor(), "expected": numbers}


def test_tiles_load_as_columns(tmp_path):
    for state in run_ranks(4, cut_both_ways, tmp_path):
        assert torch.equal(state["found"], state["expected"])


def test_copies_too_small_to_matter_are_together_in_one_file_and_large_ones_even():
    def offers(rank: int) -> list[Offer]:
        rows = Offer("weight", "F32", [4_000, 100], [rank * 1_000, 0], [1_000, 100], None)
        copies = [Offer(f"bias-{number}", "F32", [8], [0], [8], None) for number in range(12)]
        return [rows, *copies, *(Offer(f"norm-{number}", "F32", [100], [0], [100], None) for number in range(4))]

    assert share_out([offers(rank) for rank in range(4)]) == [[0, *range(1, 13), 13], [0, 14], [0, 15], [0, 16]]
