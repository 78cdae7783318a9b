"""A trace against the allocator of a real device: what is asked of it, what blocks hold (2 percent), what it reserves (5)."""

from __future__ import annotations

import pytest
import torch
from agree.traced import run_of

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.trace.allocator import allocated_bytes, reserved_bytes
from ultrascale.trace.rank import EmptySequences, trace_rank
from ultrascale.train.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def workspaces() -> None:
    """cuBLAS takes 32 MiB for each thread that multiplies, once and for good: the main one, and the one of backward passes."""
    factor = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (factor @ factor).sum().backward()


def measured(run: Run) -> tuple[int, int, int]:
    """Most bytes requested, allocated and reserved in the second step, of what this run took."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    trainer = Trainer(run, Ranks(0, 1, device), EmptySequences(run.batch.sequence_length, documents=2), draw_on_device=True)  # pyright: ignore[reportArgumentType]
    trainer.train_step()
    torch.cuda.reset_peak_memory_stats()
    trainer.train_step()
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - requested
    return most, torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - held


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_trace_peaks_where_the_device_does(recompute: str) -> None:
    layout = Layout(precision="bf16", recompute=recompute, micro_batch_size=4)  # type: ignore[arg-type]
    run = run_of(preset("smollm2-135m"), layout, length=2048)
    requested, allocated, reserved = measured(run)
    trace = trace_rank(run, 0)
    assert trace.peak_bytes(1) == pytest.approx(requested, rel=0.002)
    assert allocated_bytes(trace) == pytest.approx(allocated, rel=0.02)
    assert reserved_bytes(trace) == pytest.approx(reserved, rel=0.05)
