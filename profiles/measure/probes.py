"""Probes: the questions put to a machine, as data that travels to worker processes as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner.language.graph import Op, Program, Ref, Symbol, TensorMeta, map_refs, to_json
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.ops.families.products.narrow import (
    BLOCKS_DTYPE,
    NARROW_DTYPE,
    scales_in_tiles,
)
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.record import names_axis
from profiles.lookup.families import BLOCK_TARGET, canonical_shapes
from profiles.records import CollectiveKind, Direction, Group, OpQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTensor:
    """A tensor that a probe makes up: what matters of it is its form, not its values.

    A `transposed` one lies in memory as the transpose of its last two dims would.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProbe:
    """One operator to time, forward and (where an input needs a gradient) backward.

    `op` names its tensors t0, t1, … in order of first appearance, described by `tensors`.
    `weight` says how much of a training step hangs on it (seconds on some machine; only
    ratios matter).
    """

    op: Op
    tensors: tuple[ProbeTensor, ...]
    forward: OpQuery
    backward: OpQuery | None
    weight: float = 1.0

    @property
    def queries(self) -> tuple[OpQuery, ...]:
        """What the probe answers."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def arguments(self) -> str:
        """The op's arguments without tensors, as JSON text."""
        return json.dumps([to_json(self.op.args), to_json(self.op.kwargs)], separators=(",", ":"))

    @property
    def key(self) -> tuple:
        """Equal for probes that measure the same thing: the *signature* of the op."""
        return (
            self.op.target,
            canonical_shapes(self.forward.target, self.forward.shapes),
            tuple((t.dtype, t.requires_grad) for t in self.tensors),
            self.arguments,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a worker needs to run the probe."""
        return {"op": to_json(self.op), "tensors": [asdict(t) for t in self.tensors]}

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "()" for shape in self.forward.shapes)
        return f"{self.op.target} {shapes} {self.forward.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProbe:
    """A whole block as the runtime runs it: the check on the sum of its ops."""

    program: Program
    """The block, bound to a microbatch size."""
    forward: OpQuery
    """The forward of all its ops as a single query."""
    backward: OpQuery | None
    """The same of the backward; None where no input needs a gradient."""
    parts: tuple[OpQuery, ...]
    """The queries of its ops, both ways."""
    weight: float
    """How often the model has it."""
    compiled: bool = False
    """Whether it is compiled."""

    @property
    def queries(self) -> tuple[OpQuery, ...]:
        """What the probe answers."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def arguments(self) -> str:
        """The program's digest: blocks of equal inputs may differ inside."""
        text = json.dumps(to_json(self.program), separators=(",", ":"), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{digest} compiled" if self.compiled else digest

    @property
    def key(self) -> tuple:
        """Equal for probes of the same program."""
        return BLOCK_TARGET, self.arguments

    def to_json(self) -> dict[str, Any]:
        """Return what a worker needs to run the probe."""
        tensors = [
            asdict(
                ProbeTensor(
                    shape=meta.shape_at(1), dtype=meta.dtype, requires_grad=meta.requires_grad
                )
            )
            for name in (*self.program.inputs, *self.program.params)
            for meta in [self.program.tensor[name]]
        ]
        return {
            "program": to_json(self.program),
            "compiled": self.compiled,
            "tensors": tensors,
        }

    def __str__(self) -> str:
        return f"{'compiled ' if self.compiled else ''}block {self.program.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe:
    """One collective to time on every group of one shape at once."""

    kind: CollectiveKind
    num_bytes: int
    group: Group

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_bytes} bytes on {self.group}"


def probe_of(op: Op, tensor: Mapping[str, TensorMeta], *, weight: float = 1.0) -> OpProbe:
    """Return the probe of an op on the (bound, local) shapes in `tensor`."""
    names = list(dict.fromkeys(op.inputs))
    rename = {name: f"t{index}" for index, name in enumerate(names)}
    metas = [tensor[name] for name in names]
    inputs = [tensor[name] for name in op.inputs]
    forward, backward = op_work(op, tensor), backward_work(op, tensor)
    query = OpQuery(
        target=op.target,
        shapes=tuple(meta.shape_at(1) for meta in inputs),
        dtype=query_dtype(op, tensor),
        direction="forward",
        flop=forward.flop,
        num_bytes=forward.num_bytes,
    )
    back = replace(query, direction="backward", flop=backward.flop, num_bytes=backward.num_bytes)
    return OpProbe(
        op=replace(
            op,
            name="op",
            outputs=tuple(f"out{i}" for i in range(len(op.outputs))),
            module="",
            args=map_refs(op.args, lambda ref: Ref(rename[ref.name])),
            kwargs=tuple(
                (key, map_refs(value, lambda ref: Ref(rename[ref.name])))
                for key, value in op.kwargs
            ),
        ),
        tensors=tuple(
            ProbeTensor(shape=m.shape_at(1), dtype=m.dtype, requires_grad=m.requires_grad)
            for m in metas
        ),
        forward=query,
        backward=back if backward.num_bytes else None,
        weight=weight,
    )


def float8_probe(m: int, n: int, k: int, *, in_blocks: bool = False) -> OpProbe:
    """Return an 8-bit matmul (m, k) @ (k, n) with one scale per operand, or with `in_blocks` one
    for 32 neighbours along k, results in bfloat16.

    Forward only: gradients of 8-bit products are products of their own. The second operand
    lies column by column, as tensor cores read it.
    """
    float8 = NARROW_DTYPE
    scales: tuple[tuple[int, ...], ...] = ((), ())
    if in_blocks:
        scales = tuple((scales_in_tiles(rows, k),) for rows in (m, n))
    op = Op(
        name="op",
        target="aten._scaled_mm.default",
        args=tuple(Ref(f"t{position}") for position in range(4)),
        kwargs=(("out_dtype", Symbol(kind="dtype", value="bfloat16")),),
        outputs=("out0",),
    )
    shapes: tuple[tuple[int, ...], ...] = ((m, k), (k, n), *scales)
    dtypes = (float8, float8, *(2 * ("float8_e8m0fnu" if in_blocks else "float32",)))
    return OpProbe(
        op=op,
        tensors=tuple(
            ProbeTensor(shape=shape, dtype=dtype, requires_grad=False, transposed=position == 1)
            for position, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ),
        forward=OpQuery(
            target=op.target,
            shapes=shapes,
            dtype=BLOCKS_DTYPE if in_blocks else float8,
            direction="forward",
            flop=2.0 * m * n * k,
            # A byte for each element of both operands, two for each of the result.
            num_bytes=float(m * k + k * n + 2 * m * n),
        ),
        backward=None,
    )


def is_measurable(op: Op) -> bool:
    """Whether a measuring process can run an op: it needs no group of ranks, and no code that only
    the model's own process has.
    """
    return op.target not in (OPAQUE_MODULE, AUTOGRAD_FUNCTION) and not names_axis(op)


def block_probe(program: Program, *, weight: float, compiled: bool = False) -> BlockProbe | None:
    """Return the probe of a bound program; None if no measuring process can run it."""
    if not all(map(is_measurable, program.ops)):
        return None
    ops = [probe_of(op, program.tensor) for op in program.ops]
    parts = [q for op in ops for q in op.queries if op.forward.num_bytes]
    inputs = [program.tensor[name] for name in (*program.inputs, *program.params)]

    def total(direction: Direction) -> OpQuery:
        mine = [part for part in parts if part.direction == direction]
        return OpQuery(
            target=BLOCK_TARGET,
            shapes=tuple(meta.shape_at(1) for meta in inputs),
            dtype=next((m.dtype for m in inputs if "float" in m.dtype), "float32"),
            direction=direction,
            flop=sum(part.flop for part in mine),
            num_bytes=sum(part.num_bytes for part in mine),
        )

    backward = total("backward")
    return BlockProbe(
        program=program,
        forward=total("forward"),
        backward=backward if backward.num_bytes else None,
        parts=tuple(parts),
        weight=weight,
        compiled=compiled,
    )


def query_dtype(op: Op, tensor: Mapping[str, TensorMeta]) -> str:
    """Return the dtype that decides an op's speed: of its first floating input, else output."""
    floating = [tensor[name].dtype for name in op.inputs if "float" in tensor[name].dtype]
    return floating[0] if floating else tensor[op.outputs[0]].dtype


def plain_probe(
    target: str,
    *args: Any,
    tensors: Mapping[str, TensorMeta],
    output: TensorMeta,
    weight: float = 1.0,
) -> OpProbe:
    """Return the probe of an op written by hand; `args` may hold Refs to `tensors`."""
    op = Op(name="op", target=target, args=args, outputs=(output.name,))
    return probe_of(op, {**tensors, output.name: output}, weight=weight)


def meta(
    name: str, shape: tuple[int, ...], dtype: str = "float32", *, requires_grad: bool = True
) -> TensorMeta:
    """Return a tensor's description for `plain_probe`."""
    return TensorMeta(
        name=name,
        shape=shape,
        dtype=dtype,
        kind="activation",
        requires_grad=requires_grad and dtype.startswith(("float", "bfloat")),
    )
