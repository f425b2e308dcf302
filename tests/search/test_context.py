"""N8: cp in the space: sequences are divided where that is the best plan, and where asked (D19)."""

from dataclasses import replace
from itertools import product

import pytest

from costmodel.memory.bound import kept_bytes
from planner.errors import LayoutError
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.attention_cut import (
    IN_PIECES,
    are_mirrored,
    attention_kinds,
    pieces_of_sequences,
)
from planner.language.lowering.lowering import lower
from profiles import load_profile
from search import SearchRequest, find_plan
from search.bounds.catalogue import DividedBounds, TableBounds
from search.candidates import Candidates
from search.partition.chain_dp import solve_chain
from search.priced_configuration import PricedConfiguration
from search.space.outdone import without_outdone
from search.stages.layout_candidates import LEAST_SAVED, Border
from tests.captures import capture_tiny, capture_wide_llama
from tests.search.machine import Machine

LENGTH = 32768
MACHINE = Machine(context_bytes=0.0, devices_per_node=8)


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


@pytest.fixture(scope="module")
def long_llama():
    """Two layers of one key-value head on sequences of 32,768; only its shapes exist."""
    return capture_wide_llama(
        LENGTH,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=1,
        intermediate_size=2048,
    )


def ask(gpus=4, batch=8, **choices):
    return SearchRequest(num_devices=gpus, global_batch=batch, **choices)


def test_long_sequences_are_divided_unasked(long_llama):
    """One sample a step on four devices: gathering keys and values of one head costs less than
    what tp sends, so cp is best; with a sample for each device dp is."""
    result = find_plan(long_llama, MACHINE, ask(4, 1))
    plan = result.plan
    assert (plan.cp, plan.tp) == (4, 1)
    assert {layout.axis for layout in plan.layouts} == {"cp"}
    assert result.certificate.gap == 0
    for choices in ({"cp": 1}, {"cp": 2}):
        fixed = find_plan(long_llama, MACHINE, ask(4, 1, **choices)).plan
        assert fixed.cp == choices["cp"]
        assert fixed.estimate["step_s"] > plan.estimate["step_s"]
    assert find_plan(long_llama, MACHINE, ask(4, 4)).plan.dp == 4


def test_short_sequences_are_divided_only_when_asked(gpt):
    """D19, V11: cp=2 of 16 positions is honoured, never taken by itself."""
    assert find_plan(gpt, MACHINE, ask()).plan.cp == 1
    for choices in ({"cp": 2}, {"allow": (("cp", "2"),)}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}):
        result = find_plan(gpt, MACHINE, ask(**choices))
        assert result.plan.cp == 2
        assert result.plan.dp * result.plan.cp * result.plan.tp * result.plan.pp == 4
        assert all("cp 2" in runner_up.label for runner_up in result.runners_up)
        certificate = result.certificate
        total = certificate.evaluated + sum(n for _, n in certificate.pruned)
        assert certificate.considered == total + certificate.unexplored


@pytest.mark.parametrize(
    "choices",
    [
        *({"cp": 2, "pp": 2}, {"cp": 2, "tp": 2}, {"cp": 4, "zero": 1}),
        *({"cp": 2, "dp": 2, "zero": 3}, {"cp": 2, "hp": 2, "zero": 1}),
    ],
)
def test_the_quick_price_of_cp_is_the_estimate(gpt, choices):
    """So that what it prunes the estimate would not have taken."""
    request = ask(4, 16, recompute="none", **choices)
    candidates = Candidates.of(gpt, MACHINE, request)
    configuration = next(candidates.shapes(request)[0].configurations())
    for table in candidates.tables(*configuration.block_sizes):
        priced = PricedConfiguration(candidates, configuration, table)
        problem = priced.problem(float("inf"))
        cut = solve_chain(problem).cut
        answer = candidates.estimate(priced.plan(cut))
        assert priced.quick_step_s(cut) == pytest.approx(answer.step_s, rel=1e-9)
        assert cut.value <= answer.step_s * (1 + 1e-9)


def test_ways_to_cut_sequences_are_tables_of_their_own(long_llama):
    """B10: by queries and over a ring in one piece and more, and by heads: what causal work the
    fullest rank has, which is the mean where pieces are mirrored, so that no more are tried. No
    rank of a ring saves keys and values whole.
    """
    tables = Candidates.of(long_llama, MACHINE, ask(4, 1)).layouts.at(1, 1, 4).every
    seconds = {way_of(long_llama, c.table): seconds_of(c.table) for c in tables}
    saved = {
        way_of(long_llama, c.table): float(kept_bytes(c.table.blocks, recompute="none").sum())
        for c in tables
    }
    borders = [Border(), Border(2), Border(2, mirrored=True)]
    assert set(seconds) == {
        ("heads", Border()),
        *((kind, border) for kind in IN_PIECES for border in borders),
    }
    for kind in IN_PIECES:
        one, two, mirrored = (seconds[kind, border] for border in borders)
        # What is over the mean, 1 - 1/n, halves with twice the pieces and is nothing mirrored; what
        # lies beside causal attention is the same.
        assert two < one
        assert two - mirrored == pytest.approx(one - two, rel=1e-2)
    # Of a head of 128 numbers in bf16: keys and values of three other ranks, in two layers.
    extra = saved["queries", Border()] - saved["ring", Border()]
    assert extra == 2 * 2 * 3 / 4 * LENGTH * 128 * 2


def test_borders_that_are_left_out_save_little(long_llama):
    """With 2, 4 and 8 pieces a rank, and with these mirrored, no plan is half a percent faster."""
    sized = Candidates.of(long_llama, MACHINE, ask(4, 1)).layouts.at(1, 1, 4)
    tried = {way_of(long_llama, c.table): seconds_of(c.table) for c in sized.every}
    for kind in IN_PIECES:
        least_s = min(s for way, s in tried.items() if way[0] == kind)
        for border in (Border(n, mirrored=m) for n in (2, 4, 8) for m in (False, True)):
            table = sized._table((), kind, border)
            assert way_of(long_llama, table) == (kind, border)
            assert seconds_of(table) >= least_s * (1 - LEAST_SAVED)


def way_of(graph, table):
    """How a table's layouts run attention, and hand on sequences."""
    layouts = table.layouts
    border = Border(pieces_of_sequences(layouts), mirrored=are_mirrored(layouts))
    return (*attention_kinds(graph, layouts), border)


def seconds_of(table):
    return float((table.forward_s + table.backward_s).sum())


@pytest.mark.parametrize(
    ("machine", "fastest"),
    [
        (MACHINE, "ring"),  # parts pass beside attention to others
        (replace(MACHINE, alpha_s=1e-3), "queries"),  # more messages, each of which costs more
    ],
)
def test_a_ring_is_as_fast_as_its_messages(long_llama, machine, fastest):
    """B10: of two ways in as many pieces, the search takes the one that the links are good for."""
    layouts = Candidates.of(long_llama, machine, ask(4, 1)).layouts.at(1, 1, 4)
    seconds = {way_of(long_llama, c.table): seconds_of(c.table) for c in layouts.every}
    of_kinds = {kind: min(s for way, s in seconds.items() if way[0] == kind) for kind in IN_PIECES}
    assert min(of_kinds, key=of_kinds.__getitem__) == fastest


@pytest.fixture(scope="module")
def long_heads():
    """The same with four heads of keys, which two ranks can share."""
    return capture_wide_llama(
        LENGTH,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=2048,
    )


def test_two_levels_are_taken_where_nodes_are_far_apart(long_heads):
    """Heads are exchanged inside nodes of two, and between these go half the keys and values, which
    rings hide or gathers do not. On one node no two levels are tried.
    """
    nodes = replace(MACHINE, devices_per_node=2, inter_bytes_per_s=2e9)
    found = find_plan(long_heads, nodes, ask(4, 1))
    degrees = found.plan.degrees
    assert (degrees["cp"], degrees["hp"], found.certificate.gap) == (2, 2, 0)
    on_hp, on_cp = (
        attention_kinds(long_heads, [one for one in found.plan.layouts if one.axis == axis])
        for axis in ("hp", "cp")
    )
    assert on_hp == {"heads"}
    assert on_cp <= set(IN_PIECES)
    flat = find_plan(long_heads, nodes, ask(4, 1, hp=1)).plan
    assert flat.estimate["step_s"] > found.plan.estimate["step_s"]
    meshes = [
        shape.degrees for shape in Candidates.of(long_heads, MACHINE, ask(4, 1)).shapes(ask(4, 1))
    ]
    assert {mesh["hp"] for mesh in meshes} == {1}


def test_the_inner_level_alone_is_the_other(long_heads):
    """hp without cp is cp by heads: it is left out, but where it is asked for."""
    nodes = replace(MACHINE, devices_per_node=2)
    for request, expected in ((ask(4, 1), {(2, 2)}), (ask(4, 1, hp=2), {(1, 2), (2, 2)})):
        shapes = Candidates.of(long_heads, nodes, request).shapes(request)
        both = {(shape.cp, shape.degrees["hp"]) for shape in shapes}
        assert {pair for pair in both if pair[1] > 1} == expected


def test_samples_that_replicas_can_take_whole_are_not_cut(gpt):
    """cp 2 of microbatches of 2 is outdone by twice the replicas and microbatches of 1."""
    shapes = Candidates.of(gpt, MACHINE, ask()).shapes(ask(4, 8, allow=(("cp", "1"), ("cp", "2"))))
    kept = without_outdone(shapes)
    assert {s.microbatch_size for s in set(shapes) - set(kept)} == {2, 4, 8}
    assert all(shape.microbatch_size % 2 for shape in kept if shape.cp == 2)
    assert [shape for shape in kept if shape.cp == 1] == [s for s in shapes if s.cp == 1]
    fixed = Candidates.of(gpt, MACHINE, ask()).shapes(ask(4, 8, cp=2, microbatch_size=2))
    assert without_outdone(fixed) == tuple(fixed)


def test_work_without_cp_bounds_work_with_it(gpt, long_llama):
    """No table of cp, or of both levels, is below the bounds made of one without."""
    for (graph, batch), hp in product(((gpt, 8), (long_llama, 4)), (1, 2)):
        request = ask(4, batch, cp=2, hp=hp, microbatch_size=1)
        candidates = Candidates.of(graph, MACHINE, request)
        for shape in candidates.shapes(request):
            whole = candidates.tables(shape.tp, 1)
            least = min(
                DividedBounds(table=table, parts=2 * hp).least_step_of_shape(shape)
                for table in whole
            )
            for table in candidates.tables(*shape.block_sizes):
                assert least <= TableBounds(table=table).least_step_of_shape(shape)


def test_what_cp_cannot_divide_is_named(gpt):
    """D19, V11: the block and its tensor, whether by length or by kind."""
    with pytest.raises(LayoutError, match=r"cp=3 divides .*hands on .*16.* 15 or 18: .*pad=.* 18$"):
        find_plan(gpt, MACHINE, ask(3, 6, cp=3))
    with pytest.raises(LayoutError, match=r"it is not \[batch, sequence, hidden\]; use cp=1"):
        find_plan(capture_tiny("mlp"), MACHINE, ask(2, 8, cp=2))


@pytest.mark.parametrize("execution", ["megatron-core", "torchtitan", "nanotron"])
def test_sequences_are_divided_under_other_runtimes_as_they_were_captured(execution):
    """V11: a runtime's own norms take their factors in another order than a Llama's, and layouts on
    cp are of the model's ops, not of these."""
    graph = capture_wide_llama(4096, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8)
    request = ask(2, 4, cp=2, precision="bf16", execution=execution)
    plan = find_plan(graph, load_profile("h100-sxm5-80gb"), request).plan
    assert plan is not None
    for layout in plan.layouts:
        assert layout.axis == "cp"
        names = {op.name for op in graph.classes[layout.class_index].ops}
        assert {name for name, _ in layout.ops} <= names
        program = graph.classes[layout.class_index].bind(plan.microbatch_size)
        lowered = lower(program, layout, axis="cp", axis_size=2, sum_later=True)
        moved = [op for op in lowered.ops if op.target == REDISTRIBUTE]
        # Rotary tables, keys and values for attention; norms take what they are given.
        assert len(moved) <= 4
