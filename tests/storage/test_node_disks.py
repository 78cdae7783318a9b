"""Nodes whose disks do not see each other: what docs/object-stores.md says of them.

Ranks are forked, those of a node in a folder of its own, where the run's relative `folder` is. What has used a bucket must not
fork, as this process may have in another file's tests: a process that has not does it (`apart`), and asks through children.
"""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint.test_versions import rewrite
from ranks import run_ranks
from s3_server import Answer, proxied, reached_at
from train.small_runs import make_corpus, small_run, state, stop_at, train_here
from train.test_anomalies import spoil_next_loss

from ultrascale import checkpoint
from ultrascale.checkpoint import Slice, saving
from ultrascale.checkpoint.disk.nodes import NodeDisks, shards_to_bring
from ultrascale.checkpoint.listing import expect_readable, newest_listed, summarize
from ultrascale.checkpoint.stored.fetch import fetch, stored_checkpoints, verify_stored
from ultrascale.checkpoint.stored.unfinished import saves_on
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Faults, Run
from ultrascale.description.sections.islands import Islands
from ultrascale.failpoints import VARIABLE
from ultrascale.launch.forked import RankFailed, run_forked
from ultrascale.storage import open_store
from ultrascale.storage import parts as storage_parts
from ultrascale.train.trainer import Trainer


def save_on_own_disk(rank: int, disks: Path) -> tuple[str, list[str]]:
    """Save half a tensor into a folder that the other rank does not see; the error, and what is left on this disk."""
    root = disks / f"node-{rank}"
    half = {"w": [Slice(torch.full((2, 3), float(rank)), (4, 3), (2 * rank, 0))]}
    try:
        checkpoint.save(root, 1, half, {})
    except checkpoint.CheckpointError as error:
        return str(error), sorted(path.name for path in root.iterdir()) if root.exists() else []
    return "", []


def test_a_save_on_disks_of_two_nodes_fails_on_both_and_publishes_nothing(tmp_path: Path):
    outcomes = apart(run_ranks, 2, save_on_own_disk, tmp_path)
    for told, left in outcomes:
        assert "rank 1 of 2" in told and "step-00000001" in told and left == []
    assert all(checkpoint.newest_valid(tmp_path / f"node-{rank}") is None for rank in (0, 1))


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_see_one_disk_save_into_it(tmp_path: Path, world: int):
    apart(run_ranks, world, save_on_one_disk, tmp_path / "shared", world)
    tensors, _ = checkpoint.load_full(tmp_path / "shared/step-00000001")
    assert tensors["w"].tolist() == [[float(rank)] * 3 for rank in range(world) for _ in range(2)]


def save_on_one_disk(rank: int, root: Path, world: int) -> None:
    part = {"w": [Slice(torch.full((2, 3), float(rank)), (2 * world, 3), (2 * rank, 0))]}
    checkpoint.save(root, 1, part, {})


def begin_saving(rank: int, disks: Path) -> str:
    try:
        checkpoint.Saver(disks / f"node-{rank // 2}").close()
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""


def test_disks_of_two_nodes_are_told_before_the_first_step(tmp_path: Path):
    for told in apart(run_ranks, 4, begin_saving, tmp_path):
        assert "ranks [2, 3] of 4: it is not there: this node has a disk of its own" in told
    assert not [*tmp_path.glob("node-*/*")]
    assert apart(run_ranks, 2, begin_saving, tmp_path) == ["", ""]


SERVERS = "NODE_SERVERS"
"""Environment variable with the address of the store as each node reaches it, by number."""
FOUR, TWO = (Layout(dp=ranks, zero_stage=1, micro_batch_size=1) for ranks in (4, 2))


def stored(folder: Path, url: str, **changes: Any) -> Run:
    """The small run on four ranks, saved every 3 steps in `out` of whatever folder a rank is in, and kept at `url`."""
    if not (folder / "tokens.bin").exists():
        make_corpus(folder / "tokens")
    run = small_run(folder, **{"layout": FOUR, **changes})
    return replace(run, folder="out", checkpoint=replace(run.checkpoint, every_steps=3, keep=2, store=url))


@pytest.fixture(scope="module", autouse=True)
def clean() -> Iterator[None]:
    """While inside, `apart` has its process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        POOLS.append(pool)
        yield
        POOLS.clear()


POOLS: list[ProcessPoolExecutor] = []


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a process that has used no bucket, with this one's environment."""
    return POOLS[0].submit(in_environment, dict(os.environ), work, *arguments).result()


def in_environment(environment: dict[str, str], work: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    return work(*arguments)


def train_on_nodes(
    run: Run,
    disks: Path,
    nodes: int,
    *,
    stop: int | None = None,
    spoil: int | None = None,
    kill: str = "",
    first: int = 0,
    lose: int | None = None,
) -> list[dict]:
    """Train with the run's ranks spread over these nodes, numbered from `first` on; each rank's outcome. Raises RankFailed.

    All are stopped before the step `stop`; before the step `spoil` rank 3 spoils its loss, once; one is killed at `kill`;
    before the step `lose` rank 3 removes its node's checkpoints."""
    return apart(run_forked, run.num_processes, train_on_node, run, str(disks), nodes, stop, spoil, kill, first, lose)


def train_on_node(
    rendezvous: str,
    run: Run,
    disks: str,
    nodes: int,
    stop: int | None,
    spoil: int | None,
    kill: str,
    first: int,
    lose: int | None,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    storage_parts.PART_BYTES = 5_000
    os.environ |= {VARIABLE: kill} if kill else {}
    own = Path(disks) / f"node-{first + int(os.environ['RANK']) * nodes // run.num_processes}"
    own.mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    if SERVERS in os.environ:
        os.environ["AWS_ENDPOINT_URL"] = os.environ[SERVERS].split()[int(own.name.removeprefix("node-"))]
    spoiled: list[int] = []

    def before_step(trainer: Trainer) -> None:
        if trainer.steps_done == stop:
            trainer.request_stop()
        if trainer.steps_done == spoil and trainer.ranks.rank == 3 and not spoiled:
            spoiled.append(trainer.steps_done)
            spoil_next_loss(trainer)
        if trainer.steps_done == lose and trainer.ranks.rank == 3:
            shutil.rmtree("out/small/checkpoints")

    try:
        outcome = train_here(run, before_step=before_step, rendezvous=rendezvous)
    except checkpoint.CheckpointError as error:
        return {"error": str(error)}
    return {"steps_done": outcome.steps_done}


def in_store(url: str) -> dict[str, Any]:
    """Steps of the store's checkpoints, newest first, each of which verifies; and the objects of no checkpoint there."""
    return apart(run_forked, 1, look, url)[0]


def look(rendezvous: str, url: str) -> dict[str, Any]:
    store = open_store(f"{url}/small")
    found = stored_checkpoints(store)
    for one in found:
        assert one.index is not None, one.problem
        verify_stored(store, one.index)
    named = {key for one in found if one.index for key in one.index.part_keys()}
    loose = [one.key for one in store.walk("checkpoints") if not one.key.endswith(".json") and one.key not in named]
    return {"steps": [one.step for one in found], "loose": loose}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


def newest_in_store(url: str, folder: Path) -> dict[str, str]:
    """Digests of weights and moments in the store's newest checkpoint, brought to an empty folder."""
    return apart(run_forked, 1, bring, url, str(folder))[0]


def bring(rendezvous: str, url: str, folder: str) -> dict[str, str]:
    store = open_store(url)
    index = stored_checkpoints(store)[0].index
    assert index is not None
    return digests(checkpoint.load_full(fetch(store, index, Path(folder)))[0])


def on_disk(disks: Path, node: int) -> dict[str, list[str]]:
    """Shards of each checkpoint on a node's disk."""
    return {
        one.name: sorted(path.name[5:10] for path in one.glob("*.safetensors"))
        for one in sorted((disks / f"node-{node}/out/small/checkpoints").iterdir())
    }


def on_one_disk(rendezvous: str, run: Run, stop: int | None = None) -> int:
    torch.set_num_threads(1)
    return train_here(run, before_step=None if stop is None else stop_at(stop), rendezvous=rendezvous).steps_done


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the same run on one disk, without a store and without an end before its last step; trained once for all."""
    folder = tmp_path_factory.mktemp("straight")
    make_corpus(folder / "tokens")
    apart(run_forked, 4, on_one_disk, small_run(folder, layout=FOUR))
    return digests(state(small_run(folder)))


@pytest.mark.parametrize("where", ["url", "hub_url"])
def test_each_node_saves_and_uploads_its_own_and_empty_disks_of_another_number_go_on_to_the_same_bits(
    tmp_path: Path, request: pytest.FixtureRequest, straight: dict[str, str], where: str
):
    url = request.getfixturevalue(where)
    run = stored(tmp_path, url)
    assert train_on_nodes(run, tmp_path / "two", 2, stop=7) == [{"steps_done": 7}] * 4
    assert on_disk(tmp_path / "two", 0)["step-00000007"] == ["00000", "00001"]
    assert on_disk(tmp_path / "two", 1)["step-00000007"] == ["00002", "00003"]
    assert in_store(url)["steps"][0] == 7
    shutil.rmtree(tmp_path / "two")
    assert train_on_nodes(run, tmp_path / "four", 4, stop=10) == [{"steps_done": 10}] * 4
    shutil.rmtree(tmp_path / "four")
    assert train_on_nodes(run, tmp_path / "one", 1) == [{"steps_done": 12}] * 4
    assert in_store(url) == {"steps": [12, 10], "loose": []}
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def test_fewer_nodes_and_ranks_go_on_as_on_one_disk(tmp_path: Path, url: str):
    run = stored(tmp_path, url)
    train_on_nodes(run, tmp_path / "nodes", 4, stop=7)
    shutil.rmtree(tmp_path / "nodes/node-0")
    train_on_nodes(replace(run, layout=TWO), tmp_path / "nodes", 2, first=2)  # on two of the four, one of them now the first
    here = replace(run, folder=str(tmp_path / "shared"), checkpoint=replace(run.checkpoint, store=None))
    apart(run_forked, 4, on_one_disk, here, 7)
    apart(run_forked, 2, on_one_disk, replace(here, layout=TWO))
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == digests(state(here))
    rows = (tmp_path / "nodes/node-2/out/small/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 13))


@contextmanager
def counted(server: str, url: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """While inside, each node reaches the server by a proxy of its own; after that, the bytes of shards that each read."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(proxied(server)) for _ in range(nodes)]
        monkeypatch.setenv(SERVERS, " ".join(proxy.address for proxy in proxies))
        found: list[int] = []
        yield found
        sizes = part_sizes(url)
        for proxy in proxies:
            paths = [one.path for one in proxy.seen if one.method == "GET" and one.is_part and ".safetensors." in one.path]
            found.append(sum(sizes[path[path.index("checkpoints/") :]] for path in paths))
    monkeypatch.delenv(SERVERS)


def part_sizes(url: str) -> dict[str, int]:
    return apart(run_forked, 1, list_parts, url)[0]


def list_parts(rendezvous: str, url: str) -> dict[str, int]:
    store = open_store(f"{url}/small")
    return {one.key: store.size(one.key) for one in store.walk("checkpoints")}


def shard_bytes(url: str, step: int, *ranks: int) -> int:
    """Bytes of the shards of a step in the store that these ranks wrote."""
    found = {key: size for key, size in part_sizes(url).items() if f"/step-{step:08d}/" in key and ".safetensors." in key}
    return sum(size for key, size in found.items() if any(f"/rank-{rank:05d}." in key for rank in ranks))


SHARDED = Layout(dp=4, zero_stage=3, micro_batch_size=1)
STAGES = Layout(dp=2, pp=2, micro_batch_size=1)
"""Ranks of one stage are on one node of two."""


@pytest.mark.parametrize(
    ("layout", "own"),
    [
        pytest.param(SHARDED, [(0, 1), (2, 3)], id="sharded"),
        pytest.param(STAGES, [(0, 1), (2, 3)], id="stages"),
        pytest.param(FOUR, [(0, 1), (2, 3)], id="zero-1", marks=pytest.mark.nightly),
        pytest.param(replace(SHARDED, dp_shard=2), [(0, 1, 2, 3)] * 2, id="hybrid", marks=pytest.mark.nightly),
        pytest.param(replace(FOUR, zero_stage=0), [(0, 1, 2, 3)] * 2, id="replicas", marks=pytest.mark.nightly),
    ],
)
def test_an_empty_disk_gets_the_shards_that_its_ranks_read_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, url: str, server: str, monkeypatch: pytest.MonkeyPatch, layout: Layout, own: list[tuple[int, ...]]
):
    run = stored(tmp_path, url, layout=layout)
    run = replace(run, checkpoint=replace(run.checkpoint, keep=0))  # what removes others reads the newest back
    assert train_on_nodes(run, tmp_path / "first", 2, stop=7) == [{"steps_done": 7}] * 4
    with counted(server, url, 2, monkeypatch) as read:
        assert train_on_nodes(run, tmp_path / "fresh", 2, stop=7) == [{"steps_done": 7}] * 4
    assert read == [shard_bytes(url, 7, *ranks) for ranks in own]
    names = [[f"{rank:05d}" for rank in ranks] for ranks in own]
    assert [on_disk(tmp_path / "fresh", node)["step-00000007"] for node in (0, 1)] == names
    with counted(server, url, 2, monkeypatch) as read:
        assert train_on_nodes(run, tmp_path / "fresh", 2) == [{"steps_done": 12}] * 4
    assert read == [0, 0]
    calm = replace(run, folder=str(tmp_path / "calm"), checkpoint=replace(run.checkpoint, store=None))
    apart(run_forked, 4, on_one_disk, calm)
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == digests(state(calm))


@pytest.mark.parametrize("kill", ["fetch.files:2:1", pytest.param("fetch.done:2:1", marks=pytest.mark.nightly)])
def test_a_kill_while_a_node_fetches_and_then_other_ranks_on_these_disks_lose_no_bit(tmp_path: Path, url: str, kill: str):
    run = stored(tmp_path, url, layout=SHARDED)
    fewer = replace(run, layout=replace(SHARDED, dp=2))
    train_on_nodes(run, tmp_path / "first", 2, stop=7)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "fresh", 2, kill=kill)
    assert train_on_nodes(fewer, tmp_path / "fresh", 2) == [{"steps_done": 12}] * 2
    calm = replace(run, folder=str(tmp_path / "calm"), checkpoint=replace(run.checkpoint, store=None))
    apart(run_forked, 4, on_one_disk, calm, 7)
    apart(run_forked, 2, on_one_disk, replace(calm, layout=fewer.layout))
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == digests(state(calm))


def test_a_nodes_share_of_a_checkpoint_is_never_taken_for_a_whole_one_and_is_completed_where_one_node_has_all_ranks(
    tmp_path: Path, url: str, server: str, monkeypatch: pytest.MonkeyPatch
):
    run = stored(tmp_path, url, layout=SHARDED)
    run = replace(run, checkpoint=replace(run.checkpoint, keep=0))
    train_on_nodes(run, tmp_path / "first", 2, stop=7)
    train_on_nodes(run, tmp_path / "fresh", 2, stop=7)
    root = tmp_path / "fresh/node-0/out/small/checkpoints"
    assert on_disk(tmp_path / "fresh", 0) == {"step-00000007": ["00000", "00001"]}
    assert checkpoint.newest_valid(root) is None and newest_listed(root) is None
    for read_all in (False, True):
        assert ["rank-00002.safetensors" in (one.problem or "") for one in summarize(root, read_all=read_all)] == [True]
    with pytest.raises(SpecError, match="holds only damaged"):
        expect_readable(root)
    with pytest.raises(checkpoint.CheckpointError, match="rank-00002"):
        checkpoint.load_full(root / "step-00000007")
    here = replace(run, folder=str(root.parents[1]), checkpoint=replace(run.checkpoint, store=None))
    with pytest.raises(RankFailed, match="no checkpoint is whole"):
        apart(run_forked, 4, on_one_disk, here)

    with counted(server, url, 1, monkeypatch) as read:
        assert train_on_nodes(run, tmp_path / "fresh", 1) == [{"steps_done": 12}] * 4
    assert read == [shard_bytes(url, 7, 2, 3)]
    calm = replace(here, folder=str(tmp_path / "calm"))
    apart(run_forked, 4, on_one_disk, calm)
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == digests(state(calm))


def test_what_no_rank_reads_is_on_the_first_disk_so_that_the_disks_together_have_a_checkpoint():
    read = [{"a"}, {"b"}, {"b", "c"}, set()]
    assert shards_to_bring(read, ["a", "b", "c", "d"], NodeDisks(0, (0, 0, 2, 2))) == [["a", "b", "d"], [], ["b", "c"], []]


NIGHTLY = pytest.mark.nightly
KILLS = [
    pytest.param("upload.start:3:2", marks=NIGHTLY), "upload.part:3:9", pytest.param("upload.file:3:2", marks=NIGHTLY),
    pytest.param("store.before:0:2", marks=NIGHTLY),
]  # fmt: skip
"""While step 6 is uploaded: on the second node before, between and after its parts; on the first between parts and index."""


@pytest.mark.parametrize("kill", KILLS)
def test_a_node_that_is_lost_before_a_checkpoint_is_published_leaves_the_one_before(
    tmp_path: Path, url: str, straight: dict[str, str], kill: str
):
    run = stored(tmp_path, url)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "nodes", 2, kill=kill)
    assert in_store(url)["steps"] == [3]
    shutil.rmtree(tmp_path / "nodes/node-1")
    assert train_on_nodes(run, tmp_path / "nodes", 2, stop=8) == [{"steps_done": 8}] * 4
    said = (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert "at step 3" in said
    assert train_on_nodes(run, tmp_path / "nodes", 2) == [{"steps_done": 12}] * 4
    assert in_store(url) == {"steps": [12, 9], "loose": []}
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


@pytest.mark.parametrize("kill", [*KILLS, pytest.param("store.published:0:2", marks=NIGHTLY)])
def test_nodes_that_all_come_back_lose_nothing_that_is_on_their_disks(
    tmp_path: Path, url: str, straight: dict[str, str], kill: str
):
    run = stored(tmp_path, url)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "nodes", 2, kill=kill)
    newest = newest_on_disks(tmp_path / "nodes")
    os.rename(tmp_path / "nodes/node-0", tmp_path / "nodes/node-2")  # numbers of nodes are given anew: 1 is first now, then 2
    assert train_on_nodes(run, tmp_path / "nodes", 2, first=1) == [{"steps_done": 12}] * 4
    assert f"checkpoints/{newest} at step" in (tmp_path / "nodes/node-1/out/small/log.txt").read_text()
    assert in_store(url)["loose"] == []
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def test_a_fresh_node_that_is_the_first_loses_nothing_that_is_whole_on_the_others(
    tmp_path: Path, url: str, straight: dict[str, str]
):
    run = stored(tmp_path, url)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "nodes", 2, kill="upload.part:3:9")
    newest = newest_on_disks(tmp_path / "nodes")
    os.rename(tmp_path / "nodes/node-1", tmp_path / "nodes/node-3")
    os.rename(tmp_path / "nodes/node-0", tmp_path / "nodes/node-2")
    assert train_on_nodes(run, tmp_path / "nodes", 3, first=1) == [{"steps_done": 12}] * 4
    assert f"checkpoints/{newest} at step" in (tmp_path / "nodes/node-1/out/small/log.txt").read_text()
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def test_a_start_that_cannot_upload_what_only_disks_have_ends_and_takes_nothing_older(
    tmp_path: Path, server: str, url: str, straight: dict[str, str]
):
    run = stored(tmp_path, url)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "nodes", 2, kill="upload.part:3:9")
    newest = newest_on_disks(tmp_path / "nodes")
    refused = Answer(status=403, code="AccessDenied")
    with proxied(server) as proxy, reached_at(proxy.address):
        proxy.rule = lambda asked: refused if asked.method == "PUT" and (asked.is_part or asked.is_index) else None
        for one in train_on_nodes(run, tmp_path / "nodes", 2):
            assert f"keeping {newest}" in one["error"] and "was refused" in one["error"]
    assert [on_disk(tmp_path / "nodes", node)[newest] for node in (0, 1)] == [["00000", "00001"], ["00002", "00003"]]
    assert train_on_nodes(run, tmp_path / "nodes", 2) == [{"steps_done": 12}] * 4
    assert f"checkpoints/{newest} at step" in (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def newest_on_disks(disks: Path) -> str:
    """Newest checkpoint of which both nodes have shards: while step 6 is uploaded a fast machine trains on to step 9."""
    both = on_disk(disks, 0).keys() & on_disk(disks, 1).keys()
    return max(name for name in both if name.removeprefix("step-").isdigit())


def spoil_parts(rendezvous: str, url: str, step: int) -> None:
    store = open_store(f"{url}/small")
    index = next(one.index for one in stored_checkpoints(store) if one.step == step)
    assert index is not None
    for key in index.part_keys():
        store.write(key, bytes(len(store.read(key))))


def test_a_checkpoint_that_is_damaged_in_the_store_is_uploaded_again_from_the_disks_that_have_it_whole(
    tmp_path: Path, url: str, straight: dict[str, str]
):
    run = stored(tmp_path, url)
    train_on_nodes(run, tmp_path / "nodes", 2, stop=7)
    apart(run_forked, 1, spoil_parts, url, 7)
    assert train_on_nodes(run, tmp_path / "nodes", 2, stop=8) == [{"steps_done": 8}] * 4
    assert "at step 7" in (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert in_store(url)["steps"] == [8, 7]
    assert train_on_nodes(run, tmp_path / "nodes", 2) == [{"steps_done": 12}] * 4
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def test_a_save_of_another_release_on_a_nodes_disk_is_not_passed_over_for_an_older_one(tmp_path: Path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"w": torch.ones(2)}, {})
    rewrite(tmp_path / "step-00000001", version=2)
    assert [step for step, *_ in saves_on(tmp_path)] == [2]
    rewrite(tmp_path / "step-00000002", version=2)
    with pytest.raises(checkpoint.UnknownVersionError, match="step-00000002"):
        saves_on(tmp_path)


def test_a_save_that_is_damaged_on_a_disk_is_named_and_passed_over_for_the_stores(
    tmp_path: Path, url: str, straight: dict[str, str]
):
    run = stored(tmp_path, url)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "nodes", 2, kill="upload.part:3:9")
    newest = newest_on_disks(tmp_path / "nodes")
    spoil_last_byte(tmp_path / f"nodes/node-1/out/small/checkpoints/{newest}/rank-00002.safetensors")
    assert train_on_nodes(run, tmp_path / "nodes", 2) == [{"steps_done": 12}] * 4
    said = (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert "rank-00002.safetensors: checksum is" in said and ("at step 3" in said or newest > "step-00000006")
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


@pytest.mark.parametrize(
    "kill",
    ["publish.renamed:0:2", *(pytest.param(f"{point}:2:2", marks=NIGHTLY) for point in ("save.manifest", "publish.before"))],
)
def test_a_kill_while_nodes_publish_on_their_disks_leaves_the_one_before_or_the_new_one(
    tmp_path: Path, url: str, straight: dict[str, str], kill: str
):
    run = stored(tmp_path, url)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_on_nodes(run, tmp_path / "nodes", 2, kill=kill)
    assert train_on_nodes(run, tmp_path / "nodes", 2) == [{"steps_done": 12}] * 4
    said = (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert "at step 3" in said or "at step 6" in said
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def test_a_node_that_sees_another_store_or_has_another_run_on_its_disk_is_refused_before_the_first_step(
    tmp_path: Path, url: str
):
    own = replace(stored(tmp_path, url), checkpoint=replace(stored(tmp_path, url).checkpoint, store="kept"))
    for one in train_on_nodes(own, tmp_path / "apart", 2):
        assert "is not what rank 0 sees there" in one["error"]
    train_on_nodes(stored(tmp_path, f"{url}/other"), tmp_path / "nodes", 2, stop=1)
    shutil.rmtree(tmp_path / "nodes/node-0")
    train_on_nodes(stored(tmp_path, url), tmp_path / "calm", 1, stop=1)
    for one in train_on_nodes(stored(tmp_path, url), tmp_path / "nodes", 2):
        assert "rank 2 of 4" in one["error"] and "holds another run than out/small" in one["error"]


def test_the_export_is_made_of_all_nodes_parts(tmp_path: Path, url: str):
    run = stored(tmp_path, url, steps=3)
    train_on_nodes(replace(run, checkpoint=replace(run.checkpoint, export=True)), tmp_path / "nodes", 2)
    calm = small_run(tmp_path / "calm", layout=FOUR, steps=3, data=run.data)
    apart(run_forked, 4, on_one_disk, replace(calm, checkpoint=replace(calm.checkpoint, export=True)))
    exports = tmp_path / "nodes/node-0/out/small/export", tmp_path / "calm/small/export"
    made, expected = (safetensors.torch.load_file(one / "model.safetensors") for one in exports)
    assert digests(made) == digests(expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_going_back_after_a_step_that_is_not_finite_brings_each_node_the_others_shards(
    tmp_path: Path, url: str, straight: dict[str, str], asynchronous: bool
):
    run = replace(stored(tmp_path, url), faults=Faults(on_anomaly="rewind"))
    run = replace(run, checkpoint=replace(run.checkpoint, asynchronous=asynchronous))
    assert train_on_nodes(run, tmp_path / "nodes", 2, spoil=7) == [{"steps_done": 12}] * 4
    assert "Back to step 6." in (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def test_checkpoints_removed_on_a_node_that_is_not_the_first_are_told_and_the_next_ones_saved(
    tmp_path: Path, url: str, straight: dict[str, str]
):
    run = stored(tmp_path, url)
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=5))
    assert train_on_nodes(run, tmp_path / "nodes", 2, lose=7) == [{"steps_done": 12}] * 4
    assert [*on_disk(tmp_path / "nodes", 1)] == ["step-00000010", "step-00000012"]
    said = (tmp_path / "nodes/node-0/out/small/log.txt").read_text()
    assert said.count("on rank 2's node was removed while the run trained") == 1 and "saving failed" not in said
    assert newest_in_store(f"{url}/small", tmp_path / "reader") == straight


def spoil_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def save_with_damage(rank: int, disks: Path) -> tuple[str, list[str]]:
    """Save three times, keeping one; after the third a byte of rank 1's shard changes on its node's disk. The error, and names
    of what is left on this disk."""

    def damage(folder: Path, ranks: object) -> None:
        if folder.name == "step-00000003" and rank == 1:
            spoil_last_byte(folder / "rank-00001.safetensors")

    root, told = disks / f"node-{rank}", ""
    with checkpoint.Saver(root, keep=1, published=damage, disks=NodeDisks(rank, (0, 1))) as saver:
        for step in (1, 2, 3):
            half = {"w": [Slice(torch.full((2, 3), float(step)), (4, 3), (2 * rank, 0))]}
            try:
                saver.save(step, half, {})
            except checkpoint.SaveFailedError as error:
                told = str(error)
    return told, sorted(path.name for path in root.iterdir())


def test_nothing_is_removed_for_a_checkpoint_that_is_damaged_on_any_disk(tmp_path: Path):
    for told, left in apart(run_ranks, 2, save_with_damage, tmp_path):
        assert "rank 1 of 2" in told and "rank-00001.safetensors: checksum" in told
        assert left == ["step-00000002", "step-00000003"]


def save_where_one_disk_gives_no_name(rank: int, disks: Path) -> tuple[str, list[str]]:
    """Save twice; the second time rank 1's disk fails at the rename. The error, and names of what is left on this disk."""
    root, told, publish = disks / f"node-{rank}", "", saving.publish

    def fails(temporary: Path, final: Path) -> None:
        raise OSError(errno.ENOSPC, "no space for a name")

    with checkpoint.Saver(root, disks=NodeDisks(rank, (0, 1))) as saver:
        for step in (1, 2):
            saving.publish = fails if (rank, step) == (1, 2) else publish
            try:
                saver.save(step, {"w": [Slice(torch.full((2, 3), float(step)), (4, 3), (2 * rank, 0))]}, {})
            except checkpoint.SaveFailedError as error:
                told = str(error)
    return told, sorted(path.name for path in root.iterdir())


def test_a_save_that_gets_no_name_on_one_disk_has_none_on_any(tmp_path: Path):
    for told, left in apart(run_ranks, 2, save_where_one_disk_gives_no_name, tmp_path):
        assert "rank 1 of 2" in told and "no space for a name" in told
        assert left == ["step-00000001"]


def save_each(rank: int, disks: Path, steps: tuple[int, ...]) -> list[str]:
    """Save at these steps, keeping one and every second; names of what is left on this disk."""
    root = disks / f"node-{rank}"
    with checkpoint.Saver(root, keep=1, keep_every_steps=2, disks=NodeDisks(rank, (0, 1))) as saver:
        for step in steps:
            saver.save(step, {"w": [Slice(torch.full((2, 3), float(step)), (4, 3), (2 * rank, 0))]}, {})
    return sorted(path.name for path in root.iterdir())


def test_what_is_kept_for_good_stays_on_a_disk_though_the_first_one_is_new(tmp_path: Path):
    assert apart(run_ranks, 2, save_each, tmp_path, (2, 3)) == [["step-00000002", "step-00000003"]] * 2
    shutil.rmtree(tmp_path / "node-0")
    new, old = apart(run_ranks, 2, save_each, tmp_path, (5, 7))
    assert new == ["step-00000007"] and old == ["step-00000002", "step-00000007"]


def test_islands_on_nodes_of_their_own_each_have_a_place_in_the_store(tmp_path: Path, url: str):
    run = stored(tmp_path, url, islands=Islands(count=2, every_steps=3))
    run = replace(run, layout=TWO)
    assert train_on_nodes(run, tmp_path / "first", 4, stop=6) == [{"steps_done": 6}] * 4
    assert train_on_nodes(run, tmp_path / "second", 4) == [{"steps_done": 12}] * 4
    first, second = (newest_in_store(f"{url}/{name}", tmp_path / name) for name in ("small", "small/islands/1"))
    assert first.keys() == second.keys() and first["model.norm.weight"] == second["model.norm.weight"]
