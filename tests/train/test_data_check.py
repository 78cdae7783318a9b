"""Data that are no longer what was prepared: seen before the first step, or meanwhile with nothing lost."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from train.small_runs import (
    MODEL,
    STEPS,
    at_step,
    curve,
    same,
    small_run,
    state,
    stop_at,
    train_here,
    train_ranks,
)

from ultrascale.checkpoint import load_full, newest_valid, save
from ultrascale.data.files import DataError
from ultrascale.data.indexed import ShardWriter, Written
from ultrascale.data.manifest import CorpusManifest, ShardRecord, TokenizerFacts, save_manifest
from ultrascale.data.preparing.verify import sample_of
from ultrascale.description.layout import Layout
from ultrascale.description.run import Data, Run, Source
from ultrascale.train.start import data_check

DP_2 = Layout(dp=2, zero_stage=2, micro_batch_size=2)
TOKENS = 50_000


def write_shard(prefix: Path, num_tokens: int, seed: int = 0) -> Written:
    writer = ShardWriter(prefix, "uint16")
    writer.add_documents(np.random.default_rng(seed).integers(0, MODEL.vocab_size, num_tokens), [50] * (num_tokens // 50))
    return writer.finish()


def prepare(folder: Path, *, seed: int = 0, sampled: bool = True) -> Path:
    """A prepared folder of two shards of 100 KB, as large as each other."""
    folder.mkdir()
    records = []
    for number, name in enumerate(("s0", "s1")):
        made = write_shard(folder / name, TOKENS, 2 * seed + number)
        sample = sample_of(folder / name) if sampled else ""
        records.append(ShardRecord(name, made.documents, made.tokens, made.bin_sha256, made.idx_sha256, sample))
    save_manifest(
        CorpusManifest("uint16", TokenizerFacts("tokenizer", MODEL.vocab_size, "<eod>", 0), tuple(records), {}), folder
    )
    return folder


def replace_all(folder: Path) -> None:
    tokens = np.fromfile(folder / "s1.bin", "<u2")
    ((tokens + 1) % MODEL.vocab_size).tofile(folder / "s1.bin")


def replace_one(folder: Path) -> None:
    """Between two blocks of every sample."""
    tokens = np.fromfile(folder / "s1.bin", "<u2")
    tokens[TOKENS // 2 + 700] ^= 1
    tokens.tofile(folder / "s1.bin")


def swap(folder: Path) -> None:
    for name, other in (("s0", "x"), ("s1", "s0"), ("x", "s1")):
        (folder / f"{name}.bin").rename(folder / f"{other}.bin")


def take_from_another(folder: Path) -> None:
    (prepare(folder.parent / "another", seed=1) / "s1.bin").replace(folder / "s1.bin")


def run_of(home: Path, **changes) -> Run:
    return small_run(home, data=Data(sources=(Source(str(home / "prepared")),)), **changes)


@pytest.fixture
def large(monkeypatch) -> None:
    """Nothing is small enough to be read whole before the first step."""
    monkeypatch.setattr(data_check, "AT_ONCE_BYTES", 0)


def wait_for_check(trainer) -> None:
    for thread in threading.enumerate():
        if thread.name == "data check":
            thread.join()


@pytest.mark.catalogue(44)
@pytest.mark.parametrize("change", [replace_all, replace_one, swap, take_from_another])
def test_small_data_changed_in_place_are_refused_before_the_next_step(home, change):
    run = run_of(home)
    prepare(home / "prepared")
    train_here(run, before_step=stop_at(4))
    change(home / "prepared")
    with pytest.raises(DataError, match=r"s[01]\.bin: has another checksum than the manifest says.*--allow-changes"):
        train_here(run)
    assert len(curve(run)) == 4
    assert train_here(run, allow_changes=True).steps_done == STEPS
    assert "training goes on (--allow-changes)" in (home / "small" / "log.txt").read_text()


@pytest.mark.catalogue(44)
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("change", [replace_all, swap, take_from_another])
def test_samples_of_large_data_are_compared_before_the_first_step(home, change):
    change(prepare(home / "prepared"))
    with pytest.raises(DataError, match=r"s[01]: does not hold what was prepared"):
        train_here(run_of(home))
    assert not (home / "small" / "metrics.jsonl").exists()


@pytest.mark.catalogue(44)
@pytest.mark.usefixtures("large")
def test_one_token_of_large_data_is_found_meanwhile_and_costs_no_step(home, monkeypatch):
    folder = prepare(home / "prepared")
    calm, run = run_of(home, name="calm", layout=DP_2), run_of(home, layout=DP_2)
    train_ranks(calm)
    replace_one(folder)
    compare, first_done = data_check.expect_whole, threading.Event()

    def after_the_first_step(*arguments) -> None:
        first_done.wait(60)
        compare(*arguments)

    def meanwhile(trainer) -> None:
        if trainer.steps_done == 1:
            first_done.set()
        if trainer.steps_done == 3:
            wait_for_check(trainer)

    with monkeypatch.context() as held:
        held.setattr(data_check, "expect_whole", after_the_first_step)
        outcomes = train_ranks(run, before_step=meanwhile)
    assert {outcome.get("error") for outcome in outcomes} == {"DataError"}
    assert "s1.bin: has another checksum" in outcomes[0]["text"] and outcomes[0]["text"] == outcomes[1]["text"]
    assert 0 < len(curve(run)) < STEPS
    replace_one(folder)
    assert [outcome.get("steps_done") for outcome in train_ranks(run)] == [STEPS] * 2
    assert [row[0] for row in curve(run)] == list(range(1, STEPS + 1))
    log = (home / "small" / "log.txt").read_text()
    assert "data: 128 KiB of 234 KiB compared with the manifests" in log


@pytest.mark.usefixtures("large")
def test_undisturbed_data_are_read_to_the_end_and_that_changes_no_bit(home, monkeypatch):
    prepare(home / "prepared", sampled=False)  # as an older release did
    train_here(run_of(home), before_step=at_step(3, wait_for_check))
    log = (home / "small" / "log.txt").read_text()
    assert "data: 0 B of 234 KiB compared with the manifests" in log
    assert "; checksums match those of data prepare" in log
    monkeypatch.undo()  # small enough again
    train_here(run_of(home, name="at-once"))
    assert same(state(run_of(home)), state(run_of(home, name="at-once")))


@pytest.mark.usefixtures("large")
def test_a_run_that_is_over_waits_for_no_more_of_its_data(home, monkeypatch):
    monkeypatch.setattr(data_check, "BYTES_PER_SECOND", 1)
    prepare(home / "prepared")
    started = time.monotonic()
    train_here(run_of(home))
    assert time.monotonic() - started < data_check.LEAVING_SECONDS * 10
    assert "data: no more than" in (home / "small" / "log.txt").read_text()


@pytest.mark.catalogue(44)
def test_one_token_of_a_prefix_without_a_manifest_is_found_at_the_next_start(home):
    write_shard(home / "tokens", 3_000_000)
    train_here(small_run(home), before_step=stop_at(4))
    with open(home / "tokens.bin", "r+b") as file:
        file.seek(3_000_000)
        file.write(bytes([(file.read(1)[0] + 1) % MODEL.vocab_size]))
    with pytest.raises(DataError, match="tokens: has changed since this run first read it"):
        train_here(small_run(home))


def test_a_checkpoint_of_an_older_release_with_fewer_samples_of_a_prefix_is_gone_on_from(home):
    train_here(small_run(home), before_step=stop_at(4))
    folder = newest_valid(home / "small" / "checkpoints")
    assert folder is not None
    tensors, facts = load_full(folder)
    assert "+" in facts["data"]
    save(folder.parent, 4, tensors, facts | {"data": facts["data"].partition("+")[0]})
    assert train_here(replace(small_run(home), steps=5)).steps_done == 5
