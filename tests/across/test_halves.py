"""A program in two halves: of each part of a batch, and of what the parts gave."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from planner.language.across.halves import Halves, halves
from planner.language.graph import SAMPLE, Affine, Op, Program, Ref, TensorMeta
from planner.language.ops.samples.state import ADDED
from tests.executed import executed

N = Affine(per_sample=1, fixed=0)
PARTS = (3, 1, 4)


def random_program(seed: int) -> Program:
    """Arithmetic of numbers of samples [n], of sums and means over them, and of these again."""
    draw = random.Random(seed)
    shapes: dict[str, tuple[Affine, ...]] = {"x": (N,), "y": (N,)}
    ops = []
    for number in range(7):
        name = f"t{number}"
        source, other = draw.choice(list(shapes)), draw.choice(list(shapes))
        kind = draw.choice(["add", "mul", "sub", "sum", "mean", "exp", "sort"])
        if kind in ("sum", "mean", "exp", "sort") and not shapes[source]:
            kind = "tanh"
        shape = shapes[source] or shapes[other] if kind in ("add", "mul", "sub") else shapes[source]
        args: tuple[Ref, ...] = (Ref(source),)
        target = f"aten.{kind}.default"
        if kind in ("add", "mul", "sub"):
            target, args = f"aten.{kind}.Tensor", (Ref(source), Ref(other))
        outputs = (name, f"{name}_places") if kind == "sort" else (name,)
        ops.append(Op(name=name, target=target, args=args, outputs=outputs))
        shapes[name] = () if kind in ("sum", "mean") else shape
    names = list(shapes)[-2:]
    metas = [
        TensorMeta(name=n, shape=s, dtype="float64", kind="activation") for n, s in shapes.items()
    ]
    metas += [
        TensorMeta(name=op.outputs[1], shape=(N,), dtype="int64", kind="activation")
        for op in ops
        if len(op.outputs) > 1
    ]
    return Program(
        name="p",
        inputs=("x", "y"),
        params=(),
        outputs=tuple(names),
        tensors=tuple(metas),
        ops=tuple(ops),
    )


def joined(halved: Halves, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the parts gave, put together as `Halves` says."""
    found: dict[str, Tensor] = {}
    for name, share in halved.sums.items():
        weights = [1.0 if share == ADDED else n / sum(PARTS) for n in PARTS]
        found[name] = sum(w * part[name] for w, part in zip(weights, parts, strict=True))
    for name, dim in halved.rows.items():
        found[name] = torch.cat([part[name] for part in parts], dim)
    return found | {name: parts[0][name] for name in halved.same}


@pytest.mark.parametrize("seeds", [range(60)])
def test_the_halves_give_what_the_whole_gives(seeds):
    told = {"sums": 0, "rows": 0, "first": 0}
    for seed in seeds:
        program = random_program(seed)
        halved = halves(program, SAMPLE)
        generator = torch.Generator().manual_seed(seed)
        whole = {
            name: torch.randn(sum(PARTS), generator=generator, dtype=torch.float64) / 3
            for name in ("x", "y")
        }
        by_part = zip(*(whole[name].split(PARTS) for name in ("x", "y")), strict=True)
        parts = [executed(halved.first.bind(len(x)).ops, {"x": x, "y": y}) for x, y in by_part]
        second = executed(halved.second.bind(sum(PARTS)).ops, joined(halved, parts))
        expected = executed(program.bind(sum(PARTS)).ops, whole)
        for name in program.outputs:
            torch.testing.assert_close(second[name], expected[name], rtol=1e-10, atol=1e-12)
        told["sums"] += bool(halved.sums)
        told["rows"] += bool(halved.rows)
        told["first"] += bool(halved.first.ops)
    assert min(told.values()) > len(seeds) // 5, told
