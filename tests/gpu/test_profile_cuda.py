"""A profiled step, and the primer, on one CUDA device, without the command line and its packages: python -m pytest -m gpu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run, Source
from ultrascale.measure.step.spans import read_trace
from ultrascale.primer.run_lessons import run_lessons
from ultrascale.train.observers.profile import profile_run

pytestmark = pytest.mark.gpu
LLAMA = Model(
    vocab_size=512, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=1024,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    import numpy as np

    from ultrascale.data.indexed import ShardWriter

    folder = tmp_path_factory.mktemp("profile")
    writer = ShardWriter(folder / "tokens", "uint16")
    writer.add_documents(np.random.default_rng(0).integers(0, 512, 100_000), [1000] * 100)
    writer.finish()
    return folder


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_profiled_step_is_told_by_kernels_and_sums_to_the_step(corpus, tmp_path, compiled, recompute):
    run = Run(
        LLAMA, folder=str(tmp_path), device="cuda", compile=compiled,
        layout=Layout(micro_batch_size=4, precision="bf16", recompute=recompute), batch=Batch(1024, 8),
        data=Data(sources=(Source(str(corpus / "tokens")),), document_mask=False),
    )  # fmt: skip
    out = tmp_path / "out"
    found = profile_run(run, 4, 6, out, pictures=False)
    assert found is not None
    report = found.to_json()
    events = read_trace(out / "rank-0.json.gz")
    ahead = sorted(one.launched - one.start for one in events.kernels)  # a launch that the host was disturbed in ends late
    assert len(ahead) > 100 and ahead[int(0.98 * len(ahead))] <= 1e-4
    parts = report["by_category"]
    assert sum(parts.values()) == pytest.approx(report["step_seconds"])
    assert parts["matrix products"] > parts["attention"] > 0 and parts["optimizer"] > 0
    assert (parts["recomputation"] > 0) == (recompute == "full" and not compiled)
    assert sum(report["planned"].values()) > 0
    assert (out / "memory-rank-0.pickle").stat().st_size > 0


def test_every_kernel_of_the_primer_is_right_and_told_against_the_peak(capfd):
    assert run_lessons(as_json=True) == 0
    told = json.loads(capfd.readouterr().out)
    shares = {one["name"]: one["share"] for lesson in told["lessons"] for one in lesson["variants"]}
    assert told["all_right"] and 0 < shares["every 32. element"] < shares["neighbours"] < 1.1
    assert shares["row by row"] < shares["tiles of 128 x 128"] < 1
