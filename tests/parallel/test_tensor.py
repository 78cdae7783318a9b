"""Ranks of tensor parallelism compute what one process does: loss and every gradient, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.families import FAMILIES
from parallel.tensor_cases import Case, divisible, errors_of
from ranks import run_ranks

LIMIT = 1e-12


def worst(world: int, cases: dict[str, Case]) -> dict[str, tuple[float, str]]:
    """Of every case the largest error on any rank, and of what."""
    of_ranks = run_ranks(world, errors_of, cases, timeout_seconds=120)
    return {name: max((error, what) for found in of_ranks for what, error in found[name].items()) for name in cases}


def expect_equal(world: int, cases: dict[str, Case]) -> None:
    assert {name: found for name, found in worst(world, cases).items() if not found[0] <= LIMIT} == {}


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_family_computes_what_one_process_does(tp, sequence_parallel):
    cases = {name: Case(divisible(model, tp), sequence_parallel) for name, model in FAMILIES.items()}
    assert any(case.model.num_key_value_heads < tp for case in cases.values())
    expect_equal(tp, cases)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sequences_and_vocabularies_need_not_divide(tp):
    llama, tied = (divisible(FAMILIES[name], tp) for name in ("llama", "smollm3"))
    cases = {f"length {length}": Case(tied, length=length) for length in (19, 5, 3)}
    for vocab_size in (211, 10):
        cases[f"vocabulary {vocab_size}"] = Case(replace(llama, vocab_size=vocab_size), length=13)
        cases[f"vocabulary {vocab_size}, tied"] = Case(replace(tied, vocab_size=vocab_size), sequence_parallel=False)
    expect_equal(tp, cases)


@pytest.mark.parametrize("tp", [2, 4])
def test_recomputation_and_packed_documents_change_nothing(tp):
    cases = {
        f"{name}, {recompute}, documents {documents}, {sequence_parallel}": Case(
            FAMILIES[name], sequence_parallel, length=19, recompute=recompute, documents=documents
        )
        for name in ("llama-biases", "smollm3")
        for recompute, documents in (("none", True), ("selective", False), ("full", True), ("every-k", False))
        for sequence_parallel in (True, False)
    }
    expect_equal(tp, cases)
