"""torch.compile of each block under sharding and recomputation."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from torch._dynamo.utils import counters
from train.small_runs import at_step, curve, rows, same, small_run, state, stop_at, train_in_turn, train_ranks

from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Log, Optimizer
from ultrascale.train.trainer import Trainer


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def backend(request, compiled_by) -> None:
    """Graphs and gradients here; kernels of C++, which take ten seconds and more, at night, and in the other tests."""
    compiled_by(request.param)


def test_blocks_are_compiled_and_train_alike_under_zero_3_with_recomputation(home):
    layout = Layout(dp=2, zero_stage=3, micro_batch_size=2, recompute="full")
    eager = small_run(home, name="eager", steps=3, layout=layout, batch=Batch(sequence_length=11), optimizer=Optimizer())
    compiled = replace(eager, name="compiled", compile=True)

    def tell(trainer: Trainer) -> None:
        (home / f"{trainer.run.name}-{trainer.ranks.rank}").write_text(str(counters["stats"]["unique_graphs"]))

    for run in (eager, compiled):
        assert train_ranks(run, before_step=at_step(2, tell))[0]["steps_done"] == 3
    graphs = [int((home / f"{name}-{rank}").read_text()) for name in ("eager", "compiled") for rank in (0, 1)]
    # Ranks are forked with whatever this process has compiled before, so only the difference counts.
    assert graphs[0] == graphs[1] and min(graphs[2:]) > graphs[0]
    found, expected = (np.array(rows(run, "train/loss", "train/grad_norm")) for run in (compiled, eager))
    assert np.abs(found / expected - 1).max() < 1e-5


@pytest.mark.usefixtures("backend")
def test_a_compiled_run_goes_on_to_the_same_bits_with_its_memory_uncounted_and_told(home):
    whole = small_run(home, name="whole", compile=True, log=Log())
    stopped = replace(whole, name="stopped")
    assert whole.log.memory_steps > 2
    train_in_turn([(whole, None), (stopped, stop_at(2)), (stopped, None)])
    assert curve(stopped) == curve(whole) and same(state(stopped), state(whole))
    assert "memory is not counted: blocks are compiled" in (home / "whole" / "log.txt").read_text()
    assert not (home / "whole" / "memory.json").exists()


def test_one_process_that_compiles_nothing_never_loads_the_compiler(home):
    """A second of every start, and 100 MB."""
    file = home / "plain.toml"
    file.write_text(to_toml(small_run(home, name="plain", steps=2, optimizer=Optimizer(warmup_steps=0))))
    words = "import sys; from ultrascale.cli.main import main; sys.exit(main(sys.argv[1:]) or 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words, "train", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
