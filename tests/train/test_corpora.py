"""Corpora of one tokenizer, and a run folder that is enough to go on with."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from train.small_runs import MODEL, at_step, small_run, stop_at, train_here, train_ranks

from ultrascale.config.resolve import resolve
from ultrascale.data.preparing.prepare import Recipe, prepare
from ultrascale.data.tokenizer import train_tokenizer
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Data, Evaluation, Run, Source
from ultrascale.train.corpora import build_loader, vocabulary_notes
from ultrascale.train.folder.export import keep_tokenizer
from ultrascale.train.start.trained import open_trained

TEXT = "the model says what the model says, and what it says is in the text that it saw\n" * 40


@pytest.fixture
def run(home) -> Run:
    """Trains on `text` and `other`, folders made with tokenizers of 270 and 280 ids, as a test says."""
    (home / "text.txt").write_text(TEXT)
    for name, ids in (("text", 270), ("other", 280)):
        train_tokenizer([TEXT], ids).save(str(home / f"{name}.json"))
        prepare([home / "text.txt"], output=home / name, recipe=Recipe(tokenizer=home / f"{name}.json"), workers=1)
    model = replace(MODEL, vocab_size=280)
    return small_run(home, model=model, data=Data(sources=(Source(str(home / "text")),)))


def refused(run: Run) -> str:
    with pytest.raises(SpecError) as caught:
        train_here(run)
    assert not (Path(run.folder) / run.name / "metrics.jsonl").exists()
    return str(caught.value)


@pytest.mark.catalogue(59)
def test_a_held_out_corpus_of_another_tokenizer_is_refused_before_the_first_step(run, home):
    run = replace(run, data=replace(run.data, validation=(Source(str(home / "other")),)))
    assert f"{home / 'other'}: was prepared with another tokenizer than {home / 'text'}. Prepare all" in refused(run)


@pytest.mark.catalogue(59)
@pytest.mark.parametrize(
    "name, rule", [("missing.json", "missing.json is not there"), ("other.json", "is not the tokenizer that")]
)
def test_a_tokenizer_that_is_missing_or_not_the_data_s_is_refused_before_the_first_step(run, home, name, rule):
    told = refused(replace(run, data=replace(run.data, tokenizer=str(home / name))))
    assert told.startswith("data.tokenizer: ") and rule in told


def test_a_run_may_be_called_like_a_checkpoint(run, home):
    train_here(replace(run, name="step-2-cooldown"), before_step=stop_at(4))
    assert open_trained(home / "step-2-cooldown").steps_done == 4


def test_a_run_folder_is_enough_to_go_on_and_to_generate_from_any_folder(run, home, monkeypatch):
    monkeypatch.chdir(home)
    run = replace(run, data=replace(run.data, sources=(Source("text"),), tokenizer="text.json"))
    train_here(run, before_step=stop_at(4))
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    described = resolve(home / "small").run
    assert described.data == Data(sources=(Source(str(home / "text")),), tokenizer=str(home / "text.json"))
    assert train_here(described).steps_done == run.steps
    for gone in (home / "text.json", home / "text" / "tokenizer.json"):
        gone.unlink()
    (home / "small").rename(home / "moved")
    assert open_trained(home / "moved").tokenizer == home / "moved" / "tokenizer.json"


@pytest.mark.catalogue(58)
def test_data_cut_short_under_a_run_ends_it_with_the_file_s_name_and_not_by_sigbus(home):
    run = small_run(home, layout=Layout(dp=2, zero_stage=2, micro_batch_size=2))
    first, second = train_ranks(run, before_step=at_step(5, lambda trainer: os.truncate(home / "tokens.bin", 0)))
    assert first["error"] == second["error"] == "DataError"
    assert f"{home / 'tokens.bin'}: is 0 bytes, and was " in first["text"]


def test_a_vocabulary_far_larger_than_the_tokenizer_s_is_noted_once_with_both_numbers_and_the_keys(run, home):
    tokenizer = build_loader(run, run.data.sources).corpora[0].tokenizer
    assert tokenizer is not None
    ids = tokenizer.vocab_size
    wide = replace(run, name="wide", model=replace(MODEL, vocab_size=8 * ids), layout=Layout(dp=2), steps=2)
    train_ranks(wide)
    note = f"note: model.vocab_size = {8 * ids}, and the tokenizer of data.sources has {ids} ids: {7 * ids:,} rows of"
    assert (home / "wide" / "log.txt").read_text().count(note) == 1
    assert f"for a new run set model.vocab_size = {-(-ids // 128) * 128}." in (home / "wide" / "log.txt").read_text()


def test_a_run_says_how_often_it_reads_a_corpus_and_that_it_trains_on_what_it_is_measured_on(run, home):
    path, sequences = home / "text", sum(build_loader(run, run.data.sources).sequences_per_epoch)
    shutil.copytree(path, home / "copy")
    data = replace(run.data, validation=(Source(str(home / "copy")),))
    run = replace(run, data=data, evaluation=Evaluation(every_steps=1), batch=Batch(run.batch.sequence_length, 2 * sequences))
    train_here(replace(run, steps=3))
    log = (home / run.name / "log.txt").read_text()
    assert f"data: 3 steps read {path} 6.0 times\n" in log
    assert f"of {home / 'copy'} (evaluation.sequences), on which the run trains too\n" in log


def test_a_corpus_that_is_read_once_or_is_no_other_corpus_s_copy_is_not_noted(run, home):
    train_tokenizer([TEXT], 270).save(str(home / "text.json"))
    (home / "others.txt").write_text(TEXT[::-1])
    prepare([home / "others.txt"], output=home / "others", recipe=Recipe(tokenizer=home / "text.json"), workers=1)
    data = replace(run.data, validation=(Source(str(home / "others")),))
    sequences = sum(build_loader(run, run.data.sources).sequences_per_epoch)
    run = replace(run, data=data, evaluation=Evaluation(every_steps=1), batch=Batch(run.batch.sequence_length, sequences))
    train_here(replace(run, steps=1))
    log = (home / run.name / "log.txt").read_text()
    assert "times\n" not in log and "trains too" not in log and "val/loss: the mean over" in log


def test_a_vocabulary_padded_to_a_multiple_is_not_noted(run):
    loader = build_loader(run, run.data.sources)
    (corpus,) = loader.corpora
    manifest = corpus.manifest
    assert manifest is not None and manifest.tokenizer is not None
    tokenizer = manifest.tokenizer

    def notes(ids: int, rows: int, tp: int = 1) -> int:
        corpus.manifest = replace(manifest, tokenizer=replace(tokenizer, vocab_size=ids))
        return len(vocabulary_notes(replace(run, model=replace(MODEL, vocab_size=rows), layout=Layout(tp=tp)), loader))

    padded = [(50257, 50304), (50257, 51200), (151_643, 152_064), (128_000, 129_280), (257, 384), (300, 300)]
    assert [notes(*sizes) for sizes in padded] == [0] * len(padded)
    assert [notes(1024, 4096), notes(300, 2048), notes(300, 448), notes(300, 448, tp=2)] == [1, 1, 1, 0]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_runs_folder_keeps_the_chat_template_that_lies_beside_the_tokenizer_of_its_data(run, home, scheme):
    (home / "text" / "chat_template.jinja").write_text("{{ messages }}")
    run = replace(run, data=replace(run.data, sources=(Source(f"{scheme}{home / 'text'}"),)))
    kept = home / run.name
    kept.mkdir()
    keep_tokenizer(run)
    assert (kept / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (kept / "tokenizer.json").read_bytes() == (home / "text" / "tokenizer.json").read_bytes()
