"""A quorum: the islands that are there do an outer step, whoever else there ever was.

    knock     an island that comes, for the first time or again, waits until it is let in: with all others where a new era
              begins (none of the era before is left), or by one that takes part, which gives it the state of its own
    arrive    at an outer step all who are expected are waited for, but not who is gone, or later than
              `collective_timeout_seconds`; the first rank that has nobody to wait for says who takes part, for all
    send      moves go among those, by a thread beside the one that trains
    means     the exchange counts once every rank of every member has all of it; where one has not, none takes any of it, and
              those who are left do it again, with the same moves, until all who take part have it
    give      after the outer step the first of those who took part gives its whole state to who has knocked, and they meet at
              the next one

Every agreement is the first word under a name in the store, so that all read the same whoever writes it, also a rank that was
stopped for an hour in the middle of it: it reads there that it was left out, knocks, and is let in again as another member.
Names begin with era, step and attempt. What is agreed is kept for a thousand outer steps, what leads to it for a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from ultrascale.contact import why
from ultrascale.description.run import Run
from ultrascale.description.sections.islands import Wire
from ultrascale.islands.admission import AGAIN, Admission, Answer, Decision, LeftOutError
from ultrascale.islands.link import Groups, LostIslandError, Mean, groups_of, mean_among
from ultrascale.islands.messages import Messages
from ultrascale.islands.presence import HAS_LEFT, island_of
from ultrascale.parallel.lost import LostRankError
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import SLOW_SECONDS

KEPT = 1000
"""Outer steps whose agreements are kept."""
MOST_ATTEMPTS = 8
"""Exchanges of one outer step that may fail: each leaves an island out, or the lines between those that live are broken."""
COMPLETE = "complete"


Move = tuple[str, Tensor]
"""The name of a rank's like, and what is sent among them."""


@dataclass
class Round:
    """One outer step that was begun and is not applied."""

    step: int
    decision: Decision
    moves: list[Move] = field(default_factory=list)
    wire: Wire = "fp32"
    attempt: int = 0
    exchange: Future[list[Mean]] | None = None
    means: list[Mean] | None = None


class Quorum:
    """This rank's part. All ranks of an island come to the same calls and learn the same."""

    skips: Callable[[int, int], bool] = staticmethod(lambda step, island: False)
    """True if an island is left out of the outer step after `step` steps although it is there. For proofs: what others compute
    then is what they compute where it has died."""

    def __init__(
        self, run: Run, ranks: Ranks, likes: Mapping[str, bool], *, timeout_seconds: float, wants_to_stop: Callable[[], bool]
    ):
        """`likes`: as `islands.link.groups_of` has them."""
        self.islands, self.ranks, self.worlds, self.wants_to_stop = run.islands, ranks, run.worlds, wants_to_stop
        self.timeout_seconds, self._likes = timeout_seconds, likes
        self.door = Admission(run, ranks, timeout_seconds=timeout_seconds, wants_to_stop=wants_to_stop)
        self.store, self.presence = self.door.store, self.door.presence
        self.lines: list[str] = []
        """Lines to be told of islands that came and went."""
        self._last_step = -1
        self._rounds: dict[int, Round] = {}
        self._messages: Messages | None = None
        self._to_forget: list[list[str]] = [[]]
        self._agreed: list[list[str]] = []

    def knock(self, steps: int) -> Answer:
        """Give up all that is under way, and wait until this island is let into the run of `steps` steps."""
        self._rounds.clear()
        self._give_up_messages()
        return self.door.knock(steps)

    def arrive(self, step: int) -> bool:
        """Agree on who does the outer step after `step` steps. False: this island was asked to stop, and others have left, so
        that it owes the step. Raises LeftOutError, and LostIslandError if too few are left."""
        decision = self._decide(step, 0, self.door.last)
        if decision is None:
            return False
        self.door.last, self._last_step, self._rounds[step] = decision, step, Round(step, decision)
        self.store.set(f"{self.door.era}/latest", str(step))
        self._to_forget.append([])
        for name in self._to_forget.pop(0) if len(self._to_forget) > 2 + self.islands.fragments else ():
            self.store.forget(name)
        self._tell(step, decision)
        return True

    def send(self, step: int, moves: Sequence[Move], wire: Wire) -> list[Future[Mean]]:
        """Send `moves` among those who take part. The means of all of them are there once one of these is asked."""
        one = self._rounds[step]
        one.moves, one.wire = [*moves], wire
        self._exchange(one)
        return [_Later(self, one, index) for index in range(len(moves))]

    def means(self, one: Round) -> list[Mean]:
        """The means of an outer step, once all who take part have them. Raises LeftOutError, LostIslandError."""
        while one.means is None:
            if self._is_complete(one):
                assert one.exchange is not None
                one.means = one.exchange.result()
                self.door.present = len(one.decision.members)
                del self._rounds[one.step]
                self._forget_agreements(one)
            else:
                self._do_again(one)
        return one.means

    def finish(self, steps: int) -> None:
        """Say that the run's last outer step is done."""
        self.store.set(f"{self.door.era}/finished", str(steps))

    def leave(self) -> None:
        """Let nobody wait for this island."""
        self.presence.leave()

    def _decide(self, step: int, attempt: int, before: Decision) -> Decision | None:
        """Decide who takes part in this attempt, of those who did `before` and those who joined them; None if this island stops
        instead."""
        key = f"{self.door.era}/{step}/{attempt}"
        self._mark(f"{key}/here/{self.door.member}")
        began, way, word = time.monotonic(), f"{key}/way/{self.door.member}", None
        for _ in self.door.looks(f"at the outer step after step {step}"):
            if self.store.get(f"{self.door.era + 1}/begin") is not None:
                raise LeftOutError(f"{self.door.here} was left out, and the others have begun anew")
            if int(self.store.get(f"{self.door.era}/latest") or 0) > max(step, self._last_step):
                raise LeftOutError(f"{self.door.here} was left out of the outer step after step {step}, which others have done")
            self._do_failed_again(step)
            if (word := self.store.get(f"{key}/members")) is None:
                missing = [one for one in before.members if self.store.get(f"{key}/here/{one}") is None]
                # Asked after who is here: who gives a state comes here only once that has been taken.
                joined = [one for one in before.joining if self.store.get(f"took/{one}") == "yes"]
                missing += [one for one in joined if self.store.get(f"{key}/here/{one}") is None]
                expected = sorted([*before.members, *joined], key=island_of)
                if not attempt and self.wants_to_stop() and any(self.presence.state(one) == HAS_LEFT for one in missing):
                    self.store.first(way, "stop")
                gone = {one: end for one in missing if (end := self._end_of(one, time.monotonic() - began))}
                if len(gone) == len(missing) and self._returned(step):
                    word = self.store.first(f"{key}/members", self._proposed(step, attempt, expected, gone).word)
            if self.store.get(way) == "stop" or (word is not None and self.store.first(way, "go") == "stop"):
                return None
            if word is not None:
                break
        assert word is not None
        self._to_forget[-1].append(way)
        decision = Decision.read(word)
        if self.door.member not in decision.members:
            cause = decision.gone.get(self.door.member, "was not expected")
            raise LeftOutError(f"{self.door.here} was left out of the outer step after step {step}: it {cause}")
        return decision

    def _proposed(self, step: int, attempt: int, expected: Sequence[str], gone: dict[str, str]) -> Decision:
        skipped = {one: "is told to be left out" for one in expected if one not in gone and self.skips(step, island_of(one))}
        members = tuple(one for one in expected if one not in gone and one not in skipped)
        if len(members) < self.islands.quorum:
            raise LostIslandError(self.door.too_few(len(members), f"at the outer step after step {step}"))
        knocking = () if attempt else [self.door.knocking(i) for i in range(self.islands.count)]
        joining = tuple(one for one in knocking if one is not None and not self.skips(self._next(step), island_of(one)))
        return Decision(members, joining, gone | skipped)

    def _returned(self, step: int) -> bool:
        """True if islands that are told to be let in after this outer step have knocked."""
        islands = range(self.islands.count)
        away = set(islands) - {island_of(member) for member in self.door.last.members}
        told = [i for i in away if self.skips(step, i) and not self.skips(self._next(step), i)]
        return all(self.door.knocking(island) is not None for island in told)

    def _next(self, step: int) -> int:
        return self.islands.next_due(step, step + self.islands.every_steps)

    def _end_of(self, member: str, waited: float) -> str:
        """Why `member` is waited for no longer; empty while it is."""
        if end := self.presence.end_of(member):
            return end
        limit = self.timeout_seconds
        if waited > limit and self.store.get(f"busy/{member}") is not None:
            limit = SLOW_SECONDS
        return f"did not come within {limit:g} s (collective_timeout_seconds)" if waited > limit else ""

    def _exchange(self, one: Round) -> None:
        key, members = f"{self.door.era}/{one.step}/{one.attempt}", one.decision.members
        if self._messages is None or self._messages.members != members or self._messages.broken:
            if self._messages is not None:
                self._messages.end()
            self._messages = Messages(members, lambda: groups_of(self._likes, lambda like: self.door.group(members, key, like)))
        done, moves, wire = f"{key}/done/{self.door.member}/{self.ranks.rank}", one.moves, one.wire

        def exchanged(groups: Groups) -> list[Mean]:
            try:
                found = [mean_among(groups, like, own, wire) for like, own in moves]
                self.store.set(done, "")
                return found
            except Exception as error:
                with suppress(LostRankError):
                    self.store.first(f"{key}/verdict", f"{self.door.here} lost the others in it ({why(error)})")
                raise

        self._to_forget[-1].append(done)
        one.exchange = self._messages.submit(exchanged)

    def _is_complete(self, one: Round) -> bool:
        """Wait until an attempt is known to be complete on all who take part in it, or to have failed."""
        assert one.exchange is not None
        verdict = f"{self.door.era}/{one.step}/{one.attempt}/verdict"
        for _ in self.door.looks(f"for the mean of moves after step {one.step}"):
            if (word := self.store.get(verdict)) is not None:
                break
            if one.exchange.done():
                if (error := one.exchange.exception()) is not None:
                    self.store.first(verdict, f"{self.door.here} lost the others in it ({why(error)})")
                elif self._all_have(one):
                    self.store.first(verdict, COMPLETE)
                    continue
            for member in one.decision.members:
                if end := self.presence.end_of(member):
                    self.store.first(verdict, COMPLETE if self._all_have(one) else f"island {island_of(member)} {end}")
        if word != COMPLETE:
            self.lines.append(f"the outer step after step {one.step} is done again from the same moves: {word}")
        elif not one.exchange.done():  # all ranks have said that they have it: this one too
            one.exchange.result()
        return word == COMPLETE

    def _all_have(self, one: Round) -> bool:
        key = f"{self.door.era}/{one.step}/{one.attempt}/done"
        ranks = ((member, rank) for member in one.decision.members for rank in range(self.worlds[island_of(member)]))
        return all(self.store.get(f"{key}/{member}/{rank}") is not None for member, rank in ranks)

    def _forget_agreements(self, one: Round) -> None:
        """Forget what was agreed many outer steps ago: who has slept that long learns from later ones that it was left out."""
        attempts = [f"{self.door.era}/{one.step}/{attempt}" for attempt in range(one.attempt + 1)]
        self._agreed.append([f"{attempt}/{what}" for attempt in attempts for what in ("members", "verdict")])
        if len(self._agreed) > KEPT:
            for name in self._agreed.pop(0):
                self.store.forget(name)

    def _do_again(self, one: Round) -> None:
        """Another attempt, of those of the last one that are there."""
        one.attempt += 1
        if one.attempt > MOST_ATTEMPTS:
            told = f"{MOST_ATTEMPTS} exchanges of the outer step after step {one.step} failed"
            raise LostIslandError(f"{self.door.here} gives up, because {told}: look at the lines between them. {AGAIN}")
        self._give_up_messages()
        decision = self._decide(one.step, one.attempt, Decision(one.decision.members))
        assert decision is not None
        one.decision = decision
        if one.step == self._last_step:
            self.door.last = Decision(decision.members, self.door.last.joining, decision.gone)
        self._tell(one.step, decision)
        self._exchange(one)

    def _do_failed_again(self, step: int) -> None:
        """Do other outer steps that have failed again: who waits for this island there may be waited for here."""
        for one in list(self._rounds.values()):
            if one.step != step and one.means is None and one.exchange is not None:
                verdict = f"{self.door.era}/{one.step}/{one.attempt}/verdict"
                if one.exchange.done() and (error := one.exchange.exception()) is not None:
                    self.store.first(verdict, f"{self.door.here} lost the others in it ({why(error)})")
                if self.store.get(verdict) not in (None, COMPLETE):
                    self.means(one)

    def _give_up_messages(self) -> None:
        if self._messages is not None:
            self._messages.give_up()
        self._messages = None

    def _tell(self, step: int, decision: Decision) -> None:
        among = f"{len(decision.members)} of {self.islands.count} islands"
        for member, cause in decision.gone.items():
            rest = f"{among} go on without it until it comes back"
            self.lines.append(f"island {island_of(member)} {cause} at the outer step after step {step}: {rest}")
        for member in decision.joining:
            self.lines.append(f"island {island_of(member)} comes back after the outer step after step {step}")

    def _mark(self, name: str) -> None:
        self.store.set(name, "")
        self._to_forget[-1].append(name)


class _Later(Future[Mean]):
    """One mean of an outer step, which is agreed on when it is asked for."""

    def __init__(self, quorum: Quorum, one: Round, index: int):
        super().__init__()
        self._asks = lambda: quorum.means(one)[index]

    def result(self, timeout: float | None = None) -> Mean:
        """The mean. Raises LeftOutError, LostIslandError."""
        return self._asks()
