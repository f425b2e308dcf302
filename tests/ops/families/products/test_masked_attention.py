"""N9: attention that is told of its mask, on shards; what it saves, and what it computes."""

from __future__ import annotations

import functools

import pytest
import torch

from costmodel.memory.saved import saved_tensors
from planner.language.layout.placement import Shard
from planner.language.lowering.propagate import propagate_layout
from planner.language.ops.families.products.masked_attention import MASKED, MASKED_SHARD
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.kernel import KernelCall
from planner.language.ops.record import family_of
from planner.language.ops.strides import contiguous_strides
from tests.capture.masks.attending import LENGTH, captured
from tests.costmodel.test_saved import really_saved_bytes
from tests.ops.calls import offered, on_shard
from tests.sharding.programs import OneOp, check_lowered


def documents_in_a_window(tables):
    """Queries see three keys back, of their own document, where these count."""
    at = torch.arange(LENGTH)
    same = tables["documents"][:, None, :, None] == tables["documents"][:, None, None, :]
    near = (at <= at[:, None]) & (at > at[:, None] - 4)
    return near & same & tables["counts"].bool()[:, None, None, :]


@functools.cache
def program():
    """The block that attends, for two samples."""
    _, graph = captured(documents_in_a_window, "documents", "counts")
    (found,) = (p for p in graph.classes if any(op.target == MASKED for op in p.ops))
    return found.bind(2)


def attention():
    return OneOp(program(), ()), next(op for op in program().ops if op.target == MASKED)


def alone():
    """A program of the op alone, for questions to its record."""
    _, op = attention()
    tensors = tuple(program().tensor[name] for name in (*op.inputs, *op.outputs))
    return OneOp(
        type(program())(
            name="op", inputs=op.inputs, params=(), outputs=op.outputs, tensors=tensors, ops=(op,)
        ),
        (),
    )


def test_it_is_cut_by_sample_head_and_query():
    """Tables are cut with the samples, and whole where heads or queries are."""
    assert offered(alone(), segments=(2,)) >= {
        "S(0),S(0),S(0),S(0),S(0)->S(0)",
        "S(1),S(1),S(1),R,R->S(1)",
        "S(2),R,R,R,R->S(2)",
        "S(2)x2,R,R,R,R->S(2)x2",
    }
    ((target, args),) = on_shard(alone(), "S(2),R,R,R,R->S(2)")
    assert (target, args[-2:]) == (MASKED_SHARD, (1, "tp"))
    ((target, _),) = on_shard(alone(), "S(1),S(1),S(1),R,R->S(1)")
    assert target == MASKED


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_compute_what_the_whole_does(dim):
    """Outputs and gradients in fp64, on two ranks."""
    whole = program()
    _, op = attention()
    layout = propagate_layout(0, whole, 2, pins={op.outputs[0]: Shard(dim)}, whole_params=dim != 1)
    local = check_lowered(whole, layout, 2)
    targets = {each.target for each in local.ops}
    assert (MASKED_SHARD if dim == 2 else MASKED) in targets


def test_it_saves_what_autograd_is_given():
    """Inputs, result, tables and a sum for each row; no pairs."""
    single = program()
    assert saved_tensors(single, device_type="cpu").num_bytes == really_saved_bytes(single)


def test_only_pairs_within_bounds_are_computed():
    """Of 12 places each sees itself and 3 before it: 42 pairs, of 2 x 2 heads, by 4 and 4."""
    _, op = attention()
    work = op_work(op, program().tensor)
    assert work.flop == 2 * 4 * 42 * (4 + 4)
    assert backward_work(op, program().tensor, work).flop == 2.5 * work.flop


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_need_memory_while_they_run(device):
    """In double precision there is no other kernel, on a GPU either."""
    _, op = attention()
    strides = {name: contiguous_strides(program().tensor[name].shape_at(1)) for name in op.inputs}
    call = KernelCall(op, program().tensor, strides, device)
    rule = family_of(op.target).scratch
    assert rule is not None
    # Of 4 heads of 12 queries: pairs, sums and a copy of 4 numbers, and numbers of rows.
    assert rule(call, forward=True) == 8 * 48 * (12 + 4 * 4 + 5)
    assert rule(call, forward=False) == 8 * 48 * (2 * 12 + 3 * 4 + 1)
