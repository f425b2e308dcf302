"""Programs as FX graphs: hand-built ones, what is refused, and the quick bindings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner.errors import LayoutError
from planner.language.graph import Affine, Op, Program, Ref, Symbol, TensorMeta
from planner.runtime.stage.bindings import BINDINGS
from planner.runtime.stage.program_fx import aten_overload, to_graph_module

CPU = torch.device("cpu")


def _meta(name: str, shape: tuple[Any, ...], kind: Any = "activation") -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype="float32", kind=kind)


def _split_and_scale(size: Any = 4) -> Program:
    """in0 [4, 2] -> two halves of it in fp64, the second plus a weight."""
    return Program(
        name="layers.*",
        inputs=("in0",),
        params=("p0",),
        outputs=("add", "to"),
        tensors=(_meta("in0", (size, 2), "input"), _meta("p0", (2, 2), "param")),
        ops=(
            Op(
                name="split",
                target="aten.split.Tensor",
                args=(Ref("in0"), 2),
                outputs=("split.0", "split.1"),
            ),
            Op(
                name="to",
                target="aten.to.dtype",
                args=(Ref("split.0"), Symbol("dtype", "float64")),
                outputs=("to",),
            ),
            Op(
                name="add",
                target="aten.add.Tensor",
                args=(Ref("split.1"), Ref("p0")),
                kwargs=(("alpha", 2),),
                outputs=("add",),
            ),
        ),
    )


def test_a_program_runs_as_written():
    run = to_graph_module(_split_and_scale(), {}, CPU)
    x, w = torch.randn(4, 2), torch.randn(2, 2)
    added, cast = run(x, w)
    torch.testing.assert_close(added, x[2:] + 2 * w)
    torch.testing.assert_close(cast, x[:2].double())


def test_an_unbound_program_is_refused():
    program = _split_and_scale()
    open_op = Op(
        name="view",
        target="aten.view.default",
        args=(Ref("in0"), (Affine(2), 2)),
        outputs=("view",),
    )
    unbound = Program(
        name="x",
        inputs=("in0",),
        params=(),
        outputs=("view",),
        tensors=program.tensors[:1],
        ops=(open_op,),
    )
    with pytest.raises(LayoutError, match="bind it first"):
        to_graph_module(unbound, {}, CPU)


def _own(target: str) -> Program:
    op = Op(name="r", target=target, args=(Ref("in0"), "tp", "P", "R", False), outputs=("out",))
    return Program(
        name="x",
        inputs=("in0",),
        params=(),
        outputs=("out",),
        tensors=(_meta("in0", (2,), "input"),),
        ops=(op,),
    )


def test_an_axis_of_size_one_moves_nothing():
    x = torch.randn(2)
    (out,) = to_graph_module(_own("planner.redistribute"), {"tp": None}, CPU)(x)
    assert out is x


def test_an_unknown_axis_or_op_is_refused():
    with pytest.raises(LayoutError, match="runs on axis 'tp'; groups given: \\['cp'\\]"):
        to_graph_module(_own("planner.redistribute"), {"cp": None}, CPU)
    with pytest.raises(LayoutError, match=r"unknown target 'planner\.nothing'"):
        to_graph_module(_own("planner.nothing"), {"tp": None}, CPU)


def _samples() -> dict[str, tuple[Any, ...]]:
    """Arguments for each operator with a quick binding, optional ones left out."""
    x, y = torch.randn(4, 6), torch.rand(4, 6) + 0.5
    q = torch.randn(2, 2, 4, 3)
    square = torch.randn(6, 6)
    special: dict[str, tuple[Any, ...]] = {
        "addmm.default": (torch.randn(6), x, square),
        "bmm.default": (q[0], q[0].mT),
        "cat.default": ([x, y], 1),
        "dropout.default": (x, 0.0, True),
        "embedding.default": (x, torch.tensor([1, 3])),
        "expand.default": (x[:1], [4, 6]),
        "layer_norm.default": (x, [6]),
        "linear.default": (x, square),
        "matmul.default": (x, square),
        "mean.dim": (x, [1], True),
        "mm.default": (x, square),
        "permute.default": (x, [1, 0]),
        "pow.Tensor_Scalar": (y, 2),
        "reshape.default": (x, [3, 8]),
        "rms_norm.default": (x, [6]),
        "scaled_dot_product_attention.default": (q, q, q),
        "select.int": (x, 1, 2),
        "softmax.int": (x, -1),
        "to.dtype": (x, torch.float64),
        "transpose.int": (x, 0, 1),
        "unsqueeze.default": (x, 1),
        "view.default": (x, [8, 3]),
    }
    binary = dict.fromkeys(("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"), (x, y))
    return {name.removeprefix("aten."): (y,) for name in BINDINGS} | binary | special


@pytest.mark.parametrize("target", BINDINGS)
def test_a_binding_is_the_operator_it_stands_for(target):
    """Same values and same defaults as the overload, whose name the graph carries."""
    args = _samples()[target.removeprefix("aten.")]
    quick: Callable[..., torch.Tensor] = BINDINGS[target]
    found, expected = quick(*args), aten_overload(target)(*args)
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
