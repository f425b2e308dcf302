"""N9: what is known of masks, beside the truth for each pair of positions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from planner.capture.masks.compare import compared, compared_to_number
from planner.capture.masks.values import (
    FREE,
    Along,
    Constant,
    Denied,
    Difference,
    Dims,
    Known,
    Pattern,
    both,
    moved,
    narrower,
    opposite,
)

PLACES = 7
QUERIES, KEYS = np.meshgrid(np.arange(PLACES), np.arange(PLACES), indexing="ij")
HOLDS = {
    "le": np.less_equal,
    "lt": np.less,
    "ge": np.greater_equal,
    "gt": np.greater,
    "eq": np.equal,
    "ne": np.not_equal,
}
AT = Dims(query=-2, key=-1)


def truth(known: Known) -> np.ndarray:
    """Which pairs a pattern without tables lets through."""
    if isinstance(known, Denied):
        return ~truth(known.pattern)
    assert isinstance(known, Pattern)
    ahead, (low, high) = QUERIES - KEYS, known.ahead
    made = np.ones_like(ahead, dtype=bool)
    made &= ahead >= (-PLACES if low is None else low)
    made &= ahead <= (PLACES if high is None else high)
    if known.chunk is not None:
        made &= QUERIES // known.chunk == KEYS // known.chunk
    return made


def query(**changes: int) -> Along:
    return Along(dim=-2, size=PLACES, **changes)


def key(**changes: int) -> Along:
    return Along(dim=-1, size=PLACES, **changes)


@pytest.mark.parametrize("packet", HOLDS)
def test_places_compare_as_their_numbers_do(packet):
    for add, other in product((-2, 0, 3), repeat=2):
        expected = HOLDS[packet](QUERIES + add, KEYS + other)
        found = compared(packet, query(add=add), key(add=other))
        turned = compared(packet, key(add=other), query(add=add))
        if found is None:  # the places where two are unequal are no pattern's complement here
            assert packet in ("eq", "ne")
            continue
        assert np.array_equal(truth(found), expected), (packet, add, other)
        assert turned is not None
        assert np.array_equal(truth(turned), HOLDS[packet](KEYS + other, QUERIES + add))


@pytest.mark.parametrize("packet", HOLDS)
@pytest.mark.parametrize("is_amount", [False, True])
@pytest.mark.parametrize("is_negative", [False, True])
def test_differences_compare_with_numbers(packet, is_amount, is_negative):
    for add, number in product((-1, 0, 2), (-3, 0, 2)):
        value = Difference(
            query=query(add=add), key=key(), is_negative=is_negative, is_amount=is_amount
        )
        difference = (QUERIES + add - KEYS) * (-1 if is_negative else 1)
        expected = HOLDS[packet](abs(difference) if is_amount else difference, number)
        found = compared_to_number(packet, value, number)
        if found is not None:
            assert np.array_equal(truth(found), expected), (add, number)
        else:
            assert packet in ("eq", "ne")


def test_runs_of_equal_length_are_chunks():
    found = compared("eq", query(divided_by=3), key(divided_by=3))
    assert found is not None
    assert np.array_equal(truth(found), QUERIES // 3 == KEYS // 3)
    assert compared("le", query(divided_by=3), key(divided_by=3)) is None
    assert compared("eq", query(divided_by=3), key(divided_by=2)) is None


def test_tables_compare_with_themselves_alone():
    table = {"table": "documents", "sample": -3}
    first, second = (Along(dim=dim, size=PLACES, **table) for dim in (-2, -1))  # type: ignore[arg-type]
    assert compared("eq", first, second) == Pattern(
        same=frozenset({"documents"}), dims=Dims(-2, -1, -3)
    )
    assert compared("eq", first, key()) is None
    assert compared("eq", first, Along(dim=-1, size=PLACES, table="others", sample=-3)) is None
    assert compared("eq", first, first) is None  # both along one dim


PATTERNS = [
    Pattern(ahead=(0, None), dims=AT),
    Pattern(ahead=(None, 3), dims=AT),
    Pattern(ahead=(-2, 2), dims=AT),
    Pattern(chunk=3, dims=AT),
    Pattern(),
]


@pytest.mark.parametrize(("first", "second"), list(product(PATTERNS, repeat=2)))
def test_both_hold_where_each_does(first, second):
    found = both(first, second)
    assert found is not None
    assert np.array_equal(truth(found), truth(first) & truth(second))


def test_what_is_no_pattern_is_not_made_one():
    assert both(PATTERNS[3], Pattern(chunk=2, dims=AT)) is None
    assert both(PATTERNS[0], Pattern(ahead=(0, None), dims=Dims(query=-1, key=-2))) is None
    for pattern in PATTERNS:
        other = opposite(pattern)
        assert (other is None) == (pattern in PATTERNS[2:])
        if other is not None:
            assert np.array_equal(truth(other), ~truth(pattern))


def test_bounds_narrow():
    assert narrower(FREE, (0, 4)) == (0, 4)
    assert narrower((-3, 2), (0, None)) == (0, 2)


def test_a_place_beside_itself():
    assert [pattern.allows_itself for pattern in PATTERNS] == [True] * len(PATTERNS)
    assert not Pattern(ahead=(1, None)).allows_itself
    assert not Pattern(keys=frozenset({"padding"})).allows_itself
    assert not Pattern(table_ahead=(("positions", (None, -1)),)).allows_itself


def test_a_new_dim_moves_those_before_it():
    values = key(), query()
    assert moved(values[0], -2) == values[0]  # [S] -> [1, S]
    assert moved(values[0], -1) == query()  # [S] -> [S, 1]
    assert moved(PATTERNS[0], -3) == PATTERNS[0]
    assert moved(PATTERNS[0], -1) == Pattern(ahead=(0, None), dims=Dims(query=-3, key=-2))
    assert moved(Constant(value=1), -1) == Constant(value=1)
    assert moved(Denied(pattern=PATTERNS[0]), -3) == Denied(pattern=PATTERNS[0])


def test_places_compared_with_numbers_beyond_them_are_constant():
    assert compared_to_number("lt", key(), PLACES) == Constant(value=1)
    assert compared_to_number("ge", key(), PLACES) == Constant(value=0)
    assert compared_to_number("lt", key(), 3) is None
