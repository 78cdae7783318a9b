"""A trace against the allocator of a real device: live bytes within 2 percent, reserved ones within 5."""

from __future__ import annotations

import pytest
import torch
from agree.traced import run_of

from ultrascale.parallel.mesh import Ranks
from ultrascale.spec.layout import Layout
from ultrascale.spec.model_presets import preset
from ultrascale.spec.run import Run
from ultrascale.trace.allocator import reserved_bytes
from ultrascale.trace.rank import EmptySequences, trace_rank
from ultrascale.train.trainer import Trainer

pytestmark = pytest.mark.gpu


def measured(run: Run) -> tuple[int, int]:
    """Most bytes allocated and reserved in the second step, of what this run took."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainer = Trainer(run, Ranks(0, 1, device), EmptySequences(run.batch.sequence_length, documents=2), draw_on_device=True)  # pyright: ignore[reportArgumentType]
    trainer.train_step()
    torch.cuda.reset_peak_memory_stats()
    trainer.train_step()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - held


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_trace_peaks_where_the_device_does(recompute: str) -> None:
    layout = Layout(precision="bf16", recompute=recompute, micro_batch_size=4)  # type: ignore[arg-type]
    run = run_of(preset("smollm2-135m"), layout, length=2048)
    allocated, reserved = measured(run)
    trace = trace_rank(run, 0)
    assert trace.peak_bytes(1) == pytest.approx(allocated, rel=0.02)
    assert reserved_bytes(trace) == pytest.approx(reserved, rel=0.05)
