"""Loading, and finding a checkpoint that can be loaded.

Every byte of a checkpoint is verified before any tensor changes. For that, shards are distributed over ranks: one rank reads
each in full. Then each rank's boxes are assembled from the stored ones (DCP computes the overlaps), whatever the layout of the
save, and read in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ultrascale.checkpoint.boxes import Offer, fit_together, offer_of
from ultrascale.checkpoint.coordination import Coordinator, coordinating
from ultrascale.checkpoint.disk.damage import expected_manifest, verify_shards
from ultrascale.checkpoint.disk.dtypes import DTYPE_NAMES, DTYPES
from ultrascale.checkpoint.disk.files import Piece, opened, read_box, read_manifest
from ultrascale.checkpoint.disk.folders import candidates
from ultrascale.checkpoint.disk.patience import with_retries
from ultrascale.checkpoint.errors import CheckpointError, LostContactError, UnknownVersionError
from ultrascale.checkpoint.manifest import Chunk, Manifest, TensorEntry
from ultrascale.checkpoint.slices import Slice, Tensors, pieces_of, slices_of
from ultrascale.failpoints import failpoint


@dataclass(frozen=True)
class Rejected:
    """A folder that is named like a checkpoint but must not be loaded."""

    folder: Path
    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointSearch:
    """The newest checkpoint that verifies, if any, and the newer ones that do not."""

    folder: Path | None
    rejected: tuple[Rejected, ...] = ()


def load(
    folder: Path,
    tensors: Tensors,
    *,
    strict: bool = True,
    verified: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill `tensors` (tensors, DTensors or `Slice`s of any layout, any device) in place from the checkpoint; returns its
    metadata.

    Collective like `save`; ranks may request different names and parts. Together they must request every element of the
    checkpoint; with `strict=False` they need not, and tensors that the checkpoint lacks stay unchanged. `verified`: `search` or
    `verify` has just read every byte, so verification is skipped. Raises CheckpointError on every rank, naming every tensor
    that is missing, unexpected, or of another shape or dtype, and every damaged file. Then no tensor has changed, unless the
    disk failed between verifying and reading; the message says so.
    """
    with coordinating(process_group) as ranks:
        return _load(Path(folder), tensors, strict, verified, ranks)


def load_full(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor unsharded, on the CPU, and the metadata; on one process, with or without torch.distributed. Raises
    CheckpointError."""
    folder, alone = Path(folder), Coordinator(None)
    manifest = verify(folder)
    tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
    alone.agree(f"reading {folder}", lambda: _read_into(folder, manifest, pieces_of(slices_of(tensors))))
    return tensors, manifest.metadata


def shards_read(manifest: Manifest, tensors: Tensors) -> set[str]:
    """The files that `load` reads on this rank to fill `tensors` from a checkpoint that it accepts."""
    entries = manifest.tensors
    pieces = [
        piece for piece in pieces_of(slices_of(tensors)) if piece.name in entries and piece.shape == entries[piece.name].shape
    ]
    return {chunk.file for chunk, *_ in _reads(manifest, pieces)}


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata passed to `save`. Raises CheckpointError if the manifest is damaged; shards are not read."""
    return read_manifest(Path(folder)).metadata


def verify(folder: Path, *, process_group: dist.ProcessGroup | None = None, ranks: Coordinator | None = None) -> Manifest:
    """Read every byte of a checkpoint and compare with its manifest, which is returned. On one process, unless given ranks that
    share the work.

    Raises CheckpointError naming all damaged files.
    """
    if process_group is not None:
        with coordinating(process_group) as ranks:
            return verify(folder, ranks=ranks)
    folder, ranks = Path(folder), ranks or Coordinator(None)
    doing = f"verifying {folder}"
    manifest = ranks.agree(doing, lambda: expected_manifest(folder))
    share = list(manifest.shards.items())[ranks.rank :: ranks.world]
    ranks.agree(doing, lambda: verify_shards(folder, share, manifest.save_id))
    return manifest


def newest_valid(root: Path) -> Path | None:
    """The newest checkpoint in `root` whose every byte verifies; see `search`."""
    return search(root).folder


def search(root: Path, *, process_group: dist.ProcessGroup | None = None) -> CheckpointSearch:
    """The newest checkpoint whose every byte verifies, and why newer ones were rejected; the same on every rank.

    Collective over `process_group` (all ranks by default); shards are distributed over ranks. Changes nothing on disk. Raises
    UnknownVersionError if a newer one has an unknown format.
    """
    root = Path(root)
    with coordinating(process_group) as ranks:
        listed = ranks.on_rank_0(f"listing {root}", lambda: [[c.step, c.path.name] for c in candidates(root)])
        rejected: list[Rejected] = []
        for step, name in listed:
            try:
                verify(root / name, ranks=ranks)
            except (LostContactError, UnknownVersionError):
                raise
            except CheckpointError as error:
                rejected.append(Rejected(root / name, step, str(error)))
            else:
                return CheckpointSearch(root / name, tuple(rejected))
        return CheckpointSearch(None, tuple(rejected))


def damaged_after(folder: Path) -> tuple[Rejected, ...]:
    """Checkpoints beside `folder`, newer than it, that do not verify: the reason why a search chose `folder`. On one
    process."""
    rejected: list[Rejected] = []
    for candidate in candidates(folder.parent):
        if candidate.path.name == folder.name:
            break
        try:
            verify(candidate.path)
        except CheckpointError as error:
            rejected.append(Rejected(candidate.path, candidate.step, str(error)))
    return tuple(rejected)


def _load(folder: Path, tensors: Tensors, strict: bool, verified: bool, ranks: Coordinator) -> dict[str, Any]:
    doing = f"loading {folder}"
    manifest = ranks.agree(doing, lambda: read_manifest(folder))
    slices = ranks.agree(doing, lambda: slices_of(tensors))
    requested = _names_of_all(slices, ranks) if strict else None
    ranks.agree(doing, lambda: _check_targets(manifest, slices, requested))
    pieces = [piece for piece in pieces_of(slices) if piece.name in manifest.tensors]
    if strict:
        offers = ranks.gather([offer_of(piece) for piece in pieces])
        ranks.on_rank_0(doing, lambda: _expect_all_requested(offers or []))
    if not verified:
        verify(folder, ranks=ranks)
    failpoint("load.verified")
    late = f"{doing} (after it verified; some tensors may have changed)"
    ranks.agree(late, lambda: _read_into(folder, manifest, pieces))
    failpoint("load.read")
    return manifest.metadata


def _names_of_all(slices: list[tuple[str, Slice]], ranks: Coordinator) -> set[str]:
    """Names that any rank requests, on every rank."""
    gathered = ranks.gather(sorted({name for name, _ in slices}))
    return set(ranks.broadcast(sorted({name for names in gathered or [] for name in names})))


def _expect_all_requested(gathered: list[list[list[Any]]]) -> None:
    """On rank 0: raises if a slice is not read. If ranks request the same slice where each should have its own, another slice
    stays unread."""
    fit_together([[Offer(*fields) for fields in offer] for offer in gathered])


def _check_targets(manifest: Manifest, slices: list[tuple[str, Slice]], requested: set[str] | None) -> None:
    """Raises CheckpointError for targets that differ from the checkpoint or are missing there; with `requested`, the names that
    any rank requests, also for names on one side only."""
    wrong = []
    for name, target in sorted(slices, key=lambda entry: entry[0]):
        entry = manifest.tensors.get(name)
        if entry is not None and target.shape != entry.shape:
            wrong.append(f"{name}: shape {list(entry.shape)} in the checkpoint, {list(target.shape)} here")
        if entry is not None and target.tensor.dtype != DTYPES[entry.dtype]:
            wrong.append(f"{name}: dtype {entry.dtype} in the checkpoint, {DTYPE_NAMES[target.tensor.dtype]} here")
    if requested is not None:
        wrong += [f"{name}: not in the checkpoint" for name in sorted({name for name, _ in slices} - manifest.tensors.keys())]
        wrong += [f"{name}: only in the checkpoint" for name in sorted(manifest.tensors.keys() - requested)]
    if wrong:
        skips = "" if requested is None else " strict=False skips missing names."
        dtypes = " layout.precision and optimizer.name decide dtypes." if any(": dtype " in line for line in wrong) else ""
        remedy = f"Load into the model and optimizer that were saved.{dtypes}{skips}"
        raise CheckpointError(f"{len(wrong)} tensors do not match:\n  " + "\n  ".join(wrong) + f"\n{remedy}")


def _reads(manifest: Manifest, pieces: list[Piece]) -> list[tuple[Chunk, TensorEntry, Any, torch.Tensor]]:
    """Stored boxes that overlap this rank's boxes, with the overlaps that DCP computes."""
    stored = {name: _describe(manifest.tensors[name]) for name in {piece.name for piece in pieces}}
    jobs = []
    for piece in pieces:
        if piece.tensor.numel():
            target = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
            for item in create_read_items_for_chunk_list(piece.name, stored[piece.name], [target]):
                entry = manifest.tensors[piece.name]
                assert item.storage_index.index is not None
                jobs.append((entry.chunks[item.storage_index.index], entry, item, piece.tensor))
    return jobs


def _read_into(folder: Path, manifest: Manifest, pieces: list[Piece]) -> None:
    """Read this rank's boxes, file by file in byte order."""
    jobs = sorted(_reads(manifest, pieces), key=lambda job: (job[0].file, job[0].begin))
    for file, group in groupby(jobs, key=lambda job: job[0].file):
        with_retries(partial(_read_boxes, folder, file, list(group)))
    # Bytes are written past autograd, but holders of copies of parameters must notice the change.
    increment_version([piece.tensor for piece in pieces])


def _read_boxes(folder: Path, file: str, jobs: list[tuple[Chunk, TensorEntry, Any, torch.Tensor]]) -> None:
    with opened(folder, file) as fd:
        for chunk, entry, item, tensor in jobs:
            box = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
            read_box(fd, entry, chunk, tuple(item.storage_offsets), tensor[box], path=folder / file)


def _describe(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)
