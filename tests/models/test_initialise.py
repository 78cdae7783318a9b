import multiprocessing

import pytest
import torch
from drawn import initial_value
from models.families import FAMILIES, LLAMA
from operations import Operations
from torch.distributed.tensor import DTensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, weights
from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import TILE, initialise, weight_seed
from ultrascale.work.sharding.places import WeightShard


def initialised(model: Model, dtype: torch.dtype, seed: int = 3) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        decoder = Decoder(model).to(dtype)
    decoder.to_empty(device="cpu")
    initialise(decoder, model, seed)
    return dict(decoder.named_parameters())


def test_values_follow_the_table_of_weights():
    big = Weight("x", (400, 500), "mlp", 0, init_std=0.02)
    value = initial_value(big, seed=0)
    assert abs(value.mean().item()) < 2e-4
    assert abs(value.std().item() - 0.02) < 2e-4
    for weight in weights(FAMILIES["gpt2"]):
        if weight.init_std is None:
            assert (initial_value(weight, 0) == weight.init_fill).all()


def test_no_two_tiles_and_no_two_experts_start_alike():
    wide = initial_value(Weight("x", (128, 2048), "mlp", 0, init_std=1.0), 5)
    tiles = [wide[rows, columns] for rows in (slice(64), slice(64, 128)) for columns in (slice(1024), slice(1024, 2048))]
    experts = initial_value(Weight("x", (4, 64, 1024), "mlp", 0, init_std=1.0, is_expert=True), 5)
    assert len({tuple(one.flatten()[:8].tolist()) for one in (*tiles, *experts)}) == 8


def test_values_depend_on_seed_and_name_alone():
    found = initialised(LLAMA, torch.float32)
    for weight in reversed(list(weights(LLAMA))):
        assert torch.equal(found[weight.name], initial_value(weight, seed=3))
    assert not torch.equal(found["layers.0.mlp.up_proj.weight"], found["layers.1.mlp.up_proj.weight"])
    assert not torch.equal(found["lm_head.weight"], initialised(LLAMA, torch.float32, seed=4)["lm_head.weight"])


def test_values_stay_the_same_from_one_version_to_the_next():
    """Checked in: runs of an older version can be repeated."""
    assert weight_seed(0, "embed_tokens.weight/0/0") == 139905720820288070
    value = initial_value(Weight("embed_tokens.weight", (4, 8), "embedding", None, init_std=1.0), seed=0)
    torch.testing.assert_close(value[0, :3], torch.tensor([-0.430442, -1.587858, 0.500467]), rtol=0, atol=1e-6)


def test_precision_does_not_change_the_draw():
    fp32, fp64, bf16 = (initialised(LLAMA, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16))
    for name, value in fp32.items():
        assert torch.equal(fp64[name], value.double())
        assert torch.equal(bf16[name], value.bfloat16())


def test_a_part_is_cut_from_the_same_values_and_only_its_tiles_are_drawn():
    """Rows as ep and ZeRO cut them, columns as tp does, across the borders of tiles."""
    matrix = Weight("x", (700, 2100), "mlp", 0, init_std=1.0)
    experts = Weight("x", (6, 70, 1030), "mlp", 0, init_std=1.0, is_expert=True)
    whole = {weight: initial_value(weight, 5) for weight in (matrix, experts)}
    for weight, offsets, shape in (
        (matrix, (0, 525), (700, 525)), (matrix, (63, 0), (66, 2100)), (matrix, (699, 2099), (1, 1)),
        (matrix, (700, 0), (0, 2100)), (experts, (2, 0, 0), (2, 70, 1030)), (experts, (5, 35, 0), (1, 35, 1030)),
        (experts, (0, 0, 1000), (6, 70, 30)),
    ):  # fmt: skip
        cut = tuple(slice(first, first + length) for first, length in zip(offsets, shape, strict=True))
        with Operations("normal_") as operations:
            part = initial_value(weight, 5, part=WeightShard(offsets, shape))
        drawn = [tile.numel() for tile, *_ in operations.inputs]
        assert torch.equal(part, whole[weight][cut])
        assert sum(drawn) <= whole[weight].numel() and max(drawn, default=0) <= TILE
        if shape == (1, 1):
            assert drawn == [(700 - 640) * (2100 - 2048)]
        if shape == (2, 70, 1030):
            assert sum(drawn) == whole[weight].numel() // 3


def initialise_sharded(rank: int, world_size: int, store: str, model: Model) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    with torch.device("meta"):
        decoder = Decoder(model)
    for layer in decoder.layers.values():
        fully_shard(layer)
    fully_shard(decoder)
    decoder.to_empty(device="cpu")
    initialise(decoder, model, seed=3)
    for weight in weights(model):
        parameter = decoder.get_parameter(weight.name)
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), initial_value(weight, seed=3)), weight.name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_weights_hold_slices_of_the_same_values_uneven_ones_too(world_size, tmp_path):
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=initialise_sharded, args=(rank, world_size, str(tmp_path / "store"), LLAMA))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * world_size
