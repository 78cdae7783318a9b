"""Capabilities of attention cores, known without running them: used for error messages before a run starts, and to select the
kernels to time.

core      plain causal                            documents, sliding windows
sdpa      PyTorch's attention, which chooses      with a mask of S x S elements
varlen    as sdpa                                 flash attention with document boundaries
cudnn     cuDNN's attention, through PyTorch      -
flex      FlexAttention                           FlexAttention
flash-N   FlashAttention N of its package         the same, with document boundaries
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW, AttentionCore, Precision
from ultrascale.description.run import Run

FLASH_HEAD_DIM = 256
"""Largest head dimension that flash attention supports."""
CANDIDATE_CORES: tuple[AttentionCore, ...] = ("sdpa", "varlen", "cudnn", "flex", "flash-2", "flash-3", "flash-4")
"""Candidates in the order in which ties are broken: PyTorch's default first."""

FLASH_PACKAGES = ("flash-2", "flash-3", "flash-4")


class CoreRequirements(NamedTuple):
    """Requirements of a run on its attention core."""

    device: Literal["cpu", "cuda"]
    precision: Precision
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None: the whole sequence, or a window at least as long."""
    documents: bool = False
    head_dim: int = 64
    sinks: bool = False
    cp: int = 1
    deterministic: bool = False

    @property
    def is_masked(self) -> bool:
        """True if some token attends to fewer than all earlier tokens: a document mask, or a sliding window."""
        return self.documents or any(window is not None for window in self.windows)

    @property
    def is_narrow(self) -> bool:
        """True if attention computes in 16 bits; fp8 and narrower precisions count too, since they apply to other GEMMs
        only."""
        return self.precision in ("bf16", "fp16", *NARROW)


@lru_cache(maxsize=256)
def windows_of(model: Model, sequence_length: int) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens; None if it is as long as the sequence."""
    windows = (model.window(layer) for layer in range(model.num_hidden_layers))
    return tuple(None if window is None or window >= sequence_length else window for window in windows)


def core_requirements(run: Run, device: str) -> CoreRequirements:
    """Requirements of `run` on its attention core on `device`; every device but the CPU counts as CUDA."""
    model, layout = run.model, run.layout
    return CoreRequirements(
        "cpu" if device == "cpu" else "cuda", layout.precision, windows_of(model, run.batch.sequence_length),
        documents=run.data.document_mask, head_dim=model.head_dim, sinks=model.attention_sinks, cp=layout.cp,
        deterministic=run.deterministic,
    )  # fmt: skip


def unsupported_reason(core: AttentionCore, wanted: CoreRequirements) -> str:
    """Reason why `core` does not meet the requirements; empty if it does."""
    return next(_reasons(core, wanted), "")


def _reasons(core: AttentionCore, wanted: CoreRequirements) -> Iterator[str]:
    on_cuda = wanted.device == "cuda"
    if core in ("varlen", "flex", "cudnn") and wanted.cp > 1:
        yield f"does not go with layout.cp = {wanted.cp}, which has masks of its own, block by block"
    if core in FLASH_PACKAGES and not on_cuda:
        yield "is for CUDA"
    is_flash = core in FLASH_PACKAGES or (core == "varlen" and on_cuda)
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


def _reasons_of_cudnn(wanted: CoreRequirements) -> Iterator[str]:
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
