"""Admission of islands: an island requests to join (a knock), and the others admit it.

    knock         as a new member, until it is answered; one knock for all of the island's ranks
    a new era     begins with all islands that knock, if no member is active: at the first start, or when all have died
    a state       is sent to the new member by the first member of the outer step after which its admission is agreed

An island that was left out knocks like one that was restarted.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import NamedTuple

from ultrascale import heartbeat
from ultrascale.description.run import Run
from ultrascale.islands.link import Group, LostIslandError
from ultrascale.islands.presence import KNOCKS, TAKES_PART, Presence, island_of
from ultrascale.islands.store import open_store
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import START_SECONDS

LOOK_SECONDS = 0.01
RANKS_A_LOOK = 16
"""Islands with more ranks poll less often, because all ranks query the same store."""
RESTART_HINT = "Start it again: it takes the state of one that takes part."
BUSY = "gives its state"


class LeftOutError(LostIslandError):
    """The other islands have continued without this one, as `message` says."""

    def __init__(self, message: str):
        super().__init__(f"{message}. {RESTART_HINT}")
        self.message = message


@dataclass(frozen=True)
class Decision:
    """Members of an attempt at an outer step."""

    members: tuple[str, ...]
    """In order of their islands."""
    joining: tuple[str, ...] = ()
    """Members that knock, and receive a state after the step."""
    gone: dict[str, str] = field(default_factory=dict)
    """Expected members that do not take part, each with the reason."""

    @classmethod
    def read(cls, word: str) -> Decision:
        """Parse the decision in `word`."""
        fields = json.loads(word)
        return cls(tuple(fields["members"]), tuple(fields["joining"]), fields["gone"])

    @property
    def word(self) -> str:
        return json.dumps(asdict(self))


class Answer(NamedTuple):
    """Answer to a knock."""

    kind: str
    """`era`: all start together; `give`: `giver` sends its state after the outer step `step`; `stop`: this island received a
    stop request meanwhile; `finished`: the others have reached the run's end."""
    era: int = 0
    step: int = 0
    giver: str = ""


class Admission:
    """Admission for this rank. All ranks of an island make the same calls and get the same results."""

    def __init__(self, run: Run, ranks: Ranks, *, timeout_seconds: float, wants_to_stop: Callable[[], bool]):
        assert ranks.meeting is not None
        self.islands, self.ranks, self.wants_to_stop = run.islands, ranks, wants_to_stop
        self.timeout = timedelta(seconds=timeout_seconds)
        self.store = open_store(ranks.meeting, self.timeout)
        self.presence = Presence(self.store, ranks.island, ranks.rank, run.worlds, run.islands.silent_seconds)
        self.era = -1
        self.last = Decision(())
        """Members of the last outer step, and those that joined after it."""
        self.present = 0
        """Islands that took part in the last outer step."""

    @property
    def member(self) -> str:
        """Member name of this start of this island."""
        return self.presence.member

    @property
    def here(self) -> str:
        return f"island {self.ranks.island}"

    def knock(self, steps: int) -> Answer:
        """Wait until this island is admitted to the run of `steps` steps. Collective over its ranks."""
        drawn = f"{self.ranks.island}-{uuid.uuid4().hex[:8]}"
        self.presence.begin(self.ranks.gather_text(drawn)[0])
        began, word = time.monotonic(), None
        for _ in self.poll("to be let in"):
            if (word := self.store.get(self._answer(self.member))) is not None:
                break
            if self.wants_to_stop():
                self._post_answer(self.member, "stop")
            self.era = self._newest_era()
            beginning = None if self.era < 0 else self.decision(f"{self.era}/begin")
            finished = self.store.get(f"{self.era}/finished")
            if beginning is not None and self.member in beginning.members:
                self._post_answer(self.member, f"era {self.era}")
            elif finished is not None and steps <= int(finished):
                self._post_answer(self.member, f"finished {finished}")
            elif finished is not None or not any(self._takes_part(i, beginning) for i in range(self.islands.count)):
                self._begin_era(time.monotonic() - began)
        assert word is not None
        answer = word.split()
        if answer[0] == "era":
            self.era = int(answer[1])
            self.last = self.decision(f"{self.era}/begin")
            self.present = len(self.last.members)
        elif answer[0] == "give":
            era, step = int(answer[1]), int(answer[2])
            self.era, self.last = era, self.decision(f"{era}/{step}/0/members")
            self.present = len(self.last.members)
            return Answer("give", era, step, answer[3])
        return Answer(answer[0], self.era, int(answer[1]) if answer[0] == "finished" else 0)

    def enter(self) -> None:
        """Become an active member."""
        self.presence.say(TAKES_PART)

    def group_of_era(self) -> Group | None:
        """The group of all islands that start the era; None on a rank without counterparts."""
        return self._group_of_ranks(self.last.members, f"{self.era}/begin")

    def group_of_two(self, giver: str, taker: str) -> Group | None:
        """The group of the island that sends its state and the one that receives it; None on a rank without counterparts."""
        return self._group_of_ranks((giver, taker), f"give/{taker}")

    def _group_of_ranks(self, members: tuple[str, ...], name: str) -> Group | None:
        """Group of rank r of each island; if islands differ in dp, of the first ranks alone, on behalf of the others."""
        return self.group(members, name, str(self.ranks.rank)) if self.ranks.is_first or not self.islands.uneven_dp else None

    def takers(self, step: int) -> Iterator[str]:
        """Members that must receive this island's state after the outer step after `step` steps."""
        decision = self.decision(f"{self.era}/{step}/0/members")
        if decision.members[0] != self.member:
            return
        for taker in decision.joining:
            word = f"give {self.era} {step} {self.member}"
            # One rank may see the member as gone and another not: the first word written decides for the whole island.
            said = self.store.first(f"gives/{self.member}/{taker}", "no" if self.presence.end_of(taker) else "yes")
            if said == "yes" and self.store.first(self._answer(taker), word) == word:
                self.store.set(f"busy/{self.member}", BUSY)
                yield taker
                self.store.forget(f"busy/{self.member}")

    def has_taken(self, taker: str) -> bool:
        """Wait until all ranks of `taker` report that they have the state; False if it is gone."""
        for _ in self.poll(f"until island {island_of(taker)} has the state"):
            if (word := self.store.get(f"took/{taker}")) is not None:
                return word == "yes"
            if self.presence.end_of(taker):
                return self.store.first(f"took/{taker}", "no") == "yes"
        raise AssertionError

    def took(self) -> None:
        """Report that this rank has the state, and wait for the island's other ranks. Raises LostIslandError if one fails."""
        self.ranks.barrier()
        if self.store.first(f"took/{self.member}", "yes") != "yes":
            raise LostIslandError(f"{self.here} took the state of another too late. {RESTART_HINT}")

    def _begin_era(self, waited: float) -> None:
        """Start an era with all islands that knock, once all have, or the time limit for starts has passed."""
        knocking = [member for i in range(self.islands.count) if (member := self.knocking(i)) is not None]
        if len(knocking) < self.islands.count and waited < START_SECONDS:
            return
        if len(knocking) < self.islands.quorum:
            raise LostIslandError(self.too_few(len(knocking), "to begin"))
        self.store.first(f"{self.era + 1}/begin", Decision(tuple(knocking)).word)

    def decision(self, name: str) -> Decision:
        """The recorded decision of this name."""
        word = self.store.get(name)
        assert word is not None, name
        return Decision.read(word)

    def _newest_era(self) -> int:
        era = max(self.era, -1)
        while self.store.get(f"{era + 1}/begin") is not None:
            era += 1
        return era

    def _takes_part(self, island: int, beginning: Decision | None) -> bool:
        member = self.presence.current(island)
        if member is None or member == self.member or self.presence.end_of(member):
            return False
        begins = beginning is not None and member in beginning.members
        state = self.presence.state(member)
        return state == TAKES_PART or (begins and state == KNOCKS)

    def knocking(self, island: int) -> str | None:
        member = self.presence.current(island)
        knocks = member is not None and self.presence.state(member) == KNOCKS and not self.presence.end_of(member)
        return member if knocks and self.store.get(self._answer(member or "")) is None else None

    def group(self, members: tuple[str, ...], name: str, like: str) -> Group:
        """The group of this rank's `like` on the islands of `members`."""
        store = self.store.for_group(f"{name}/{like}", len(members))
        islands = [island_of(member) for member in members]
        return Group(store, islands, members.index(self.member), self.timeout, self.islands.divisor(islands))

    def too_few(self, present: int, where: str) -> str:
        reason = f"{present} of {self.islands.count} islands are there {where}, and islands.quorum is {self.islands.quorum}"
        return f"{self.here} ends, because {reason}. Start the others again: each goes on from its checkpoint."

    def _answer(self, member: str) -> str:
        return f"answer/{member}"

    def _post_answer(self, member: str, word: str) -> None:
        self.store.first(self._answer(member), word)

    def poll(self, what: str) -> Iterator[None]:
        """Poll repeatedly, at growing intervals, while reporting to this rank's watchdog that it is alive and waiting."""
        pause, beaten = LOOK_SECONDS / 10, 0.0
        while True:
            if time.monotonic() - beaten > 1.0:
                heartbeat.beat(f"waiting for other islands {what}")
                beaten = time.monotonic()
            yield
            time.sleep(pause)
            pause = min(pause * 1.2, LOOK_SECONDS * (5 + self.ranks.world * self.islands.count / RANKS_A_LOOK))
