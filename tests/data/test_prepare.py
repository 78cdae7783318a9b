"""Text to prepared folders: the result, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data.little_text import lines, recipe
from tokenizers import Tokenizer

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.data.preparing.inspect import verify_folder
from ultrascale.data.preparing.prepare import Progress, Recipe, prepare
from ultrascale.data.preparing.shards import is_held_out
from ultrascale.data.preparing.workers import run_tasks
from ultrascale.data.reading.documents import PIECE_BYTES
from ultrascale.data.tokenizer import train_tokenizer


def contents(folder):
    """Checksums of everything a preparation leaves."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def texts_of(folder):
    """Every document, decoded by the library itself."""
    corpus = Corpus(folder)
    decoder = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    documents = [corpus.document(number) for number in range(corpus.num_documents)]
    assert corpus.tokenizer is not None
    assert all(int(ids[-1]) == corpus.tokenizer.eod_id for ids in documents)
    return [decoder.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in documents]


def test_every_document_comes_back_in_order_with_its_end(tmp_path, source, tokenizer):
    made = prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1).manifest
    assert texts_of(tmp_path / "out") == lines()
    assert len(made.shards) > 5
    verify_folder(tmp_path / "out")


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path, source):
    made = Recipe(train_tokenizer=300, shard_bytes=2000, validation_fraction=0.2)
    for workers in (1, 3):
        prepare([source], output=tmp_path / str(workers), recipe=made, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert not [name for name in contents(tmp_path / "1") if "partial" in name or "unfinished" in name]


def test_held_out_documents_are_the_share_asked_for_and_nothing_is_lost(tmp_path, source, tokenizer):
    made = prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer, validation_fraction=0.2), workers=1)
    training, held_out = texts_of(tmp_path / "out"), texts_of(tmp_path / "out" / "validation")
    assert sorted(training + held_out) == sorted(lines())
    assert 50 < len(held_out) < 110
    assert made.validation is not None and made.validation.documents == len(held_out)


def test_a_hash_holds_out_its_share():
    assert abs(sum(is_held_out(f"file:{number}", 0.01) for number in range(100_000)) - 1000) < 130


def test_a_trained_tokenizer_sees_no_held_out_document(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(40):
        word = "zebra" if is_held_out(f"{number}.txt", 0.3) else "apple"
        (folder / f"{number}.txt").write_text(f"{word} " * 20)
    prepare([folder], output=tmp_path / "out", recipe=Recipe(train_tokenizer=262, validation_fraction=0.3), workers=1)
    vocabulary = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert "apple" in vocabulary and not any("z" in token and len(token) > 1 for token in vocabulary)


def test_a_run_that_fails_halfway_goes_on_to_the_undisturbed_result(tmp_path, source, tokenizer):
    prepare([source], output=tmp_path / "calm", recipe=recipe(tokenizer), workers=1)
    in_the_way = tmp_path / "out" / "shard-00004.bin"
    in_the_way.mkdir(parents=True)
    with pytest.raises(DataError, match=r"shard-00004\.bin\S*: cannot be written: Is a directory.*finished shards are kept"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)
    in_the_way.rmdir()
    made = sorted((tmp_path / "out").rglob("shard-*.bin"))
    kept = {path: path.stat().st_mtime_ns for path in made}
    prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")
    assert len(made) >= 4 and {path: path.stat().st_mtime_ns for path in made} == kept


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_half_shard(tmp_path, source, tokenizer):
    (source / "000.txt").write_text("many words " * 20_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"shard-00000\.bin: cannot be written: File too large"):
            prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer, shard_bytes=1 << 20), workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "tokenizer.json", "unfinished.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from ultrascale.data.preparing.prepare import Recipe, prepare
if __name__ == "__main__":
    def die_after_shards(progress):
        if len(list(Path(sys.argv[2]).glob("shard-*.json"))) >= int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
    recipe = Recipe(tokenizer=Path(sys.argv[3]), shard_bytes=20_000, validation_fraction=0.2)
    prepare([sys.argv[1]], output=sys.argv[2], recipe=recipe, workers=2, on_progress=die_after_shards)
"""
"""It kills itself amid its work: a test that looks from outside may come when all is done."""


def test_a_killed_run_leaves_no_process_and_goes_on_to_the_undisturbed_result(tmp_path, tokenizer):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text * 20}) + "\n" for text in lines(1000)))
    wanted = recipe(tokenizer, shard_bytes=20_000, validation_fraction=0.2)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    out = tmp_path / "out"
    for shards in (2, 8, 20):
        words = [sys.executable, str(script), str(folder), str(out), str(tokenizer), str(shards)]
        with subprocess.Popen(words, start_new_session=True) as run:
            assert run.wait(300) == -signal.SIGKILL
        assert len(list(out.glob("shard-*.json"))) >= shards
        deadline = time.monotonic() + 200
        while _group_lives(run.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _group_lives(run.pid)
    assert not (out / "manifest.json").exists()
    prepare([folder], output=out, recipe=wanted, workers=1)
    prepare([folder], output=tmp_path / "calm", recipe=wanted, workers=1)
    assert contents(out) == contents(tmp_path / "calm")


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_damaged_shard_of_a_finished_folder_is_made_anew(tmp_path, source, tokenizer):
    out = tmp_path / "out"
    prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    before = contents(out)
    (out / "shard-00001.bin").write_bytes((out / "shard-00001.bin").read_bytes()[:-2])
    (out / "shard-00002.idx").unlink()
    prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    assert contents(out) == before


def test_a_finished_folder_is_left_as_it_is(tmp_path, source, tokenizer):
    out = tmp_path / "out"
    prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    times = {path: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    assert {path: path.stat().st_mtime_ns for path in out.glob("shard-*")} == times


def add_bad_lines(source):
    with open(source / "many.jsonl", "a") as file:
        file.write('{"text": ""}\n{"text": null}\n{broken\n\n')


@pytest.mark.catalogue(55)
def test_bad_documents_are_counted_by_reason_and_the_rest_is_kept(tmp_path, source, tokenizer):
    add_bad_lines(source)
    (source / "latin.txt").write_bytes("é".encode("latin-1"))
    for workers in (1, 2):
        out = tmp_path / str(workers)
        made = prepare([source], output=out, recipe=recipe(tokenizer, on_bad="skip"), workers=workers).manifest
        assert made.skipped == {"broken_json": 1, "empty": 1, "empty_line": 1, "invalid_utf8": 1, "not_text": 1}
        assert json.loads((out / "manifest.json").read_text())["skipped"] == made.skipped
        assert texts_of(out) == lines()


@pytest.mark.catalogue(55)
def test_a_bad_document_ends_the_run_and_a_repair_goes_on_with_what_is_finished(tmp_path, source, tokenizer):
    for name in ("zz.jsonl",):
        (source / name).write_text('{"text": "x"}\n{broken\n')
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"zz\.jsonl:2 \(byte 14\): is not JSON"):
        prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-*.bin")}
    assert len(kept) > 5
    (source / "zz.jsonl").write_text('{"text": "x"}\n{"text": "repaired"}\n')
    prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    assert texts_of(out) == [*lines(), "x", "repaired"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_after_a_failure_the_same_command_may_skip_and_a_strict_one_fails_again(tmp_path, source, tokenizer):
    add_bad_lines(source)
    out = tmp_path / "out"
    for on_bad in ("fail", "skip", "fail"):
        if on_bad == "skip":
            assert prepare([source], output=out, recipe=recipe(tokenizer, on_bad=on_bad), workers=1).manifest.documents == 400
        else:
            with pytest.raises(DataError, match=r"many\.jsonl:281 "):
                prepare([source], output=out, recipe=recipe(tokenizer, on_bad=on_bad), workers=1)


def test_a_long_bad_document_is_taken_back(tmp_path, tokenizer):
    """Its first piece, and several windows of it, are good."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("a good one " * 300)
    (folder / "b.txt").write_bytes(b"a bad one " * (PIECE_BYTES // 8) + b"\xff")
    (folder / "c.txt").write_text("another " * 300)
    made = prepare([folder], output=tmp_path / "out", recipe=Recipe(tokenizer=tokenizer, on_bad="skip"), workers=1).manifest
    assert texts_of(tmp_path / "out") == ["a good one " * 300, "another " * 300]
    assert made.skipped == {"invalid_utf8": 1}
    verify_folder(tmp_path / "out")


@pytest.mark.catalogue(56)
def test_a_million_documents_of_one_character_are_counted_right(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 100_000)
    made = prepare([tmp_path / "x.jsonl"], output=tmp_path / "out", recipe=Recipe(tokenizer=tokenizer), workers=1).manifest
    assert (made.documents, made.tokens) == (100_000, 200_000)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda source, wanted: wanted | {"field": "body"}, r"--field: is 'body', but .* was begun with 'text'"),
        (lambda source, wanted: wanted | {"shard_bytes": 3000}, r"--shard-bytes: is 3000, but .* was begun with 2000"),
        (lambda source, wanted: (source / "new.txt").write_text("x") and wanted, r"new\.txt: is new or has changed"),
        (lambda source, wanted: (source / "00.txt").write_text("y") and wanted, r"00\.txt: is new or has changed"),
        (lambda source, wanted: (source / "00.txt").unlink() or wanted, r"00\.txt: is no longer among the inputs"),
        (lambda source, wanted: _as_if_begun_with_hidden(source) or wanted, r"\.x\.txt: is no .* if --glob does too"),
    ],
)
def test_another_request_for_a_prepared_folder_is_refused(tmp_path, source, tokenizer, change, expected):
    wanted = {"tokenizer": tokenizer, "shard_bytes": 2000}
    prepare([source], output=tmp_path / "out", recipe=Recipe(**wanted), workers=1)
    with pytest.raises(DataError, match=expected):
        prepare([source], output=tmp_path / "out", recipe=Recipe(**change(source, wanted)), workers=1)


def _as_if_begun_with_hidden(source: Path) -> None:
    """As older releases did, which read hidden files."""
    manifest = source.parent / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("/00.txt", "/.x.txt"))
    (source / "00.txt").rename(source / ".x.txt")


def test_a_folder_without_a_finished_shard_is_begun_anew_by_a_corrected_request(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 9)
    with pytest.raises(DataError, match="has no field 'txt'"):
        prepare([tmp_path / "a.jsonl"], output=tmp_path / "out", recipe=Recipe(train_tokenizer=280, field="txt"), workers=1)
    assert (tmp_path / "out" / "unfinished.json").exists()
    (tmp_path / "b.txt").write_text("other words")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    prepare(inputs, output=tmp_path / "out", recipe=Recipe(train_tokenizer=270), workers=1)
    prepare(inputs, output=tmp_path / "calm", recipe=Recipe(train_tokenizer=270), workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


def test_a_request_with_a_setting_that_this_release_does_not_know_is_refused(tmp_path, source, tokenizer):
    prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["request"]["deduplicate"] = True
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"--deduplicate: is None, but .* was begun with True"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)


@pytest.mark.catalogue(59)
def test_another_tokenizer_for_a_prepared_folder_is_refused(tmp_path, source, tokenizer):
    prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)
    train_tokenizer(["other words"], 260).save(str(tmp_path / "other.json"))
    with pytest.raises(DataError, match=r"other\.json: is not the tokenizer that .* was begun with"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tmp_path / "other.json"), workers=1)
    (tmp_path / "out" / "tokenizer.json").write_bytes((tmp_path / "other.json").read_bytes())
    with pytest.raises(DataError, match=r"out/tokenizer\.json: is not the tokenizer this folder was begun with"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokenizer": None}, "exactly one is needed"),
        ({"train_tokenizer": 300}, "exactly one is needed"),
        ({"validation_fraction": 1.0}, r"--validation-fraction: must be in \[0, 1\), is 1.0"),
        ({"shard_bytes": 0}, "--shard-bytes: must be at least 1, is 0"),
        ({"glob": "*.none"}, r"holds no file that matches '\*\.none'"),
        ({"field": "body"}, r"has no field 'body', only 'text'"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, source, tokenizer, options, expected):
    with pytest.raises(DataError, match=expected):
        prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer, **options), workers=1)


@pytest.mark.parametrize(("fraction", "share"), [(1e-9, "none"), (1 - 1e-9, "all")])
def test_a_share_that_holds_out_none_or_all_is_refused_before_anything_is_written(tmp_path, source, tokenizer, fraction, share):
    count = len([line for path in source.iterdir() for line in path.read_text().splitlines()])
    with pytest.raises(DataError, match=rf"--validation-fraction: is {fraction}, which holds out {share} of {count} documents"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer, validation_fraction=fraction), workers=1)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_not_there_is_told_before_anything_is_written(tmp_path, source):
    with pytest.raises(DataError, match=r"none\.json: is not there"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tmp_path / "none.json"), workers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.catalogue(56)
def test_no_documents_is_an_error_that_says_what_was_skipped(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"no document was left for it; 1 were skipped: \{'broken_json': 1\}") as told:
        prepare([tmp_path / "x.jsonl"], output=tmp_path / "out", recipe=recipe(tokenizer, on_bad="skip"), workers=1)
    assert f"Remove {tmp_path / 'out'}, then" in str(told.value)  # else what was begun refuses another recipe


def test_an_output_inside_the_input_is_refused(tmp_path, source, tokenizer):
    (source / "out").mkdir()
    (source / "out" / "x.txt").write_text("x")
    with pytest.raises(DataError, match="lies in the output folder"):
        prepare([source], output=source / "out", recipe=recipe(tokenizer), workers=1)


def test_an_output_that_cannot_be_made_is_refused(tmp_path, source, tokenizer):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"file: is a file, and text is prepared into a folder"):
        prepare([source], output=tmp_path / "file" / "out", recipe=recipe(tokenizer), workers=1)


def test_an_output_that_is_a_file_is_called_one(tmp_path, source, tokenizer):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"file: is a file, and text is prepared into a folder\. Choose another --output"):
        prepare([source, tmp_path / "file"], output=tmp_path / "file", recipe=recipe(tokenizer), workers=1)


def test_two_preparations_of_one_folder_do_not_mix(tmp_path, source, tokenizer):
    refused = []

    def again(progress):
        if not refused:
            with pytest.raises(DataError, match="is being prepared by another process") as error:
                prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)
            refused.append(error)

    prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1, on_progress=again)
    assert len(refused) == 1


@pytest.mark.catalogue(58)
def test_an_input_that_changes_while_it_is_read_is_an_error(tmp_path, source, tokenizer):
    def change(progress):
        if progress.stage == "shards":
            (source / "00.txt").write_text("changed while being read")

    with pytest.raises(DataError, match=r"00\.txt: changed while it was read"):
        prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1, on_progress=change)


def test_progress_ends_at_all_bytes_and_all_tokens(tmp_path, source, tokenizer):
    seen: list[Progress] = []
    made = prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1, on_progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == sum(path.stat().st_size for path in source.iterdir())
    assert seen[-1].tokens == made.manifest.tokens


def _die(task, report):
    os._exit(7)


def test_a_worker_that_dies_is_an_error_with_its_exit_code():
    with pytest.raises(DataError, match="a worker process ended with exit code 7"):
        run_tasks([1, 2], _die, workers=2, report=lambda *numbers: None)


def _negated(task, report):
    return -task


AFTER_A_LAUNCHER = """
import sys
from ultrascale.launch.warm import prepare
prepare("ultrascale.data.preparing.workers", warm=True)
from ultrascale.data.preparing.workers import run_tasks
from data.test_prepare import _negated
print(run_tasks([1, 2], _negated, workers=2, report=print))
"""


def test_workers_end_in_a_process_that_has_trained():
    """Its fork server is the ranks', and passes on that the signals of a batch system are blocked."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_LAUNCHER], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout == "[-1, -2]\n", done.stderr
