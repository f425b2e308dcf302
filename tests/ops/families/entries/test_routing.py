"""Rows in the order of their experts: each rank may sort its own, and what it makes of them."""

from __future__ import annotations

import pytest
import torch

from planner.errors import LayoutError
from planner.language.graph import Op, Program, Ref, TensorMeta
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import Own, has_way, parse_placement
from planner.language.lowering.lowering import lower
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS, SORT_ROWS, UNSORT_ROWS
from planner.language.ops.families.products.matmul import GROUPED_MM
from planner.language.ops.registry import strategies
from planner.runtime.stage.calls.local_ops import (
    bias_of_runs,
    grouped_mm,
    sort_rows,
    unsort_rows,
)
from planner.runtime.stage.program_fx import to_graph_module
from tests.sharding.programs import run_dense, run_local, whole

ROWS, WIDTH, CHOSEN, EXPERTS = 12, 4, 2, 3


def meta(name: str, *shape: int, dtype: str = "float64", kind: str = "activation") -> TensorMeta:
    needs = dtype == "float64"
    return TensorMeta(name=name, shape=shape, dtype=dtype, kind=kind, requires_grad=needs)


def layer() -> Program:
    """Rows sorted, multiplied by their expert's matrix and put back."""
    copies = ROWS * CHOSEN
    ops = (
        Op(
            name="sort",
            target=SORT_ROWS,
            args=(Ref("rows"), Ref("experts"), EXPERTS),
            outputs=("sorted", "order", "ends"),
        ),
        Op(
            name="products",
            target=GROUPED_MM,
            args=(Ref("sorted"), Ref("matrices"), Ref("ends")),
            outputs=("products",),
        ),
        Op(
            name="biased",
            target=BIAS_OF_RUNS,
            args=(Ref("products"), Ref("biases"), Ref("ends")),
            outputs=("biased",),
        ),
        Op(
            name="unsort",
            target=UNSORT_ROWS,
            args=(Ref("biased"), Ref("order"), Ref("weights"), CHOSEN),
            outputs=("sums",),
        ),
    )
    return Program(
        name="layer",
        inputs=("rows", "experts", "weights"),
        params=("matrices", "biases"),
        outputs=("sums",),
        tensors=(
            meta("rows", ROWS, WIDTH),
            meta("experts", ROWS, CHOSEN, dtype="int64"),
            meta("weights", ROWS, CHOSEN),
            meta("matrices", EXPERTS, WIDTH, WIDTH, kind="param"),
            meta("biases", EXPERTS, WIDTH, kind="param"),
            meta("sorted", copies, WIDTH),
            meta("order", copies, dtype="int64"),
            meta("ends", EXPERTS, dtype="int32"),
            meta("products", copies, WIDTH),
            meta("biased", copies, WIDTH),
            meta("sums", ROWS, WIDTH),
        ),
        ops=ops,
    )


def tensors_of(program: Program) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        name: (
            torch.randint(EXPERTS, program.tensor[name].shape)
            if name == "experts"
            else torch.randn(program.tensor[name].shape, dtype=torch.float64)
        )
        for name in (*program.inputs, *program.params)
    }


def by_rows(segments: str = "") -> ClassLayout:
    rows, order, ends = f"S(0){segments}", f"O(0){segments}", f"O{segments}"
    return ClassLayout(
        class_index=0,
        inputs=(rows,) * 3,
        params=("R",) * 2,
        outputs=(rows,),
        ops=(
            ("sort", f"{rows},{rows}->{rows},{order},{ends}"),
            ("products", f"{rows},R,{ends}->{rows}"),
            ("biased", f"{rows},R,{ends}->{rows}"),
            ("unsort", f"{rows},{order},{rows}->{rows}"),
        ),
    )


def offered(name: str) -> set[str]:
    program = layer()
    op = next(op for op in program.ops if op.name == name)
    return {str(sharding) for sharding in strategies(op, program.tensor, 2)[1:]}


def test_each_call_may_have_rows_of_each_ranks_own():
    """The order and the ends are then each rank's own, and are taken as such alone."""
    assert offered("sort") == {"S(0),S(0)->S(0),O(0),O", "S(1),R->S(1),R,R"}
    assert offered("products") == {
        "S(0),R,O->S(0)",
        "S(1),S(1),R->P",
        "R,S(2),R->S(1)",
    }
    assert offered("biased") == {"S(0),R,O->S(0)", "S(1),S(1),R->S(1)", "P,P,R->P"}
    assert offered("unsort") == {"S(0),O(0),S(0)->S(0)", "S(1),R,R->S(1)", "P,R,R->P"}


@pytest.mark.parametrize("segments", ["", "x2", "x3"])
@pytest.mark.parametrize("made_again", [None, {"products"}, {"sort", "biased", "unsort"}])
def test_rows_of_each_ranks_own_give_the_same_sums_and_gradients(segments, made_again):
    """In one piece or in several, and recomputed."""
    program, layout = layer(), by_rows(segments)
    tensors = tensors_of(program)
    cotangents = [torch.randn(ROWS, WIDTH, dtype=torch.float64)]
    outputs, gradients = run_dense(program, tensors, cotangents)
    placed = {
        name: parse_placement(text)
        for name, text in zip(
            (*program.inputs, *program.params), (*layout.inputs, *layout.params), strict=True
        )
    }
    local = lower(program, layout, axis="tp", axis_size=2)
    results = run_local(
        local,
        tensors,
        placed,
        cotangents,
        [parse_placement(layout.outputs[0])],
        2,
        made_again=None if made_again is None else frozenset(made_again),
    )
    rows = parse_placement(layout.outputs[0])
    (found,) = whole([values[0] for values, _ in results], rows)
    torch.testing.assert_close(found, outputs[0], rtol=1e-12, atol=1e-12)
    for name, place in placed.items():
        if gradients[name] is not None:
            # (Matrices are whole, so lowering summed their gradients over the ranks.)
            for joined in whole([each[name] for _, each in results], place):
                torch.testing.assert_close(joined, gradients[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("source", "target"), [("O", "R"), ("R", "O"), ("O(0)", "S(0)")])
def test_there_is_no_way_from_or_to_what_is_each_ranks_own(source, target):
    assert not has_way(parse_placement(source), parse_placement(target))
    assert not has_way(Own(0), Own(0, 2))
    assert has_way(Own(0, 2), parse_placement("O(0)x2"))


def test_a_layout_that_mixes_ranks_rows_is_refused():
    """Ends of each rank's own for rows of all: products of the wrong experts, so no program."""
    layout = by_rows()
    ops = dict(layout.ops) | {"products": "R,S(2),R->S(1)", "biased": "S(1),S(1),R->S(1)"}
    layout = layout.model_copy(update={"ops": tuple(ops.items())})
    local = lower(layer(), layout, axis="tp", axis_size=2)
    with pytest.raises(LayoutError, match="no way from placement O to R: each rank has a value"):
        to_graph_module(local, {"tp": None}, torch.device("cpu"))


@pytest.mark.parametrize("text", ["O", "O(0)"])
def test_blocks_and_parameters_have_a_whole(text):
    layout = by_rows()
    for field in ("inputs", "params", "outputs"):
        with pytest.raises(ValueError, match=r"each rank's own|never partial"):
            ClassLayout(**{**layout.model_dump(), field: (text,)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("stable", [True, False])
def test_the_calls_have_the_bits_of_the_library(dtype, copies, stable):
    """`grouped_mm_experts_forward` of transformers 5, but for its products."""
    torch.manual_seed(0)
    rows, weights = torch.randn(ROWS, WIDTH, dtype=dtype), torch.rand(ROWS, copies, dtype=dtype)
    biases = torch.randn(EXPERTS, WIDTH, dtype=dtype)
    experts = torch.randint(EXPERTS, (ROWS, copies))
    leaves = [rows, weights, biases]

    def ours(rows, weights, biases):
        found, order, ends = sort_rows(rows, experts, EXPERTS, stable)
        return unsort_rows(bias_of_runs(found.tanh(), biases, ends), order, weights, copies), ends

    def library(rows, weights, biases):
        ids, order = torch.sort(experts.reshape(-1), stable=stable)
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        found = rows[order // copies].tanh() + biases[ids]
        found = found * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        found = found[back].view(ROWS, copies, WIDTH).sum(1)
        return found, torch.cumsum(counts, 0, dtype=torch.int32)

    results = []
    for call in (ours, library):
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        sums, ends = call(*given)
        grad = torch.randn(sums.shape, generator=torch.Generator().manual_seed(1)).to(sums.dtype)
        sums.backward(grad)
        results.append([sums, ends, *(leaf.grad for leaf in given)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_experts_that_are_none_of_ours_come_last_and_are_in_no_run():
    experts = torch.tensor([EXPERTS, 0, EXPERTS + 1, 2])
    _, order, ends = sort_rows(torch.randn(4, WIDTH), experts, EXPERTS)
    assert order.tolist() == [1, 3, 0, 2]
    assert ends.tolist() == [1, 1, 2]


def test_products_of_runs_take_rows_in_this_order():
    rows, matrices = torch.randn(ROWS, WIDTH), torch.randn(EXPERTS, WIDTH, WIDTH)
    experts = torch.randint(EXPERTS, (ROWS,))
    found, order, ends = sort_rows(rows, experts, EXPERTS)
    sums = unsort_rows(grouped_mm(found, matrices, ends), order, None, 1)
    torch.testing.assert_close(sums, torch.einsum("rh,rhm->rm", rows, matrices[experts]))
