"""Tables of reshard edges beside what they stand for, and the solver that only counts proofs."""

from itertools import product

from ortools.sat.python import cp_model

from planner.language.layout.placement import Partial, Replicate, Shard
from planner.language.layout.redistribute import collectives
from search.ilp.joint import solve_model
from search.op_layout.block_prices import BoundClass
from search.op_layout.reshard_edges import MOVES, moves_between, produced, requirements
from tests.search.test_bounds import captured

PLACES = (Replicate(), Partial(), Shard(0), Shard(1), Shard(0, 2), Shard(1, 3))


def test_moves_are_those_of_redistribution():
    """M8: one table of sorts of moves gives the collectives of every pair of placements."""
    required = [(place, partial) for place, partial in product(PLACES, (False, True))]
    required = [
        (place, partial) for place, partial in required if place == Replicate() or not partial
    ]
    moves = moves_between(PLACES, required)
    for (row, place), (column, (wanted, partial)) in product(
        enumerate(PLACES), enumerate(required)
    ):
        assert MOVES[moves[row, column]] == collectives(place, wanted, partial)


def test_equal_placements_are_one_object():
    assert produced(Replicate(), Shard(0)) is produced(Replicate(), Shard(0))
    assert requirements((Shard(0), False)) is not requirements((Shard(1), False))


def test_ops_that_differ_in_names_alone_have_one_signature():
    """E: a block's two layer norms are one signature."""
    graph = captured("gpt")
    program = max(graph.classes, key=lambda block: len(block.ops)).bind(2)
    signatures = BoundClass(class_index=0, program=program).signatures
    assert len(set(map(id, signatures))) < len(signatures)


def test_a_proof_or_nothing():
    model = cp_model.CpModel()
    x = model.new_int_var(0, 9, "x")
    model.add(x >= 4)
    model.minimize(x)
    found = solve_model(model, 10.0)
    assert found is not None
    assert (found[0].value(x), found[1]) == (4, True)
    model.add(x <= 3)
    assert solve_model(model, 10.0) is None
