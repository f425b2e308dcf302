"""What is known of routing's values without their numbers, beside their numbers.

Ops are drawn at random and run twice: as they are, and with another permutation in the place of the
one that the sort made. What is said to lie in the order of the sort has then moved with it, what is
said to be back has not.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from planner.capture.routing.follow import SORTS, follow
from planner.capture.routing.values import (
    Back,
    Biases,
    Blank,
    Counts,
    Hits,
    InOrder,
    Inverse,
    Known,
    Numbers,
    Ones,
    Order,
    Repeated,
    Rows,
    Weighted,
    Weights,
)
from planner.language.graph import Op, Ref, TensorMeta
from planner.language.ops.record import packet_of
from tests.executed import executed

ROWS, CHOICES, EXPERTS, WIDTH = 4, 2, 3, 2
COPIES, SEEDS, OPS = ROWS * CHOICES, 150, 32


def given(seed: int) -> dict[str, Tensor]:
    """Rows, their experts (all of each row's others), weights, a table of biases, and constants."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(ROWS)])
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator).double(),
        "flat": experts[:, :CHOICES].reshape(-1),
        "weights": torch.randn(COPIES, generator=generator).double(),
        "by_row": torch.randn(ROWS, CHOICES, 1, generator=generator).double(),
        "table": torch.randn(EXPERTS, WIDTH, generator=generator).double(),
    }


BEGIN = [
    ("copies", "aten.repeat_interleave.self_int", (Ref("x"), CHOICES, 0)),
    ("numbers", "aten.arange.default", (COPIES,)),
    ("zeros", "aten.zeros_like.default", (Ref("flat"),)),
    ("blank", "aten.zeros_like.default", (Ref("copies"),)),
    ("empty", "aten.empty_like.default", (Ref("copies"),)),
    ("empty_rows", "aten.empty_like.default", (Ref("x"),)),
    ("blank_rows", "aten.zeros_like.default", (Ref("x"),)),
]
USUAL = [
    ("taken", "aten.index.Tensor", (Ref("copies"), (Ref("order"),))),
    ("in_order", "aten.index.Tensor", (Ref("weights"), (Ref("order"),))),
    ("column", "aten.unsqueeze.default", (Ref("in_order"), 1)),
    ("weighted", "aten.mul.Tensor", (Ref("taken"), Ref("column"))),
    ("rows_of", "aten.floor_divide.default", (Ref("order"), CHOICES)),
    ("places", "aten.argsort.default", (Ref("order"),)),
    ("hits", "aten.one_hot.default", (Ref("flat"), EXPERTS)),
]
"""What most routers do, which others then go on from."""
DRAWN = [
    ("aten.argsort.default", ("1",)),
    ("aten.sort.default", ("1",)),
    ("aten.floor_divide.default", ("1", CHOICES)),
    ("aten.index_put.default", ("1", ("1",), "1")),
    ("aten.scatter.src", ("1", 0, "1", "1")),
    ("aten.one_hot.default", ("1", EXPERTS)),
    ("aten.sum.dim_IntList", ("2", (0,))),
    ("aten.cumsum.default", ("1", 0)),
    ("aten.index.Tensor", ("rows", ("1",))),
    ("aten.index.Tensor", ("weights", ("1",))),
    ("aten.index.Tensor", ("table", ("1",))),
    ("aten.index.Tensor", ("2", ("1",))),
    ("aten.index_select.default", ("2", 0, "1")),
    ("aten.unsqueeze.default", ("1", 1)),
    ("aten.mul.Tensor", ("2", "2")),
    ("aten.add.Tensor", ("2", "2")),
    ("aten.tanh.default", ("2",)),
    ("aten.index_put.default", ("blank", ("1",), "2")),
    ("aten.index_put.default", ("blank_rows", ("1",), "2")),
    ("aten.index_put.default", ("zeros", ("1",), "numbers")),
    ("aten.index_add.default", ("empty", 0, "1", "2")),
    ("aten.index_add.default", ("empty_rows", 0, "1", "2")),
    ("aten.index_put.default", ("empty", ("1",), "2")),
    ("aten.index_copy.default", ("blank", 0, "1", "2")),
    ("aten.index_add.default", ("blank_rows", 0, "1", "2")),
    ("aten.reshape.default", ("2", (ROWS, CHOICES, WIDTH))),
    ("aten.mul.Tensor", ("3", "by_row")),
    ("aten.sum.dim_IntList", ("3", (1,))),
]


def random_ops(seed: int) -> tuple[list[Op], dict[str, Tensor], dict[str, Tensor]]:
    """Ops that torch takes, what they make, and what they make under another permutation."""
    draw, values = random.Random(seed), given(seed)
    other = torch.randperm(COPIES, generator=torch.Generator().manual_seed(-seed - 1))
    moved, ops = dict(values), list[Op]()

    def add(op: Op) -> None:
        made = executed([op], values)
        values.update(made)
        # (Of the experts' numbers alone: a sort of an order follows from the order.)
        if packet_of(op.target) in SORTS and op.inputs == ("flat",):
            moved[op.outputs[-1]] = other
            if len(op.outputs) > 1:
                moved[op.outputs[0]] = moved["flat"][other]
        else:
            moved.update(executed([op], moved))
        ops.append(op)

    for name, target, args in BEGIN:
        add(Op(name=name, target=target, args=args, outputs=(name,)))
    add(Op(name="sort", target="aten.sort.default", args=(Ref("flat"),), outputs=("s", "order")))
    for name, target, args in USUAL if draw.random() < 0.7 else ():
        add(Op(name=name, target=target, args=args, outputs=(name,)))

    def fill(arg: object, target: str) -> object:
        if isinstance(arg, tuple) and arg and isinstance(arg[0], str):
            return tuple(fill(each, target) for each in arg)
        if arg == "rows":
            return Ref(draw.choice(["x", "copies"]))
        if isinstance(arg, str) and arg.isdigit():
            fitting = [n for n, v in values.items() if v.dim() == int(arg) and not v.isnan().any()]
            usual = [name for name, *_ in USUAL if name in fitting]
            return Ref(draw.choice([*fitting, *fitting[-4:] * 2, *usual * 3]))
        return Ref(arg) if isinstance(arg, str) else arg

    while len(ops) < OPS:
        target, args = draw.choice(DRAWN)
        name = f"t{len(ops)}"
        outputs = (f"{name}_sorted", name) if target.startswith("aten.sort.") else (name,)
        op = Op(
            name=name, target=target, args=tuple(fill(a, target) for a in args), outputs=outputs
        )
        with suppress(RuntimeError, IndexError, TypeError, ValueError):
            add(op)
    return ops, values, moved


def check(known: Known, value: Tensor, source: str, order: Tensor, values: dict[str, Tensor]):
    """That a value, but for rows in the order of the sort of `source`, is what is known of it."""
    long, sorts = value.reshape(-1), values[source]
    flat = values[getattr(known, "experts", source)].reshape(-1)
    if isinstance(known, Order):
        assert torch.equal(long, order // known.divided)
    elif isinstance(known, InOrder):
        assert torch.equal(long, sorts[order])
    elif isinstance(known, Inverse):
        assert torch.equal(long[order], torch.arange(len(order)))
    elif isinstance(known, Hits):
        numbers = flat if known.sort is None else flat[order]
        assert torch.equal(value, one_hot(numbers, known.number))
    elif isinstance(known, Counts):
        counts = torch.bincount(flat, minlength=known.number)
        assert torch.equal(long, counts.cumsum(0) if known.summed else counts)
    elif isinstance(known, Numbers):
        assert torch.equal(long, torch.arange(len(long)))
    elif known == Blank(zeros=True):
        assert (value == 0).all()
    elif isinstance(known, Repeated):
        of = values[known.of].repeat_interleave(known.times, 0)
        assert torch.equal(value.reshape(of.shape), of)


def lost_in(ops: list[Op], known: dict[str, Known]) -> set[str]:
    """What follows from a sort in ways that are not known: a sort so used is left as it is."""
    lost: set[str] = set()
    for op in ops:
        of_sort = any(getattr(known.get(name), "sort", None) for name in op.inputs)
        is_unknown = of_sort and not any(name in known for name in op.outputs)
        if is_unknown or lost.intersection(op.inputs):
            lost.update(op.outputs)
    return lost


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance():
    """Memory that is not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_is_known_of_values_is_what_they_are():
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        ops, values, moved = random_ops(seed)
        known, _ = follow(ops, {n: meta_of(n, v) for n, v in values.items()})
        lost = lost_in(ops, known)
        for name, what in known.items():
            if name in lost:
                continue
            sort = getattr(what, "sort", None) or "order"
            source = next(op.inputs[0] for op in ops if sort in op.outputs)
            first, second = values[sort], moved[sort]
            for run, order in ((values, first), (moved, second)):
                check(what, run[name], source, order, run)
            if isinstance(what, Rows | Weights | Weighted | Biases):
                back = [v[name][torch.argsort(order)] for v, order in
                        ((values, first), (moved, second))]  # fmt: skip
                torch.testing.assert_close(*back, msg=lambda m, s=seed, n=name: f"{s} {n} {m}")
            if isinstance(what, Back):
                torch.testing.assert_close(values[name], moved[name])
            seen[type(what).__name__] += 1
    rare = [kind for kind in Known.__args__ if seen[kind.__name__] < 10]
    assert set(rare) <= {Ones}, seen  # (none is made here)


def meta_of(name: str, value: Tensor) -> TensorMeta:
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorMeta(name=name, shape=tuple(value.shape), dtype=dtype, kind="activation")
