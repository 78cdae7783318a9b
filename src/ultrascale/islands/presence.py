"""Signs of life of islands that were started separately.

A member is one start of one island, such as `2-5f01c3`: an island that was restarted or readmitted is another member, and
agreements of the earlier one do not bind it. Each of its ranks increments a counter in the store. A rank that sees a counter
unchanged for `islands.silent_seconds`, on its own clock, treats the member as gone. That clock counts little of a time in which
this process did not run: a machine that was paused has paused its other islands too. The member may be alive and only have been
silent: it discovers that it was left out, and is readmitted as another member.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ultrascale.islands.store import IslandStore, LostStoreError

KNOCKS, TAKES_PART, HAS_LEFT = "knocks", "takes part", "has left"
BEATS = 10
"""Signs of life per `islands.silent_seconds`."""
MOST_COUNTED = 2
"""Most intervals between signs of life that one gap between two readings of the clock counts as."""


class Presence:
    """This rank's signs of life, and its view of its counterparts on the other islands."""

    def __init__(self, store: IslandStore, island: int, rank: int, worlds: Sequence[int], silent_seconds: float):
        """`worlds`: ranks of each island."""
        self.store, self.island, self.rank, self.silent_seconds = store, island, rank, silent_seconds
        self.worlds = worlds
        self.member = ""
        self._over = threading.Event()
        self._seen: dict[str, tuple[str | None, float]] = {}
        """The last sign of each observed rank, and when it was first seen, in seconds that this process was running."""
        self._looked: dict[str, tuple[float, str]] = {}
        self._clock, self._read_at, self._reading = 0.0, time.monotonic(), threading.Lock()

    def begin(self, member: str) -> None:
        """Be present as `member` from now on."""
        self._over.set()
        self.member, self._over = member, threading.Event()
        self.say(KNOCKS)
        self.store.set(f"current/{self.island}", member)
        threading.Thread(target=self._live, args=(member, self._over), daemon=True, name="presence").start()

    def say(self, state: str) -> None:
        """Publish this island's state."""
        self.store.set(f"state/{self.member}", state)

    def leave(self) -> None:
        """Stop giving signs of life."""
        self._over.set()
        self.say(HAS_LEFT)

    def current(self, island: int) -> str | None:
        """The current member of `island`; None if it has never started."""
        return self.store.get(f"current/{island}")

    def state(self, member: str) -> str | None:
        """Last state that a member has published."""
        return self.store.get(f"state/{member}")

    def end_of(self, member: str) -> str:
        """Reason why a member counts as gone; empty while it is there."""
        now = time.monotonic()
        looked_at, end = self._looked.get(member, (-1.0, ""))
        if looked_at < 0 or now - looked_at > self.silent_seconds / (2 * BEATS):
            end = self._look(member, self._seconds_running())
            self._looked[member] = now, end
        return end

    def _look(self, member: str, now: float) -> str:
        if self.current(island_of(member)) != member:
            return "was started again"
        world, quiet_since = self.worlds[island_of(member)], now
        for rank in range(self.rank % world, world, self.worlds[self.island]):  # all of a larger island's between them
            name = _sign(member, rank)
            sign, (before, since) = self.store.get(name), self._seen.get(name, (None, now))
            self._seen[name] = sign, (now if sign != before else since)
            quiet_since = min(quiet_since, self._seen[name][1])
        if now - quiet_since <= self.silent_seconds:
            return ""
        return "has left" if self.state(member) == HAS_LEFT else f"was silent for {self.silent_seconds:g} s"

    def _seconds_running(self) -> float:
        """Seconds so far in which this process was running. Also read at each sign of life: time without looks counts too."""
        with self._reading:
            now = time.monotonic()
            self._clock += min(now - self._read_at, MOST_COUNTED * self.silent_seconds / BEATS)
            self._read_at = now
            return self._clock

    def _live(self, member: str, over: threading.Event) -> None:
        count = 0
        while not over.is_set():
            count += 1
            self._seconds_running()
            with suppress(LostStoreError):  # callers that need the store report it
                self.store.set(_sign(member, self.rank), str(count))
            over.wait(self.silent_seconds / BEATS)


def island_of(member: str) -> int:
    """The island that a member is a start of."""
    return int(member.partition("-")[0])


def _sign(member: str, rank: int) -> str:
    return f"sign/{member}/{rank}"
