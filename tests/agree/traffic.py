"""What ranks send, as a rank's own calls tell it: kind, group, pass and bytes of every collective, or what stands for one.

On the CPU many collectives are messages between all pairs (`parallel.data.collectives.PendingExchange`), whose tags tell what
they mean. Numbers of bytes are those of `work.ops.Collective`: of the whole buffer that is gathered or reduced, or of what one
rank holds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.parallel.data import collectives
from ultrascale.parallel.pipeline.pipeline_messages import Mailbox
from ultrascale.parallel.tags import Tag

KINDS = {
    Tag.PARAMETERS: "parameters",
    Tag.GRADIENTS: "gradients",
    Tag.SEQUENCE_PARTS: "all_gather",
    Tag.SEQUENCE_SUMS: "reduce_scatter",
    Tag.TIED_EMBEDDING: "tied",
    Tag.MIRROR: "mirror",
    Tag.KEYS: "keys",
    Tag.KEY_GRADIENTS: "gradients of keys",
    Tag.SWAP: "swap",
}
CALLERS = {
    "begin_exchange": "all_to_all",
    "_gathered": "all_gather",
    "sum_rows": "reduce_scatter",
    "foreach_reduce": "copies of gradients",
    "_sum_over": "shares of gradients",
}
"""Functions of ours and of FSDP2 that call `torch.distributed`, and what for."""


class Key(NamedTuple):
    """Which collectives are counted together."""

    kind: str
    group: tuple[int, int]
    """(size, stride) of its ranks."""
    when: str
    """`forward` or `backward`."""


class Traffic:
    """Calls and bytes by `Key`."""

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self.num_bytes: Counter[Key] = Counter()

    def note(self, kind: str, group: dist.ProcessGroup | None, num_bytes: int) -> None:
        """One collective of `group`, None: of all ranks."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(ranks) == 1:  # FSDP2 sums over them all the same
            return
        when = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        key = Key(kind, (len(ranks), ranks[1] - ranks[0]), when)
        self.calls[key] += 1
        self.num_bytes[key] += num_bytes


def _caller() -> str:
    """Who called what is watched: past this function, the note and its wrapper."""
    return sys._getframe(3).f_code.co_name


@contextmanager
def watched() -> Iterator[Traffic]:
    """Note what this process sends meanwhile."""
    traffic, undo = Traffic(), []

    def wrap(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            note(*arguments, **options)
            return original(*arguments, **options)

        setattr(owner, name, call)
        undo.append(lambda: setattr(owner, name, original))

    def exchange(_: Any, sent: list[Tensor], received: list[Tensor], group: dist.ProcessGroup, tag: Tag) -> None:
        kind = KINDS[tag]
        if tag is Tag.SEQUENCE_SUMS and sent[0] is sent[-1]:
            return traffic.note("all_reduce", group, sent[0].nbytes)
        traffic.note(kind, group, sum(one.nbytes for one in (received if kind in ("all_gather", "parameters") else sent)))

    def all_reduce(tensor: Tensor, *rest: Any, group: Any = None, **options: Any) -> None:
        kind = "numbers" if tensor.dtype == torch.int64 else CALLERS.get(_caller(), "all_reduce")
        traffic.note(kind, group, tensor.nbytes)

    def all_to_all(received: Tensor, sent: Tensor, *rest: Any, group: Any = None, **options: Any) -> None:
        kind = "numbers" if sent.dtype == torch.int64 else CALLERS[_caller()]
        traffic.note(kind, group, received.nbytes if kind == "all_gather" else sent.nbytes)

    def messages(operations: list[Any]) -> None:
        sent = [one for one in operations if one.op is dist.isend]
        if operations:
            kind = KINDS[Tag(operations[0].tag)]
            traffic.note(kind, operations[0].group, sum(one.tensor.nbytes for one in sent))

    def mail(box: Mailbox, message: Any, tensor: Tensor) -> None:
        traffic.note("send", box.groups[0], tensor.nbytes)

    wrap(collectives.PendingExchange, "__init__", exchange)
    wrap(dist, "all_reduce", all_reduce)
    wrap(dist, "all_to_all_single", all_to_all)
    wrap(dist, "batch_isend_irecv", messages)
    wrap(Mailbox, "send", mail)
    try:
        yield traffic
    finally:
        for one in reversed(undo):
            one()
