"""A manifest or its metadata with any key gone, or another value in its place: a clear error or a right result."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.test_versions import contents, rewrite
from train.small_runs import at_step, make_corpus, small_run, stop_at, train_here, train_ranks

from ultrascale.checkpoint import CheckpointError, load_full
from ultrascale.checkpoint.manifest import MANIFEST_NAME
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Checkpoint, Log
from ultrascale.train.folder.resume import changes_since, restore
from ultrascale.train.start.trained import open_trained
from ultrascale.train.trainer import Trainer

OTHERS: list[Any] = [None, True, -1, 1.5, "", "[", [], {}, ["x"], {"x": 1}]
Saved = tuple[Trainer, Path, dict[str, Any]]
OPTIONAL = {
    "fp8_amax_history",
    "noise_scale",
    "optimizer",
    "skipped_steps",
    "norms",
    "loss_scale",
    "saved_at",
    "imported_dtype",
    "islands",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """The trainer of a run, its checkpoint, and its manifest as plain data."""
    home = tmp_path_factory.mktemp("facts")
    make_corpus(home / "tokens")
    log = Log(memory_steps=0, gradient_noise_scale=True)
    run = small_run(home, checkpoint=Checkpoint(None, keep=0, export=False), log=log)
    trainers: list[Trainer] = []
    train_here(run, before_step=at_step(0, trainers.append))
    folder = home / run.name / "checkpoints" / "step-00000012"
    return trainers[0], folder, json.loads((folder / MANIFEST_NAME).read_text())


def write(folder: Path, content: dict[str, Any]) -> None:
    rest = json.dumps({key: value for key, value in content.items() if key != "checksum"}).encode()[1:]
    (folder / MANIFEST_NAME).write_bytes(b'{"checksum":"crc32:%08x",\n' % zlib.crc32(rest) + rest)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every key of every object is; of lists, the first item's."""
    inside = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, one in inside:
        if isinstance(value, dict):
            yield (*path, key)
        yield from places(one, (*path, key))


def changed(content: dict[str, Any], place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    content = copy.deepcopy(content)
    holder: Any = content
    for key in place[:-1]:
        holder = holder[key]
    change(holder, place[-1])
    return content


def told(saved: Saved, content: dict[str, Any]) -> str:
    """What going on from the checkpoint, and opening it to generate from, say of it; empty if both work."""
    trainer, folder, original = saved
    write(folder, content)
    says = []
    try:
        for use in (lambda: restore(trainer, folder), lambda: changes_since(folder, trainer.run), lambda: open_trained(folder)):
            try:
                use()
            except (CheckpointError, SpecError) as error:
                says.append(str(error))
    finally:
        write(folder, original)
    return "\n".join(says)


def test_the_whole_manifest_is_read(saved):
    assert told(saved, saved[2]) == ""


@pytest.mark.catalogue(31, 48)
def test_every_key_that_is_missing_is_named_with_its_file(saved):
    _, folder, content = saved
    content = {key: value for key, value in content.items() if key != "checksum"}
    gone = [place for place in places(content) if place[0] != "tensors" or place[1:2] in ((), ("model.norm.weight",))]
    assert len(gone) > 60
    for place in gone:
        *_, last = place
        said = told(saved, changed(content, place, lambda holder, key: holder.pop(key)))
        if place[0] == "metadata" and last in OPTIONAL and len(place) == 2:
            continue  # older releases did not write them
        if place[:2] == ("metadata", "decides") and len(place) > 2:
            assert last in said or not said, (place, said)  # compared with the run's own; null is as good as none
            continue
        assert str(last) in said and str(folder.name) in said, (place, said)


@pytest.mark.catalogue(31)
def test_every_key_with_something_else_in_its_place_gives_a_clear_error_or_a_right_result(saved):
    _, _, content = saved
    content = {key: value for key, value in content.items() if key != "checksum"}
    some = [place for place in places(content) if place[0] != "tensors" and len(place) <= 3]
    for place in some:
        for value in OTHERS:
            told(saved, changed(content, place, lambda holder, key, value=value: holder.__setitem__(key, value)))


@pytest.mark.parametrize("where", [(), ("loss_scale",)])
def test_a_key_that_this_release_does_not_know_is_refused(saved, where):
    """It may decide how to train on."""
    _, _, content = saved
    metadata = content["metadata"] | {"loss_scale": {"value": 1.0, "steps_since_change": 0}}
    holder = metadata
    for key in where:
        holder = holder[key]
    holder["ema_decay"] = 0.999
    assert f"metadata key '{'.'.join([*where, 'ema_decay'])}' is not known to this release." in told(
        saved, content | {"metadata": metadata}
    )


@pytest.mark.catalogue(31)
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("skipped_steps", -5, "is -5, expected 0 to 12"),
        ("skipped_steps", 13, "is 13, expected 0 to 12"),
        ("skipped_steps", 10**400, "is 10000000000"),
        ("steps_done", 10**400, "is 10000000000"),
        ("norms", [1.0, -1.0], "holds something else than norms"),
        ("norms", [10**400], "holds something else than norms"),
        ("noise_scale", {"signal": 10**400, "noise": 1.0}, "is 10000000000"),
        ("loss_scale", {"value": 0.0, "steps_since_change": 0}, "is 0.0, expected 5.96046e-08 to"),
        ("loss_scale", {"value": 1.0, "steps_since_change": -1}, "is -1, expected 0 to 12"),
        ("fp8_amax_history", {"updates": 13, "length": 16, "layers": [0, 1]}, "is 13, expected 0 to 12"),
        ("fp8_amax_history", {"updates": 1, "length": 10**9, "layers": [0, 1]}, "is 1000000000, expected 1 to"),
        ("fp8_amax_history", {"updates": 1, "length": 16, "layers": [0, 10**9]}, "expected the first and the last block"),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_a_counter_that_no_run_can_have_is_refused_in_one_sentence(saved, key, value, expected):
    _, folder, content = saved
    content = {one: value for one, value in content.items() if one != "checksum"}
    said = told(saved, content | {"metadata": content["metadata"] | {key: value}})
    assert said.startswith(f"{folder / MANIFEST_NAME}: metadata key '{key}") and expected in said


def test_a_checkpoint_that_no_run_has_saved_is_told(saved):
    _, folder, content = saved
    said = told(saved, content | {"metadata": {}})
    assert f"{folder / MANIFEST_NAME}: metadata key 'steps_done' is missing. It was not saved by a training run" in said
    assert load_full(folder)[1]["steps_done"] == 12


@pytest.mark.catalogue(28)
def test_a_newer_checkpoint_of_another_release_ends_the_start_and_stays_as_it_is(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(
        tmp_path,
        layout=Layout(dp=2, zero_stage=2, micro_batch_size=2),
        checkpoint=Checkpoint(every_steps=4, keep=1, export=False),
    )
    train_ranks(run, before_step=stop_at(8))
    (newest,) = (tmp_path / run.name / "checkpoints").iterdir()
    before = contents(rewrite(newest, version=2))
    first, second = train_ranks(run)
    assert first == second and first["error"] == "UnknownVersionError"
    assert f"{newest / MANIFEST_NAME}: format is 'ultrascale-checkpoint' version 2, expected" in first["text"]
    assert contents(newest) == before and [*newest.parent.iterdir()] == [newest]
