"""Words that islands agree through: both kinds of store keep the same promises, and one that is gone is told of."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from islands.apart import until
from stand_ins import Clock

from ultrascale.islands import presence
from ultrascale.islands.presence import KNOCKS, Presence
from ultrascale.islands.store import IslandStore, LostStoreError, main, open_store

TIMEOUT = timedelta(seconds=30)


@pytest.fixture(params=["file", "tcp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/meeting"
        return
    words = [sys.executable, "-m", "ultrascale.islands.store", "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.kill()


def test_of_those_that_come_at_once_one_is_first_for_all(url: str) -> None:
    stores = [open_store(url, TIMEOUT) for _ in range(8)]
    found: list[str] = []
    at_once = threading.Barrier(len(stores))

    def say(store: IslandStore, word: str) -> None:
        at_once.wait()
        found.append(store.first("0/3/0/members", word))

    threads = [threading.Thread(target=say, args=(store, str(n))) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(stores) and len(set(found)) == 1
    assert {store.get("0/3/0/members") for store in stores} == set(found)


def test_a_word_is_replaced_and_forgotten(url: str) -> None:
    one, other = open_store(url, TIMEOUT), open_store(url, TIMEOUT)
    assert other.get("state/1-aa") is None
    one.set("state/1-aa", "")
    assert other.get("state/1-aa") == ""
    one.set("state/1-aa", "knocks")
    assert other.get("state/1-aa") == "knocks"
    other.forget("state/1-aa")
    other.forget("state/1-aa")
    assert one.get("state/1-aa") is None


@pytest.fixture
def clock(clock_of) -> Clock:
    """Of islands that count signs of life."""
    return clock_of(presence)


SILENT_SECONDS = 0.5
STRIDE_SECONDS = 0.08
"""Less than the clock counts of one gap; ten are more than SILENT_SECONDS."""


def wait_for_signs(store: IslandStore, *names: str) -> None:
    """Wait until each of these ranks has given another sign of life."""
    for name in names:
        before = store.get(f"sign/{name}")
        until(lambda: store.get(f"sign/{name}") != before, f"a sign of {name}")  # noqa: B023 (called before the next)


def end_in_silence(clock: Clock, by: Presence, member: str) -> str:
    """Why `member` is gone, for an island whose clock moves until it is; a sign that was under way may come yet."""
    for _ in range(30):
        clock.now += STRIDE_SECONDS
        if end := by.end_of(member):
            return end
    return ""


def test_who_is_silent_or_was_started_again_is_gone(url: str, clock: Clock) -> None:
    store = open_store(url, TIMEOUT)
    here, there = (Presence(open_store(url, TIMEOUT), island, 0, (1, 1), SILENT_SECONDS) for island in range(2))
    here.begin("0-aa")
    there.begin("1-aa")
    assert here.current(1) == "1-aa" and here.state("1-aa") == KNOCKS
    for _ in range(10):
        wait_for_signs(store, "1-aa/0")
        assert not here.end_of("1-aa")
        clock.now += STRIDE_SECONDS
    there.begin("1-bb")
    assert here.end_of("1-aa") == "was started again"
    assert not here.end_of("1-bb")
    there.leave()
    assert end_in_silence(clock, here, "1-bb") == "has left"
    here.leave()


def test_every_rank_of_a_larger_island_is_looked_at(url: str, clock: Clock) -> None:
    worlds, store = (1, 2), open_store(url, TIMEOUT)
    small = Presence(open_store(url, TIMEOUT), 0, 0, worlds, SILENT_SECONDS)
    first, second = (Presence(open_store(url, TIMEOUT), 1, rank, worlds, SILENT_SECONDS) for rank in range(2))
    for one, member in ((small, "0-aa"), (first, "1-aa"), (second, "1-aa")):
        one.begin(member)
    for _ in range(10):
        wait_for_signs(store, "0-aa/0", "1-aa/0", "1-aa/1")
        assert not small.end_of("1-aa") and not second.end_of("0-aa")
        clock.now += STRIDE_SECONDS
    second.leave()
    assert end_in_silence(clock, small, "1-aa") == "has left"
    wait_for_signs(store, "0-aa/0")
    assert not second.end_of("0-aa")
    small.leave()
    first.leave()


def test_a_pause_of_all_islands_is_the_silence_of_none(tmp_path: Path, clock: Clock) -> None:
    """As of a machine that was suspended: the first to run again sees no new sign of the others."""
    store = open_store(f"file://{tmp_path}/meeting", TIMEOUT)
    here = Presence(store, 0, 0, (1, 1), SILENT_SECONDS)
    here.begin("0-aa")
    store.set("current/1", "1-aa")
    store.set("sign/1-aa/0", "1")
    assert not here.end_of("1-aa")
    clock.now += 100 * SILENT_SECONDS
    assert not here.end_of("1-aa")
    assert end_in_silence(clock, here, "1-aa") == "was silent for 0.5 s"
    here.leave()


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/meeting", TIMEOUT)
    shutil.rmtree(tmp_path / "meeting")
    with pytest.raises(
        LostStoreError, match=rf"islands cannot agree any more, because the folder {tmp_path}/meeting \(islands.m"
    ):
        store.set("current/0", "0-aa")


def test_a_server_that_cannot_listen_says_so_in_one_sentence() -> None:
    for words in (["no.such.host.invalid", "29400"], ["127.0.0.1", "70000"]):
        with pytest.raises(SystemExit, match=f"^cannot listen at {':'.join(words)}: .*Name an address and a free port"):
            main(words)


HEARS_CTRL_C = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background has it ignored
runpy.run_module("ultrascale.islands.store", run_name="__main__")
"""


def test_ctrl_c_ends_a_server_without_a_traceback() -> None:
    words = [sys.executable, "-c", HEARS_CTRL_C, "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            server.send_signal(signal.SIGINT)
            assert (server.communicate(timeout=200)[1], server.returncode) == ("", 0)
        finally:
            server.kill()  # else a server that goes on would be waited for without end


def test_a_server_listens_where_it_is_told_and_one_that_has_ended_is_named() -> None:
    words = [sys.executable, "-m", "ultrascale.islands.store", "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        store = open_store(server.stdout.readline().split()[-1], TIMEOUT)
        heard = [one.laddr.ip for one in psutil.Process(server.pid).net_connections() if one.status == "LISTEN"]
        assert heard == ["127.0.0.1"]
        store.set("current/0", "0-aa")
        server.kill()
        server.wait()
    with pytest.raises(LostStoreError, match=r"because the server at tcp://127.0.0.1:\d+ \(islands.meet\) does not answer: "):
        for _ in range(3):
            store.get("current/0")
