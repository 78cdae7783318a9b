"""The outer loop of one rank (DiLoCo): called by the trainer after each step, and its state in a checkpoint.

    begin        all islands are in the same round, from the same anchor: others receive the state of an island that is
    after_step   apply the means that have arrived, send deltas that are due
    leave        stop before the next outer step: the other islands stop too, and do the step after the next start

With a quorum (`islands.quorum`) the others continue instead; an island that was left out rejoins in `_come_back`, with all of
its state received from another island.

Between two outer steps islands need no agreement: if they stopped at different steps of a round, they resume there, and reach
its end with the same bits as without the stop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ultrascale.checkpoint.slices import Slice
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.islands import unsharded
from ultrascale.islands.admission import Answer, LeftOutError
from ultrascale.islands.link import Group, IslandLink, LostIslandError, Mean, mean_among
from ultrascale.islands.outer_state import OuterState
from ultrascale.islands.presence import island_of
from ultrascale.islands.quorum import Quorum
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import LocalParameter, Share

Tensors = Mapping[str, Sequence[Slice]]
Facts = dict[str, Any]
Restore = Callable[[Facts], None]
Whole = tuple[Callable[[], Tensors], Callable[[], Facts], Restore]


class OuterLoop:
    """Outer loop of one rank. All islands construct theirs at once."""

    def __init__(self, run: Run, ranks: Ranks, share: Share, *, wants_to_stop: Callable[[], bool] = lambda: False):
        self.islands, self.steps, self.ranks = run.islands, run.steps, ranks
        self.state = OuterState(run.islands, share)
        limit = run.collective_timeout_seconds
        self.link: IslandLink | None = None
        """Link of islands that were started together."""
        self.quorum: Quorum | None = None
        """Quorum of islands that were started separately."""
        likes = self.state.likes()
        if ranks.meeting:
            self.quorum = Quorum(run, ranks, likes, timeout_seconds=limit, wants_to_stop=wants_to_stop)
        else:
            divisor = run.islands.divisor(range(run.islands.count))
            self.link = IslandLink(ranks, run.islands.count, timeout_seconds=limit, likes=likes, divisor=divisor)
        self.outer_steps = 0
        """Outer steps so far, counted per fragment."""
        self.owes = False
        """True if outer steps are overdue because another island had left."""
        self.stops = False
        """True if this island was not admitted, and stops."""
        self.under_way: dict[int, int] = {}
        """Fragments in flight, each with the step after which it is applied."""
        self.sent_bytes = 0
        """Bytes sent by all ranks of this island to other islands, in deltas and means, since the run's first step."""
        self._deltas: dict[int, list[Future[Mean]]] = {}
        alone = replace(run.islands, quorum=0, silent_seconds=1.0, meet="")  # what each may say in its own way
        decisive = (alone, run.model, run.batch, run.optimizer, run.steps, run.seed)
        self._description = _number(repr(decisive).encode())
        self._whole: Whole
        self._beside = ThreadPoolExecutor(1, "islands")

    def after_step(self, steps_done: int) -> bool:
        """Apply the fragments that are due after this step, and send the next. Returns False if another island has left, so
        that this one must stop too. Raises LostIslandError."""
        try:
            self._apply(steps_done)
        except LeftOutError as error:
            return self._come_back(steps_done, error)
        self.owes = bool(self.islands.due(steps_done, self.steps))
        return self.settle(steps_done)

    def settle(self, steps_done: int) -> bool:
        """Do overdue outer steps, if any; False if they are still overdue."""
        try:
            return not self.owes or self.meet(steps_done)
        except LeftOutError as error:
            return self._come_back(steps_done, error)

    def meet(self, steps_done: int) -> bool:
        """Does the outer steps that are due; False, with nothing done, if another island has left."""
        if not self._arrive(steps_done):
            return False
        is_last, later = steps_done == self.steps, self.islands.overlap_steps
        if is_last:
            self._apply(max([steps_done, *self.under_way.values()]))
        due = self.islands.due(steps_done, self.steps)
        self._send(steps_done, due, beside=later > 0 and not is_last)
        for fragment in due:
            self.under_way[fragment] = steps_done if is_last else steps_done + later
        self.owes = False
        self._apply(steps_done)
        self._give(steps_done)
        if is_last and self.quorum is not None:
            self.quorum.finish(steps_done)
        return True

    def leave(self, steps_done: int) -> None:
        """Tell the other islands that this one stops before its next outer step."""
        if self.quorum is not None:
            for fragment in sorted(self._deltas):
                self._await(fragment)
            self.quorum.leave()
        elif self.link is not None and not self.owes:
            self.link.leave(self.islands.next_outer_step(steps_done, self.steps))

    def values(self) -> dict[str, int]:
        """Values for a row of metrics."""
        present = self.islands.count if self.quorum is None else self.quorum.admission.present
        return {"outer/steps": self.outer_steps, "outer/sent_bytes": self.sent_bytes, "outer/islands": present}

    def lines(self) -> list[str]:
        """Log lines since the last call."""
        if self.quorum is None:
            return []
        messages, self.quorum.lines = self.quorum.lines, []
        return messages

    # Contents of a checkpoint.

    def tensors(self) -> Iterator[tuple[str, LocalParameter, Tensor]]:
        """The outer state of each weight, after waiting for communication in flight."""
        for fragment in sorted(self._deltas):
            self._await(fragment)
        return ((f"islands.{kind}", part.shard, tensor) for part in self.state.parts() for kind, tensor in part.tensors())

    def facts(self) -> dict[str, Any]:
        """The JSON metadata of the state."""
        return {
            "count": self.islands.count, "fragments": self.islands.fragments, "outer_steps": self.outer_steps,
            "sent_bytes": self.sent_bytes, "owes": int(self.owes), "under_way": [[*pair] for pair in self.under_way.items()],
        }  # fmt: skip

    def expect(self, facts: dict[str, Any] | None) -> None:
        """Allocate the tensors that a checkpoint with these facts holds. Raises SpecError if it cannot be resumed from."""
        waiting = [] if facts is None else facts["under_way"]
        if waiting and facts is not None and facts["fragments"] != self.islands.fragments:
            rule = f"is {self.islands.fragments}, but the checkpoint has some of {facts['fragments']} fragments under way"
            raise mistake("islands.fragments", rule, f"Set it back to {facts['fragments']}.")
        if waiting:
            self.state.allow_overlap()

    def restored(self, facts: dict[str, Any] | None) -> None:
        """Resume from a checkpoint whose tensors are loaded; None: from a run without islands, whose weights become the
        anchor."""
        if facts is None:
            self.state.anchor_here()
            return
        self.outer_steps, self.owes = facts["outer_steps"], bool(facts["owes"])
        self.sent_bytes = facts["sent_bytes"]
        self.under_way = {fragment: step for fragment, step in facts["under_way"]}

    # Start of islands.

    def begin(self, steps_done: int, tensors: Callable[[], Tensors], facts: Callable[[], Facts], restore: Restore) -> str:
        """Bring all islands into one round, from one anchor: the first of the islands that are furthest sends its state to
        every island that differs. Returns a description, empty if there was nothing to do. Raises SpecError if descriptions
        differ.

        `tensors` and `facts` return what a checkpoint of this rank would hold now; `restore` receives the sender's facts.
        """
        self._whole = tensors, facts, restore
        if self.link is not None:
            groups = self.link.groups.values() if self.ranks.is_first or not self.islands.uneven_dp else ()
            return self._compare(next(iter(groups), None), steps_done)
        assert self.quorum is not None
        if steps_done >= self.steps and not self.owes:
            return ""
        return self._let_in(self.quorum.knock(self.steps), steps_done)

    def _compare(self, group: Group | None, steps_done: int) -> str:
        """Make all of `group` continue from the state of the first of those that are furthest."""
        meets = steps_done if self.owes else self.islands.next_outer_step(steps_done, self.steps)
        status = torch.tensor([meets, steps_done, self._digest(), self._description])
        islands, entries = self._answer_of_first(
            lambda: [] if group is None else [group.islands, group.all_gather(status).tolist()]
        )
        self._expect_one_description([entry[3] for entry in entries], islands)
        leader = max(range(len(entries)), key=lambda index: (*entries[index][:2], -index))
        joining = {i for i, entry in enumerate(entries) if (entry[0], entry[2]) != (entries[leader][0], entries[leader][2])}
        # Only some ranks may hold a weight that differs, and all ranks of an island must act alike.
        joining = {index for of_rank in self.ranks.gather_json(sorted(joining)) for index in of_rank}
        if not joining:
            return ""
        index = islands.index(self.ranks.island)
        self._hand_over(group, leader, gives=index == leader, takes=index in joining)
        which = f"island{'s' * (len(joining) > 1)} {', '.join(str(islands[index]) for index in sorted(joining))}"
        return f"{which} took the state of island {islands[leader]}, at step {entries[leader][1]}"

    def _answer_of_first(self, ask: Callable[[], list[Any]]) -> list[Any]:
        """Answer for this rank; if islands differ in dp, that of rank 0 for all. Collective in that case."""
        return self.ranks.gather_json(ask())[0] if self.islands.uneven_dp else ask()

    def _hand_over(self, group: Group | None, leader: int, *, gives: bool, takes: bool, state: Tensors | None = None) -> None:
        """Send the full state of member `leader` of `group`, which `gives`, to those that take it. `state`: the leader's
        tensors, if it has them already."""
        tensors, facts, restore = self._whole
        leader_facts = self._answer_of_first(lambda: [] if group is None else [self._facts_of(group, leader, facts())])[0]
        if takes:
            self.expect(leader_facts["islands"])
        state = state or tensors()
        if self.islands.uneven_dp:
            unsharded.hand_over(self.ranks, group, leader, state, gives=gives, takes=takes)
        for _, slices in () if self.islands.uneven_dp else sorted(state.items()):
            for part in slices:
                assert group is not None
                group.broadcast(part.tensor if takes else part.tensor.clone(), leader)
        if takes:
            restore({**leader_facts, "islands": {**leader_facts["islands"], "sent_bytes": self.sent_bytes}})
            self.state.forget_residuals()

    def _facts_of(self, group: Group, leader: int, facts: Facts) -> Facts:
        text = json.dumps(facts).encode()
        size = torch.tensor([len(text)])
        group.broadcast(size, leader)
        encoded = torch.tensor(list(text.ljust(int(size))[: int(size)]), dtype=torch.uint8)
        group.broadcast(encoded, leader)
        return json.loads(bytes(encoded.tolist()))

    # Rejoining, and admitting islands.

    def _come_back(self, steps_done: int, error: LeftOutError) -> bool:
        """Rejoin after being left out; False if this island must stop instead."""
        assert self.quorum is not None
        self.quorum.lines.append(error.message)
        self.quorum.lines.append(self._let_in(self.quorum.knock(self.steps), steps_done))
        return not self.stops and self.settle(self._whole[1]()["steps_done"])

    def _let_in(self, answer: Answer, steps_done: int) -> str:
        """Act on the answer to a knock. Returns a description."""
        quorum = self.quorum
        assert quorum is not None
        self.stops = answer.kind in ("stop", "finished")
        if answer.kind == "finished":
            return f"the others have finished the run without island {self.ranks.island}: it stops at step {steps_done}"
        if answer.kind == "stop":
            return f"island {self.ranks.island} was asked to stop before it was let in"
        if answer.kind == "give":
            message = self._take(answer)
        elif self._deltas:
            message = f"island {self.ranks.island} has deltas under way, and those whom it sent them to have died"
            raise LostIslandError(f"{message}. Start it again: it goes on from its checkpoint.")
        else:
            message = self._compare(quorum.admission.group_of_era(), steps_done)
        quorum.admission.enter()
        return message or f"island {self.ranks.island} begins with {quorum.admission.present} of {self.islands.count} islands"

    def _take(self, answer: Answer) -> str:
        quorum = self.quorum
        assert quorum is not None
        self._deltas.clear()
        self.under_way.clear()
        group = quorum.admission.group_of_two(answer.giver, quorum.admission.member)
        described = self._answer_of_first(lambda: [] if group is None else self._described_by(group))
        giver = island_of(answer.giver)
        self._expect_one_description(described, [giver, self.ranks.island])
        self._hand_over(group, 0, gives=False, takes=True)
        quorum.admission.took()
        return f"island {self.ranks.island} took the state of island {giver}, at step {answer.step}"

    def _described_by(self, group: Group) -> list[int]:
        return group.all_gather(torch.tensor([self._description])).flatten().tolist()

    def _give(self, steps_done: int) -> None:
        """Send this island's state to those that it must admit, if any."""
        quorum = self.quorum
        if quorum is None:
            return
        for taker in quorum.admission.takers(steps_done):
            state = self._whole[0]()  # including deltas in flight, for which the ranks of this island wait together
            try:
                self._give_to(quorum, taker, state)
            except LostIslandError as error:
                quorum.lines.append(f"island {island_of(taker)} was lost while it was given a state: {error}")
            if quorum.admission.has_taken(taker):
                quorum.lines.append(
                    f"island {island_of(taker)} has the state of island {self.ranks.island}, at step {steps_done}"
                )

    def _give_to(self, quorum: Quorum, taker: str, state: Tensors) -> None:
        group: Group | None = None
        lost: list[LostIslandError] = []

        def described() -> list[int]:
            nonlocal group
            try:
                group = quorum.admission.group_of_two(quorum.admission.member, taker)
                return [] if group is None else self._described_by(group)
            except LostIslandError as error:
                lost.append(error)
                return []

        if len(same := self._answer_of_first(described)) == 2 and same[0] == same[1]:
            self._hand_over(group, 0, gives=True, takes=False, state=state)
        if lost:
            raise lost[0]

    def _arrive(self, steps_done: int) -> bool:
        if self.link is not None:
            return self.link.arrive(steps_done)
        assert self.quorum is not None
        return self.quorum.arrive(steps_done)

    def _expect_one_description(self, described: list[int], islands: list[int]) -> None:
        if len(set(described)) > 1:
            odd = next(island for island, description in zip(islands, described, strict=True) if description != described[0])
            other = "another model, batch, optimizer, seed, number of steps or [islands]"
            rule = f"island {odd} was started with {other} than island {islands[0]}"
            raise mistake("islands", rule, "Start all islands with the same description.")

    def _digest(self) -> int:
        """Digest of this rank's anchors; if islands differ in dp, of the island's anchors, the same on all of its ranks."""
        bits = [(place, [part.contiguous().view(-1).view(torch.uint8).numpy().data for part in some])
                for place, some in self.state.anchors()]  # fmt: skip
        if not self.islands.uneven_dp:
            return _number(*(part for _, some in bits for part in some))
        lines = "\n".join(f"{index}, {place}: {_number(*some)}" for index, (place, some) in enumerate(bits))
        return _number("\n".join(sorted({*"\n".join(self.ranks.gather_text(lines)).split("\n")})).encode())

    # Messages between islands.

    def _send(self, steps_done: int, fragments: list[int], *, beside: bool) -> None:
        wire = self.islands.dtype
        if self.quorum is not None:
            deltas = [[(bucket.like, bucket.deltas()) for bucket in self.state.fragments[fragment]] for fragment in fragments]
            means = iter(self.quorum.send(steps_done, [delta for of_fragment in deltas for delta in of_fragment], wire))
            self._deltas |= {
                fragment: [next(means) for _ in of_fragment] for fragment, of_fragment in zip(fragments, deltas, strict=True)
            }
            return
        assert self.link is not None
        groups = self.link.groups
        for fragment in fragments:
            deltas = [(bucket.like, bucket.deltas()) for bucket in self.state.fragments[fragment]]
            if beside:
                self._deltas[fragment] = [self._beside.submit(mean_among, groups, like, delta, wire) for like, delta in deltas]
            else:
                self._deltas[fragment] = [_done(mean_among(groups, like, delta, wire)) for like, delta in deltas]

    def _await(self, fragment: int) -> None:
        """Store the means of a fragment, once they have arrived."""
        means = [future.result() for future in self._deltas[fragment]]
        del self._deltas[fragment]
        for bucket, mean in zip(self.state.fragments[fragment], means, strict=True):
            bucket.receive(mean.values, mean.lost)
        self.sent_bytes += int(self.ranks.sum(torch.tensor([sum(mean.sent_bytes for mean in means)])))

    def _apply(self, steps_done: int) -> None:
        """The outer steps of fragments that are due after this step, in the order in which they were sent."""
        for fragment in [fragment for fragment, step in self.under_way.items() if step <= steps_done]:
            if fragment in self._deltas:
                self._await(fragment)
            self.state.step(fragment)
            self.outer_steps += 1
            del self.under_way[fragment]


def _done(result: Mean) -> Future[Mean]:
    future: Future[Mean] = Future()
    future.set_result(result)
    return future


def _number(*data: bytes | memoryview) -> int:
    """A digest that fits into an int64."""
    digest = hashlib.blake2b(digest_size=7)
    for chunk in data:
        digest.update(chunk)
    return int.from_bytes(digest.digest(), "big")
