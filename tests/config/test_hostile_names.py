"""Names and paths that lead elsewhere are refused before anything is made."""

from __future__ import annotations

import os

import pytest

from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.manifest import _FILE, check_name
from ultrascale.config.resolve import resolve
from ultrascale.data.files import DataError
from ultrascale.data.manifest import record_from
from ultrascale.description.problems import SpecError
from ultrascale.train.folder.run_folder import RunFolder

BAD_NAMES = [
    "", ".", "..", "../x", "..\\x", "/etc/passwd", "a/b", "a\\b", "a/../../b", "~", "~root", "-rf", "--name", ".hidden", "_x",
    "a\0b", "a\nb", "a\rb", "a\tb", "a b", " a", "a ", "a;b", "a|b", "a&b", "$(id)", "`id`", "${HOME}", "a*", "a?", "[a]",
    "{a}", "a'b", 'a"b', "a<b", "a>b", "a:b", "a%2fb", "%00", "a=b", "a,b", "a@b", "a#b", "a!b", "a^b", "x" * 65, "é",
    "x" * 5000, "名", "a\u202eb", "a\u200bb", "\u0430", "a\x1b[2J", "\ufeffa", "a\x7f", "file://a", "con/..",
    "a//b", "./a", "a/.", "\ud800",
]  # fmt: skip
GOOD_NAMES = ["a", "0", "a.b-c_d", "A" * 64, "llama-3.1-8b", "a.."]


def named(name: str):
    return resolve(None, {"model.preset": "tiny-llama", "batch.sequence_length": 8, "name": name})


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_a_run_s_name_that_leads_elsewhere_is_refused(name):
    with pytest.raises(SpecError) as caught:
        named(name)
    assert [problem.key for problem in caught.value.problems] == ["name"]


@pytest.mark.parametrize(
    "folder", ["~/runs", "~", "$SCRATCH/runs", "${SCRATCH}", "a/$HOME/x", "/scratch/${USER}", "./$HOME", "runs/of-$USER", "$"]
)
def test_a_folder_that_a_shell_would_expand_is_refused(folder):
    """It once became a folder of that very name, in the current one: removed by `rm -rf ~`."""
    settings = {"model.preset": "tiny-llama", "batch.sequence_length": 8}
    with pytest.raises(SpecError, match="which a shell would expand") as caught:
        resolve(None, settings | {"folder": folder})
    literal = f"./{folder}"
    assert (literal in str(caught.value)) == ("$" not in folder)
    if "$" not in folder:
        assert resolve(None, settings | {"folder": literal}).run.folder


@pytest.mark.parametrize("folder", ["a~b/~", "price-5$", "a/$/b", "a$5"])
def test_a_folder_with_a_sign_that_names_no_variable_is_accepted(folder):
    settings = {"model.preset": "tiny-llama", "batch.sequence_length": 8}
    assert resolve(None, settings | {"folder": folder}).run.folder == folder


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_plain_name_is_a_folder_below_the_folder_of_runs(name, tmp_path):
    run = resolve(None, {"model.preset": "tiny-llama", "batch.sequence_length": 8, "name": name, "folder": str(tmp_path)}).run
    assert RunFolder.of(run).path.resolve().parent == tmp_path.resolve()


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if os.sep in name or "\0" in name or name in (".", "..", "")])
def test_shards_of_checkpoints_and_data_have_no_paths_for_names(name):
    assert not _FILE.fullmatch(name)
    with pytest.raises((TypeError, DataError)):
        record_from({"name": name, "documents": 1, "tokens": 1, "bin_sha256": "", "idx_sha256": "", "sources": []})


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "x" * 1001, "a\x1b[2J", "__metadata__"])
def test_tensors_have_names_that_a_terminal_does_not_obey(name):
    with pytest.raises(CheckpointError):
        check_name(name, "here")
