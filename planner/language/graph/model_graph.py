"""ModelGraph: a captured model as plain data, free of torch.

A graph is a straight-line program over named tensors. Sizes are numbers or `Affine`
functions of the microbatch size, found by capturing at two batch sizes, so one capture
answers for every microbatch size. The program is a *preamble* (cheap, parameter-free
values derived from the batch alone, such as masks and rotary tables, which every stage
computes for itself) followed by a chain of *blocks*. Equal blocks share a `BlockClass`,
and each expensive question is asked once per class.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import is_
from typing import Any, Literal

from planner.language.graph.unit import SAMPLE, Unit
from planner.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer that is `per_sample * microbatch_size + fixed`."""

    per_sample: int
    fixed: int = 0

    def at(self, microbatch_size: int) -> int:
        """Return the number at this microbatch size."""
        return self.per_sample * microbatch_size + self.fixed


Size = int | Affine


def size_at(size: Size, microbatch_size: int) -> int:
    """Return a size as a number at this microbatch size."""
    return size.at(microbatch_size) if isinstance(size, Affine) else size


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor named in an op's arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch constant in an op's arguments: kind ``dtype``, ``layout``, ``memory_format``
    or ``device`` (always "the device the program runs on", so its value is empty); or a number that
    JSON has not, of kind ``complex``, as Python writes it.
    """

    kind: Literal["dtype", "layout", "memory_format", "device", "complex"]
    value: str = ""

    def constant(self, torch: Any, device: Any) -> Any:
        """Return what it stands for, of the module torch (which is not loaded here)."""
        if self.kind == "complex":
            return complex(self.value)
        return device if self.kind == "device" else getattr(torch, self.value)


Arg = None | bool | int | float | str | Affine | Ref | Symbol | tuple["Arg", ...]

TensorKind = Literal["param", "buffer", "constant", "input", "activation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """What is known of a tensor without its values.

    `fqn` is the qualified name in the user's module for params and buffers (`aliases` its
    other names when tied); for an input it is its path in the batch. `data` holds the
    flattened values of a small constant made inside forward. `table` says where a table lies whose
    gradient is rows (`planner.language.graph.tables`): "device", or "host", which takes none of a
    device's memory; "" for all else, and in a capture.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    kind: TensorKind
    requires_grad: bool = False
    fqn: str = ""
    aliases: tuple[str, ...] = ()
    data: tuple[bool | int | float, ...] | None = None
    table: Literal["", "device", "host"] = ""

    @property
    def on_host(self) -> bool:
        """Whether it is a table that a plan keeps in the host's memory."""
        return self.table == "host"

    def shape_at(self, microbatch_size: int) -> tuple[int, ...]:
        """Return the concrete shape at this microbatch size."""
        for size in self.shape:
            if type(size) is not int:
                return tuple(size_at(size, microbatch_size) for size in self.shape)
        return self.shape  # type: ignore[return-value]

    def bind(self, microbatch_size: int) -> TensorMeta:
        """Return the tensor with every size a number, for one microbatch size."""
        shape = self.shape_at(microbatch_size)
        return self if shape is self.shape else replace(self, shape=shape)

    def numel_at(self, microbatch_size: int) -> int:
        """Return the number of elements at this microbatch size."""
        return prod(self.shape_at(microbatch_size))

    def bytes_at(self, microbatch_size: int) -> int:
        """Return the size in bytes, on a device, at this microbatch size."""
        return 0 if self.on_host else self.numel_at(microbatch_size) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator: `target` is an overload such as ``aten.linear.default`` (any library's, by
    its namespace) or, in a lowered graph, one of our own (``planner.redistribute`` …).

    `args` and `kwargs` hold `Ref` for tensors; `module` is the qualified name of the
    user's module that called it, relative to its block. `line` is the user's code it comes
    from, ``file:line: `code```, for messages: ops of other lines are equal. `beside` says that the
    model's own forward called it, and not the module of its block.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[str, ...]
    module: str = ""
    line: str = field(default="", compare=False, repr=False)
    beside: bool = field(default=False, compare=False, repr=False)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors in the arguments, in order of appearance, repeats kept."""
        names: list[str] = []
        _collect_names(self.args, names)
        for _, value in self.kwargs:
            _collect_names(value, names)
        return tuple(names)

    def bind(self, microbatch_size: int) -> Op:
        """Return the op with every size a number, for one microbatch size."""
        args, kwargs = (
            bind_arg(argument, microbatch_size) for argument in (self.args, self.kwargs)
        )
        if args is self.args and kwargs is self.kwargs:
            return self
        return replace(self, args=args, kwargs=kwargs)

    def rename(self, rename: Callable[[str], str]) -> Op:
        """Return the op with every tensor name (and its own) passed through `rename`."""
        return replace(
            self,
            args=map_refs(self.args, lambda ref: Ref(rename(ref.name))),
            kwargs=tuple(
                (key, map_refs(value, lambda ref: Ref(rename(ref.name))))
                for key, value in self.kwargs
            ),
            outputs=tuple(rename(name) for name in self.outputs),
        )


def _collect_names(arg: Arg, names: list[str]) -> None:
    """Append the names of the Refs in an argument tree; the search calls this very often."""
    if isinstance(arg, Ref):
        names.append(arg.name)
    elif isinstance(arg, tuple):
        for item in arg:
            _collect_names(item, names)


def iter_refs(arg: Arg) -> Iterator[Ref]:
    """Yield every Ref in an argument tree, left to right."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from iter_refs(item)


def map_refs(arg: Any, change: Callable[[Ref], Arg]) -> Any:
    """Return the argument tree with each Ref replaced by `change(ref)`."""
    if isinstance(arg, Ref):
        return change(arg)
    if isinstance(arg, tuple):
        return tuple(map_refs(item, change) for item in arg)
    return arg


def bind_arg(arg: Any, microbatch_size: int) -> Any:
    """Return the argument tree with each Affine replaced by its number; itself without any."""
    if isinstance(arg, Affine):
        return arg.at(microbatch_size)
    if isinstance(arg, tuple):
        items = tuple(bind_arg(item, microbatch_size) for item in arg)
        return arg if all(map(is_, items, arg)) else items
    return arg


@dataclass(frozen=True, kw_only=True)
class Program:
    """A straight-line piece of a model: what is sharded, lowered, priced and run.

    `inputs` are the activations and batch inputs taken, `params` the parameters, buffers
    and constants, `outputs` the tensors handed on. `tensors` describes all of them and
    every intermediate.
    """

    name: str
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[TensorMeta, ...]
    ops: tuple[Op, ...]

    @cached_property
    def tensor(self) -> dict[str, TensorMeta]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    def bind(self, microbatch_size: int) -> Program:
        """Return the program with every size a number, for one microbatch size."""
        return replace(
            self,
            tensors=tuple(tensor.bind(microbatch_size) for tensor in self.tensors),
            ops=tuple(op.bind(microbatch_size) for op in self.ops),
        )

    def only(self, outputs: tuple[str, ...]) -> Program:
        """Return the part of the program that `outputs` need."""
        needed = set(outputs)
        ops = []
        for op in reversed(self.ops):
            if needed.intersection(op.outputs):
                ops.append(op)
                needed.update(op.inputs)
        ops.reverse()
        produced = {name for op in ops for name in op.outputs}
        return replace(
            self,
            inputs=tuple(name for name in self.inputs if name in needed),
            params=tuple(name for name in self.params if name in needed),
            outputs=outputs,
            tensors=tuple(t for t in self.tensors if t.name in needed | produced),
            ops=tuple(ops),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One link of the chain: a use of class `class_index` on tensors of the model.

    `inputs`, `params` and `outputs` name model tensors, in the order of the class
    program's own `inputs`, `params` and `outputs`.
    """

    index: int
    name: str
    class_index: int
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """What is made of the whole batch before a step, of which every part of it takes the same.

    Attributes:
        program: makes it of the batch, of buffers that stay as they are and of constants; its
            params are named as in the graph.
        values: names in the graph of what blocks take, each with the output that it is. A tensor
            with samples along a dim is cut as the batch is.
        shares: names in the graph of what blocks multiply a term of the loss by, each with the
            output that counts what the term is the mean over (`SAMPLES`: the samples): what
            counts in a part, by what counts in the whole.
    """

    program: Program
    values: tuple[tuple[str, str], ...]
    shares: tuple[tuple[str, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the graph of all that blocks take."""
        return tuple(name for name, _ in (*self.values, *self.shares))


SAMPLES = "samples"
"""Stands for a count of samples among the shares of a `WholeBatch`."""


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A captured model: batch inputs, preamble, the chain of blocks and their classes.

    `tensors` describes inputs, params, buffers, constants, preamble outputs and every
    tensor that crosses a block boundary. `loss` names the scalar that the last block returns.
    `batch_inputs` are names of all tensor leaves of the batch, in tree order, used or not;
    `batch_tree` is the JSON form of the batch's structure (see `planner.language.graph.batch`).
    `whole` is what parts of a batch take of the whole one (`planner.language.across.whole`); None:
    nothing. Where samples belong together (`unit`), what sizes count as a sample is a unit of them.
    `outside_bytes` are those of the state dict that no block uses, or that are read apart from
    blocks, too: each rank keeps them in host memory (`planner.runtime.state.users_module.outside`).
    `libraries` are modules to import before ops of theirs are there.
    """

    name: str
    tensors: tuple[TensorMeta, ...]
    batch_inputs: tuple[str, ...]
    batch_tree: Any = field(compare=False)
    preamble: Program
    blocks: tuple[Block, ...]
    classes: tuple[Program, ...]
    loss: str
    whole: WholeBatch | None = None
    unit: Unit = SAMPLE
    outside_bytes: int = 0
    libraries: tuple[str, ...] = ()

    @cached_property
    def tensor(self) -> dict[str, TensorMeta]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def params(self) -> tuple[TensorMeta, ...]:
        """The trainable and frozen parameters, each tied group once."""
        return tuple(t for t in self.tensors if t.kind == "param")

    def num_params(self) -> int:
        """Return the number of parameter elements, tied ones once."""
        return sum(t.numel_at(1) for t in self.params)

    @cached_property
    def shared_params(self) -> dict[str, tuple[int, ...]]:
        """The blocks that use each parameter, buffer or constant of several blocks."""
        users: dict[str, list[int]] = {}
        for block in self.blocks:
            for name in dict.fromkeys(block.params):
                users.setdefault(name, []).append(block.index)
        return {name: tuple(blocks) for name, blocks in users.items() if len(blocks) > 1}

    @cached_property
    def producer(self) -> dict[str, int]:
        """Index of the block that makes each boundary tensor."""
        return {name: block.index for block in self.blocks for name in block.outputs}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the structure: ops, shapes, dtypes, names; not of any weight or line."""
        text = json.dumps(to_json(self, lines=False), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def to_json(value: Any, *, lines: bool = True) -> Any:
    """Return a ModelGraph (or any part of one) as JSON data; `from_json` is the inverse.

    Without `lines` it is the structure alone: equal for graphs that differ in where the user's
    code stands, or in what no block uses.
    """
    if value is None or type(value) in (str, int, bool, float):
        return value
    if isinstance(value, Affine):
        return {"a": [value.per_sample, value.fixed]}
    if isinstance(value, Ref):
        return {"r": value.name}
    if isinstance(value, Symbol):
        return {"s": [value.kind, value.value]}
    if isinstance(value, TensorMeta | Op | Program | Block | ModelGraph | WholeBatch | Unit):
        names = [
            name for name in value.__dataclass_fields__ if lines or name not in ("line", "shown_by")
        ]
        if isinstance(value, Op) and not (lines and value.beside):
            names.remove("beside")
        if isinstance(value, TensorMeta) and not value.table:
            names.remove("table")  # a plan's word: captures are what they were without
        if isinstance(value, ModelGraph) and value.unit.is_sample:
            names.remove("unit")  # so captures of other models are what they were without units
        if isinstance(value, ModelGraph) and value.whole is None:
            names.remove("whole")
        if isinstance(value, ModelGraph) and not (lines and value.outside_bytes):
            names.remove("outside_bytes")  # no part of the structure
        if isinstance(value, ModelGraph) and not (lines and value.libraries):
            names.remove("libraries")
        fields = {name: to_json(getattr(value, name), lines=lines) for name in names}
        return {"t": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item, lines=lines) for item in value]
    if isinstance(value, dict):
        return {"d": {k: to_json(v, lines=lines) for k, v in value.items()}}
    return value


def from_json(value: Any) -> Any:
    """Inverse of `to_json`; sequences come back as tuples. Raise ValueError on bad data."""
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "t" in value:
        kinds = {
            c.__name__: c for c in (TensorMeta, Op, Program, Block, ModelGraph, WholeBatch, Unit)
        }
        if value["t"] not in kinds:
            raise ValueError(f"unknown record {value['t']!r}")
        return kinds[value["t"]](**{k: from_json(v) for k, v in value.items() if k != "t"})
    if "a" in value:
        return Affine(*value["a"])
    if "r" in value:
        return Ref(value["r"])
    if "s" in value:
        return Symbol(*value["s"])
    return {k: from_json(v) for k, v in value["d"].items()}


def written_buffers(program: Program) -> tuple[str, ...]:
    """Return the params of a program that it reads and puts back (see
    `planner.capture.reading.writes`).
    """
    return tuple(
        dict.fromkeys(
            op.inputs[0]
            for op in program.ops
            if op.target == "aten.copy_.default" and op.inputs[0] in program.params
        )
    )
