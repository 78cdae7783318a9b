"""Rows and files that nobody should write: each is told in a sentence, and takes no other row with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan.test_validate import LLAMA, RESULTS, config, write

from ultrascale.cli.main import main
from ultrascale.description.problems import SpecError
from ultrascale.validation import predict
from ultrascale.validation.predict import predict_rows
from ultrascale.validation.rows import read_rows
from ultrascale.validation.setups import setup_of


def test_predictions_never_replace_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows, other = write(tmp_path / "rows.csv", LLAMA | RESULTS), tmp_path / "notes.txt"
    other.write_text("kept")
    before = rows.read_text()
    for file in (rows, other):
        assert main(["validate", str(rows), "--out", str(file)]) == 2
        assert f"{file} is there already" in capsys.readouterr().err
    assert (rows.read_text(), other.read_text()) == (before, "kept")
    (tmp_path / "empty.csv").touch()
    assert main(["validate", str(rows), "--out", str(tmp_path / "empty.csv")]) == 0  # mktemp leaves one: nothing is lost


def test_missing_paths_are_mistakes_told_before_anything_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = write(tmp_path / "rows.csv", LLAMA)
    assert main(["validate", str(rows), "--out", str(tmp_path / "none" / "out.csv")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["validate", str(tmp_path / "absent.csv")]) == 2
    assert "cannot be read: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"n_gpus": "0", "dp": "0"}, "n_gpus must be at least 1, found 0; dp must be at least 1"),
        ({"n_gpus": "", "dp": "0"}, "dp must be at least 1"),
        ({"seq_len": "0"}, "seq_len must be at least 1"),
        ({"layers": "0"}, "layers must be at least 1"),
        ({"global_batch": "99999999999999999999"}, "global_batch must be at most 2,147,483,647, found about 10^20"),
        ({"n_gpus": "1e300"}, "n_gpus must be at most 1,000,000, found about 10^300"),
    ],
)
def test_numbers_no_run_can_have_make_a_reason_of_that_row_alone(cells: dict[str, str], reason: str):
    whole, odd = predict_rows([config(), config(**cells)])
    assert whole.step_seconds is not None and odd.step_seconds is None
    assert reason in odd.reason and len(odd.reason) < 200


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"ep": "8"}, "ep = 8 is not read: the model has no experts"),
        ({"vpp": "2"}, "vpp = 2 is not read: there is no pipeline"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is read as selective"),
        ({"pp_schedule": "banana", "pp": "2", "dp": "32"}, "pp_schedule 'banana' is read as 1f1b"),
        ({"attn_kind": "banana"}, "attn_kind 'banana' is not read"),
        ({"offload": "the moon"}, "offload 'the moon' is not read"),
        ({"flops_def": "guessed"}, "flops_def 'guessed' is not read"),
        ({"zero_stage": "hsdp0"}, "'hsdp0' is read as shards of 64"),
        ({"grad_accum": "4"}, "grad_accum = 4 is not read: global_batch = 64 over dp x micro_batch is 1"),
    ],
)
def test_words_that_are_read_otherwise_are_told(cells: dict[str, str], reason: str):
    prediction = predict_rows([config(**cells)])[0]
    assert prediction.step_seconds is not None and reason in prediction.reason


def test_a_plain_row_has_nothing_read_otherwise():
    assert " read" not in predict_rows([config()])[0].reason


@pytest.mark.parametrize(("word", "meant"), [("yes", "full"), ("no", "none"), ("op", "selective")])
def test_words_for_recomputation_are_known(word: str, meant: str):
    assert [layout.recompute for layout in setup_of(config(recompute=word)).layouts] == [meant]


def test_experts_of_a_model_known_by_name_are_cut():
    names = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    assert setup_of(config(model="Mixtral-8x7B", ep="8", **dict.fromkeys(names, ""))).layouts[0].ep == 8


def test_a_row_that_breaks_the_arithmetic_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch):
    whole = predict.setup_of

    def breaks(row, tuning):
        return whole(row, tuning) if row.model != "odd" else 1 / 0

    monkeypatch.setattr(predict, "setup_of", breaks)
    first, odd = predict_rows([config(), config(model="odd")])
    assert first.step_seconds is not None and odd.reason == "cannot be described: division by zero"


def test_a_negative_result_is_refused_rather_than_scored(tmp_path: Path):
    file = write(tmp_path / "rows.csv", LLAMA | RESULTS | {"step_time_s": "-1.3"})
    with pytest.raises(SpecError, match=r"column step_time_s holds '-1\.3' where a number that is not negative belongs"):
        read_rows(file)


def test_a_narrow_terminal_cuts_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    source = "megatron-bridge performance recipes of 2026"
    failed = LLAMA | RESULTS | {"outcome": "oom", "source_key": source}
    file = write(tmp_path / "rows.csv", LLAMA | RESULTS | {"source_key": source}, failed)
    shown = {}
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["validate", str(file)]) == 0
        shown[width] = capsys.readouterr().out
    assert "…" not in shown[80]
    assert max(len(line.rstrip()) for line in shown[80].splitlines() if "%" in line) <= 80
    assert shown[80].count("%") > 10
    assert [word for word in shown[80].split() if "%" in word] == [word for word in shown[200].split() if "%" in word]


def test_the_same_rows_however_a_program_writes_them(tmp_path: Path):
    """With a byte-order mark, CRLF, thousands in quotes, empty lines, columns of its own, and without those of results."""
    rows = write(tmp_path / "rows.csv", LLAMA | RESULTS)
    header, cells = rows.read_text().splitlines()
    plain, here = read_rows(rows)[0].config, tmp_path / "same.csv"
    for text in (
        f"\n\n{header}\n\n{cells}\n\n",
        f"{header},color\r\n{cells},red\r\n",
        f"{header}\n{cells}\n".replace(",128256,", ',"128,256",'),
    ):
        here.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_rows(here)[0].config == plain
    without = write(tmp_path / "without.csv", {name: cell for name, cell in LLAMA.items() if name not in RESULTS})
    assert predict_rows([read_rows(without)[0].config]) == predict_rows([plain])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n_gpus,tp\n", "has a header but no rows"),
        ("", r"its first line \(empty\)"),
        ("model;n_gpus;tp\na;8;1\n", "is separated by semicolons"),
        ("model\tn_gpus\ttp\na\t8\t1\n", "is separated by tabs"),
        ("x" * 5000, "has the columns of no known form"),
    ],
)
def test_files_without_runs_are_told_in_a_sentence(tmp_path: Path, text: str, told: str):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(SpecError, match=told) as caught:
        read_rows(tmp_path / "rows.csv")
    assert len(caught.value.problems) == 1 and len(str(caught.value)) < 500


def test_lines_are_counted_as_an_editor_does(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("\n\nn_gpus,tp\n8,1\n8,wide\n")
    with pytest.raises(SpecError, match=r"rows\.csv:5"):
        read_rows(tmp_path / "rows.csv")


def test_rows_without_a_prediction_are_told_by_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    odd = [LLAMA | {"id": f"odd-{i}", "gpu": "abacus"} for i in range(14)]
    assert main(["validate", str(write(tmp_path / "rows.csv", LLAMA, *odd))]) == 0
    printed = capsys.readouterr().out
    assert printed.count("is not in the catalogue") == 1
    assert "odd-0, odd-1," in printed and "odd-11 and 2 more: gpu 'abacus'" in printed
