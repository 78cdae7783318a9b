"""Which attention core can do what, without running any: told before a run starts, and why one is left out of a contest.

core      plain causal                            documents, sliding windows
sdpa      torch's attention, which chooses        under a mask of S x S numbers
varlen    as sdpa                                 flash attention told where documents end
cudnn     cuDNN's attention, through torch        -
flex      FlexAttention                           FlexAttention
flash-N   FlashAttention N of its package         the same, told where documents end
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from ultrascale.spec.layout import NARROW, AttentionCore, Precision
from ultrascale.spec.model import Model
from ultrascale.spec.run import Run

FLASH_HEAD_DIM = 256
"""The widest head that flash attention knows."""
CONTESTANTS: tuple[AttentionCore, ...] = ("sdpa", "varlen", "cudnn", "flex", "flash-2", "flash-3", "flash-4")
"""In the order in which ties are decided: torch's own choice first."""

PACKAGED = ("flash-2", "flash-3", "flash-4")


class Wanted(NamedTuple):
    """What a run asks of its attention core."""

    device: Literal["cpu", "cuda"]
    precision: Precision
    windows: tuple[int | None, ...]
    """Of all layers; None: the whole sequence. A window that is no narrower than the sequence is none."""
    documents: bool = False
    head_dim: int = 64
    sinks: bool = False
    cp: int = 1
    deterministic: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether some layer sees less than all earlier tokens."""
        return self.documents or any(window is not None for window in self.windows)

    @property
    def is_narrow(self) -> bool:
        """Whether attention computes in 16 bits; fp8 and narrower are dtypes of other products."""
        return self.precision in ("bf16", "fp16", *NARROW)


@lru_cache(maxsize=256)
def windows_of(model: Model, sequence_length: int) -> tuple[int | None, ...]:
    """The window of each layer; None where it is as long as the sequence."""
    found = (model.window(layer) for layer in range(model.num_hidden_layers))
    return tuple(None if window is None or window >= sequence_length else window for window in found)


def attention_wanted(run: Run, device: str) -> Wanted:
    """What `run` asks of its attention core on `device`, which counts as CUDA unless it is the CPU."""
    model, layout = run.model, run.layout
    return Wanted(
        "cpu" if device == "cpu" else "cuda", layout.precision, windows_of(model, run.batch.sequence_length),
        documents=run.data.document_mask, head_dim=model.head_dim, sinks=model.attention_sinks, cp=layout.cp,
        deterministic=run.deterministic,
    )  # fmt: skip


def why_not(core: AttentionCore, wanted: Wanted) -> str:
    """Why `core` cannot do what is wanted; empty if it can."""
    return next(_reasons(core, wanted), "")


def _reasons(core: AttentionCore, wanted: Wanted) -> Iterator[str]:
    on_cuda = wanted.device == "cuda"
    if core in ("varlen", "flex", "cudnn") and wanted.cp > 1:
        yield f"does not go with layout.cp = {wanted.cp}, which has masks of its own, block by block"
    if core in PACKAGED and not on_cuda:
        yield "is for CUDA"
    is_flash = core in PACKAGED or (core == "varlen" and on_cuda)
    if is_flash and not wanted.is_narrow:
        yield f"is flash attention, which knows 16 bits only; layout.precision is {wanted.precision}"
    if is_flash and wanted.head_dim > FLASH_HEAD_DIM:
        yield f"is flash attention, which knows heads of up to {FLASH_HEAD_DIM}, not of {wanted.head_dim}"
    if core == "flex" and not on_cuda:
        yield "cannot be compiled for training on the CPU, and uncompiled makes all scores"
    if core == "flex" and wanted.precision == "fp64":
        yield "knows no fp64"
    if core == "cudnn":
        yield from _reasons_of_cudnn(wanted)


def _reasons_of_cudnn(wanted: Wanted) -> Iterator[str]:
    if wanted.device == "cpu":
        yield "is for CUDA"
    if not wanted.is_narrow:
        yield f"knows 16 bits only; layout.precision is {wanted.precision}"
    if wanted.is_masked:
        yield "knows neither documents nor sliding windows without a mask of S x S numbers"
    if wanted.sinks:
        yield "knows no attention sinks"
    if wanted.deterministic:
        yield "is not deterministic in its backward pass"
