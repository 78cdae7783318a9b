"""Tables of layouts: a NumPy column per field, so that column arithmetic prices a hundred thousand layouts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.description.layout import NARROW, Layout, Precision
from ultrascale.description.problems import mistake
from ultrascale.description.recomputed import blocks_text, modes_of
from ultrascale.description.schedules import SCHEDULES, USUAL, KnownSchedule

Column = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]
PLAIN_RECOMPUTE = ("none", "selective", "full")
"""Modes that treat all blocks alike."""
RECOMPUTE = (*PLAIN_RECOMPUTE, "every-k", "blocks")
CP_METHODS = ("ring", "all-gather", "all-to-all", "ring+all-to-all")
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "fp16", *NARROW)
_IS_NARROW = np.array([name in NARROW for name in PRECISIONS])
_NARROW_BYTES = np.array([NARROW.get(name, 0.0) for name in PRECISIONS])
FP8_SCALINGS = ("row", "tensor", "delayed")
SCHEDULE_NAMES = tuple(SCHEDULES)
CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE, "precision": PRECISIONS, "fp8_scaling": FP8_SCALINGS, "cp_method": CP_METHODS,
    "schedule": SCHEDULE_NAMES,
}  # fmt: skip
"""Columns of indices, and the values that they index."""
FLAGS = (
    "fp8_all_gather", "sequence_parallel", "tp_overlap", "partition_checkpoints", "offload_activations", "offload_optimizer",
)  # fmt: skip
"""Columns of 0 and 1."""


@dataclass(frozen=True)
class LayoutTable:
    """Layouts as columns of equal length. Choices are indices into the values of `CHOICES`."""

    dp: Column
    zero_stage: Column
    dp_shard: Column
    """Number of dp ranks that shard one replica of the state: `Layout.shard_size`."""
    micro_batch_size: Column
    recompute: Column
    recompute_every: Column
    precision: Column
    fp8_scaling: Column
    fp8_amax_history_len: Column
    fp8_keep_blocks: Column
    fp8_all_gather: Column
    reduce_itemsize: Column
    """Bytes of one reduced gradient element."""
    layers_per_bucket: Column
    tp: Column
    sequence_parallel: Column
    tp_overlap: Column
    """`Layout.tp_overlap`, where it has an effect."""
    cp: Column
    cp_method: Column
    cp_heads: Column
    pp: Column
    virtual_stages: Column
    schedule: Column
    ep: Column
    expert_tp: Column
    partition_checkpoints: Column
    mlp_chunks: Column
    offload_activations: Column
    offload_optimizer: Column
    modes: tuple[str, ...] = ()
    """Recomputation of each block (`description.recomputed`), for a table of one layout with recompute = "blocks". If all
    layouts of a table recompute the same named modules: that mode, once."""

    def __len__(self) -> int:
        return len(self.dp)

    def modes_of_blocks(self, count: int) -> tuple[str, ...]:
        """`modes` of `count` blocks."""
        return self.modes * count if len(self.modes) == 1 else self.modes

    def take(self, index: Indices | Bools | Sequence[int]) -> LayoutTable:
        """The rows of `index`, an array of numbers or of booleans."""
        taken: dict[str, Any] = {name: getattr(self, name)[index] for name in COLUMNS}
        return LayoutTable(**taken, modes=self.modes)

    @property
    def world_size(self) -> Column:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def cp_places(self) -> Column:
        """Ranks in a ring, or in the all-gather of keys and values: `Layout.cp_grid[0]`."""
        swaps = self.cp_method == CP_METHODS.index("all-to-all")
        return np.where(swaps, 1, self.cp // np.minimum(self.cp, self.cp_heads))

    @property
    def gathers_fp8(self) -> Bools:
        """True where weights of fp8 GEMMs are all-gathered in fp8: `work.fp8_slots.gathers_fp8`."""
        in_fp8 = _IS_NARROW[self.precision] & (self.fp8_all_gather > 0)
        return in_fp8 & (self.zero_stage > 0) & (self.dp_shard * self.cp > 1) if in_fp8.any() else in_fp8

    @property
    def kept_blocks(self) -> Column:
        """Number of first, and of last, blocks that stay in bf16 in an fp8 run."""
        return np.where(_IS_NARROW[self.precision], self.fp8_keep_blocks, 0)

    @property
    def narrow_bytes(self) -> Floats:
        """Bytes per element of the operands of an fp8 or fp4 GEMM, including scales per block."""
        return _NARROW_BYTES[self.precision]

    @property
    def scales_by_tensor(self) -> Bools:
        """True where fp8 weights have scales per tensor or row, besides the scales per block in `narrow_bytes`."""
        return self.precision != PRECISIONS.index("mxfp8")

    @property
    def delays_fp8(self) -> Bools:
        """True where fp8 uses delayed scaling (scales from an amax history)."""
        in_fp8 = self.precision == PRECISIONS.index("fp8")
        return in_fp8 & (self.fp8_scaling == FP8_SCALINGS.index("delayed"))

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> LayoutTable:
        """Table of these layouts, in order, without `layers_per_stage`.

        Raises SpecError for a pipeline whose schedule is not in `SCHEDULES`.
        """
        layouts = list(layouts)
        rows = [_row(layout) for layout in layouts]
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS)).T
        block_modes = {_block_modes(layout) for layout in layouts}
        assert len(layouts) == 1 or block_modes <= {()}, "blocks of their own are told of one layout at a time"
        return cls(*columns, modes=modes_of(_block_modes(layouts[0])) if len(layouts) == 1 else ())

    @classmethod
    def concatenate(cls, tables: Sequence[LayoutTable]) -> LayoutTable:
        joined: dict[str, Any] = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
        return cls(**joined, modes=tables[0].modes)

    def layout(self, index: int) -> Layout:
        """Row `index` as a layout."""
        row: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in COLUMNS}
        row |= {name: values[row[name]] for name, values in CHOICES.items()} | {name: bool(row[name]) for name in FLAGS}
        if row["dp_shard"] == (1 if row["zero_stage"] == 0 else row["dp"]):
            row["dp_shard"] = None
        if self.modes:
            alike = len(self.modes) == 1
            row |= {"recompute": self.modes[0]} if alike else {"recompute_blocks": blocks_text(self.modes)}
        reduce_itemsize = row.pop("reduce_itemsize")
        layout = Layout(**row)
        narrow = layout.master_dtype == "fp32" and reduce_itemsize == 2
        return replace(layout, reduce_dtype="bf16") if narrow else layout


def by_schedule(fact: Callable[[KnownSchedule], Any]) -> NDArray[Any]:
    """Array of a fact of every schedule, for indexing by the column `schedule`."""
    return np.array([fact(schedule) for schedule in SCHEDULES.values()])


def distinct(column: Column) -> Column:
    """Distinct values of a column of non-negative numbers; a single value as it is. (`np.unique` would import masked
    arrays.)"""
    return column if len(column) < 2 else np.flatnonzero(np.bincount(column.astype(np.intp)))


COLUMNS = tuple(field.name for field in fields(LayoutTable) if field.name != "modes")


def _block_modes(layout: Layout) -> tuple[str, ...]:
    """Recomputation of each block, or once for all blocks, if `RECOMPUTE` has no word for it."""
    return layout.recompute_blocks if layout.recompute in RECOMPUTE else (layout.recompute,)


def _row(layout: Layout) -> list[int]:
    schedule = layout.schedule if layout.pp > 1 or layout.schedule in SCHEDULES else USUAL  # no effect without a pipeline
    if schedule not in SCHEDULES:
        rule = f"is {schedule!r}, and a table of layouts has schedules known by name alone"
        raise mistake("layout.schedule", rule, f"Take {', '.join(SCHEDULES)}.")
    values = vars(layout) | {
        "dp_shard": layout.shard_size,
        "recompute": layout.recompute if layout.recompute in RECOMPUTE else "blocks",
        "reduce_itemsize": {"fp64": 8, "fp32": 4}.get(layout.gradient_reduce_dtype, 2),
        "tp_overlap": layout.tp_overlap and layout.tp > 1,
        "schedule": schedule,
    }
    return [CHOICES[name].index(values[name]) if name in CHOICES else int(values[name]) for name in COLUMNS]
