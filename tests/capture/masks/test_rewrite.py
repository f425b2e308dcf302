"""N9: masks that are positions compared are told to the kernel; what is told is the same mask."""

from __future__ import annotations

import pytest
import torch

from planner.capture.blocks import RawGraph
from planner.capture.masks.rewrite import mask_pattern, simplified, with_told_masks
from planner.capture.masks.values import ANYWHERE, Additive, Constant, Dims, Pattern
from planner.language.graph import Affine, Ref
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


def window(tables):
    query, key = places(tables)
    return (key <= query) & (key > query - 4)


def window_by_triangles(tables):
    whole = torch.ones(S, S, dtype=torch.bool)
    return whole.tril() & ~whole.tril(-5)


def window_of_two_sides(tables):
    query, key = places(tables)
    return abs(query - key) <= 3


def chunks(tables):
    query, key = places(tables)
    return (key <= query) & (query // 5 == key // 5)


def later_only_by_two(tables):
    return torch.full((S, S), -torch.inf, dtype=torch.float64).triu(3)


def documents(tables):
    query, key = opened(tables["documents"])
    at = torch.arange(S)
    return (query == key) & (at[None, None, None] <= at[None, None, :, None])


def documents_of_both_directions(tables):
    query, key = opened(tables["documents"])
    return query == key


def documents_that_positions_tell(tables):
    """As the library finds packed sequences, and compares positions inside each."""
    at = tables["positions"]
    runs = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    samples = torch.arange(len(at))[:, None, None, None]
    query, key = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    true = query.new_ones((), dtype=torch.bool)
    same = true & (runs[samples, query] == runs[samples, key])
    near = at[samples, key] > at[samples, query] - 3
    return same & (near & (at[samples, key] <= at[samples, query]))


def padding(tables):
    query, key = places(tables)
    return (key <= query) & tables["counts"].bool()[:, None, None, :]


def padding_of_opened_numbers(tables):
    query, _ = places(tables)
    return (tables["counts"][:, None, None] > 0) & (query >= 0)


def all_at_once(tables):
    query, key = places(tables)
    first, second = opened(tables["documents"])
    return (abs(query - key) < 4) & (first == second) & (tables["counts"][:, None, None, :] != 0)


TOLD = {
    window: (0, 3, None, False, False),
    window_by_triangles: (0, 4, None, False, False),
    window_of_two_sides: (-3, 3, None, False, False),
    chunks: (0, None, 5, False, False),
    later_only_by_two: (-2, None, None, False, False),
    documents: (0, None, None, True, False),
    documents_of_both_directions: (None, None, None, True, False),
    documents_that_positions_tell: (0, 2, None, True, False),
    padding: (0, None, None, False, True),
    padding_of_opened_numbers: (None, None, None, False, True),
    all_at_once: (-3, 3, None, True, True),
}


@pytest.mark.parametrize("make", TOLD, ids=lambda make: make.__name__)
def test_windows_chunks_documents_and_padding_are_told(make):
    """N9: the graph has no tensor of pairs, and the same loss and gradients in fp64."""
    tables = ("documents", "positions", "counts")
    module, graph = captured(make, *tables)
    (attention,) = attention_of(graph)
    low, high, chunk, _, _, same, keys = attention.args[3:]
    assert attention.target == "planner.masked_attention"
    assert (low, high, chunk, same is not None, keys is not None) == TOLD[make]
    assert not pairs_held(graph, S)
    check_equal(module, graph, batch_of(5, *tables))


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


def even_places(tables):
    bits = torch.arange(S) & 1
    return bits[:, None] == bits[None]


def joined_bits(tables):
    bits = torch.arange(S) | 1
    return bits[:, None] == bits[None]


def rounded_places(tables):
    at = torch.arange(S, dtype=torch.bfloat16) + 256
    return at[None] <= at[:, None]


def ones_that_are_added(tables):
    """Added to scores, a triangle of ones hides nothing."""
    return torch.ones(S, S, dtype=torch.float64).tril()


UNKNOWN = [
    earlier_or_first, slightly_lowered, later_halves, squares, turned, of_another_table,
    even_places, joined_bits, rounded_places, ones_that_are_added,
]  # fmt: skip


@pytest.mark.parametrize("make", UNKNOWN, ids=lambda make: make.__name__)
def test_a_mask_that_is_not_recognised_stays(make):
    """N9: no mask is taken for another; these stay tensors, and what they compute."""
    module, graph = captured(make, "positions")
    (attention,) = attention_of(graph)
    assert isinstance(attention.args[3], Ref)
    check_equal(module, graph, batch_of(5, "positions"))


CAUSAL_PATTERN = Pattern(ahead=(0, None), dims=Dims(query=-2, key=-1))


@pytest.mark.parametrize(
    ("known", "dtype", "found"),
    [
        (CAUSAL_PATTERN, "bool", CAUSAL_PATTERN),
        (CAUSAL_PATTERN, "float32", None),
        (Additive(pattern=CAUSAL_PATTERN), "float32", CAUSAL_PATTERN),
        (Additive(pattern=CAUSAL_PATTERN), "bool", None),
        (Constant(value=1), "bool", Pattern()),
        (Constant(value=0), "float32", Pattern()),
        (Constant(value=0), "bool", None),
        (Constant(value=1), "float32", None),
        # A query that is left no key: low numbers that are all equal hide nothing.
        (Additive(pattern=Pattern(ahead=(1, None))), "float32", None),
        (None, "bool", None),
    ],
)
def test_truth_lets_through_and_numbers_are_added(known, dtype, found):
    assert mask_pattern(known, dtype) == found


def test_bounds_that_bound_nothing_are_left_out():
    """8 queries, 6 keys: a query is 5 behind the last key at most, 7 ahead of the first."""
    for ahead, told in (((-5, 7), (None, None)), ((-4, 6), (-4, 6)), ((-4, 9), (-4, None))):
        found = simplified(Pattern(ahead=ahead), {}, 8, 6)
        assert found is not None
        assert found.ahead == told
    for chunk in (7, 8):
        found = simplified(Pattern(chunk=chunk), {}, 8, 6)
        assert found is not None
        assert found.chunk == (7 if chunk == 7 else None)


def test_a_pattern_of_other_dims_or_sizes_is_not_told():
    assert simplified(CAUSAL_PATTERN, {}, 8, 8) == CAUSAL_PATTERN
    for dims in (Dims(query=-1, key=-2), Dims(query=-3, key=-1), Dims(key=-1, sample=-3)):
        assert simplified(Pattern(ahead=(0, None), dims=dims), {}, 8, 8) is None
    assert simplified(CAUSAL_PATTERN, {}, Affine(8), 8) is None


def test_numbers_of_a_table_bound_places_inside_the_runs_that_they_number():
    bounded = Pattern(same=frozenset({"runs"}), table_ahead=(("positions", (0, 2)),))
    found = simplified(bounded, {"runs": "positions"}, 8, 8)
    assert found == Pattern(same=frozenset({"runs"}), ahead=(0, 2), dims=ANYWHERE)
    assert simplified(bounded, {"runs": "others"}, 8, 8) is None


def test_a_graph_without_attention_is_as_it_was():
    raw = RawGraph(tensors={}, inputs=(), ops=(), loss="")
    assert with_told_masks(raw) is raw
