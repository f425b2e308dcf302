"""Loops over experts are told in sorted runs of rows, and compute what they did."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.ops.families.entries.routing import SORT_ROWS, STACK_OF_RUNS, UNSORT_ROWS
from planner.runtime.stage.calls.opaque_modules import keep_modules
from tests.capture.loops.looping import (
    EXPERTS,
    LAYERS,
    LOOPS,
    PASSING_OVER,
    WIDTH,
    Gated,
    Looping,
    apart,
    batch_of,
    captured,
    plain,
)

WITHIN = 1e-12


def build(loop, make=Gated, **how):
    torch.manual_seed(0)
    return Looping(loop, make, **how).double()


def targets(graph):
    return [op.target for block in graph.blocks for op in graph.classes[block.class_index].ops]


def check_told(module, make_batch=batch_of):
    graph = captured(module, make_batch)
    found = targets(graph)
    assert found.count(SORT_ROWS) == found.count(UNSORT_ROWS) == LAYERS
    assert OPAQUE_MODULE not in found
    for size in (1, 5):
        assert apart(graph, module, make_batch(size)) < WITHIN
    return found


@pytest.mark.parametrize("make", [Gated, plain])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_told(name, make):
    found = check_told(build(LOOPS[name], make))
    assert (STACK_OF_RUNS in found) == (name in PASSING_OVER)


@pytest.mark.parametrize("shut", [False, True])
def test_one_expert_a_row(shut):
    check_told(build(LOOPS["of_mixtral"], chosen=1, shut=shut))


def test_a_loop_in_half_precision():
    """Sums are of the same rows, in another order."""

    def make_batch(size):
        return batch_of(size, torch.bfloat16)

    torch.manual_seed(0)
    module = Looping(LOOPS["of_qwen2_moe"]).bfloat16()
    graph = captured(module, make_batch)
    assert targets(graph).count(SORT_ROWS) == LAYERS
    assert apart(graph, module, make_batch(5)) < 0.02


def test_a_row_alone_may_be_computed_on_between():
    def loop(layer, rows, weights, ids):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(layer.experts):
            which, slot = torch.where(ids == number)
            if len(which) > 0:
                count, width = rows[which].shape
                made = F.layer_norm(expert(rows[which].view(count, width)), (WIDTH,)).tanh()
                first, second = made.chunk(2, -1)
                made = torch.cat([second, first], -1)
                out.index_add_(0, which, made * weights[which, slot].unsqueeze(-1))
        return out

    assert STACK_OF_RUNS in check_told(build(loop))


# ------------------------------------------------------------------------------ near misses


def _loop(pick=None, made=None, skip=None, experts=range(EXPERTS), put=None):
    """A loop of which a step is another."""
    pick = pick or (lambda ids, number: torch.where(ids == number))
    made = made or (lambda layer, number, rows: layer.experts[number](rows))
    put = put or (lambda out, which, rows: out.index_add(0, which, rows))

    def loop(layer, rows, weights, ids):
        out = torch.zeros_like(rows)
        for number in experts:
            which, slot = pick(ids, number)
            if skip is not None and skip(ids, number, which):
                continue
            rows_of = made(layer, number, rows[which])
            out = put(out, which, rows_of * weights[which, slot].unsqueeze(-1))
        return out

    return loop


def _by_other_counts(layer, rows, weights, ids):
    """Experts are passed over by how often others were chosen."""
    out = torch.zeros_like(rows)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    others = F.one_hot((ids + 1) % EXPERTS, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(others.sum((-1, -2)), 0).nonzero():
        slot, which = torch.where(mask[number].squeeze(0))
        made = layer.experts[number](rows[which]) * weights[which, slot, None]
        out.index_add_(0, which, made)
    return out


def _often_chosen(layer, rows, weights, ids):
    """Experts of one row are passed over."""
    out = torch.zeros_like(rows)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum((-1, -2)), 1).nonzero():
        slot, which = torch.where(mask[number].squeeze(0))
        made = layer.experts[number](rows[which]) * weights[which, slot, None]
        out.index_add_(0, which, made)
    return out


def _of_other_rows(layer, rows, weights, ids):
    """Weights of rows in another order than the rows."""
    out = torch.zeros_like(rows)
    for number in range(EXPERTS):
        which, slot = torch.where(ids == number)
        _, back = torch.where((ids == number).t().contiguous())
        out.index_add_(0, which, layer.experts[number](rows[back]) * weights[which, slot, None])
    return out


def _capacity(ids, number):
    which, slot = torch.where(ids == number)
    return which[:3], slot[:3]


def _counting(layer, rows, weights, ids):
    """A buffer counts experts that have rows."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        if len(which) > 0:
            layer.closed[0] += 0.01
            out.index_add_(0, which, expert(rows[which]) * weights[which, slot, None])
    return out


def _of_those_hit(layer, rows, weights, ids):
    """What is added for an expert that has rows reaches all rows."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        if len(which) > 0:
            out = out + layer.up[number, :, 0]
            out = out.index_add(0, which, expert(rows[which]) * weights[which, slot, None])
    return out


def _of_none(layer, rows, weights, ids):
    """Experts without rows have a term of their own."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        if len(which) > 0:
            out = out.index_add(0, which, expert(rows[which]) * weights[which, slot, None])
        else:
            out = out + 0 * sum(p.sum() for p in expert.parameters())
    return out


MISSES = {
    "a sum for experts that have rows": _of_those_hit,
    "a sum for experts that have none": _of_none,
    "rows past a capacity": _loop(_capacity),
    "experts of few rows passed over": _loop(skip=lambda ids, n, which: len(which) < 2),
    "as many as others": _loop(skip=lambda ids, n, which: len(which) > len(ids) // 2),
    "passed over by another's rows": _loop(skip=lambda ids, n, which: not (ids == n - 1).any()),
    "an expert left out": _loop(experts=range(EXPERTS - 1)),
    "an expert twice": _loop(experts=[*range(EXPERTS), 0]),
    "numbers of others": _loop(lambda ids, n: torch.where((ids + 1) % EXPERTS == n)),
    "more than a number": _loop(lambda ids, n: torch.where(ids >= n)),
    "rows meet": _loop(made=lambda layer, n, rows: layer.experts[n](rows - rows.mean(0))),
    "a mean over rows": _loop(made=lambda layer, n, rows: layer.experts[n](rows) / len(rows)),
    "other work for one": _loop(
        made=lambda layer, n, rows: layer.experts[n](rows if n else 2 * rows)
    ),
    "rows that stay what was put last": _loop(
        put=lambda out, which, rows: out.index_copy(0, which, rows)
    ),
    "counts of another tensor": _by_other_counts,
    "experts of one row passed over": _often_chosen,
    "places of another order": _of_other_rows,
}


@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_runs_as_it_is(name):
    torch.manual_seed(0)
    module = Looping(MISSES[name], layers=1).double()
    graph = captured(module)
    found = targets(graph)
    assert OPAQUE_MODULE in found
    assert SORT_ROWS not in found
    keep_modules(graph, module)
    assert apart(graph, module, batch_of(5)) < WITHIN


def test_a_buffer_that_counts_experts_with_rows_is_refused_as_before():
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="writes into an input, a parameter or a buffer"):
        captured(Looping(_counting, layers=1).double())
