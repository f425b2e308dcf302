"""A value brought to another placement, by hand: 100 bytes of a (2, 25) tensor on two tp ranks."""

from costmodel.memory.block.copies import copy_between
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements

WHOLE = Placements()
ROWS, COLUMNS = (Placements.of({"tp": Shard(dim)}) for dim in (0, 1))
OPTIONS = {"shape": (2, 25), "degrees": Degrees(tp=2)}


def test_nothing_moves_where_it_lies_already():
    assert copy_between(WHOLE, WHOLE, 100, **OPTIONS) is None


def test_gathered_rows_land_where_they_belong():
    """Rows follow each other in memory, so all-gather writes the whole of 100 bytes; back, the
    gradient's half of 50 is there beside the whole one."""
    copy = copy_between(ROWS, WHOLE, 100, **OPTIONS)
    assert (copy.num_bytes, copy.making_bytes, copy.is_view) == (100, 100, False)
    assert copy.returning_bytes == 50
    assert not copy.passes_on


def test_gathered_columns_are_staged():
    """Pieces of columns arrive one after the other and are copied to their places: 100 more."""
    copy = copy_between(COLUMNS, WHOLE, 100, **OPTIONS)
    assert copy.making_bytes == 200


def test_a_rank_s_own_rows_are_a_view_of_the_whole():
    """Contiguous: no copy, but the whole's memory stays."""
    copy = copy_between(WHOLE, ROWS, 50, **OPTIONS)
    assert copy.is_view
    assert copy.num_bytes == copy.making_bytes == 0
