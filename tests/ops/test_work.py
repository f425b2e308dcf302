"""Flop and bytes of families whose count is their own, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from costmodel.memory.saved import saved_tensors, scratch_bytes, unreduced_bytes
from planner.language.graph import Op
from planner.language.ops.call import NO_WORK
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.recompute_choice import is_cheap
from planner.language.ops.weight_products import deferrable_products
from tests.sharding.programs import frozen, one_op

CALLS = {
    # 2 x 3 rows of 4 by a weight of 5 x 4: 2 flop for each of 6 x 5 results and 4 terms.
    "linear": (one_op("aten.linear.default", torch.ones(2, 3, 4), torch.ones(5, 4)), 240, 480),
    # The addend comes first: [3, 5] and [3, 4] @ [4, 5]. Three operands of two dims get gradients.
    "addmm": (
        one_op("aten.addmm.default", torch.ones(3, 5), torch.ones(3, 4), torch.ones(4, 5)),
        120,
        360,
    ),
    # i and j of size 3 and 5, contracted over k of size 4.
    "einsum": (
        one_op("aten.einsum.default", "ik,kj->ij", [torch.ones(3, 4), torch.ones(4, 5)]),
        120,
        240,
    ),
    # 8 positions of 1 image and 2 channels out; a kernel has 3 channels of 1 x 1.
    "convolution": (
        one_op("aten.conv2d.default", torch.ones(1, 3, 2, 4), torch.ones(2, 3, 1, 1)),
        96,
        192,
    ),
    # Each of 3 x 8 entries of the input meets 2 channels of 1 x 1.
    "transposed convolution": (
        one_op("aten.conv_transpose2d.input", torch.ones(1, 3, 2, 4), torch.ones(3, 2, 1, 1)),
        96,
        192,
    ),
    # Scores of 2 heads of 4 queries and 4 keys: 32, by 8 and 8; backward 5 products to 2.
    "attention": (
        one_op(
            "aten.scaled_dot_product_attention.default", *(torch.ones(1, 2, 4, 8) for _ in range(3))
        ),
        1024,
        2560,
    ),
    # A causal mask leaves half.
    "causal attention": (
        one_op(
            "aten.scaled_dot_product_attention.default",
            *(torch.ones(1, 2, 4, 8) for _ in range(3)),
            None,
            0.0,
            True,
        ),
        512,
        1280,
    ),
    # 12 entries of 10 flop.
    "gelu": (one_op("aten.gelu.default", torch.ones(3, 4)), 120, 240),
}


@pytest.mark.parametrize("name", CALLS)
def test_flop_forward_and_backward(name):
    single, forward, backward = CALLS[name]
    work = op_work(single.op, single.program.tensor)
    assert work.flop == forward
    assert backward_work(single.op, single.program.tensor, work).flop == backward


@pytest.mark.parametrize("grouped", [False, True])
def test_causal_attention_of_a_shard_leaves_later_keys_out(grouped):
    """N9: of 2 heads of 4 queries and 4 keys 2 x 10 pairs are met, by 8 and 8; where weights are
    dropped a mask is made, and all 32.
    """
    single = CALLS["attention"][0]
    for dropout, flop in ((0.0, 640), (0.5, 1024)):
        args = (*single.op.args[:3], dropout, None, grouped, 1, "cp")
        op = replace(single.op, target="planner.causal_attention", args=args)
        work = op_work(op, single.program.tensor)
        assert work.flop == flop
        assert backward_work(op, single.program.tensor, work).flop == 2.5 * flop


def test_an_embedding_reads_the_rows_it_gathers():
    """5 rows of 4 numbers and 5 indices of 8 bytes, not the table of 100 rows."""
    single = one_op("aten.embedding.default", torch.ones(100, 4), torch.zeros(5, dtype=torch.int64))
    work = op_work(single.op, single.program.tensor)
    assert (work.read_bytes, work.write_bytes) == (5 * 4 * 4 + 5 * 8, 5 * 4 * 4)
    back = backward_work(single.op, single.program.tensor, work)
    assert back.write_bytes == 100 * 4 * 4 + 5 * 4 * 4


@pytest.mark.parametrize(
    "single",
    [
        one_op("aten.view.default", torch.ones(4, 6), [24]),
        one_op("aten.broadcast_to.default", torch.ones(1, 6), [4, 6]),
        one_op("aten.to.dtype", torch.ones(4), torch.float32),
        one_op("aten.unbind.int", torch.ones(4, 6)),
    ],
    ids=lambda single: single.op.target,
)
def test_views_and_casts_to_the_same_dtype_move_nothing(single):
    assert op_work(single.op, single.program.tensor) == NO_WORK
    assert backward_work(single.op, single.program.tensor) == NO_WORK


def test_no_gradient_no_backward():
    single = one_op("aten.gelu.default", frozen(torch.ones(4)))
    assert backward_work(single.op, single.program.tensor) == NO_WORK


@pytest.mark.parametrize(
    ("single", "forward", "backward"),
    [
        # The gradient of x^2 by way of x and 2 x: two tensors of 48 bytes.
        (one_op("aten.pow.Tensor_Scalar", torch.ones(3, 4), 2), 0, 96),
        # The gradient of the log-softmax beside the logits'.
        (one_op("aten.cross_entropy_loss.default", torch.ones(3, 4), torch.zeros(3).long()), 0, 48),
        (one_op("aten.relu.default", torch.ones(3, 4)), 0, 0),
    ],
)
def test_scratch(single, forward, backward):
    saved = saved_tensors(single.program)
    assert scratch_bytes(single.op, saved.storages, forward=True) == forward
    assert scratch_bytes(single.op, saved.storages, forward=False) == backward


def test_gradients_of_a_product_with_broadcasting_are_made_whole_first():
    """[3, 4] times [4]: the second gradient has 48 bytes before it is summed to 16."""
    single = one_op("aten.mul.Tensor", torch.ones(3, 4), torch.ones(4))
    saved = saved_tensors(single.program)
    assert unreduced_bytes(single.op, single.op.inputs, saved.storages) == 48
    assert unreduced_bytes(single.op, single.op.inputs[:1], saved.storages) == 0


@pytest.mark.parametrize(
    ("target", "cheap"),
    [
        ("aten.gelu.default", True),
        ("aten.linear.default", False),
        ("aten.topk.default", False),
        ("aten.linalg_svd.default", False),
        ("planner.redistribute", False),
        ("planner.vocab_embedding", True),
        ("flash_attn.forward.default", False),
    ],
)
def test_what_selective_recomputation_runs_again(target, cheap):
    assert is_cheap(Op(name="x", target=target, args=(), outputs=("x",))) == cheap


def test_products_by_trained_weights_are_deferrable():
    single = one_op("aten.linear.default", torch.ones(2, 4), torch.ones(5, 4), torch.ones(5))
    program = replace(
        single.program,
        inputs=("x0",),
        params=("x1", "x2"),
        tensors=tuple(
            replace(meta, kind="param") if meta.name in ("x1", "x2") else meta
            for meta in single.program.tensors
        ),
    )
    (found,) = deferrable_products(program).values()
    x, weight, bias, transposed = found
    assert (x.name, weight.name, bias.name, transposed) == ("x0", "x1", "x2", True)
    assert deferrable_products(single.program) == {}  # its weight is no parameter
