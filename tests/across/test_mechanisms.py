"""What single ops do to the samples of a batch, one mechanism at a time, on programs by hand."""

from __future__ import annotations

import ast
from pathlib import Path

from planner.language import across
from planner.language.across.by_rules import by_rules
from planner.language.across.follow import follow_program, step_of
from planner.language.across.written import written
from planner.language.graph import Affine, Op, Program, Ref, TensorMeta
from planner.language.graph.mixing import Kind
from planner.language.layout.placement import Shard
from planner.language.ops.families.entries.order import sorted_rows
from planner.language.ops.families.losses.counted_labels import class_loss
from planner.language.ops.families.shapes.indexing import _index_select
from planner.language.ops.families.shapes.repeats import copies
from planner.language.ops.record import family_of
from planner.language.ops.samples.state import (
    ADDED,
    ANY_ORDER,
    CONSTANT,
    IN_ORDER,
    SAMPLES,
    SCALED,
    WHOLE,
    State,
)
from planner.language.ops.samples.step import Edit, Walk

N = Affine(per_sample=1, fixed=0)
BATCH = State(rows=Shard(0))


PURE = State(rows=Shard(0), pure=True)


def walk(
    *ops: tuple,
    inputs: dict[str, tuple],
    buffers: dict[str, tuple] | None = None,
    batch: tuple[str, ...] = (),
) -> Walk:
    """Follow ops (name, target, args, shape) on inputs whose samples lie along dim 0; those of the
    `batch` no parameter reached.
    """
    buffers = buffers or {}
    shapes = inputs | buffers | {name: shape for name, _, _, shape in ops}
    whole = {name for name, target, _, _ in ops if "sort" in target or "arange" in target} | {"t"}
    program = Program(
        name="p",
        inputs=tuple(inputs),
        params=tuple(buffers),
        outputs=(ops[-1][0],),
        tensors=tuple(
            TensorMeta(
                name=name,
                shape=shape,
                dtype="int64" if name in whole else "float32",
                kind="input" if name in inputs else "buffer" if name in buffers else "activation",
                requires_grad=False,
            )
            for name, shape in shapes.items()
        ),
        ops=tuple(Op(name=n, target=t, args=a, outputs=(n,)) for n, t, a, _ in ops),
    )
    states = dict.fromkeys(inputs, BATCH) | dict.fromkeys(buffers, WHOLE)
    states |= dict.fromkeys(batch, PURE)
    found = Walk(program=program, states=states)
    follow_program(found)
    return found


def kinds(found: Walk) -> list[Kind]:
    return [fault.kind for fault in found.faults]


def test_entries_stay_with_their_samples():
    found = walk(("y", "aten.relu.default", (Ref("x"),), (N, 4)), inputs={"x": (N, 4)})
    assert found.states["y"] == BATCH
    assert kinds(found) == []
    assert family_of("aten.relu").across.handlers == ()  # by the rules alone


def test_a_part_counts_once_in_a_sum_and_by_its_samples_in_a_mean():
    total = walk(("y", "aten.sum.default", (Ref("x"),), ()), inputs={"x": (N, 4)}).states["y"]
    assert (total.sums, total.share) == (("y",), ADDED)
    mean = walk(("y", "aten.mean.default", (Ref("x"),), ()), inputs={"x": (N, 4)}).states["y"]
    assert (mean.sums, mean.share) == (("y",), SAMPLES)


def test_a_sum_divided_by_the_number_of_samples_is_a_mean():
    found = walk(
        ("total", "aten.sum.default", (Ref("x"),), ()),
        ("y", "aten.div.Tensor", (Ref("total"), N), ()),
        inputs={"x": (N, 4)},
    )
    assert found.states["y"].share == SAMPLES
    assert not found.edits


def test_another_number_of_samples_is_that_of_the_whole_batch():
    found = walk(
        ("total", "aten.sum.default", (Ref("x"),), ()),
        ("y", "aten.div.Tensor", (Ref("total"), Affine(1, -1)), ()),
        inputs={"x": (N, 4)},
    )
    assert found.states["y"].share == ADDED
    assert tuple(found.edits) == (Edit(op="y", at=1, is_number=True),)


def test_terms_that_count_differently_get_their_shares():
    found = walk(
        ("total", "aten.sum.default", (Ref("x"),), ()),
        ("mean", "aten.mean.default", (Ref("x"),), ()),
        ("y", "aten.add.Tensor", (Ref("total"), Ref("mean")), ()),
        ("z", "aten.add.Tensor", (Ref("y"), 3.0), ()),
        inputs={"x": (N, 4)},
    )
    assert (found.states["z"].share, found.states["z"].terms) == (SCALED, (ADDED, SAMPLES))
    assert tuple(found.edits) == (
        Edit(op="y", at=1, share=SAMPLES),
        Edit(op="z", at=1, share=SAMPLES, is_number=True),
    )


def test_what_no_parameter_reaches_is_taken_of_the_whole_batch():
    found = walk(
        ("mean", "aten.mean.default", (Ref("rewards"),), ()),
        ("root", "aten.sqrt.default", (Ref("mean"),), ()),
        ("y", "aten.mul.Tensor", (Ref("x"), Ref("root")), (N, 4)),
        inputs={"x": (N, 4), "rewards": (N,)},
        batch=("rewards",),
    )
    assert found.states["root"].loose == ":root"
    assert found.states["y"] == BATCH
    assert (kinds(found), tuple(found.edits)) == ([], (Edit(op="y", at=1),))


def test_a_sum_that_is_used_as_a_value_mixes_samples():
    found = walk(
        ("total", "aten.mean.default", (Ref("x"),), ()),
        ("y", "aten.sqrt.default", (Ref("total"),), ()),
        inputs={"x": (N, 4)},
    )
    assert kinds(found) == ["mixed"]


def test_a_sum_divided_by_a_sum_is_a_mean_of_what_the_other_counts():
    ops = (
        ("above", "aten.sum.default", (Ref("x"),), ()),
        ("below", "aten.sum.default", (Ref("mask"),), ()),
        ("y", "aten.div.Tensor", (Ref("above"), Ref("below")), ()),
    )
    inputs = {"x": (N, 4), "mask": (N, 4)}
    found = walk(*ops, inputs=inputs, batch=("mask",))
    assert found.states["y"] == State(sums=("above",), share=SCALED, terms=(":below",))
    assert tuple(found.edits) == (Edit(op="y", at=1),)
    # Of a mask that the model makes, nothing tells it before the step.
    assert kinds(walk(*ops, inputs=inputs)) == ["normaliser"]


def test_pairs_of_samples_are_seen_by_their_sizes():
    found = walk(
        ("y", "aten.matmul.default", (Ref("x"), Ref("z")), (N, N)),
        inputs={"x": (N, 4), "z": (4, N)},
    )
    assert kinds(found) == ["pairs"]


def test_rows_repeated_as_a_whole_lie_in_runs():
    found = walk(
        ("y", "aten.repeat.default", (Ref("x"), (2, 1)), (Affine(per_sample=2, fixed=0), 4)),
        inputs={"x": (N, 4)},
    )
    assert found.states["y"] == State(rows=Shard(0, 2))
    assert copies in family_of("aten.repeat").across.handlers


def test_sorted_rows_come_back_by_the_order_that_undoes_the_order():
    found = walk(
        ("there", "aten.argsort.default", (Ref("key"),), (N,)),
        ("back", "aten.argsort.default", (Ref("there"),), (N,)),
        ("sorted", "aten.index_select.default", (Ref("x"), 0, Ref("there")), (N, 4)),
        ("y", "aten.index_select.default", (Ref("sorted"), 0, Ref("back")), (N, 4)),
        inputs={"key": (N,), "x": (N, 4)},
    )
    assert found.states["sorted"].order == "there"
    assert found.states["y"] == BATCH
    assert kinds(found) == []
    assert sorted_rows in family_of("aten.argsort").across.handlers
    assert _index_select in family_of("aten.index_select").across.handlers


def test_rows_of_two_orders_must_not_meet():
    found = walk(
        ("there", "aten.argsort.default", (Ref("key"),), (N,)),
        ("sorted", "aten.index_select.default", (Ref("x"), 0, Ref("there")), (N, 4)),
        ("y", "aten.add.Tensor", (Ref("sorted"), Ref("x")), (N, 4)),
        inputs={"key": (N,), "x": (N, 4)},
    )
    assert kinds(found) == ["mixed"]


def test_a_buffer_written_from_samples_and_one_that_moves():
    copied = walk(
        ("total", "aten.mean.dim", (Ref("x"), (0,)), (4,)),
        ("y", "aten.copy_.default", (Ref("b"), Ref("total")), (4,)),
        inputs={"x": (N, 4)},
        buffers={"b": (4,)},
    )
    assert kinds(copied) == ["buffer"]
    moved = walk(
        ("y", "aten.mul_.Scalar", (Ref("b"), 0.9), (4,)),
        inputs={"x": (N, 4)},
        buffers={"b": (4,)},
    )
    assert kinds(moved) == []  # once for a batch: `planner.language.across.cut.moved_once`
    drawn = walk(
        ("noise", "aten.rand_like.default", (Ref("b"),), (4,)),
        ("y", "aten.mul_.Tensor", (Ref("b"), Ref("noise")), (4,)),
        inputs={"x": (N, 4)},
        buffers={"b": (4,)},
    )
    assert kinds(drawn) == ["repeated"]


def test_an_op_without_any_rule_is_unknown():
    found = walk(("y", "other.op.default", (Ref("x"),), (N, 4)), inputs={"x": (N, 4)})
    assert CONSTANT.pure
    assert kinds(found) == ["unknown"]
    op = found.program.ops[0]
    assert by_rules(step_of(found, op, [WHOLE])) != (WHOLE,)


def test_class_weights_divide_by_the_weights_of_the_targets():
    found = walk(
        ("y", "aten.cross_entropy_loss.default", (Ref("x"), Ref("t"), Ref("w")), ()),
        inputs={"x": (N, 4), "t": (N,)},
        buffers={"w": (4,)},
    )
    assert class_loss in family_of("aten.cross_entropy_loss").across.handlers
    assert found.states["y"].sums == ("y",)
    assert kinds(found) == ["normaliser"]  # (of targets that a parameter may have reached)


def test_a_mean_over_labels_counts_by_those_that_are_not_ignored():
    found = walk(
        ("y", "aten.cross_entropy_loss.default", (Ref("x"), Ref("t")), ()),
        inputs={"x": (N, 4), "t": (N,)},
        batch=("t",),
    )
    assert (found.states["y"].share, kinds(found)) == (":y", [])


def test_constants_of_the_batchs_size_are_equal_in_any_order():
    found = walk(("y", "aten.zeros.default", ((N, 4),), (N, 4)), inputs={"x": (N, 4)})
    assert found.states["y"] == State(rows=Shard(0), order=ANY_ORDER, equal=True, pure=True)
    assert found.states["y"].order != IN_ORDER


def test_a_counter_may_move():
    found = walk(
        ("y", "aten.zero_.default", (Ref("b"),), (4,)),
        inputs={"x": (N, 4)},
        buffers={"b": (4,)},
    )
    step = step_of(found, found.program.ops[0], [WHOLE])
    assert written(step) == (WHOLE,)
    assert kinds(found) == []


def test_numbers_of_rows_divided_by_another_name_of_the_op():
    """`torch.divide` is `torch.div`."""
    for name in ("div", "divide"):
        found = walk(
            ("rows", "aten.arange.default", (Affine(per_sample=4, fixed=0),), (Affine(4, 0),)),
            ("samples", f"aten.{name}.Tensor_mode", (Ref("rows"), 4, "floor"), (Affine(4, 0),)),
            inputs={"x": (N, 4)},
        )
        assert (found.states["samples"].each, kinds(found)) == (1, [])


def test_ops_are_named_by_their_records_alone():
    """No second table of ops: what follows samples names none, but what writes in place."""
    rooms = Path(across.__file__).parent
    named = {
        (file.name, node.value)
        for file in rooms.glob("*.py")
        if file.name != "whole.py"  # (makes ops)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and str(node.value).startswith(("aten.", "planner."))
        and "language" not in str(node.value)
    }
    assert named == {
        ("sums.py", "aten.add"),
        ("sums.py", "aten.sub"),
        ("sums.py", "aten.rsub"),
        ("written.py", "aten.copy_"),
        ("walk.py", "aten.batch_norm.default"),
    }
