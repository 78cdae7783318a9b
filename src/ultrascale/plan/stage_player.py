"""A stage of a pipeline whose passes are replayed once, then played: the same bytes in a fraction of the time.

Micro-batches come and go alike. The first pass of a kind is replayed operation by operation (`plan.stage_replay`), and its
effect on the books is written down. If it left the stage as it found it, the next pass of that kind is one entry. A pass in a
state that was not seen before is replayed; what played passes of its micro-batch would have left is made first, off the books.
Stages with the same blocks between the ends share what is written down, those of other ranks of a layout too.
`tests/plan/test_stage_player.py` holds this to the plain replay, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from ultrascale.plan.ledger import Effect, Held
from ultrascale.plan.stage_replay import StageReplay
from ultrascale.plan.tally import Counts
from ultrascale.schedules.actions import Action, Kind


@dataclass(frozen=True)
class Entry:
    """One pass: its effect on the ledger and the tally, and what it hands to a neighbouring stage."""

    effect: Effect
    counts: Counts
    result: tuple[str, str, int] | None
    """Category, label and bytes."""
    keeps_gradient: int
    """Holders that the gradient which came in has gained: I keeps it for W."""


@dataclass
class Played:
    """A micro-batch that is only in the books."""

    given: Held | None
    gradient: Held | None = None
    input_gradient: Action | None = None
    """Its I, once that has been played too."""


Entries = dict[Hashable, Entry | None]


def alike(stage: StageReplay) -> Hashable:
    """The same for stages whose passes change the books alike: their own blocks, or a number where they hold an end."""
    part, layout = stage.part, stage.layout
    if part.is_first or part.is_last:
        return part
    return tuple((id(stage.work.block(layer)), layout.again(layer)) for layer in part.blocks)


@dataclass
class StagePlayer:
    """The three passes of `StageReplay`."""

    stage: StageReplay
    _entries: Entries = field(default_factory=dict)
    """None: a pass that changes the stage's state, or shares its result, and is replayed every time."""
    _played: dict[int, Played] = field(default_factory=dict)
    _state: Hashable | None = None

    def forward(self, micro_batch: int, given: Held | None = None) -> Held | None:
        """F."""
        key = Kind.FORWARD, self._now()
        if (entry := self._entries.get(key)) is None:
            return self._replay(key, lambda: self.stage.forward(micro_batch, given), None)
        self._played[micro_batch] = Played(given)
        return self._play(entry, None)

    def backward(self, action: Action, gradient: Held | None = None) -> Held | None:
        """B, I, or the W of the first stage, which does all."""
        key, one = self._key(action), self._played.get(action.micro_batch)
        if one is None or (entry := self._entries.get(key)) is None:
            self._make(action.micro_batch)
            return self._replay(key, lambda: self.stage.backward(action, gradient), gradient)
        if action.kind is Kind.INPUT_GRADIENT:
            one.gradient, one.input_gradient = gradient, action
        else:
            del self._played[action.micro_batch]
        return self._play(entry, gradient)

    def weight_gradients(self, action: Action) -> None:
        """W."""
        key = self._key(action)
        if action.micro_batch not in self._played or (entry := self._entries.get(key)) is None:
            self._make(action.micro_batch)
            self._replay(key, lambda: self.stage.weight_gradients(action), None)
        else:
            del self._played[action.micro_batch]
            self._play(entry, None)

    def _key(self, action: Action) -> Hashable:
        return action._replace(micro_batch=0, beside=None), self._now()

    def _now(self) -> Hashable:
        if self._state is None:
            self._state = self.stage.state()
        return self._state

    def _play(self, entry: Entry, gradient: Held | None) -> Held | None:
        self.stage.ledger.apply(entry.effect)
        self.stage.tally.add(entry.counts)
        if gradient is not None:
            gradient.holders += entry.keeps_gradient
        return None if entry.result is None else Held(*entry.result)

    def _replay(self, key: Hashable, run: Callable[[], Held | None], gradient: Held | None) -> Held | None:
        """The pass itself, written down if it has not been."""
        ledger, tally, before = self.stage.ledger, self.stage.tally, self._now()
        self._state = None
        if key in self._entries:
            return run()
        holders, counted = 0 if gradient is None else gradient.holders, tally.counted()
        with ledger.recording() as recorded:
            result = run()
        told = None if result is None else (result.category, result.label, result.num_bytes)
        kept = 0 if gradient is None else gradient.holders - holders
        repeats = self._now() == before and (result is None or result.holders == 1)
        self._entries[key] = Entry(recorded.effect(), tally.since(counted), told, kept) if repeats else None
        return result

    def _make(self, micro_batch: int) -> None:
        """What played passes of a micro-batch would have left. The books have it already."""
        one = self._played.pop(micro_batch, None)
        if one is None:
            return
        stage, given, gradient = self.stage, one.given, one.gradient
        with stage.ledger.off_the_books(), stage.tally.off_the_books(), stage.buckets_left_alone():
            if one.input_gradient is None:
                self._let_go(stage.forward(micro_batch, given))
                return
            for held in (given, gradient):  # their owners have let go since
                if held is not None:
                    held.holders += 1
            self._let_go(stage.forward(micro_batch, given))
            kept = 0 if gradient is None else gradient.holders - 1
            if gradient is not None:
                gradient.holders = 1
            self._let_go(stage.backward(one.input_gradient, gradient))
            if gradient is not None:
                assert gradient.holders == 1 + kept, gradient
                gradient.holders = kept
            if given is not None:
                given.holders -= 1
                assert given.holders == 0, given

    def _let_go(self, result: Held | None) -> None:
        if result is not None:
            self.stage.ledger.drop(result)
