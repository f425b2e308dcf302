"""Random small models: straight-line programs grown op by op from the rule families."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.language.graph import Op, Program, Ref, TensorMeta
from planner.runtime.stage.program_fx import aten_overload
from tests.sharding.programs import meta_of


@dataclass
class Growth:
    """A program under construction, with the values its tensors have."""

    rng: random.Random
    ops: list[Op] = field(default_factory=list)
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def tensor(self, name: str, shape: tuple[int, ...], kind: Any = "param") -> Ref:
        self.values[name] = torch.zeros(shape, dtype=torch.float64)
        self.metas[name] = meta_of(name, self.values[name], kind)
        if kind == "param":
            self.params.append(name)
        return Ref(name)

    def param(self, *shape: int) -> Ref:
        return self.tensor(f"w{len(self.params)}", shape)

    def call(self, target: str, *args: Any, **kwargs: Any) -> list[str]:
        """Append an op and return the names of its outputs."""

        def value(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return self.values[arg.name]
            return [value(a) for a in arg] if isinstance(arg, tuple) else arg

        result = aten_overload(target)(*map(value, args), **kwargs)
        outputs = result if isinstance(result, list | tuple) else (result,)
        names = [f"v{len(self.ops)}_{i}" for i in range(len(outputs))]
        for name, output in zip(names, outputs, strict=True):
            self.values[name] = output
            self.metas[name] = meta_of(name, output)
        keywords = tuple(kwargs.items())
        op = Op(
            name=f"op{len(self.ops)}",
            target=target,
            args=args,
            kwargs=keywords,
            outputs=tuple(names),
        )
        self.ops.append(op)
        return names


Step = Callable[[Growth, str], str]
"""Grows a program from one of its values (of three dims) to a new one of three dims."""


def linear(g: Growth, x: str) -> str:
    width, out = g.shape(x)[-1], g.rng.choice([4, 6, 8])
    bias = (g.param(out),) if g.rng.random() < 0.7 else ()
    return g.call("aten.linear.default", Ref(x), g.param(out, width), *bias)[0]


def flat_addmm(g: Growth, x: str) -> str:
    a, b, c = g.shape(x)
    out = g.rng.choice([4, 8])
    flat = g.call("aten.reshape.default", Ref(x), (-1, c))[0]
    y = g.call("aten.addmm.default", g.param(out), Ref(flat), g.param(c, out))[0]
    return g.call("aten.view.default", Ref(y), (a, b, out))[0]


def unary(g: Growth, x: str) -> str:
    name = g.rng.choice(["relu", "gelu", "tanh", "sigmoid", "silu", "neg", "sin", "clone"])
    return g.call(f"aten.{name}.default", Ref(x))[0]


def scale(g: Growth, x: str) -> str:
    name = g.rng.choice(["add", "mul", "sub"])
    return g.call(f"aten.{name}.Tensor", Ref(x), g.param(g.shape(x)[-1]))[0]


def number(g: Growth, x: str) -> str:
    name = g.rng.choice(["add", "mul", "div"])
    return g.call(f"aten.{name}.Tensor", Ref(x), 1.5)[0]


def residual(g: Growth, x: str) -> str:
    same = [n for n, v in g.values.items() if tuple(v.shape) == g.shape(x) and n not in g.params]
    name = g.rng.choice(["add", "mul", "maximum"])
    overload = "default" if name == "maximum" else "Tensor"
    return g.call(f"aten.{name}.{overload}", Ref(x), Ref(g.rng.choice(same)))[0]


def norm(g: Growth, x: str) -> str:
    width = g.shape(x)[-1]
    return g.call(
        "aten.layer_norm.default", Ref(x), (width,), g.param(width), g.param(width), 1e-3
    )[0]


def rms_norm(g: Growth, x: str) -> str:
    squares = g.call("aten.pow.Tensor_Scalar", Ref(x), 2)[0]
    mean = g.call("aten.mean.dim", Ref(squares), (-1,), True)[0]
    inverse = g.call("aten.rsqrt.default", Ref(g.call("aten.add.Tensor", Ref(mean), 0.1)[0]))[0]
    return g.call("aten.mul.Tensor", Ref(x), Ref(inverse))[0]


def softmax(g: Growth, x: str) -> str:
    return g.call("aten.softmax.int", Ref(x), g.rng.choice([-1, 1]))[0]


def swap(g: Growth, x: str) -> str:
    return g.call("aten.transpose.int", Ref(x), *g.rng.sample(range(3), 2))[0]


def regroup(g: Growth, x: str) -> str:
    a, b, c = g.shape(x)
    shape = g.rng.choice([(a, b * c, 1), (a * b, c, 1), (1, a * b, c), (a, c, b)])
    return g.call("aten.reshape.default", Ref(x), shape)[0]


def halves(g: Growth, x: str) -> str:
    dim = g.rng.randrange(3)
    if g.shape(x)[dim] < 2:
        return x
    first, second = g.call("aten.chunk.default", Ref(x), 2, dim)[:2]
    if g.shape(first) != g.shape(second):
        return first
    if g.rng.random() < 0.5:
        return g.call("aten.mul.Tensor", Ref(first), Ref(second))[0]
    return g.call("aten.cat.default", (Ref(second), Ref(first)), dim)[0]


def shift(g: Growth, x: str) -> str:
    dim = g.rng.randrange(3)
    padding = [0] * (2 * (2 - dim)) + [1, 0]
    padded = g.call("aten.constant_pad_nd.default", Ref(x), tuple(padding))[0]
    return g.call("aten.slice.Tensor", Ref(padded), dim, 0, g.shape(x)[dim])[0]


def reduce(g: Growth, x: str) -> str:
    name, overload = g.rng.choice([("sum", "dim_IntList"), ("mean", "dim"), ("amax", "default")])
    kept = g.call(f"aten.{name}.{overload}", Ref(x), (g.rng.randrange(3),), True)[0]
    return g.call("aten.expand.default", Ref(kept), g.shape(x))[0]


def attention(g: Growth, x: str) -> str:
    b, s, c = g.shape(x)
    heads = g.rng.choice([h for h in (1, 2, 4) if c % h == 0])
    split = []
    for _ in range(3):
        y = g.call("aten.linear.default", Ref(x), g.param(c, c))[0]
        y = g.call("aten.view.default", Ref(y), (b, s, heads, c // heads))[0]
        split.append(Ref(g.call("aten.transpose.int", Ref(y), 1, 2)[0]))
    y = g.call("aten.scaled_dot_product_attention.default", *split, is_causal=True)[0]
    y = g.call("aten.transpose.int", Ref(y), 1, 2)[0]
    return g.call("aten.reshape.default", Ref(y), (b, s, c))[0]


def products(g: Growth, x: str) -> str:
    swapped = g.call("aten.transpose.int", Ref(x), 1, 2)[0]
    return g.call("aten.bmm.default", Ref(x), Ref(swapped))[0]


def convolution(g: Growth, x: str) -> str:
    channels = g.shape(x)[1]
    out = g.rng.choice([4, 6])
    args = (g.param(out, channels, 3), g.param(out), (1,), (1,))
    return g.call("aten.conv1d.default", Ref(x), *args)[0]


def cumulate(g: Growth, x: str) -> str:
    return g.call("aten.cumsum.default", Ref(x), g.rng.randrange(3))[0]


STEPS: list[Step] = [
    linear, flat_addmm, unary, scale, number, residual, norm, rms_norm, softmax, swap, regroup,
    halves, shift, reduce, attention, products, convolution, cumulate,
]  # fmt: skip


def random_program(seed: int) -> Program:
    """A program of 3 to 12 steps from one or two inputs to one or two outputs."""
    rng = random.Random(seed)
    g = Growth(rng)
    sizes = [rng.choice([2, 4, 6, 8, 3]) for _ in range(3)]
    inputs = ["in0"] if rng.random() < 0.6 else ["in0", "in1"]
    for name in inputs:
        g.tensor(name, tuple(sizes), "activation")
    values = list(inputs)
    for _ in range(rng.randint(3, 12)):
        # Mostly grow from the newest value, so that programs are deep; sometimes branch.
        x = values[-1] if rng.random() < 0.8 else rng.choice(values)
        if g.values[x].numel() > 4096:
            x = values[0]
        values.append(rng.choice(STEPS)(g, x))
    made = [name for op in g.ops for name in op.outputs]
    outputs = tuple(dict.fromkeys([values[-1], *rng.sample(made, 1)]))
    return Program(
        name=f"random{seed}",
        inputs=tuple(inputs),
        params=tuple(g.params),
        outputs=outputs,
        tensors=tuple(g.metas.values()),
        ops=tuple(g.ops),
    )
