"""What is known of values that ops make, beside the values: ops are run and followed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import torch

from planner.capture.masks.follow import LEAST_MASKED, follow
from planner.capture.masks.values import (
    Additive,
    Along,
    Bounds,
    Breaks,
    Constant,
    Denied,
    Difference,
    First,
    Known,
    Pattern,
    Steps,
)
from planner.language.graph import Affine, Op, Ref, TensorMeta

SAMPLES, PLACES = 3, 7
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0] * 7, [0, 1, 1, 1, 1, 1, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 0]])
COUNTS = torch.tensor([[True] * 5 + [False] * 2, [True] * 7, [True] * 3 + [False] * 4])


class Run:
    """Ops that are run as they are written down. Mutable."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: dict[str, TensorMeta] = {}
        self.values: dict[str, torch.Tensor] = {}

    def given(self, name: str, value: torch.Tensor, kind: Any = "input") -> Ref:
        """Add a tensor; a size of `SAMPLES` is that of the batch."""
        shape = tuple(Affine(1) if size == SAMPLES else size for size in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors[name] = TensorMeta(name=name, shape=shape, dtype=dtype, kind=kind)
        self.values[name] = value
        return Ref(name)

    def call(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Run an op of aten and write it down with its result."""
        packet, overload = target.split(".")

        def real(arg: Any) -> Any:
            if isinstance(arg, tuple):
                return [real(each) for each in arg]
            return self.values[arg.name] if isinstance(arg, Ref) else arg

        run = getattr(getattr(torch.ops.aten, packet), overload)
        made = run(*map(real, args), **{name: real(arg) for name, arg in kwargs.items()})
        name = f"made_{len(self.ops)}"
        self.given(name, made, "activation")
        as_data = {
            key: str(arg).removeprefix("torch.") if isinstance(arg, torch.dtype) else arg
            for key, arg in kwargs.items()
        }
        self.ops.append(
            Op(
                name=name,
                target=f"aten.{target}",
                args=args,
                kwargs=tuple(as_data.items()),
                outputs=(name,),
            )
        )
        return Ref(name)

    def known(self, of: Ref) -> Known | None:
        """Return what is known of a result."""
        return follow(self.ops, self.tensors)[0].get(of.name)

    def grid(self, size: int = PLACES) -> tuple[Ref, Ref]:
        """Return places of queries as a column and of keys as a row."""
        places = self.call("arange.default", size)
        return self.call("unsqueeze.default", places, -1), self.call("unsqueeze.default", places, 0)

    def told(self, known: Known, of: Ref) -> np.ndarray:
        """Return the numbers that something known has at each place of a value."""
        shape = self.values[of.name].shape
        at = np.indices(shape)
        numbers = {
            name: tensor.numpy().reshape([size for size in tensor.shape if size != 1])
            for name, tensor in self.values.items()
            if tensor.dtype != torch.bfloat16
        }

        def along(value: Along, place: int | None = None) -> np.ndarray:
            number = at[value.dim] if place is None else np.full(shape, place)
            if value.table is not None:
                assert value.sample is not None
                number = numbers[value.table][at[value.sample], number].astype(int)
            return (number + value.add) // value.divided_by

        def within(number: np.ndarray, bounds: Bounds) -> np.ndarray:
            low, high = bounds
            return (number >= (-1e9 if low is None else low)) & (
                number <= (1e9 if high is None else high)
            )

        def holds(pattern: Pattern) -> np.ndarray:
            made = np.ones(shape, bool)
            query, key, sample = pattern.dims
            if pattern.ahead != (None, None):
                made &= within(at[query] - at[key], pattern.ahead)
            if pattern.chunk is not None:
                made &= at[query] // pattern.chunk == at[key] // pattern.chunk
            for name in pattern.keys:
                made &= numbers[name][at[sample], at[key]].astype(bool)
            ahead = dict.fromkeys(pattern.same, (0, 0)) | dict(pattern.table_ahead)
            for name, bounds in ahead.items():
                table = numbers[name].astype(int)
                made &= within(table[at[sample], at[query]] - table[at[sample], at[key]], bounds)
            return made

        if isinstance(known, Constant):
            return np.full(shape, known.value, dtype=float)
        if isinstance(known, Along):
            return along(known)
        if isinstance(known, First):
            return along(known.of, place=0) + known.add
        if isinstance(known, Difference):
            made = along(known.query) - along(known.key)
            made = (-made if known.is_negative else made) + known.add
            return abs(made) if known.is_amount else made
        if isinstance(known, Steps | Breaks):
            table = along(known.of)
            steps = np.diff(table, prepend=table[..., :1] - 1)
            return steps if isinstance(known, Steps) else steps != 1
        if isinstance(known, Denied):
            return ~holds(known.pattern)
        return holds(known.pattern if isinstance(known, Additive) else known)


def agrees(run: Run, of: Ref, known: Known) -> bool:
    """Whether the numbers of a value are as it is known to be."""
    told, real = run.told(known, of), run.values[of.name].double().numpy()
    if isinstance(known, Additive):
        return bool(np.all(np.where(told, real == 0, real <= LEAST_MASKED)))
    if isinstance(known, Constant) and not np.isfinite(known.value):
        return bool(np.all(real == known.value))
    return bool(np.allclose(told.astype(float), real, rtol=1e-6))


class Written:
    """Random expressions of places, tables and masks."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self.run, self.rng = run, rng
        documents = run.given("documents", DOCUMENTS[:, None])
        opened = [run.call("unsqueeze.default", documents, dim) for dim in (-1, -2)]
        self.pairs = [run.grid(), opened]
        counts = run.given("counts", COUNTS)
        for dim in (1, 2):
            counts = run.call("unsqueeze.default", counts, dim)
        self.counts = counts

    def changed(self, number: Ref) -> Ref:
        """Return whole numbers with something done to them: often nothing."""
        rng, by = self.rng, self.rng.choice((-1, 1, 2))
        calls = [
            ("add.Tensor", number, by),
            ("sub.Tensor", number, by),
            ("floor_divide.default", number, 3),
            ("bitwise_and.Scalar", number, 1),
            ("bitwise_or.Scalar", number, 1),
            ("bitwise_not.default", number),
            ("to.dtype", number, rng.choice((torch.int32, torch.int64))),
        ]
        return self.run.call(*rng.choice(calls)) if rng.random() < 0.4 else number

    def compared(self) -> Ref:
        """Return a comparison of queries with keys, or of their difference with a number."""
        rng, op = self.rng, self.rng.choice(("le", "lt", "ge", "gt", "eq", "ne"))
        first, second = map(self.changed, rng.sample(list(rng.choice(self.pairs)), 2))
        if rng.random() < 0.5:
            return self.run.call(f"{op}.Tensor", first, second)
        numbers = self.run.call("sub.Tensor", first, second)
        if rng.random() < 0.5:
            numbers = self.run.call("abs.default", numbers)
        return self.run.call(f"{op}.Scalar", self.changed(numbers), rng.choice((-1, 0, 2)))

    def truth(self, depth: int) -> Ref:
        """Return a mask, as truth or as 0 and 1."""
        run, rng = self.run, self.rng
        kind = rng.choice(("and", "or", "not", "number", "where", "times")) if depth else "leaf"
        if kind in ("and", "or"):
            op = rng.choice((f"bitwise_{kind}.Tensor", f"logical_{kind}.default"))
            return run.call(op, self.truth(depth - 1), self.truth(depth - 1))
        if kind == "not":
            op = rng.choice(("bitwise_not.default", "logical_not.default"))
            return run.call(op, self.truth(depth - 1))
        if kind == "number":
            return run.call(
                "to.dtype", self.truth(depth - 1), rng.choice((torch.int64, torch.bool))
            )
        if kind == "times":
            return run.call("mul.Tensor", self.truth(depth - 1), self.truth(depth - 1))
        if kind == "where":
            numbers = rng.choice(((1, 0), (0, 1), (1, 2)))
            filled = [run.call("full.default", (), number) for number in numbers]
            return run.call("where.self", self.condition(depth - 1), *filled)
        ones = run.call(
            "ones.default", (PLACES, PLACES), dtype=rng.choice((torch.bool, torch.int64))
        )
        triangle = rng.choice(("tril.default", "triu.default"))
        leaves = (self.compared, lambda: run.call(triangle, ones, rng.choice((-1, 0, 2))))
        return rng.choice((*leaves, *leaves, lambda: ones, lambda: self.counts))()

    def condition(self, depth: int) -> Ref:
        """Return a mask of truth."""
        return self.run.call("to.dtype", self.truth(depth), torch.bool)

    def added(self, depth: int) -> Ref:
        """Return a mask that is added to scores."""
        run, rng = self.run, self.rng
        low = rng.choice((-1e30, -float("inf"), -1.0))
        kind = rng.choice(("sum", "fill", "where") if depth else ("triangle", "times"))
        if kind == "sum":
            return run.call("add.Tensor", self.added(depth - 1), self.added(depth - 1))
        if kind == "fill":
            return run.call(
                "masked_fill.Scalar", self.added(depth - 1), self.condition(depth - 1), low
            )
        numbers = run.call("full.default", (PLACES, PLACES), low)
        if kind == "where":
            pair = [numbers, self.added(depth - 1)]
            rng.shuffle(pair)
            return run.call("where.self", self.condition(depth - 1), *pair)
        if kind == "times":
            return run.call("mul.Tensor", self.condition(0), max(low, -1e30))
        return run.call(
            rng.choice(("tril.default", "triu.default")), numbers, rng.choice((-1, 0, 1))
        )


def test_what_is_known_of_random_masks_is_so():
    """Sums, bits, casts, comparisons and choices of places, tables and numbers."""
    rng, seen = random.Random(0), Counter[str]()
    for number in range(80):
        run = Run()
        written = Written(run, rng)
        (written.truth if number % 2 else written.added)(2)
        for name, known in follow(run.ops, run.tensors)[0].items():
            seen[type(known).__name__] += 1
            assert agrees(run, Ref(name), known), (known, run.values[name], run.ops)
    kinds = ("Along", "Constant", "Pattern", "Denied", "Additive", "Difference")
    assert min(seen[kind] for kind in kinds) > 8, seen


def test_a_table_that_numbers_runs_is_told_of_which_it_does():
    """Where positions do not go up by one a run begins; they are summed to the runs' numbers."""
    run = Run()
    table = run.given("positions", POSITIONS)
    start = run.call("sub.Tensor", run.call("slice.Tensor", table, 1, 0, 1), 1)
    steps = run.call("diff.default", table, 1, -1, start)
    breaks = run.call("ne.Scalar", steps, 1)
    runs = run.call("cumsum.default", breaks, -1)
    for each in (start, steps, breaks):
        known = run.known(each)
        assert known is not None
        assert agrees(run, each, known)
    found, numbered = follow(run.ops, run.tensors)
    assert numbered == {runs.name: "positions"}
    assert found[runs.name] == Along(dim=-1, size=PLACES, table=runs.name, sample=-2)
    # From another start the first place may break a run, and the sum along samples numbers none.
    other = run.call("diff.default", table, 1, -1, run.call("slice.Tensor", table, 1, 0, 1))
    assert run.known(other) is None
    across = run.call("cumsum.default", breaks, 0)
    assert across.name not in follow(run.ops, run.tensors)[1]


def test_a_table_is_read_at_all_its_samples_and_places_or_is_not_known():
    run = Run()
    table = run.given("documents", DOCUMENTS)
    some = run.given("samples", torch.tensor([2, 0, 1])[:, None, None])
    every = run.call("arange.default", SAMPLES)
    for dim in (1, 2):
        every = run.call("unsqueeze.default", every, dim)
    for places in run.grid():
        read = run.call("index.Tensor", table, (every, places))
        known = run.known(read)
        assert isinstance(known, Along)
        assert agrees(run, read, known)
        later = run.call("clamp.default", run.call("sub.Tensor", places, 1), 0)
        before = run.call("sub.Tensor", every, 1)  # sample -1 is the last
        for samples, at in ((some, places), (before, places), (every, later)):
            assert run.known(run.call("index.Tensor", table, (samples, at))) is None


def test_a_part_of_places_is_known_where_it_is_the_first():
    run = Run()
    places, table = run.call("arange.default", PLACES), run.given("documents", DOCUMENTS)
    first = run.call("slice.Tensor", places, 0, 0, 4)
    assert run.known(first) == Along(dim=-1, size=4)
    for start, end, step in ((1, PLACES, 1), (0, PLACES, 2)):
        part = run.call("slice.Tensor", places, 0, start, end, step)
        assert run.known(part) is None
    assert run.known(run.call("slice.Tensor", table, 1, 0, 4)) is None


def test_places_that_half_precision_rounds_are_not_known():
    """bfloat16 has 256, 258, 260: a query would see a key behind it."""
    run = Run()
    assert run.known(run.call("arange.default", 300, dtype=torch.int32)) is not None
    for dtype in (torch.bfloat16, torch.float16):
        assert run.known(run.call("arange.default", 300, dtype=dtype)) is None


def test_bits_of_whole_numbers_are_no_truth():
    """2 & 1 is 0, 1 | 2 is 3, ~0 is -1; and 1 & 1 is 1."""
    run = Run()
    one, two = (run.call("full.default", (PLACES, PLACES), number) for number in (1, 2))
    places = run.call("arange.default", PLACES)
    calls = [
        ("bitwise_and.Tensor", two, one),
        ("bitwise_and.Tensor", places, one),
        ("logical_and.default", places, one),
        ("bitwise_or.Tensor", two, one),
        ("bitwise_or.Tensor", one, places),
        ("bitwise_not.default", one),
    ]
    for call in calls:
        assert run.known(run.call(*call)) is None, call
    for op in ("bitwise_and.Tensor", "bitwise_or.Tensor", "logical_and.default"):
        assert run.known(run.call(op, one, one)) == Constant(value=1)
    # Of truth, either way: what is joined to all of it changes nothing.
    anything = run.given("anything", torch.rand(PLACES, PLACES) > 0.5)
    every = run.call("ones.default", (PLACES, PLACES), dtype=torch.bool)
    assert run.known(run.call("logical_or.default", anything, every)) == Constant(value=1)
