"""What is said of the order of rows, and of numbers of rows, holds of real rows and numbers."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from planner.language.across.follow import follow_program
from planner.language.graph import Affine, Op, Program, Ref, TensorMeta
from planner.language.layout.placement import Shard
from planner.language.ops.samples.state import ANY_ORDER, State
from planner.language.ops.samples.step import Walk
from tests.executed import executed

N = Affine(per_sample=1, fixed=0)
ROWS, OPS, SEEDS = 7, 7, 60


def followed(ops: list[Op], dtypes: dict[str, str]) -> Walk:
    """Follow ops on `x`, the numbers of its rows, and on `key`, by which they are sorted."""
    program = Program(
        name="p",
        inputs=("x", "key"),
        params=(),
        outputs=(),
        tensors=tuple(
            TensorMeta(
                name=name,
                shape=(N,),
                dtype=dtype,
                kind="input" if name in ("x", "key") else "activation",
                requires_grad=False,
            )
            for name, dtype in dtypes.items()
        ),
        ops=tuple(ops),
    )
    walk = Walk(program=program, states=dict.fromkeys(("x", "key"), State(rows=Shard(0))))
    follow_program(walk)
    return walk


def random_op(draw: random.Random, number: int, rows: list[str], places: list[str]) -> Op:
    """An op that reorders rows, or makes numbers of rows."""
    name = f"t{number}"
    row, place = draw.choice(rows), draw.choice([*places, ""])
    if not place:
        kind = draw.choice(["argsort", "arange", "flip"])
    else:
        kind = draw.choice(["argsort", "select", "copy", "put", "sort places", "places of", "flip"])
    target, args = {
        "argsort": ("aten.argsort.default", (Ref(row),)),
        "arange": ("aten.arange.default", (N,)),
        "flip": ("aten.flip.default", (Ref(row), (0,))),
        "select": ("aten.index_select.default", (Ref(row), 0, Ref(place))),
        "copy": ("aten.index_copy.default", (Ref(draw.choice(rows)), 0, Ref(place), Ref(row))),
        "put": ("aten.index_put.default", (Ref(row), (Ref(place),), Ref(draw.choice(rows)))),
        "sort places": ("aten.argsort.default", (Ref(place),)),
        "places of": ("aten.index.Tensor", (Ref(draw.choice(places or rows)), (Ref(place),))),
    }[kind]
    return Op(name=name, target=target, args=args, outputs=(name,))


def random_program(seed: int) -> tuple[list[Op], Walk]:
    """Ops none of which mixes samples: others are left out as they are drawn."""
    draw = random.Random(seed)
    ops: list[Op] = []
    dtypes = {"x": "float64", "key": "float64"}
    rows, places = ["x", "key"], list[str]()
    walk = followed(ops, dtypes)
    for number in range(3 * OPS):
        op = random_op(draw, number, rows, places)
        makes_places = (
            "arg" in op.target
            or "arange" in op.target
            or op.inputs[:1] in ((each,) for each in places)
        )
        tried = {**dtypes, op.name: "int64" if makes_places else "float64"}
        found = followed([*ops, op], tried)
        if found.faults or found.edits:
            continue
        ops, dtypes, walk = [*ops, op], tried, found
        (places if makes_places else rows).append(op.name)
        if len(ops) == OPS:
            break
    return ops, walk


def test_orders_and_numbers_of_rows_are_those_of_real_rows():
    seen = {"orders": 0, "back": 0, "numbers": 0}
    for seed in range(SEEDS):
        ops, walk = random_program(seed)
        generator = torch.Generator().manual_seed(seed)
        # Rows tell which they are, so any tensor of them tells its order.
        x = torch.arange(ROWS, dtype=torch.float64)
        key = torch.randperm(ROWS, generator=generator).double()
        values = executed([bound(op) for op in ops], {"x": x, "key": key})
        came: dict[str, Tensor] = {"": torch.arange(ROWS)}
        by_key = torch.argsort(key)
        for name, value in values.items():
            state = walk.states[name]
            if state.points is not None or name == "key" or state.order == ANY_ORDER:
                continue
            # Either numbers of rows, or their keys: both say which rows they are.
            rows = value.long() if is_of("x", name, ops) else by_key[value.long()]
            first = came.setdefault(state.order, rows)
            assert torch.equal(first, rows), (seed, name, state)
            seen["orders"] += state.order != ""
            seen["back"] += state.order == "" and name != "x"
        for name, value in values.items():
            state = walk.states[name]
            if state.points is None or {state.order, state.points} - came.keys():
                continue
            # An entry is the place in the order `points` of the row in the order `order`.
            assert torch.equal(came[state.points][value], came[state.order]), (seed, name, state)
            seen["numbers"] += 1
    assert min(seen.values()) > SEEDS // 3, seen


def is_of(source: str, name: str, ops: list[Op]) -> bool:
    """Whether a tensor of rows has those of `source`, which reordering leaves."""
    maker = next((op for op in ops if op.name == name), None)
    if maker is None:
        return name == source
    taken = maker.inputs[-1] if "copy" in maker.target or "put" in maker.target else maker.inputs[0]
    return is_of(source, taken, ops)


def bound(op: Op) -> Op:
    """The op on real rows."""
    return op.bind(ROWS)
