"""Saving: every rank writes what it alone holds, rank 0 writes down where everything is, and then it gets its name.

    plan      each rank lists its boxes; DCP's planner on rank 0 gives replicated ones to one rank each, evenly by bytes
    write     each rank streams its boxes into one shard and fsyncs it
    publish   rank 0 checks that every shard is visible and complete, writes the manifest, renames

After each stage all ranks agree that all is well. If not, all raise, nothing is published, and the temporary folder is removed.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ultrascale.checkpoint.coordination import Coordinator, coordinating
from ultrascale.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.files import Piece, verify_size, write_file, write_shard
from ultrascale.checkpoint.folders import publish, step_folder, temporary_folder
from ultrascale.checkpoint.manifest import (
    MANIFEST_NAME,
    Chunk,
    Entry,
    Manifest,
    Shard,
    check_name,
    decode,
    encode,
    metadata_text,
)
from ultrascale.failpoints import failpoint


@dataclass(frozen=True)
class Plan:
    """One save, agreed between the ranks, with what this rank writes."""

    root: Path
    step: int
    save_id: str
    pieces: list[Piece]
    tensors: dict[str, tuple[str, list[int]]]
    """On rank 0: dtype and global shape of every tensor of any rank."""
    metadata: dict[str, Any]

    @property
    def temporary(self) -> Path:
        return temporary_folder(self.root, self.step, self.save_id)


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    metadata: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save `tensors` (tensors or DTensors, any device, by global name) as the checkpoint of `step`; the folder `root/step-...`.

    Collective over `process_group` (all ranks by default; alone without torch.distributed). Plain tensors of one name count as
    replicas. `metadata` must be plain JSON; rank 0's is kept. `root` must be the same folder for all ranks. A checkpoint of the
    same step is replaced. Raises CheckpointError on every rank if any failed; then nothing has changed."""
    with coordinating(process_group) as ranks:
        plan = plan_save(Path(root), step, tensors, metadata, ranks=ranks)
        return write_and_publish(plan, ranks=ranks)


def plan_save(
    root: Path, step: int, tensors: Mapping[str, torch.Tensor], metadata: dict[str, Any], *, ranks: Coordinator
) -> Plan:
    """Decide which rank writes what. Collective. Raises CheckpointError."""
    doing = f"saving step {step} to {root}"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def list_boxes() -> list[WriteItem]:
        _check_request(step, tensors)
        metadata_text(metadata)
        planner.set_up_planner(dict(tensors), is_coordinator=ranks.rank == 0)
        return [item for item in planner.create_local_plan().items if _worth_writing(item)]

    items = ranks.agree(doing, list_boxes)
    offers = ranks.gather([_to_json(item) for item in items])
    shared = ranks.on_rank_0(doing, lambda: _share_out(planner, offers or []))
    mine = [items[index] for index in shared["items"][ranks.rank]]
    pieces = [_piece(item, planner) for item in mine]
    return Plan(root, step, shared["save_id"], pieces, shared["tensors"], metadata)


def copy_to_host(plan: Plan) -> Plan:
    """The plan with its own copy of the numbers in host memory, so that training may change the originals."""
    copies = [replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in plan.pieces]
    return replace(plan, pieces=copies)


def write_and_publish(plan: Plan, *, ranks: Coordinator) -> Path:
    """Write what `plan` says and publish it. Collective. Raises CheckpointError on every rank."""
    doing = f"saving step {plan.step} to {plan.root}"
    final = step_folder(plan.root, plan.step)
    try:
        ranks.agree(doing, lambda: _make_temporary(plan) if ranks.rank == 0 else None)
        written = ranks.agree(doing, lambda: _write_pieces(plan, ranks.rank))
        shards = ranks.gather(written)
        ranks.agree(doing, lambda: _finish(plan, shards or [], final) if ranks.rank == 0 else None)
    except BaseException:
        if ranks.rank == 0:  # If this fails too, the next start sweeps it away.
            shutil.rmtree(plan.temporary, ignore_errors=True)
        raise
    return final


def _check_request(step: int, tensors: Mapping[str, torch.Tensor]) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise CheckpointError(f"step: {step!r} cannot be one; expected an integer from 0 to 10^18.")
    for name, tensor in tensors.items():
        check_name(name, "tensors")
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{name}: is {type(tensor).__name__}, expected a tensor. Put plain values into the metadata.")
        check_tensor(name, tensor)


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError unless the tensor has numbers that a file can hold and that are final."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name}: dtype {tensor.dtype} has no name on disk; expected one of {list(DTYPE_NAMES)}.")
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        raise CheckpointError(f"{name}: on {tensor.device} with layout {tensor.layout}, expected dense numbers in memory.")
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name}: a sum still spread over ranks ({tensor.placements}). Reduce it before.")


def _worth_writing(item: WriteItem) -> bool:
    """Ranks left with nothing of an unevenly cut tensor have an empty box; a tensor without elements keeps one box."""
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) > 0 or prod(item.tensor_data.size) == 0


def _to_json(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None
    shard = item.type == WriteItemType.SHARD
    chunk = data.chunk
    return [item.index.fqn, DTYPE_NAMES[data.properties.dtype], list(data.size), list(chunk.offsets), list(chunk.sizes), shard]


def _from_json(value: list[Any]) -> WriteItem:
    name, dtype, shape, offsets, sizes, shard = value
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size(shape))
    kind = WriteItemType.SHARD if shard else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


def _share_out(planner: DefaultSavePlanner, offers: list[list[list[Any]]]) -> dict[str, Any]:
    """On rank 0: from every rank's boxes, the indices of those it writes; each box goes to exactly one rank."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for rank, offer in enumerate(offers):
        for name, dtype, shape, *_ in offer:
            if tensors.setdefault(name, (dtype, shape)) != (dtype, shape):
                problem = f"rank {rank} has {dtype} {shape}, a lower rank {tensors[name]}"
                raise CheckpointError(f"{name}: {problem}; expected the same dtype and global shape on all ranks.")
    plans = [SavePlan([_from_json(value) for value in offer]) for offer in offers]
    try:
        shared, _ = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            f"the ranks' shards do not fit together: {error}. Every element must be on some rank, once."
        ) from error
    places = [{item.index: index for index, item in enumerate(plan.items)} for plan in plans]
    indices = [[place[item.index] for item in plan.items] for place, plan in zip(places, shared, strict=True)]
    return {"save_id": uuid.uuid4().hex, "items": indices, "tensors": tensors}


def _piece(item: WriteItem, planner: DefaultSavePlanner) -> Piece:
    assert item.tensor_data is not None
    with torch.no_grad():
        tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return Piece(item.index.fqn, tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets), tensor.detach())


def _make_temporary(plan: Plan) -> None:
    failpoint("save.start")
    plan.root.mkdir(parents=True, exist_ok=True)
    plan.temporary.mkdir()
    failpoint("save.folder")


def _write_pieces(plan: Plan, rank: int) -> dict[str, Any] | None:
    """This rank's shard; what the manifest must say of it. None if it has nothing to write."""
    if not plan.pieces:
        return None
    file = f"rank-{rank:05d}.safetensors"
    shard, begins = write_shard(plan.temporary, file, plan.pieces, save_id=plan.save_id, step=plan.step)
    failpoint("save.shard")
    boxes = [
        [piece.name, DTYPE_NAMES[piece.tensor.dtype], piece.shape, piece.offsets, list(piece.tensor.shape), begin]
        for piece, begin in zip(plan.pieces, begins, strict=True)
    ]
    return {"file": file, "bytes": shard.bytes, "checksum": shard.checksum, "boxes": boxes}


def _finish(plan: Plan, written: list[dict[str, Any] | None], final: Path) -> None:
    """On rank 0: the manifest, from what was written and not from what was planned; then the name."""
    parts = [part for part in written if part is not None]
    manifest = _manifest(plan, parts)
    data = encode(manifest)
    where = plan.temporary / MANIFEST_NAME
    decode(data, str(where))  # What a later load would refuse must not be published.
    stored = {name: (entry.dtype, list(entry.shape)) for name, entry in manifest.tensors.items()}
    planned = {name: (dtype, list(shape)) for name, (dtype, shape) in plan.tensors.items()}
    if stored != planned:
        lost = sorted(name for name in planned if stored.get(name) != planned[name])
        raise CheckpointError(f"{where}: {lost[:20]} were planned but not written. Report this: it is a fault of the program.")
    for file, shard in manifest.shards.items():
        verify_size(plan.temporary, file, shard)
    failpoint("save.shards")
    write_file(where, data)
    failpoint("save.manifest")
    publish(plan.temporary, final)


def _manifest(plan: Plan, parts: list[dict[str, Any]]) -> Manifest:
    shards = {part["file"]: Shard(part["bytes"], part["checksum"]) for part in parts}
    chunks: dict[str, list[Chunk]] = {}
    heads: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, dtype, shape, offsets, sizes, begin in part["boxes"]:
            heads[name] = (dtype, tuple(shape))
            chunks.setdefault(name, []).append(Chunk(tuple(offsets), tuple(sizes), part["file"], begin))
    entries = {name: Entry(*head, tuple(sorted(chunks[name], key=lambda c: c.offsets))) for name, head in heads.items()}
    return Manifest(plan.save_id, plan.step, shards, dict(sorted(entries.items())), plan.metadata)
