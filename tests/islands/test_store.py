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


def test_who_is_silent_or_was_started_again_is_gone(url: str) -> None:
    here = Presence(open_store(url, TIMEOUT), 0, 0, (1, 1), 0.5)
    there = Presence(open_store(url, TIMEOUT), 1, 0, (1, 1), 0.5)
    there.begin("1-aa")
    assert here.current(1) == "1-aa" and here.state("1-aa") == KNOCKS
    until_seen = threading.Event()
    for _ in range(10):
        assert not here.end_of("1-aa")
        until_seen.wait(0.1)
    there.begin("1-bb")
    until_seen.wait(0.2)
    assert here.end_of("1-aa") == "was started again"
    assert not here.end_of("1-bb")
    there.leave()
    assert any(here.end_of("1-bb") == "has left" or until_seen.wait(0.1) for _ in range(100))


def test_every_rank_of_a_larger_island_is_looked_at(url: str) -> None:
    worlds = (1, 2)
    small = Presence(open_store(url, TIMEOUT), 0, 0, worlds, 0.5)
    first, second = (Presence(open_store(url, TIMEOUT), 1, rank, worlds, 0.5) for rank in range(2))
    for one, member in ((small, "0-aa"), (first, "1-aa"), (second, "1-aa")):
        one.begin(member)
    waits = threading.Event()
    for _ in range(10):
        assert not small.end_of("1-aa") and not second.end_of("0-aa")
        waits.wait(0.1)
    second.leave()
    assert any(small.end_of("1-aa") == "has left" or waits.wait(0.1) for _ in range(100))
    assert not second.end_of("0-aa")


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/meeting", TIMEOUT)
    shutil.rmtree(tmp_path / "meeting")
    with pytest.raises(
        LostStoreError, match=rf"islands cannot agree any more, because the folder {tmp_path}/meeting \(islands.m"
    ):
        store.set("current/0", "0-aa")


def test_a_server_that_cannot_listen_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["no.such.host.invalid", "29400"], ["127.0.0.1", "70000"]):
        monkeypatch.setattr(sys, "argv", ["store", *words])
        with pytest.raises(SystemExit, match=f"^cannot listen at {':'.join(words)}: .*Name an address and a free port"):
            main()


def test_ctrl_c_ends_a_server_without_a_traceback() -> None:
    words = [sys.executable, "-m", "ultrascale.islands.store", "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert (server.communicate(timeout=60)[1], server.returncode) == ("", 0)


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
