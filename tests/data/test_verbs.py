"""`ultrascale data` on the command line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
from api.validator import wrong
from tokenizers import Tokenizer, models

from ultrascale.cli.data import command
from ultrascale.description.problems import SpecError


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 5)
    return folder


def arguments(text, *more):
    return ["prepare", str(text), "--output", str(text.parent / "out"), "--train-tokenizer", "300", "--workers", "1", *more]


def test_prepare_and_inspect_print_what_was_made(text, capsys):
    assert command(arguments(text, "--glob", "*.py", "--validation-fraction", "0.2")) == 0
    assert "in 2" in capsys.readouterr().out  # 24 documents or so of 30
    assert command(["inspect", str(text.parent / "out"), "--sequence", "1", "--sequence-length", "50", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "return x" in shown and "verified" in shown and "a document begins" in shown
    assert command(["inspect", str(text.parent / "out")]) == 0
    shown = capsys.readouterr().out
    assert "document 0 begins" in shown and "def " in shown


def test_control_characters_emoji_names_and_markup_of_a_text_are_printed_as_text(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\x1b]0;owned\x07 \x9b31m \u202e :smile: [bold]x[/bold] [/none]\ta\nb\n" * 9)
    out = tmp_path / "out"
    assert command(["prepare", str(tmp_path / "a.txt"), "--output", str(out), "--train-tokenizer", "300"]) == 0
    for more in ([], ["--document", "0"], ["--sequence", "0", "--sequence-length", "64"]):
        capsys.readouterr()
        assert command(["inspect", str(out), *more]) == 0
        shown = capsys.readouterr().out
        assert "\\x1b]0;owned\\x07 \\x9b31m \\u202e :smile: [bold]x[/bold] [/none]" in shown and "a\nb\n" in shown
        assert not set(shown) & set("\x1b\x07\x9b\u202e")


def test_a_damaged_tokenizer_leaves_the_facts_and_the_ids(text, capsys):
    assert command(arguments(text)) == 0
    tokenizer = text.parent / "out" / "tokenizer.json"
    tokenizer.write_text("{")
    capsys.readouterr()
    assert command(["inspect", str(text.parent / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "30 documents" in shown and "shard-00000" in shown and f"cannot be decoded: {tokenizer}: is not a" in shown
    assert command(["inspect", str(text.parent / "out"), "--document", "0"]) == 1


def test_a_readme_beside_lines_of_json_is_told_to_be_a_document(text, capsys):
    (text / "lines.jsonl").write_text('{"text": "a line"}\n')
    (text / "README.md").write_text("about the lines")
    assert command(arguments(text, "--glob", "[lR]*")) == 0
    assert f"as one document: 1 file, first {text / 'README.md'}" in capsys.readouterr().out


def test_held_out_text_that_no_run_finds_by_itself_is_told_with_its_folder_and_key(text, tmp_path, capsys):
    assert command(arguments(text, "--validation-fraction", "0.2", "--validation", str(tmp_path / "held"))) == 0
    assert f"in {tmp_path / 'held'}: train reads it if data.validation names it" in capsys.readouterr().out
    usual = str(text.parent / "out" / "validation")
    assert command(arguments(text, "--validation-fraction", "0.2", "--validation", usual)) == 0
    assert "if data.validation names it" not in capsys.readouterr().out


def test_json_output_is_json_with_the_counts(text, capsys):
    assert command(arguments(text, "--json")) == 0
    made = json.loads(capsys.readouterr().out)
    assert command(["inspect", str(text.parent / "out"), "--document", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert made["documents"] == shown["documents"] == 30
    assert wrong(made) == wrong(shown) == []
    assert (
        command(["inspect", str(text.parent / "out"), "--sequence", "1", "--sequence-length", "50", "--verify", "--json"]) == 0
    )
    assert wrong(json.loads(capsys.readouterr().out)) == []
    assert shown["document"]["text"].startswith("def f11(x)")  # fourth in order of name: 0, 1, 10, 11


def test_the_help_names_every_format_that_is_read(capsys):
    assert command(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("text", "JSONL", ".gz", ".zst", "Parquet", "CSV", "TSV", "Arrow", "WebDataset", "MDS"))


def test_skipped_documents_are_printed_with_the_first_of_each_reason(text, capsys):
    (text / "bad.py").write_bytes(b"\xff")
    assert command(arguments(text, "--on-bad", "skip")) == 0
    assert f"skipped 1 invalid_utf8, first {text / 'bad.py'}" in capsys.readouterr().out


def test_a_tokenizer_that_loses_characters_is_told(text, tmp_path, capsys):
    Tokenizer(models.BPE({"<|endoftext|>": 0, "e": 1, "f": 2}, [])).save(str(tmp_path / "few.json"))
    assert command(["prepare", str(text), "--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "few.json")]) == 0
    assert "no tokens for rare characters, such as \N{SNOWMAN}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (["--glob", "*.none"], 2, "holds no file that matches"),
        (["--tokenizer", "tokenizer.json"], 2, "exactly one is needed"),
        (["--validation", "held"], 2, "has nothing to hold without --validation-fraction"),
        (["--workers", "0"], 2, "must be at least 1, is 0"),
    ],
)
def test_mistakes_end_with_their_exit_code_and_a_remedy(text, capsys, more, code, expected):
    assert command(arguments(text, *more)) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "prepare none --train-tokenizer 300 --output out",
        "prepare good.txt --tokenizer none --output out",
        "prepare good.txt --train-tokenizer 300 --output good.txt",
        "prepare good.txt --train-tokenizer 300 --output good.txt/out",
        "inspect none", "inspect empty", "inspect good.txt", "inspect made --document 99", "inspect made --sequence -1",
    ],
)  # fmt: skip
def test_a_path_that_is_not_there_or_of_another_kind_is_a_wrong_command_as_of_other_verbs(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "good.txt").write_text("good")
    assert command(["prepare", "good.txt", "--train-tokenizer", "300", "--output", "made"]) == 0
    assert command(words.split()) == 2
    told = capsys.readouterr().err
    assert "invalid arguments" in told and "made has" not in told and not (tmp_path / "out").exists()


def test_what_a_file_holds_is_no_fault_of_the_command(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    assert command(["prepare", str(tmp_path / "bad.txt"), "--train-tokenizer", "300", "--output", str(tmp_path / "out")]) == 1


def test_an_array_of_json_is_told_with_the_command_that_makes_lines_of_it(tmp_path, capsys):
    words = ["--train-tokenizer", "300", "--output", str(tmp_path / "out")]
    for text in ('[\n {"text": "a"},\n {"text": "b"}\n]\n', '[{"text": "a"}, {"text": "b"}]'):
        (tmp_path / "a.json").write_text(text)
        assert command(["prepare", str(tmp_path / "a.json"), *words]) == 1
        told = capsys.readouterr().err
        assert "is a JSON array" in told and f"jq -c '.[]' {tmp_path / 'a.json'} > {tmp_path / 'a.jsonl'}" in told


def test_a_pipe_is_refused_since_it_has_no_name_that_tells_the_format(tmp_path, capsys):
    words = ["--train-tokenizer", "300", "--output", str(tmp_path / "out")]
    reading, writing = os.pipe()
    os.write(writing, b'{"text": "a"}\n')
    os.close(writing)
    with open(tmp_path / "a.jsonl", "w") as file:
        for name in (f"/dev/fd/{reading}", f"/dev/fd/{file.fileno()}", os.devnull):
            assert command(["prepare", name, *words]) == 2
            assert f"{name}\n" in (told := capsys.readouterr().err) and "is a device or a stream" in told
    os.close(reading)
    assert not (tmp_path / "out").exists()


def test_without_a_terminal_progress_is_a_line_now_and_then(text, capsys, monkeypatch):
    assert command(arguments(text)) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("ultrascale.cli.data.LINE_SECONDS", 0.0)
    assert command([*arguments(text)[:3], str(text.parent / "again"), *arguments(text)[4:]]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("tokenizer: 0 B of") and told[-1].startswith("tokenizing: ") and told[-1].endswith(" tokens")


def test_several_wrong_options_are_told_together(text, capsys):
    words = ["--train-tokenizer", "10000000000", "--workers", "0", "--validation", "held", "--shard-bytes", "0"]
    assert command(arguments(text, *words)) == 2
    told = capsys.readouterr().err
    expected = ("must be at most 1,000,000, is 10000000000", "  --workers\n", "  --validation\n", "  --shard-bytes\n")
    assert [part for part in expected if part not in told] == []
    assert not (text.parent / "out").exists()


def test_a_tokenizer_smaller_than_asked_for_says_how_many_ids_it_has(text, capsys):
    assert command(arguments(text, "--train-tokenizer", "5000")) == 0
    told = capsys.readouterr().out
    ids = json.loads((text.parent / "out" / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    assert f"the tokenizer has {ids} ids, fewer than the 5,000 asked for" in told


def test_an_unknown_option_is_bad_usage(text):
    with pytest.raises(SpecError, match="Did you mean --workers"):
        command(arguments(text, "--workerz", "1"))


def test_no_verb_and_an_unknown_verb_are_bad_usage(capsys):
    assert [command([]), command(["--help"])] == [2, 0]
    with pytest.raises(SpecError, match=r"there is no verb `data preparing`\. Did you mean prepare"):
        command(["preparing"])


def test_a_terminal_shows_a_progress_bar(text):
    code = "import sys; from ultrascale.cli.data import command; sys.exit(command(sys.argv[1:]))"
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", code, *arguments(text)],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += (piece := os.read(ours, 65536))
        except OSError:  # the other end is closed
            break
        if not piece:
            break
    os.close(ours)
    assert run.wait() == 0
    assert b"tokenizing" in shown and b"tokens" in shown
