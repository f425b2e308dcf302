"""N9: masks that are positions compared are told to the kernel; what is told is the same mask."""

from __future__ import annotations

import pytest
import torch

from planner.graph import Ref
from tests.capture.masks.attending import (
    LENGTH,
    attention_of,
    batch_of,
    captured,
    check_equal,
    pairs_held,
)

S = LENGTH


def places(tables):
    """Positions of queries in a column, and of keys in a row."""
    at = torch.arange(S)
    return at[:, None], at[None, :]


def opened(table):
    return table[:, None, :, None], table[:, None, None, :]


def lower(tables):
    return torch.ones(S, S, dtype=torch.bool).tril()


def compared(tables):
    query, key = places(tables)
    return key <= query


def by_differences(tables):
    query, key = places(tables)
    return (torch.zeros_like(key) <= query - key) & (key >= 0)


def not_later(tables):
    query, key = places(tables)
    return ~(key > query)


def added(tables):
    return torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)


def filled(tables):
    later = torch.ones(S, S).triu(diagonal=1).bool()
    return torch.zeros(S, S, dtype=torch.float64).masked_fill(later, -1e30)


def chosen(tables):
    query, key = places(tables)
    return torch.where(key > query, -torch.inf, 0.0).double()


def expanded(tables):
    query, key = places(tables)
    return (key <= query)[None, None].expand(len(tables["ids"]), 1, S, S)


def a_wide_window(tables):
    query, key = places(tables)
    return (key <= query) & (key > query - S)


def of_sequences_not_packed(tables):
    """As the library makes it where sequences may be packed: runs of positions are compared."""
    at = torch.arange(S)[None].expand(len(tables["ids"]), -1)
    breaks = torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1
    runs = breaks.cumsum(-1)
    samples = torch.arange(len(at))[:, None, None, None]
    query, key = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    true = query.new_ones((), dtype=torch.bool)
    return (true & (runs[samples, query] == runs[samples, key])) & (
        at[samples, key] <= at[samples, query]
    )


CAUSAL = [
    lower, compared, by_differences, not_later, added, filled, chosen, expanded,
    a_wide_window, of_sequences_not_packed,
]  # fmt: skip


@pytest.mark.parametrize("make", CAUSAL, ids=lambda make: make.__name__)
def test_a_causal_mask_is_an_argument(make):
    """N9: whatever it is written with, the graph has none, and the same loss and gradients."""
    module, graph = captured(make)
    (attention,) = attention_of(graph)
    assert attention.args[3:] == (None, 0.0, True)
    assert not pairs_held(graph, S)
    check_equal(module, graph, batch_of(5))


def everything(tables):
    return torch.ones(S, S, dtype=torch.bool)


def from_the_first_place_on(tables):
    query, _ = places(tables)
    return (query >= 0).expand(S, S)


def nothing_added(tables):
    return torch.zeros(S, S, dtype=torch.float64)


FULL = [everything, from_the_first_place_on, nothing_added]


@pytest.mark.parametrize("make", FULL, ids=lambda make: make.__name__)
def test_a_mask_that_hides_nothing_is_left_out(make):
    """N9: attention of every position to every other has no mask."""
    module, graph = captured(make)
    (attention,) = attention_of(graph)
    assert len(attention.args) == 3
    assert not pairs_held(graph, S)
    check_equal(module, graph, batch_of(5))


def earlier_or_first(tables):
    query, key = places(tables)
    return (key <= query) | (key == 3)


def slightly_lowered(tables):
    query, key = places(tables)
    return torch.where(key > query, -1.0, 0.0).double()


def later_halves(tables):
    query, key = places(tables)
    return query * 2 >= key


def squares(tables):
    query, key = places(tables)
    return key * key <= query


def turned(tables):
    query, key = places(tables)
    return (key <= query).T | (key == query)


def of_another_table(tables):
    query, key = opened(tables["positions"])
    return key <= query


UNKNOWN = [earlier_or_first, slightly_lowered, later_halves, squares, turned, of_another_table]


@pytest.mark.parametrize("make", UNKNOWN, ids=lambda make: make.__name__)
def test_a_mask_that_is_not_recognised_stays(make):
    """N9: no mask is taken for another; these stay tensors, and what they compute."""
    module, graph = captured(make, "positions")
    (attention,) = attention_of(graph)
    assert isinstance(attention.args[3], Ref)
    check_equal(module, graph, batch_of(5, "positions"))
