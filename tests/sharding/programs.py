"""Small programs for sharding tests, and the placements of real tensors on simulated ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.language.graph import Op, Program, Ref, Symbol, TensorMeta
from planner.language.layout.placement import Placement, Replicate, Shard, parse_placement
from planner.language.lowering.lowering import lower
from planner.language.plan import ClassLayout
from planner.runtime.stage.calls import local_ops
from planner.runtime.stage.program_fx import aten_overload, to_graph_module
from planner.runtime.stage.recompute import Keeper, Recomputed
from tests.sharding.ranks import on_ranks


def meta_of(name: str, tensor: Tensor, kind: str = "activation") -> TensorMeta:
    return TensorMeta(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        kind=kind,
        requires_grad=tensor.is_floating_point() and not getattr(tensor, "is_frozen", False),
    )


def frozen(tensor: Tensor) -> Tensor:
    """Mark a tensor as one that needs no gradient, such as running statistics."""
    tensor.is_frozen = True  # type: ignore[attr-defined]
    return tensor


@dataclass(frozen=True)
class OneOp:
    """A program of one op and the tensors it is tried on."""

    program: Program
    inputs: tuple[Tensor, ...]

    @property
    def op(self) -> Op:
        return self.program.ops[0]


def one_op(target: str, *args: Any, **kwargs: Any) -> OneOp:
    """Record one call of an op, ATen's or the runtime's own, on real tensors."""
    tensors: list[Tensor] = []

    def record(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            position = next((i for i, t in enumerate(tensors) if t is arg), len(tensors))
            if position == len(tensors):
                tensors.append(arg)
            return Ref(f"x{position}")
        if isinstance(arg, list | tuple):
            return tuple(record(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return Symbol("dtype", str(arg).removeprefix("torch."))
        return arg

    recorded = tuple(record(arg) for arg in args)
    keywords = tuple((key, record(value)) for key, value in kwargs.items())
    namespace, _, name = target.partition(".")
    function = getattr(local_ops, name) if namespace == "planner" else aten_overload(target)
    result = function(*args, **kwargs)
    outputs = tuple(result) if isinstance(result, list | tuple) else (result,)
    names = tuple(f"y{i}" for i in range(len(outputs)))
    inputs = tuple(f"x{i}" for i in range(len(tensors)))
    program = Program(
        name=target.split(".")[1],
        inputs=inputs,
        params=(),
        outputs=names,
        tensors=(
            *(meta_of(n, t) for n, t in zip(inputs, tensors, strict=True)),
            *(meta_of(n, t) for n, t in zip(names, outputs, strict=True)),
        ),
        ops=(Op(name="op", target=target, args=recorded, kwargs=keywords, outputs=names),),
    )
    return OneOp(program, tuple(tensors))


def place(tensor: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """Return one rank's part; terms of a Partial are random and add up to the tensor."""
    if isinstance(placement, Shard):
        segments = tensor.chunk(placement.segments, placement.dim)
        pieces = [
            segment.chunk(world_size, placement.dim)[-1 - rank if turned else rank]
            for segment, turned in zip(segments, turns(placement), strict=True)
        ]
        return torch.cat(pieces, placement.dim)
    if isinstance(placement, Replicate):
        return tensor.clone()
    generator = torch.Generator().manual_seed(tensor.numel())
    terms = [
        torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for _ in range(world_size - 1)
    ]
    return [tensor - sum(terms), *terms][rank] if terms else tensor.clone()


def turns(placement: Shard) -> list[bool]:
    """Whether each segment is dealt to the ranks from the last."""
    return [placement.mirrored and bool(i % 2) for i in range(placement.segments)]


def whole(parts: Sequence[Tensor], placement: Placement) -> list[Tensor]:
    """Return the whole tensor as each rank knows it: all must agree with the dense one."""
    if isinstance(placement, Shard):
        pieces = [part.chunk(placement.segments, placement.dim) for part in parts]
        in_order = [
            piece[i]
            for i, turned in enumerate(turns(placement))
            for piece in pieces[:: -1 if turned else 1]
        ]
        return [torch.cat(in_order, placement.dim)]
    if isinstance(placement, Replicate):
        return list(parts)
    return [torch.stack(list(parts)).sum(0)]


def run_dense(program: Program, tensors: Mapping[str, Tensor], cotangents: Sequence[Tensor | None]):
    """Outputs and gradients of a program in one process."""
    values = {
        n: t.clone().requires_grad_(program.tensor[n].requires_grad) for n, t in tensors.items()
    }
    module = to_graph_module(program, {"tp": None}, torch.device("cpu"))
    names = (*program.inputs, *program.params)
    outputs = module(*(values[name] for name in names))
    backward(outputs, cotangents)
    return outputs, {name: values[name].grad for name in names}


def backward(outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> None:
    pairs = [
        (y, g)
        for y, g in zip(outputs, cotangents, strict=True)
        if g is not None and y.requires_grad
    ]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def run_local(
    program: Program,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    cotangents: Sequence[Tensor | None],
    output_placements: Sequence[Placement],
    world_size: int,
    made_again: frozenset[str] | None = None,
):
    """Outputs and gradients of a local program on every rank: lists by rank.

    With `made_again` it is recomputed in the backward, these ops and no others.
    """
    names = (*program.inputs, *program.params)

    def body(rank: int):
        values = {
            n: place(tensors[n], placements[n], rank, world_size).requires_grad_(
                program.tensor[n].requires_grad
            )
            for n in names
        }
        groups, cpu = {"tp": dist.group.WORLD}, torch.device("cpu")
        run = to_graph_module(program, groups, cpu)
        if made_again is not None:
            keeper = Keeper()
            module = to_graph_module(program, groups, cpu, keeper=keeper, made_again=made_again)
            run = Recomputed(module.forward, device=torch.device("cpu"), keeper=keeper, draws=False)
        outputs = run(*(values[name] for name in names))
        parts = [
            # The gradient of a Partial value is whole on each rank.
            None
            if g is None
            else place(g, p if isinstance(p, Shard) else Replicate(), rank, world_size)
            for g, p in zip(cotangents, output_placements, strict=True)
        ]
        backward(outputs, parts)
        return [y.detach() for y in outputs], {name: values[name].grad for name in names}

    return on_ranks(world_size, body)


def random_cotangents(program: Program, seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor | None] = []
    for name in program.outputs:
        meta = program.tensor[name]
        floating = meta.dtype.startswith("float")
        found.append(
            torch.randn(meta.shape, generator=generator, dtype=getattr(torch, meta.dtype))
            if floating
            else None
        )
    return found


def random_values(program: Program, seed: int) -> dict[str, Tensor]:
    """Values for a program's inputs and params: small indices, true masks, normal floats."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in (*program.inputs, *program.params):
        meta = program.tensor[name]
        dtype = getattr(torch, meta.dtype)
        if meta.data is not None:
            found[name] = torch.tensor(meta.data, dtype=dtype).reshape(meta.shape)
        elif meta.dtype == "bool":
            found[name] = torch.ones(meta.shape, dtype=dtype)
        elif meta.dtype.startswith("int"):
            found[name] = torch.randint(0, 2, meta.shape, generator=generator, dtype=dtype)
        else:
            found[name] = torch.randn(meta.shape, generator=generator, dtype=dtype) * 0.5
    return found


def check_lowered(
    program: Program,
    layout: ClassLayout,
    axis_size: int,
    seed: int = 0,
    *,
    recompute: bool = False,
) -> Program:
    """Compare a program lowered under a layout with the dense one; return the local program.

    With `recompute`, ops drawn at random are made again in the backward.
    """
    local = lower(program, layout, axis_size=axis_size)
    coin = random.Random(seed)
    made_again = frozenset(op.name for op in local.ops if coin.random() < 0.5)
    tensors = random_values(program, seed)
    placements = {
        name: parse_placement(text)
        for name, text in zip(
            (*program.inputs, *program.params), (*layout.inputs, *layout.params), strict=True
        )
    }
    output_placements = [parse_placement(text) for text in layout.outputs]
    cotangents = random_cotangents(program, seed + 1)
    outputs, grads = run_dense(program, tensors, cotangents)
    results = run_local(
        local,
        tensors,
        placements,
        cotangents,
        output_placements,
        axis_size,
        made_again if recompute else None,
    )
    for i, (dense, placement) in enumerate(zip(outputs, output_placements, strict=True)):
        for joined in whole([values[i] for values, _ in results], placement):
            close(joined, dense.detach(), f"output {program.outputs[i]} of {program.name}")
    largest = max((g.abs().max().item() for g in grads.values() if g is not None), default=0.0)
    for name, grad in grads.items():
        if grad is None:
            continue
        # A Partial value has a whole gradient on each rank.
        placement = placements[name]
        at_rest = placement if isinstance(placement, Shard) else Replicate()
        parts = [found[name] for _, found in results]
        for joined in whole(parts, at_rest):
            label = f"gradient of {name} ({placement}) of {program.name}"
            close(joined, grad, label, scale=largest)
    return local


def close(found: Tensor, expected: Tensor, label: str, *, scale: float = 0.0) -> None:
    """Compare in fp64. Of a tensor whose terms cancel (a query of equal keys) nothing but their
    rounding is left: it may differ by that of terms of `scale`, the size of its neighbours.
    """
    atol = max(1e-9, 1e-11 * scale)
    torch.testing.assert_close(
        found, expected, rtol=1e-9, atol=atol, equal_nan=True, msg=lambda m: f"{label}: {m}"
    )
