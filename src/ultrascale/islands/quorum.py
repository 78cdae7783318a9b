"""A quorum: the islands that are present do an outer step, without waiting for lost ones.

    knock     an island that starts or restarts waits for admission: with all others if a new era begins (no member of the
              last one is left), or by a member, which sends it a state
    arrive    at an outer step the members wait for all that are expected, but not for one that is gone, or later than
              `collective_timeout_seconds`; the first rank with nothing left to wait for decides the members for all
    send      members exchange deltas, in a thread beside training
    means     the exchange counts once every rank of every member has all of it; if one has not, none uses it, and the
              remaining members repeat it, with the same deltas, until all of them have it
    give      after the outer step the first of its members sends its full state to an island that knocks, and they meet at
              the next one

Every agreement is the first word written under a name in the store, so that all ranks read the same whoever writes it. Even a
rank that was suspended for an hour reads there that it was left out, knocks, and is readmitted as another member. Names begin
with era, step and attempt. Agreements are kept for a thousand outer steps, the words that lead to them for a few.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from ultrascale.contact import meaning_of
from ultrascale.description.run import Run
from ultrascale.description.sections.islands import Wire
from ultrascale.islands.admission import RESTART_HINT, Admission, Answer, Decision, LeftOutError
from ultrascale.islands.link import Groups, LostIslandError, Mean, make_groups, mean_among
from ultrascale.islands.presence import HAS_LEFT, island_of
from ultrascale.parallel.lost import LostRankError
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import SLOW_SECONDS

STEPS_KEPT = 1000
"""Outer steps whose agreements are kept."""
MOST_ATTEMPTS = 8
"""Most failed exchanges of one outer step. Each removes an island; otherwise connections between live islands are broken."""
COMPLETE = "complete"
T = TypeVar("T")


Delta = tuple[str, Tensor]
"""Name of a rank's set of counterparts, and the tensor sent among them."""


@dataclass
class OuterStep:
    """One outer step that has started and is not applied yet."""

    step: int
    decision: Decision
    deltas: list[Delta] = field(default_factory=list)
    wire: Wire = "fp32"
    attempt: int = 0
    exchange: Future[list[Mean]] | None = None
    means: list[Mean] | None = None


class Quorum:
    """The quorum for this rank. All ranks of an island make the same calls and get the same results."""

    def __init__(
        self, run: Run, ranks: Ranks, likes: Mapping[str, bool], *, timeout_seconds: float, wants_to_stop: Callable[[], bool]
    ):
        """`likes`: as in `islands.link.make_groups`."""
        self.islands, self.ranks, self.worlds, self.wants_to_stop = run.islands, ranks, run.worlds, wants_to_stop
        self.timeout_seconds, self._likes = timeout_seconds, likes
        self.admission = Admission(run, ranks, timeout_seconds=timeout_seconds, wants_to_stop=wants_to_stop)
        self.store, self.presence = self.admission.store, self.admission.presence
        self.lines: list[str] = []
        """Log lines about islands that joined or left."""
        self._last_step = -1
        self._outer_steps: dict[int, OuterStep] = {}
        self._messages: QuorumMessages | None = None
        self._to_forget: list[list[str]] = [[]]
        self._agreed: list[list[str]] = []

    def knock(self, steps: int) -> Answer:
        """Abandon everything in flight, and wait until this island is admitted to the run of `steps` steps."""
        self._outer_steps.clear()
        self._abandon_exchanges()
        return self.admission.knock(steps)

    def arrive(self, step: int) -> bool:
        """Agree on the members of the outer step after `step` steps. False: this island received a stop request, and others
        have left, so the step is overdue. Raises LeftOutError, and LostIslandError if too few are left."""
        decision = self._decide(step, 0, self.admission.last)
        if decision is None:
            return False
        self.admission.last, self._last_step, self._outer_steps[step] = decision, step, OuterStep(step, decision)
        self.store.set(f"{self.admission.era}/latest", str(step))
        self._to_forget.append([])
        for name in self._to_forget.pop(0) if len(self._to_forget) > 2 + self.islands.fragments else ():
            self.store.forget(name)
        self._add_lines(step, decision)
        return True

    def send(self, step: int, deltas: Sequence[Delta], wire: Wire) -> list[Future[Mean]]:
        """Send `deltas` to the members. Waiting for one of the returned means waits for all of them."""
        pending = self._outer_steps[step]
        pending.deltas, pending.wire = [*deltas], wire
        self._exchange(pending)
        return [_LazyMean(self, pending, index) for index in range(len(deltas))]

    def means(self, pending: OuterStep) -> list[Mean]:
        """The means of an outer step, once all members have them. Raises LeftOutError, LostIslandError."""
        while pending.means is None:
            if self._is_complete(pending):
                assert pending.exchange is not None
                pending.means = pending.exchange.result()
                self.admission.present = len(pending.decision.members)
                del self._outer_steps[pending.step]
                self._forget_agreements(pending)
            else:
                self._retry(pending)
        return pending.means

    def finish(self, steps: int) -> None:
        """Record that the run's last outer step is done."""
        self.store.set(f"{self.admission.era}/finished", str(steps))

    def leave(self) -> None:
        """Announce that no island needs to wait for this one."""
        self.presence.leave()

    def _decide(self, step: int, attempt: int, before: Decision) -> Decision | None:
        """Decide the members of this attempt, from those of `before` and those that joined them; None if this island stops
        instead."""
        key = f"{self.admission.era}/{step}/{attempt}"
        self._mark(f"{key}/here/{self.admission.member}")
        began, way_key, word = time.monotonic(), f"{key}/way/{self.admission.member}", None
        for _ in self.admission.poll(f"at the outer step after step {step}"):
            if self.store.get(f"{self.admission.era + 1}/begin") is not None:
                raise LeftOutError(f"{self.admission.here} was left out, and the others have begun anew")
            if int(self.store.get(f"{self.admission.era}/latest") or 0) > max(step, self._last_step):
                raise LeftOutError(
                    f"{self.admission.here} was left out of the outer step after step {step}, which others have done"
                )
            self._retry_failed(step)
            if (word := self.store.get(f"{key}/members")) is None:
                missing = [member for member in before.members if self.store.get(f"{key}/here/{member}") is None]
                # Checked after arrival: a sender of a state arrives here only once that was received.
                joined = [member for member in before.joining if self.store.get(f"took/{member}") == "yes"]
                missing += [member for member in joined if self.store.get(f"{key}/here/{member}") is None]
                expected = sorted([*before.members, *joined], key=island_of)
                if not attempt and self.wants_to_stop() and any(self.presence.state(member) == HAS_LEFT for member in missing):
                    self.store.first(way_key, "stop")
                gone = {member: end for member in missing if (end := self._end_of(member, time.monotonic() - began))}
                if len(gone) == len(missing):
                    word = self.store.first(f"{key}/members", self._proposed(step, attempt, expected, gone).word)
            if self.store.get(way_key) == "stop" or (word is not None and self.store.first(way_key, "go") == "stop"):
                return None
            if word is not None:
                break
        assert word is not None
        self._to_forget[-1].append(way_key)
        decision = Decision.read(word)
        if self.admission.member not in decision.members:
            cause = decision.gone.get(self.admission.member, "was not expected")
            raise LeftOutError(f"{self.admission.here} was left out of the outer step after step {step}: it {cause}")
        return decision

    def _proposed(self, step: int, attempt: int, expected: Sequence[str], gone: dict[str, str]) -> Decision:
        members = tuple(name for name in expected if name not in gone)
        if len(members) < self.islands.quorum:
            raise LostIslandError(self.admission.too_few(len(members), f"at the outer step after step {step}"))
        knocking = () if attempt else map(self.admission.knocking, range(self.islands.count))
        return Decision(members, tuple(filter(None, knocking)), gone)

    def _end_of(self, member: str, waited: float) -> str:
        """Reason to stop waiting for `member`; empty while there is none."""
        if end := self.presence.end_of(member):
            return end
        limit = self.timeout_seconds
        if waited > limit and self.store.get(f"busy/{member}") is not None:
            limit = SLOW_SECONDS
        return f"did not come within {limit:g} s (collective_timeout_seconds)" if waited > limit else ""

    def _exchange(self, pending: OuterStep) -> None:
        key, members = f"{self.admission.era}/{pending.step}/{pending.attempt}", pending.decision.members
        if self._messages is None or self._messages.members != members or self._messages.broken:
            if self._messages is not None:
                self._messages.end()
            self._messages = QuorumMessages(
                members, lambda: make_groups(self._likes, lambda like: self.admission.group(members, key, like))
            )
        done, deltas, wire = f"{key}/done/{self.admission.member}/{self.ranks.rank}", pending.deltas, pending.wire

        def exchanged(groups: Groups) -> list[Mean]:
            try:
                means = [mean_among(groups, like, delta, wire) for like, delta in deltas]
                self.store.set(done, "")
                return means
            except Exception as error:
                with suppress(LostRankError):
                    self.store.first(f"{key}/verdict", f"{self.admission.here} lost the others in it ({meaning_of(error)})")
                raise

        self._to_forget[-1].append(done)
        pending.exchange = self._messages.submit(exchanged)

    def _is_complete(self, pending: OuterStep) -> bool:
        """Wait until an attempt is known to be complete on all members, or to have failed."""
        assert pending.exchange is not None
        verdict = f"{self.admission.era}/{pending.step}/{pending.attempt}/verdict"
        for _ in self.admission.poll(f"for the mean of deltas after step {pending.step}"):
            if (word := self.store.get(verdict)) is not None:
                break
            if pending.exchange.done():
                if (error := pending.exchange.exception()) is not None:
                    self.store.first(verdict, f"{self.admission.here} lost the others in it ({meaning_of(error)})")
                elif self._all_have(pending):
                    self.store.first(verdict, COMPLETE)
                    continue
            for member in pending.decision.members:
                if end := self.presence.end_of(member):
                    self.store.first(verdict, COMPLETE if self._all_have(pending) else f"island {island_of(member)} {end}")
        if word != COMPLETE:
            self.lines.append(f"the outer step after step {pending.step} is done again from the same deltas: {word}")
        elif not pending.exchange.done():  # all ranks have said that they have it: this one too
            pending.exchange.result()
        return word == COMPLETE

    def _all_have(self, pending: OuterStep) -> bool:
        key = f"{self.admission.era}/{pending.step}/{pending.attempt}/done"
        ranks = ((member, rank) for member in pending.decision.members for rank in range(self.worlds[island_of(member)]))
        return all(self.store.get(f"{key}/{member}/{rank}") is not None for member, rank in ranks)

    def _forget_agreements(self, pending: OuterStep) -> None:
        """Remove agreements of many outer steps ago: a rank suspended that long learns from later ones that it was left out."""
        attempts = [f"{self.admission.era}/{pending.step}/{attempt}" for attempt in range(pending.attempt + 1)]
        self._agreed.append([f"{attempt}/{topic}" for attempt in attempts for topic in ("members", "verdict")])
        if len(self._agreed) > STEPS_KEPT:
            for name in self._agreed.pop(0):
                self.store.forget(name)

    def _retry(self, pending: OuterStep) -> None:
        """Another attempt, with the members of the last one that are present."""
        pending.attempt += 1
        if pending.attempt > MOST_ATTEMPTS:
            reason = f"{MOST_ATTEMPTS} exchanges of the outer step after step {pending.step} failed"
            raise LostIslandError(
                f"{self.admission.here} gives up, because {reason}: look at the lines between them. {RESTART_HINT}"
            )
        self._abandon_exchanges()
        decision = self._decide(pending.step, pending.attempt, Decision(pending.decision.members))
        assert decision is not None
        pending.decision = decision
        if pending.step == self._last_step:
            self.admission.last = Decision(decision.members, self.admission.last.joining, decision.gone)
        self._add_lines(pending.step, decision)
        self._exchange(pending)

    def _retry_failed(self, step: int) -> None:
        """Repeat other outer steps that have failed again: an island awaited here may be waiting for this one there."""
        for pending in list(self._outer_steps.values()):
            if pending.step != step and pending.means is None and pending.exchange is not None:
                verdict = f"{self.admission.era}/{pending.step}/{pending.attempt}/verdict"
                if pending.exchange.done() and (error := pending.exchange.exception()) is not None:
                    self.store.first(verdict, f"{self.admission.here} lost the others in it ({meaning_of(error)})")
                if self.store.get(verdict) not in (None, COMPLETE):
                    self.means(pending)

    def _abandon_exchanges(self) -> None:
        if self._messages is not None:
            self._messages.give_up()
        self._messages = None

    def _add_lines(self, step: int, decision: Decision) -> None:
        among = f"{len(decision.members)} of {self.islands.count} islands"
        for member, cause in decision.gone.items():
            rest = f"{among} go on without it until it comes back"
            self.lines.append(f"island {island_of(member)} {cause} at the outer step after step {step}: {rest}")
        for member in decision.joining:
            self.lines.append(f"island {island_of(member)} comes back after the outer step after step {step}")

    def _mark(self, name: str) -> None:
        self.store.set(name, "")
        self._to_forget[-1].append(name)


class _LazyMean(Future[Mean]):
    """One mean of an outer step; agreement is reached when its result is read."""

    def __init__(self, quorum: Quorum, pending: OuterStep, index: int):
        super().__init__()
        self._get_means = lambda: quorum.means(pending)[index]

    def result(self, timeout: float | None = None) -> Mean:
        """The mean. Raises LeftOutError, LostIslandError."""
        return self._get_means()


class QuorumMessages:
    """Groups of one set of islands, and the thread that exchanges deltas in them while training continues. Gloo calls cannot be
    interrupted: an abandoned thread waits for its time-out."""

    def __init__(self, members: tuple[str, ...], make: Callable[[], Groups]):
        self.members, self.broken = members, False
        self._make, self._jobs = make, queue.SimpleQueue[tuple[Callable[[Groups], Any], Future[Any]] | None]()
        threading.Thread(target=self._work, daemon=True, name="islands").start()

    def submit(self, job: Callable[[Groups], T]) -> Future[T]:
        """Queue `job` behind those submitted before it."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def give_up(self) -> None:
        """Abandon the thread; jobs that have not started fail."""
        self.broken = True
        self.end()

    def end(self) -> None:
        """Stop after the queued jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        groups: Groups | None = None
        while (task := self._jobs.get()) is not None:
            job, future = task
            try:
                if self.broken:
                    raise LostIslandError("an exchange before it failed")
                groups = self._make() if groups is None else groups
                result = job(groups)
            except Exception as error:
                self.broken = True
                future.set_exception(error)
            else:
                future.set_result(result)
