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
    with_ties,
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


@pytest.mark.parametrize("what", ["expert", "layer"])
def test_a_part_in_two_places(what):
    """torch's tracer hands out parts of classes of its own then."""
    check_told(with_ties(build(LOOPS["of_mixtral"]), what))


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


def test_a_shape_tells_whether_there_are_rows():
    def loop(layer, rows, weights, ids):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(layer.experts):
            which, slot = torch.where(ids == number)
            if which.shape[0] == 0:
                continue
            out.index_add_(0, which, expert(rows[which]) * weights[which, slot].unsqueeze(-1))
        return out

    assert STACK_OF_RUNS in check_told(build(loop))


@pytest.mark.parametrize("of", ["rows", "weights", "made"])
def test_what_is_detached_has_no_gradient(of):
    def loop(layer, rows, weights, ids):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(layer.experts):
            which, slot = torch.where(ids == number)
            found = {"rows": rows[which], "weights": weights[which, slot].unsqueeze(-1)}
            found |= {of: found[of].detach()} if of in found else {}
            made = expert(found["rows"])
            made = made.detach() + found["rows"] if of == "made" else made
            out.index_add_(0, which, made * found["weights"])
        return out

    check_told(build(loop))


class _SequenceFirst(torch.nn.Module):
    """Rows lie position by position, and their experts are chosen sample by sample."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn
        self.gate = torch.nn.Linear(WIDTH, EXPERTS)
        self.experts = torch.nn.ModuleList(Gated() for _ in range(EXPERTS))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).max(-1)
        rows, weights = x.transpose(0, 1).reshape(-1, WIDTH), weights.t().reshape(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (which,) = torch.where(self.turn(ids, number).reshape(-1))
            out = out.index_add(0, which, expert(rows[which]) * weights[which, None])
        return out.view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)


TURNS = {
    "transpose": lambda ids, number: (ids == number).transpose(0, 1),
    "permute": lambda ids, number: F.one_hot(ids, EXPERTS).permute(2, 1, 0)[number],
}


@pytest.mark.parametrize("turn", TURNS)
def test_rows_in_another_order_than_their_experts(turn):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = _SequenceFirst(TURNS[turn])

        def forward(self, x, labels):
            return F.cross_entropy(self.layer(x)[..., :EXPERTS].flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    module = Model().double()
    graph = captured(module)
    keep_modules(graph, module)
    assert apart(graph, module, batch_of(5)) < WITHIN


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


def _looking_behind(layer, rows, weights, ids):
    """What is added behind the loop depends on the last expert's rows."""
    out = LOOPS["passing_over"](layer, rows, weights, ids)
    return layer.shared(out) if (ids == EXPERTS - 1).any() else out


def _looking_at_values(layer, rows, weights, ids):
    """What is done behind the loop depends on values that are no choice."""
    out = LOOPS["by_where"](layer, rows, weights, ids)
    return out / 2 if (out.abs() > 100).any() else out


def _of_the_last(layer, rows, weights, ids):
    """An expert has a term of its own where it has rows, behind the rows of all."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        if which.numel() > 0:
            out = out.index_add(0, which, expert(rows[which]) * weights[which, slot, None])
    return out + layer.shared(rows) if which.numel() > 0 else out


def _hit(ids):
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    return mask, torch.greater(mask.sum((-1, -2)), 0).nonzero()


def _numbered_anew(layer, rows, weights, ids):
    """Experts by their place among those that were chosen."""
    out = torch.zeros_like(rows)
    mask, hit = _hit(ids)
    for place, number in enumerate(hit):
        slot, which = torch.where(mask[number].squeeze(0))
        made = layer.experts[place](rows[which]) * weights[which, slot, None]
        out.index_add_(0, which, made)
    return out


def _a_term_for_each(layer, rows, weights, ids):
    """A sum over the experts that were chosen, before the loop."""
    mask, hit = _hit(ids)
    out = torch.zeros_like(rows)
    extra = 0
    for number in hit:
        extra = extra + layer.up[number].mean()
    for number in hit:
        slot, which = torch.where(mask[number].squeeze(0))
        out.index_add_(0, which, layer.experts[number](rows[which]) * weights[which, slot, None])
    return out + extra


def _some_passed_over(layer, rows, weights, ids):
    """The first expert has a gradient without rows, and others have none."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        if number > 0 and which.numel() == 0:
            continue
        out.index_add_(0, which, expert(rows[which]) * weights[which, slot, None])
    return out


def _number_beside(count):
    """The number of an expert's rows is computed with beside the loop."""

    def loop(layer, rows, weights, ids):
        out, extra = torch.zeros_like(rows), layer.closed.new_zeros(()).to(rows.dtype)
        for number, expert in enumerate(layer.experts):
            which, slot = torch.where(ids == number)
            out.index_add_(0, which, expert(rows[which]) * weights[which, slot, None])
            extra = extra + count(which, weights.mean())
        return out + extra

    return loop


def _weighted(change):
    """Weighted rows are computed on before they are added."""
    return lambda layer, rows, weights, ids: _loop(
        put=lambda out, which, made: out.index_add(0, which, change(made))
    )(layer, rows, weights, ids)


def _ending(layer, rows, weights, ids):
    """An expert without rows ends the loop."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        if which.numel() == 0:
            break
        out.index_add_(0, which, expert(rows[which]) * weights[which, slot, None])
    return out


MISSES = {
    "an end at an expert without rows": _ending,
    "a look behind the loop": _looking_behind,
    "a look at values": _looking_at_values,
    "a look at the last expert": _of_the_last,
    "experts by another number": _numbered_anew,
    "a sum over those that were chosen": _a_term_for_each,
    "some passed over": _some_passed_over,
    "their number times a mean": _number_beside(lambda which, mean: mean * which.numel()),
    "as many ones": _number_beside(lambda which, mean: mean * torch.ones(len(which)).sum()),
    "bytes of rows": _loop(skip=lambda ids, n, which: which.nbytes < 20),
    "weighted rows in half precision": _weighted(lambda made: made.half().double()),
    "halves of weighted rows": _weighted(lambda made: torch.cat(made.chunk(2, -1)[::-1], -1)),
    "a bias of one number": _loop(
        made=lambda layer, n, rows: layer.experts[n](rows) + layer.up.mean((1, 2))[n, None]
    ),
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
