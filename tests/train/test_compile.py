"""torch.compile of each block under sharding and recomputation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from train.small_runs import rows, small_run, train_ranks

from ultrascale.spec.layout import Layout
from ultrascale.spec.run import Batch, Optimizer


def test_compiled_blocks_train_alike_under_zero_3_with_recomputation(home):
    layout = Layout(dp=2, zero_stage=3, micro_batch_size=2, recompute="full")
    eager = small_run(home, name="eager", steps=3, layout=layout, batch=Batch(sequence_length=11), optimizer=Optimizer())
    compiled = replace(eager, name="compiled", compile=True)
    for run in (eager, compiled):
        assert train_ranks(run)[0]["steps_done"] == 3
    found, expected = (np.array(rows(run, "train/loss", "train/grad_norm")) for run in (compiled, eager))
    assert np.abs(found / expected - 1).max() < 1e-5
