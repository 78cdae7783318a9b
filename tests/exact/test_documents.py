"""What the proof's made-up sequences meet: the edges at which a layout goes wrong by one."""

from __future__ import annotations

import numpy as np
import pytest

from ultrascale.check.oracle.documents import PARTS, RandomDocuments
from ultrascale.work.sharding.places import even_part

VOCABULARY, STEPS = 211, 3


def drawn(length: int, batch: int, *, vocab_parts: int = 1):
    loader = RandomDocuments(sequence_length=length, vocab_size=VOCABULARY, seed=0, vocab_parts=vocab_parts)
    return loader.read(range(STEPS * batch))


def documents(row: np.ndarray) -> np.ndarray:
    """Tokens of each document of a sequence."""
    return np.bincount(row)


@pytest.mark.parametrize("length, batch", [(61, 1), (61, 2), (23, 4), (24, 6)])
def test_the_first_and_last_id_of_every_part_of_the_vocabulary_are_read_and_predicted(length, batch):
    found = drawn(length, batch, vocab_parts=5)
    cut = [even_part(VOCABULARY, parts, part) for parts in (*PARTS, 5) for part in range(parts)]
    edges = {edge for first, size in cut for edge in (first, first + size - 1)}
    assert edges <= set(found.tokens.flat)
    if (length, batch) != (23, 4):
        assert edges <= set(found.targets[found.targets >= 0].flat)


def test_documents_fill_a_sequence_end_where_its_parts_do_and_have_one_token_or_two():
    found = drawn(61, 1)
    whole, cut = documents(found.document_ids[0]), documents(found.document_ids[1])
    assert whole.tolist() == [61] and (found.targets[0] >= 0).all()
    assert {1, 2} <= set(cut) and cut[-1] == 1 and found.targets[1, -1] == -100
    ends = set((np.cumsum(cut) - 1).tolist())
    assert {sum(even_part(61, parts, part)) - 1 for parts in (2, 3, 4) for part in range(parts)} <= ends
    assert len(set(found.tokens[1][found.positions[1] == 0])) == 1  # ties


def test_a_micro_batch_of_two_is_one_document_each_at_least_once_in_three_steps():
    found = drawn(61, 2)
    assert any(found.document_ids[first : first + 2].max() == 0 for first in range(0, 6, 2))


def test_ranks_and_micro_batches_have_other_numbers_of_targets_also_where_documents_are_not_masked():
    for masked in (True, False):
        loader = RandomDocuments(sequence_length=61, vocab_size=VOCABULARY, seed=0, document_mask=masked)
        counts = (loader.read(range(4)).targets >= 0).sum(1)
        assert len(set(counts.tolist())) == 4
