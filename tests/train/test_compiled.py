"""A second start finds what the first compiled in the run's folder: told by the compiler's own counters."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches, fresh_cache
from train.small_runs import make_corpus, rows, small_run, train_here

from ultrascale.description.run import Batch, Data, Optimizer, Run, Source
from ultrascale.train.start.compiled import load_compiled, save_compiled


def start(run: Run, stop: int) -> dict[str, int]:
    """Train up to step `stop` in a compiler that remembers no graph; what it had to compile, and what it found. C++ that an
    earlier start compiled stays in the cache: it takes longest, and no counter tells of it."""
    torch._dynamo.reset()
    clear_caches()
    counters.clear()
    for graphs in ("fxgraph", "aotautograd"):
        shutil.rmtree(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / graphs, ignore_errors=True)
    train_here(replace(run, steps=stop), allow_changes=True)
    return {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit")}


@pytest.mark.timeout(900)  # one graph is compiled, which takes minutes where many share a machine
def test_a_run_that_goes_on_compiles_nothing_again_and_says_how_long_compiling_took(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(
        tmp_path, compile=True, batch=Batch(11, 2), data=Data((Source(str(tmp_path / "tokens")),), document_mask=False)
    )
    run = replace(run, optimizer=Optimizer())
    with fresh_cache():
        first, second = start(run, 1), start(run, 2)
    assert first == {"miss": 2, "hit": 0}  # one graph for all blocks, forward and backward
    assert second == {"miss": 0, "hit": 2}
    assert [row for (row,) in rows(run, "step")] == [1, 2]
    assert all(seconds > 0 for (seconds,) in rows(run, "perf/compile_s"))


def test_a_file_that_is_no_cache_and_one_that_is_not_there_are_passed_over(tmp_path):
    assert not load_compiled(tmp_path / "compiled.bin")
    (tmp_path / "compiled.bin").write_bytes(b"not what torch wrote")
    assert not load_compiled(tmp_path / "compiled.bin")


def test_what_cannot_be_kept_is_no_error(tmp_path, monkeypatch):
    kept = [(b"1", None), None]
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: kept.pop(0))
    assert not save_compiled(tmp_path / "no such folder" / "compiled.bin")
    assert not save_compiled(tmp_path / "compiled.bin") and not list(tmp_path.iterdir())
