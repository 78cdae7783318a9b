"""Saving: every rank writes its share of the boxes, rank 0 writes the manifest, and a rename publishes the checkpoint.

    plan      each rank lists its boxes; rank 0 checks that they cover the tensors, and assigns replicas evenly by bytes
    write     each rank streams its boxes into one shard and fsyncs it
    publish   rank 0 checks that every shard is visible and complete, writes the manifest, renames

On nodes with local disks the lowest rank of each node publishes there, all with the same manifest (`disk.nodes`). After each
stage all ranks agree on success. On a failure all raise, nothing is published, and temporary folders are removed; a node that
has already published takes that back.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ultrascale.checkpoint.boxes import Offer, offer_of, share_out
from ultrascale.checkpoint.coordination import Coordinator, coordinating
from ultrascale.checkpoint.disk.dtypes import DTYPE_NAMES
from ultrascale.checkpoint.disk.files import Piece, verify_size, write_file, write_shard
from ultrascale.checkpoint.disk.folders import make_folder, publish, step_folder, temporary_folder
from ultrascale.checkpoint.disk.nodes import NodeDisks, remove_published
from ultrascale.checkpoint.disk.patience import with_retries
from ultrascale.checkpoint.errors import CheckpointError, LostContactError
from ultrascale.checkpoint.finite import expect_finite
from ultrascale.checkpoint.manifest import MANIFEST_NAME, Shard, decode, encode, manifest_of, metadata_text, shard_name
from ultrascale.checkpoint.slices import Tensors, pieces_of, slices_of
from ultrascale.failpoints import failpoint
from ultrascale.open_folder import OpenFolder


@dataclass(frozen=True)
class SavePlan:
    """One save, agreed between the ranks, with the boxes that this rank writes."""

    root: Path
    step: int
    save_id: str
    pieces: list[Piece]
    tensors: dict[str, tuple[str, list[int]]]
    """On rank 0: dtype and global shape of every tensor of any rank."""
    metadata: dict[str, Any]
    open_folder: OpenFolder | None = None
    """On a rank that publishes: the folder that must still be at `root`. None: no check; it is created if it is missing."""
    disks: NodeDisks | None = None
    """The disks that hold `root`. None: one for all ranks."""

    @property
    def temporary(self) -> Path:
        return temporary_folder(self.root, self.step, self.save_id)


def save(
    root: Path,
    step: int,
    tensors: Tensors,
    metadata: dict[str, Any],
    *,
    compare_copies: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save `tensors` (tensors, DTensors, `Slice`s, any device, by global name) as the checkpoint of `step`; returns its folder.

    Collective over `process_group` (default: all ranks; alone without torch.distributed). Ranks may have different names. One
    of a box's replicas is written; with `compare_copies` every rank first hashes its boxes, and differing replicas are an
    error. `metadata` must be plain JSON; rank 0's is saved. `root` must be the same folder for all ranks. A checkpoint of
    `step` is replaced. Raises CheckpointError on every rank if any failed; then nothing has changed.
    """
    with coordinating(process_group) as ranks:
        plan = plan_save(Path(root), step, tensors, metadata, ranks=ranks, compare_copies=compare_copies)
        return write_and_publish(plan, ranks=ranks)


def plan_save(
    root: Path,
    step: int,
    tensors: Tensors,
    metadata: dict[str, Any],
    *,
    ranks: Coordinator,
    compare_copies: bool = False,
    finite: bool = False,
) -> SavePlan:
    """Decide which rank writes what. Collective. Raises CheckpointError, with `finite` also for NaN and infinity."""
    doing = f"saving step {step} to {root}"

    def list_boxes() -> tuple[list[Piece], list[Offer]]:
        if type(step) is not int or not 0 <= step < 10**18:
            raise CheckpointError(f"step: {step!r} cannot be one; expected an integer from 0 to 10^18.")
        metadata_text(metadata)
        pieces = pieces_of(slices_of(tensors))
        if finite:
            expect_finite(pieces)
        return pieces, [offer_of(piece, with_digest=compare_copies) for piece in pieces]

    pieces, local_offers = ranks.agree(doing, list_boxes)
    offers = ranks.gather(local_offers)
    shared = ranks.on_rank_0(doing, lambda: _share_out(offers or []))
    mine = [pieces[index] for index in shared["items"][ranks.rank]]
    return SavePlan(root, step, shared["save_id"], mine, shared["tensors"], metadata)


def copy_to_host(plan: SavePlan) -> SavePlan:
    """The plan with a copy of the data in host memory, so that training may change the originals."""
    copies = [replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in plan.pieces]
    return replace(plan, pieces=copies)


def write_and_publish(plan: SavePlan, *, ranks: Coordinator) -> Path:
    """Write the boxes of `plan` and publish them on its disks. Collective. Raises CheckpointError on every rank."""
    doing = f"saving step {plan.step} to {plan.root}"
    final = step_folder(plan.root, plan.step)
    disks = plan.disks or NodeDisks(ranks.rank, (0,) * ranks.world)
    try:
        ranks.agree(doing, lambda: _make_temporary(plan) if disks.leads else None)
        written = ranks.agree(doing, lambda: _write_pieces(plan, ranks.rank))
        shards = ranks.gather(written)
        contents = ranks.agree(doing, lambda: _contents(plan, shards or []) if ranks.rank == 0 else {})
        if not disks.are_shared:
            contents = ranks.broadcast(contents)
            ranks.agree(doing, lambda: _expect_shards(plan, contents, disks) if disks.leads else None)
        ranks.agree(doing, lambda: _finish(plan, contents, disks, final) if disks.leads else None)
    except BaseException as error:
        if disks.leads:  # If this fails too, the next start removes it.
            shutil.rmtree(plan.temporary, ignore_errors=True)
            if not disks.are_shared and isinstance(error, CheckpointError) and not isinstance(error, LostContactError):
                remove_published(final, plan.save_id)
        raise
    return final


def _share_out(gathered: list[list[list[Any]]]) -> dict[str, Any]:
    """On rank 0: the indices of the boxes that each rank writes, and the dtype and shape of every tensor."""
    offers = [[Offer(*part) for part in offer] for offer in gathered]
    tensors = {part.name: (part.dtype, part.shape) for offer in offers for part in offer}
    return {"save_id": uuid.uuid4().hex, "items": share_out(offers), "tensors": tensors}


def _make_temporary(plan: SavePlan) -> None:
    failpoint("save.start")
    if plan.open_folder is None:
        make_folder(plan.root)
    expect_same_folder(plan.open_folder)
    with_retries(plan.temporary.mkdir)
    failpoint("save.folder")


def expect_same_folder(open_folder: OpenFolder | None) -> None:
    """Raises CheckpointError if the path of `open_folder` now leads elsewhere."""
    if open_folder is not None and (fate := open_folder.fate()):
        raise CheckpointError(f"{open_folder.path} {fate} since checkpoints were first saved there.")


def _write_pieces(plan: SavePlan, rank: int) -> dict[str, Any] | None:
    """Write this rank's shard. Returns its entry for the manifest, None if the rank has nothing to write."""
    if not plan.pieces:
        return None
    file = shard_name(rank)
    shard, begins = write_shard(plan.temporary, file, plan.pieces, save_id=plan.save_id, step=plan.step)
    failpoint("save.shard")
    boxes = [
        [piece.name, DTYPE_NAMES[piece.tensor.dtype], piece.shape, piece.offsets, list(piece.tensor.shape), begin]
        for piece, begin in zip(plan.pieces, begins, strict=True)
    ]
    return {"file": file, "bytes": shard.bytes, "checksum": shard.checksum, "boxes": boxes}


def _contents(plan: SavePlan, written: list[dict[str, Any] | None]) -> dict[str, Any]:
    """On rank 0: the manifest's text, from what was written and not from what was planned, and its shards."""
    manifest = manifest_of(plan.save_id, plan.step, [part for part in written if part is not None], plan.metadata)
    data = encode(manifest)
    where = plan.temporary / MANIFEST_NAME
    decode(data, str(where))  # Never publish a manifest that a later load would refuse.
    stored = {name: (entry.dtype, list(entry.shape)) for name, entry in manifest.tensors.items()}
    planned = {name: (dtype, list(shape)) for name, (dtype, shape) in plan.tensors.items()}
    if stored != planned:
        lost = sorted(name for name in planned if stored.get(name) != planned[name])
        raise CheckpointError(f"{where}: {lost[:20]} were planned but not written. Report this: it is a fault of the program.")
    return {"manifest": data.decode("ascii"), "shards": [[file, *astuple(shard)] for file, shard in manifest.shards.items()]}


def _expect_shards(plan: SavePlan, contents: dict[str, Any], disks: NodeDisks) -> None:
    """Raises CheckpointError unless the shards that ranks on this disk wrote are there with their full length."""
    on_disk = {shard_name(rank) for rank in disks.mates}
    for file, shard in ((file, Shard(*facts)) for file, *facts in contents["shards"] if file in on_disk):
        verify_size(plan.temporary, file, shard)


def _finish(plan: SavePlan, contents: dict[str, Any], disks: NodeDisks, final: Path) -> None:
    """On the rank that publishes on this disk: write the manifest, then rename."""
    where, data = plan.temporary / MANIFEST_NAME, contents["manifest"].encode("ascii")
    _expect_shards(plan, contents, disks)
    failpoint("save.shards")
    write_file(where, data)
    failpoint("save.manifest")
    expect_same_folder(plan.open_folder)
    publish(plan.temporary, final)
