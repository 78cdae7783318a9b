"""On what, and at which sizes, kernels are timed. To be imported before triton is: without CUDA that is interpreted."""

from __future__ import annotations

import os

import torch
from torch import Tensor

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float32
ROWS, HIDDEN, FFN, HEADS, KEY_HEADS, HEAD_DIM, VOCAB = (8192, 4096, 14336, 32, 8, 128, 128_256) if HAS_CUDA else (
    16, 64, 96, 4, 2, 16, 300
)  # fmt: skip
"""Llama 3 8B at 8,192 tokens."""
LENGTH = ROWS
NUM_EXPERTS = 8
NUM_DOCUMENTS = 8


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers for the same seed."""
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(DTYPE)
