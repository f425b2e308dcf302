"""Layout candidates: each kind's bound is below the table of the layout."""

from __future__ import annotations

import pytest

from search import SearchRequest
from search.candidates import Candidates
from search.stages.layout_candidates import worth_trying
from tests.search.machine import Machine

MACHINE = Machine()


@pytest.fixture(scope="module")
def candidates(llama):
    return Candidates.of(llama, MACHINE, SearchRequest(num_devices=8, global_batch=8))


def block_seconds(table) -> float:
    return float((table.forward_s + table.backward_s).sum())


@pytest.mark.parametrize("tp", [2, 4])
def test_a_closer_look_only_raises_the_bound(candidates, tp):
    optimistic = candidates.layouts.optimistic(tp, 1)
    (fastest,) = candidates.layouts.fastest(tp, 1)
    every = candidates.layouts.every(tp, 1)
    assert 0 < optimistic.least_s <= fastest.least_s * (1 + 1e-9)
    for layout in every:
        assert fastest.least_s <= layout.least_s * (1 + 1e-9)
        assert layout.least_s <= block_seconds(layout.table) * (1 + 1e-9)
    assert optimistic.table.key == fastest.table.key


def test_tables_are_named_by_what_they_are_of(candidates):
    tables = [layout.table for tp in (1, 2, 4) for layout in candidates.layouts.every(tp, 1)]
    tables += [layout.table for layout in candidates.layouts.every(2, 2)]
    assert len({table.key for table in tables}) == len(tables)
    again = Candidates.of(candidates.graph, MACHINE, SearchRequest(num_devices=8, global_batch=8))
    assert again.layouts.fastest(2, 1)[0].table.key == candidates.layouts.fastest(2, 1)[0].table.key


def test_a_table_that_is_slower_must_hold_clearly_less(candidates):
    tables = [layout.table for layout in candidates.layouts.every(4, 1)]
    kept = worth_trying([*tables, *tables])
    assert [block_seconds(table) for table in kept] == sorted(map(block_seconds, kept))
    assert len({table.key for table in kept}) == len(kept)
