"""SIGKILL at every named point of preparing and loading data: what has its final name is whole, and the same command again ends
with the bytes of a run that nobody disturbed.

`wrong_after` is the claim about a folder; controls plant bugs into the order of writing and require it to fail. A kill loses
nothing that the system has taken, so a second claim holds the order of fsync and rename, for a loss of power.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
from data.little_text import recipe
from train.small_runs import curve, make_corpus, same, small_run, state, train_here

from ultrascale import data
from ultrascale.data.files import PARTIAL
from ultrascale.data.indexed import ShardWriter
from ultrascale.data.manifest import load_manifest
from ultrascale.data.preparing import prepare as preparing
from ultrascale.description.run import Checkpoint
from ultrascale.failpoints import VARIABLE, failpoint

PREPARING = [
    ("prepare.tokenizer", 1), ("prepare.requested", 1), ("file.written", 1), ("file.written", 2), ("file.written", 4),
    ("shard.document", 1), ("shard.written", 1), ("shard.written", 4), ("shard.renamed", 1), ("shard.renamed", 2),
    ("shard.renamed", 3), ("shard.recorded", 1), ("shard.recorded", 2), ("prepare.durable", 1), ("prepare.durable", 2),
    ("prepare.manifest", 1), ("prepare.manifest", 2), ("prepare.removed", 1), ("prepare.removed", 2),
]  # fmt: skip
LOADING = [("data.opened", 1), ("data.read", 1), ("data.read", 9)]


def prepare_here(source: Path, output: Path, tokenizer: Path) -> preparing.Prepared:
    wanted = recipe(tokenizer, shard_bytes=6000, validation_fraction=0.2)
    return preparing.prepare([source], output=output, recipe=wanted, workers=1)


def name_before_content() -> None:
    """The planted bug: shards are written under their final names."""
    setattr(ShardWriter, "_partial", lambda writer, path: path)  # noqa: B010


def manifest_before_shards() -> None:
    """The planted bug: the manifest is there first, and what it promises later."""

    def conclude_early(tasks, work, **options):
        done = run(tasks, work, **options)
        folder = tasks[0].folders[0]
        for path in (*folder.rglob("shard-*.bin"), *folder.rglob("shard-*.idx")):
            path.rename(path.with_name(f"{path.name}{PARTIAL}"))
        return done

    def save_then_name(manifest, folder):
        save(manifest, folder)
        failpoint("planted.promised")
        for path in folder.glob(f"shard-*{PARTIAL}"):
            path.rename(path.with_name(path.name.removesuffix(PARTIAL)))

    run, save, removing = preparing.run_tasks, preparing.save_manifest, preparing._remove
    preparing.run_tasks, preparing.save_manifest = conclude_early, save_then_name
    preparing._remove = lambda paths: removing(path for path in paths if PARTIAL not in path.name)


def _child(point: str, bug: str | None, source: Path, output: Path, tokenizer: Path) -> None:
    os.environ |= {VARIABLE: point, "RAYON_NUM_THREADS": "1"}
    if bug == "name before content":
        name_before_content()
    elif bug == "manifest before shards":
        manifest_before_shards()
    prepare_here(source, output, tokenizer)


def killed(work: Callable[..., None], *arguments: object, method: str = "forkserver") -> None:
    """Run `work` in a process of its own, which must die of its kill point."""
    process = multiprocessing.get_context(method).Process(target=work, args=arguments)  # pyright: ignore
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, f"ended with {process.exitcode}: the point was not reached"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def wrong_after(folder: Path, calm: dict[str, bytes]) -> list[str]:
    """Files with a final name that are not whole, and those that a manifest promises and that are not there."""
    found = contents(folder)
    wrong = [name for name, content in found.items() if name in calm and content != calm[name]]
    for each in (folder, folder / "validation"):
        if (each / "manifest.json").exists():
            promised = [f"{shard.name}.{kind}" for shard in load_manifest(each).shards for kind in ("bin", "idx")]
            wrong += [name for name in promised if not (each / name).exists()]
    return wrong


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Torch is imported once, and not for each kill: by a fork server of its own, which finds modules of the package alone."""
    forkserver._forkserver._stop()  # pyright: ignore
    multiprocessing.set_forkserver_preload(["pytest", "torch.distributed.fsdp", "ultrascale.train.loop", preparing.__name__])


@pytest.fixture
def calm(tmp_path, source, tokenizer) -> dict[str, bytes]:
    prepare_here(source, tmp_path / "calm", tokenizer)
    return contents(tmp_path / "calm")


def test_every_named_point_of_data_is_killed_at_here():
    sources = Path(data.__file__).parent.rglob("*.py")
    named = set(re.findall(r'failpoint\("([a-z.]+)"\)', "".join(path.read_text() for path in sources)))
    assert named == {point for point, _ in PREPARING + LOADING}


@pytest.mark.catalogue(58)
def test_a_kill_at_any_point_of_preparing_leaves_whole_files_and_the_same_command_ends_with_the_same_bytes(
    tmp_path, source, tokenizer, calm
):
    assert sum(name.endswith(".bin") for name in calm) >= 4  # shards of both folders
    for point, hit in PREPARING:
        output = tmp_path / f"{point}-{hit}"
        killed(_child, f"{point}:0:{hit}", None, source, output, tokenizer)
        assert wrong_after(output, calm) == [], point
        prepare_here(source, output, tokenizer)
        assert contents(output) == calm, point


@pytest.mark.catalogue(58)
@pytest.mark.parametrize(
    ("bug", "point"), [("name before content", "shard.document:0:9"), ("manifest before shards", "planted.promised:0:1")]
)
def test_control_a_planted_bug_in_the_order_of_writing_is_caught(tmp_path, source, tokenizer, calm, bug, point):
    killed(_child, point, bug, source, tmp_path / "bug", tokenizer)
    assert wrong_after(tmp_path / "bug", calm) != []


def names_given_too_early(monkeypatch, work: Callable[[], object]) -> list[str]:
    """Files that got their final name, or were promised by a manifest, before a loss of power could not undo them."""
    synced: set[int] = set()
    wrong: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_name(old, new) -> None:
        target, inode = Path(new), os.stat(old).st_ino
        if re.fullmatch(r"shard-\d+\.json", target.name) is None and inode not in synced:  # records are checked, not trusted
            wrong.append(target.name)
        if target.name == "manifest.json" and os.stat(target.parent).st_ino not in synced:
            wrong.append(f"{target.parent.name}/")
        replace(old, new)
        synced.discard(os.stat(target.parent).st_ino)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_name)
    work()
    return wrong


@pytest.mark.catalogue(58)
def test_nothing_gets_its_name_before_its_bytes_are_on_disk_nor_a_manifest_before_the_names(
    tmp_path, source, tokenizer, monkeypatch
):
    assert names_given_too_early(monkeypatch, lambda: prepare_here(source, tmp_path / "out", tokenizer)) == []


def _train(point: str, home: Path, steps_between: int) -> None:
    os.environ[VARIABLE] = point
    train_here(small_run(home, checkpoint=Checkpoint(every_steps=steps_between, keep=0, export=False)))


@pytest.mark.catalogue(42)
def test_a_kill_while_loading_data_changes_no_bit_of_the_run(tmp_path):
    for name in ("calm", *(f"{point}-{hit}" for point, hit in LOADING)):
        (tmp_path / name).mkdir()
        make_corpus(tmp_path / name / "tokens")
    checkpoint = Checkpoint(every_steps=2, keep=0, export=False)
    train_here(small_run(tmp_path / "calm", checkpoint=checkpoint))
    for point, hit in LOADING:
        home = tmp_path / f"{point}-{hit}"
        killed(_train, f"{point}:0:{hit}", home, 2, method="fork")
        train_here(small_run(home, checkpoint=checkpoint))
        assert curve(small_run(home)) == curve(small_run(tmp_path / "calm")), point
        assert same(state(small_run(home)), state(small_run(tmp_path / "calm"))), point
