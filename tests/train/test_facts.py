"""A manifest or its metadata with any key gone, or another value in its place: a clear error or a right result."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train.small_runs import at_step, make_corpus, small_run, train_here

from ultrascale.checkpoint import CheckpointError, load_full
from ultrascale.checkpoint.manifest import MANIFEST_NAME
from ultrascale.spec.problems import SpecError
from ultrascale.spec.run import Checkpoint, Log
from ultrascale.train.resume import changes_since, restore
from ultrascale.train.trained import open_trained
from ultrascale.train.trainer import Trainer

OTHERS: list[Any] = [None, True, -1, 1.5, "", "[", [], {}, ["x"], {"x": 1}]
Saved = tuple[Trainer, Path, dict[str, Any]]
OPTIONAL = {"fp8_amax_history", "noise_scale", "optimizer", "skipped_steps", "norms", "loss_scale", "saved_at"}


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


def test_a_checkpoint_that_no_run_has_saved_is_told(saved):
    _, folder, content = saved
    said = told(saved, content | {"metadata": {}})
    assert f"{folder / MANIFEST_NAME}: metadata key 'steps_done' is missing. It was not saved by a training run" in said
    assert load_full(folder)[1]["steps_done"] == 12
