"""Every rule by construction: each strategy it offers, run on shards, equals the whole op.

Values and gradients, in double precision. A gradient is compared under the stated
convention: of a Shard input it is that shard, of a Partial input it is whole, of a
Replicate input it is a term of a sum if any output is not Replicate, else whole.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from planner.errors import LayoutError
from planner.language.layout.placement import OpSharding, Own, Partial, Replicate, Shard
from planner.language.ops.call import local_shape
from planner.language.ops.registry import grad_is_partial, has_rule, local_ops, strategies
from tests.sharding.op_cases import CASES
from tests.sharding.programs import (
    OneOp,
    one_op,
    place,
    random_cotangents,
    run_dense,
    run_local,
    whole,
)

SEEDS = range(2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_equals_the_whole_op(case, seed):
    """M12, M13, D5: forward and gradient of each generated strategy match the dense op."""
    axis_size = 2 + seed % 2
    torch.manual_seed(seed)
    single = CASES[case](random.Random(f"{case}{seed}"), axis_size)
    assert has_rule(single.op.target)
    offered = strategies(
        single.op,
        single.program.tensor,
        axis_size,
        segments=(2, 3),
        mirrored=True,
        asked=True,
    )
    assert offered[0] == OpSharding(
        inputs=(Replicate(),) * len(single.op.inputs),
        outputs=(Replicate(),) * len(single.op.outputs),
    )
    assert len(offered) > 1, f"{single.op.target} offers nothing for these shapes"
    for sharding in offered[1:]:
        check(single, sharding, axis_size)


def check(single: OneOp, sharding: OpSharding, axis_size: int) -> None:
    """Compare one op under one sharding with the whole op."""
    program = single.program
    tensors = dict(zip(program.inputs, single.inputs, strict=True))
    placements = dict(zip(single.op.inputs, sharding.inputs, strict=True))
    if tuple(placements[name] for name in single.op.inputs) != sharding.inputs:
        return  # one tensor in two placements: needs a redistribution, see test_lowering
    if any(isinstance(place, Own) for place in (*sharding.inputs, *sharding.outputs)):
        return  # rows of each rank's own have no whole alone, see test_routing
    cotangents = random_cotangents(program, seed=1)
    outputs, grads = run_dense(program, tensors, cotangents)
    results = run_local(
        local_program(single, sharding, axis_size),
        tensors,
        placements,
        cotangents,
        sharding.outputs,
        axis_size,
    )
    label = f"{single.op.target} {[list(t.shape) for t in single.inputs]} as {sharding}"
    for i, (dense, placement) in enumerate(zip(outputs, sharding.outputs, strict=True)):
        for joined in whole([values[i] for values, _ in results], placement):
            close(joined, dense.detach(), f"output {i} of {label}")
    partial = grad_is_partial(sharding.outputs)
    for name, placement in placements.items():
        if grads[name] is None:
            continue
        locals_ = [found[name] for _, found in results]
        locals_ = [
            torch.zeros_like(t) if g is None else g
            for g, t in zip(locals_, _locals(tensors[name], placement, axis_size), strict=True)
        ]
        if isinstance(placement, Replicate) and partial:
            placement = Partial()
        elif isinstance(placement, Partial):
            placement = Replicate()
        for joined in whole(locals_, placement):
            close(joined, grads[name], f"gradient of {name} of {label}")


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize(
    "bounds",
    [(0, None, None), (None, None, None), (0, 5, None), (-4, 3, None), (0, None, 8)],
    ids=str,
)
@pytest.mark.parametrize("is_told", [False, True], ids=["", "documents, padding"])
def test_attention_of_mirrored_pieces_equals_the_whole(ranks, pieces, bounds, is_told):
    """Keys gathered and on a ring: causal, without a mask, windows, chunks, tables."""
    torch.manual_seed(0)
    length = 24
    query, key, value = (torch.randn(2, h, length, 4, dtype=torch.float64) for h in (4, 2, 2))
    tables = [torch.randint(0, 3, (2, length)).sort(-1)[0], torch.rand(2, length) > 0.3]
    told = tables if is_told else [None, None]
    single = one_op("planner.masked_attention", query, key, value, *bounds, None, True, *told)
    rest = ",R,R" if is_told else ""
    cut = f"S(2)z{pieces}"
    for keys in ("R", cut):
        sharding = OpSharding.parse(f"{cut},{keys},{keys}{rest}->{cut}")
        check(single, sharding, ranks)
    if bounds == (0, None, None) and not is_told:
        causal = one_op(
            "aten.scaled_dot_product_attention.default",
            query, key, value, is_causal=True, enable_gqa=True,
        )  # fmt: skip
        check(causal, OpSharding.parse(f"{cut},R,R->{cut}"), ranks)


def _locals(tensor, placement, axis_size):
    if isinstance(placement, Shard):
        return [place(tensor, placement, rank, axis_size) for rank in range(axis_size)]
    return [tensor] * axis_size


def local_program(single: OneOp, sharding: OpSharding, axis_size: int):
    """The op's local form as a program of its own, without any redistribution."""
    program = single.program
    form = local_ops(single.op, sharding, program.tensor, axis="tp", axis_size=axis_size)
    placed = dict(zip(single.op.inputs, sharding.inputs, strict=True))
    placed |= dict(zip(single.op.outputs, sharding.outputs, strict=True))
    return replace(
        program,
        ops=form.ops,
        tensors=tuple(
            replace(t, shape=local_shape(t.shape_at(1), placed[t.name], axis_size))
            for t in program.tensors
        ),
    )


def close(found: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-11, equal_nan=True, msg=lambda m: f"{label}: {m}"
    )


UNARY_NONLINEAR = ["relu", "gelu", "silu", "tanh", "exp", "rsqrt", "sigmoid", "pow"]


@pytest.mark.parametrize("name", UNARY_NONLINEAR)
def test_nonlinear_ops_never_take_a_partial_sum(name):
    """D6: no strategy of a non-linear op has a Partial input."""
    single = CASES[name](random.Random(0), 2)
    for sharding in strategies(single.op, single.program.tensor, 2):
        assert Partial() not in sharding.inputs


def test_the_same_tensor_twice_needs_one_placement_each():
    """A square, x * x, is not linear in x: a Partial x must not be offered for both."""
    single = CASES["mul_self"](random.Random(0), 2)
    for sharding in strategies(single.op, single.program.tensor, 2):
        assert sharding.inputs != (Partial(), Partial())


def test_sizes_that_do_not_divide_are_refused_with_the_rule():
    """M8: dim 6 on 4 ranks is not offered, and asking for it says what is."""
    single = one_op("aten.relu.default", torch.randn(6, 8))
    offered = strategies(single.op, single.program.tensor, 4)
    assert [str(s) for s in offered] == ["R->R", "S(1)->S(1)"]
    asked = OpSharding.parse("S(0)->S(0)")
    with pytest.raises(LayoutError) as refused:
        local_ops(single.op, asked, single.program.tensor, axis="tp", axis_size=4)
    assert str(refused.value) == (
        "op op (aten.relu.default of [6, 8]) can't run as S(0)->S(0) on tp=4: dim 0 of x0 has "
        "size 6, which tp=4 does not divide (tp may be 1, 2, 3, 6); use one of R->R; S(1)->S(1)"
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_offered_on_two_ranks_is_exact_or_refused_on_five(case):
    """M8: any op of any family, asked to split a size that five ranks don't divide."""
    torch.manual_seed(0)
    single = CASES[case](random.Random(case), 2)
    choices = {"segments": (2, 3), "asked": True}
    offered = strategies(single.op, single.program.tensor, 5, **choices)
    for sharding in strategies(single.op, single.program.tensor, 2, **choices):
        if sharding in offered:
            check(single, sharding, 5)
            continue
        with pytest.raises(LayoutError, match=r"op op .* can't run as .* on tp=5") as refused:
            local_ops(single.op, sharding, single.program.tensor, axis="tp", axis_size=5)
        reason = str(refused.value)
        uneven = r"dim \d of [xy]\d+ has size \d+, which tp=5 does not divide.*\(tp may be [1-9]"
        assert re.search(uneven, reason) or "would compute something else" in reason


def test_fused_projections_and_flattened_batches_are_cut_in_segments():
    """The q, k and v of one matrix stay on their rank; a sequence shard survives flattening."""
    split = one_op("aten.split.Tensor", torch.randn(2, 12), 4, 1)
    offered = list(map(str, strategies(split.op, split.program.tensor, 2)))
    assert "S(1)x3->S(1),S(1),S(1)" in offered
    flatten = one_op("aten.view.default", torch.randn(3, 4, 5), [12, 5])
    offered = list(map(str, strategies(flatten.op, flatten.program.tensor, 2)))
    assert "S(1)->S(0)x3" in offered
