"""The order of elimination, and what its steps sum, on structures small enough to see."""

from itertools import pairwise

import pytest

from search.op_layout.ordering import Ordering, elimination_order


def chain(length: int) -> tuple[tuple[int, ...], ...]:
    """Tables of a chain: one between each two neighbours."""
    return tuple(pairwise(range(length)))


def test_a_chain_never_needs_a_table_of_three():
    """The ends go first: each sum is over a variable and its one neighbour that is left."""
    order = elimination_order(chain(6), (4,) * 6, 16)
    assert sorted(step.variable for step in order) == list(range(6))
    assert max(step.num_cells for step in order) == 16
    assert [len(step.scope) for step in order] == [1, 1, 1, 1, 1, 0]


def test_a_step_lines_up_its_tables():
    """T(0, 1) + T(1, 2), variable 1 leaves: shapes (2, 3, 1) and (1, 3, 5) over (0, 1, 2)."""
    ordering = Ordering(((0, 1), (1, 2)), (2, 3, 5), 100)
    ordering.eliminate(1)
    (step,) = ordering.steps
    assert (step.scope, step.axis, step.shape, step.num_cells) == ((0, 2), 1, (2, 3, 5), 30)
    assert step.tables == ((0, (2, 3, 1)), (1, (1, 3, 5)))
    assert ordering.neighbours[0] == {2}


@pytest.mark.parametrize(("most", "is_found"), [(4**4, True), (4**4 - 1, False)])
def test_what_is_too_wide_has_no_order(most, is_found):
    """Four variables that are all in one table: the first step sums over all of them."""
    assert (elimination_order(((0, 1, 2, 3),), (4,) * 4, most) is not None) == is_found


def test_large_tables_are_ordered_by_what_they_join():
    """Of both orders the one with fewer cells is taken: no worse than smallest tables first."""
    width, size = 4, 12
    grid = [(r * width + c, r * width + c + 1) for r in range(width) for c in range(width - 1)]
    grid += [(r * width + c, (r + 1) * width + c) for r in range(width - 1) for c in range(width)]
    smallest_first = Ordering(grid, (size,) * width**2, 1e9)
    assert smallest_first.run()
    order = elimination_order(tuple(grid), (size,) * width**2, 10**9)
    cells = sum(step.num_cells for step in order)
    assert cells <= sum(step.num_cells for step in smallest_first.steps)
    assert len(order) == width**2


def test_a_variable_taken_out_links_nothing():
    ordering = Ordering(chain(3), (4,) * 3, 100)
    assert ordering.take_out(1) == [0, 1]
    assert ordering.neighbours[0] == ordering.neighbours[2] == set()
    assert ordering.run()
    assert [step.scope for step in ordering.steps] == [(), ()]
