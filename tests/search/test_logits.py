"""Whether a loss has the logits of all tokens, or makes them in chunks, is searched."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import inf

import pytest

from costmodel import CostCache, estimate
from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.lowering.passes import losses_in_chunks
from planner.units import GIB
from profiles import load_profile
from search import SearchRequest, find_plan
from search.bounds.catalogue import TableBounds
from search.candidates import Candidates
from search.partition.chain_dp import solve_chain
from search.priced_configuration import PricedConfiguration
from search.stages.either_table import with_both
from tests.captures import capture_tiny, capture_wide_llama
from tests.search.machine import Machine

MACHINE = Machine(memory_bytes=80.0 * GIB)


@cache
def wide() -> ModelGraph:
    """Two layers of a Llama on 4096 tokens, with a vocabulary of many times its width."""
    return capture_wide_llama(4096, vocab_size=128256)


def request(**choices) -> SearchRequest:
    return SearchRequest(num_devices=2, global_batch=4, **choices)


def test_each_layout_is_priced_both_ways():
    """In chunks it is slower by a product and holds less; neither is pruned for the other."""
    candidates = Candidates.of(wide(), MACHINE, request())
    for tp in (1, 2):
        found = candidates.layouts.at(tp, 1).tables
        whole = {table.layouts: table for table in found if not table.logit_rows}
        chunked = {table.layouts: table for table in found if table.logit_rows}
        assert whole
        assert chunked.keys() == whole.keys()
        for layouts, table in chunked.items():
            assert table.logit_rows == 2048
            other = whole[layouts]
            assert table.key != other.key
            assert (table.forward_s >= other.forward_s).all()
            assert table.backward_s[-1] > other.backward_s[-1]
            assert (table.backward_s[:-1] == other.backward_s[:-1]).all()
            assert table.blocks.saved_bytes[-1] < 0.2 * other.blocks.saved_bytes[-1]


def test_bounds_of_layouts_hold_for_chunks():
    """What ops of whole logits take at least, chunks take, too."""
    candidates = Candidates.of(wide(), MACHINE, request())
    for layout in candidates.layouts.at(2, 1).every:
        seconds = float((layout.table.forward_s + layout.table.backward_s).sum())
        assert layout.least_s + layout.accumulate_s <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("tp", [1, 2])
def test_bounds_of_memory_hold_for_chunks(tp):
    """The gradient of whole logits is no part of what a backward of chunks holds."""
    candidates = Candidates.of(wide(), MACHINE, request(logits="chunked"))
    (shape,) = [
        shape
        for shape in candidates.shapes(request(logits="chunked", tp=tp, pp=1))
        if shape.microbatch_size == 1 and shape.cp == 1
    ]
    for table in candidates.layouts.at(tp, 1).tables:
        for configuration in shape.configurations():
            priced = PricedConfiguration(candidates, configuration, table)
            (memory,) = candidates.estimate(priced.plan(priced.only_cut(inf))).memory
            assert TableBounds(table=table).least_peak_bytes(configuration) <= memory.total


def test_no_plan_of_either_is_below_what_stands_for_both():
    """Bounds of steps and of memory, the best cuts under ever less memory, and interleaved ones."""
    asked = request()
    candidates = Candidates.of(wide(), MACHINE, asked)
    compared = Counter()
    for shape in candidates.shapes(asked):
        if shape.cp > 1:
            continue
        tables = candidates.tables(*shape.block_sizes)
        for table in with_both(tables):
            if len(table.members) == 1:
                continue
            for configuration in shape.configurations():
                least = _least_of(candidates, configuration, table)
                for own in table.members:
                    theirs = _least_of(candidates, configuration, own)
                    for name, value in least.items():
                        # (Interleaved stages may lie otherwise, where it stands for neither.)
                        compared[name[0], value < inf] += name in theirs
                        assert value <= theirs.get(name, inf) * (1 + 1e-12)
    assert {name for name, _ in compared} == {"step", "memory", "cut", "even"}
    assert min(compared["cut", True], compared["even", True]) > 10


def _least_of(candidates, configuration, table) -> dict[tuple, float]:
    """What a search bounds the plans of a configuration by, by what is asked."""
    bounds, priced = TableBounds(table=table), PricedConfiguration(candidates, configuration, table)
    found = {("memory",): bounds.least_peak_bytes(configuration)}
    for limit in (3, 5, 8, 80):
        if configuration.vpp > 1 and candidates.have_equal_cuts(configuration, table):
            cut = priced.even_cut(limit * GIB)
            found["even", limit, priced.interleaved.cut.cuts] = cut.value if cut else inf
        elif configuration.vpp == 1 and configuration.pp > 1:
            cut = solve_chain(priced.problem(limit * GIB)).cut
            found["cut", limit] = cut.value if cut else inf
    if configuration.vpp == 1:
        found["step",] = bounds.least_step_s(configuration)
    return found


def test_chunks_are_chosen_where_memory_is_short():
    """Under a limit that whole logits meet by a slower plan, or by none."""
    found = {
        (logits, limit): find_plan(
            wide(), MACHINE, request(logits=logits, memory_limit_bytes=limit and int(limit * GIB))
        )
        for logits in ("whole", "auto", "chunked")
        for limit in (None, 2.5)
    }
    plans = {key: result.plan for key, result in found.items()}
    steps = {key: plan.estimate["step_s"] for key, plan in plans.items() if plan is not None}
    # With all the room there is, whole logits are as fast as can be.
    assert plans["auto", None].logit_rows == 0
    assert steps["auto", None] == steps["whole", None]
    assert steps["chunked", None] > steps["whole", None]
    short = plans["auto", 2.5]
    assert short is not None
    assert short.logit_rows == plans["chunked", None].logit_rows == 2048
    assert steps["auto", 2.5] < steps.get(("whole", 2.5), float("inf"))
    # The plan's own estimate is what the search had.
    again = estimate(wide(), MACHINE, short, costs=CostCache(wide(), MACHINE))
    assert again.step_s == pytest.approx(steps["auto", 2.5])


def test_few_tokens_are_one_chunk():
    candidates = Candidates.of(capture_tiny("gpt"), MACHINE, request(logits="chunked"))
    assert not any(table.logit_rows for table in candidates.layouts.at(1, 1).tables)


def test_few_bytes_are_worth_no_second_table():
    """Where the search chooses; 4.2 GB of whole logits and probabilities are 1.3% of the device."""
    large = Machine(memory_bytes=300.0 * GIB)
    for logits, has_chunks in (("auto", False), ("chunked", True)):
        candidates = Candidates.of(wide(), large, request(logits=logits))
        assert any(t.logit_rows for t in candidates.layouts.at(1, 1).tables) == has_chunks


def test_what_is_worth_it_follows_from_the_limit_of_a_search():
    """Not from the device: 4.2 GB are 5% of 80 GiB; candidates that are kept are asked again."""
    large, free = Machine(memory_bytes=300.0 * GIB), request()
    tight = request(memory_limit_bytes=80 * GIB)
    of_free, of_tight = (Candidates.of(wide(), large, asked) for asked in (free, tight))
    kept = (of_free, of_tight, of_free.under(tight), of_tight.under(free))
    found = [any(t.logit_rows for t in each.layouts.at(1, 1).tables) for each in kept]
    assert found == [False, True, True, False]
    assert of_free.under(free) is of_free


def test_chunks_have_about_as_many_logits_as_there_are_hidden_states(monkeypatch):
    monkeypatch.setattr(losses_in_chunks, "LEAST_ROWS", 1)
    candidates = Candidates.of(wide(), MACHINE, request(logits="chunked"))
    hidden = wide().tensor[wide().blocks[-1].inputs[0]].shape[-1]
    for tp in (1, 2):
        (rows,) = {table.logit_rows for table in candidates.layouts.at(tp, 1).tables}
        assert rows % 128 == 0
        assert 0 <= rows - 4096 * hidden * tp / 128256 < 128


def test_what_cannot_have_chunks_is_told():
    with pytest.raises(LayoutError, match="no loss of the model is a cross entropy"):
        Candidates.of(capture_tiny("unet"), MACHINE, request(logits="chunked"))
    with pytest.raises(LayoutError, match="megatron-core has losses of its own"):
        Candidates.of(
            wide(),
            load_profile("h100-sxm5-80gb"),
            request(logits="chunked", execution="megatron-core"),
        )
    with pytest.raises(LayoutError, match="whose stages would each choose"):
        request(logits="chunked", meshes="own")
    with pytest.raises(LayoutError, match="use whole, chunked, or auto"):
        request(logits="half")
