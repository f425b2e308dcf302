"""Ready-made calls of the op or block that a probe describes, on made-up tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.language.graph import Op, Program, Ref, Symbol, TensorMeta, from_json
from planner.language.ops.call import Call as OpCall
from planner.language.ops.record import Numbers, family_of
from planner.runtime.stage.compiled.block import CompiledBlock
from planner.runtime.stage.compiled.halves import cut
from planner.runtime.stage.compiled.kernels import compiled
from planner.runtime.stage.compiled.trace import trace
from planner.runtime.stage.program_fx import aten_overload, to_graph_module

ARENA_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Inputs rotate through this much memory, so that weights are as cold as in training: more
than a core's share of the caches, and more than the L2 of a GPU."""

ALIGNMENT_BYTES = 256
MAX_CALLS = 32
"""So many calls are prepared, each with its own leaves."""

Call = tuple[list[Any], dict[str, Any], list[Tensor]]
"""Arguments, keyword arguments, and the leaves among them that need gradients."""


SCALE = 1 / 16
"""Deviation of what probes compute on, of activations and weights alike: products of a few hundred
terms stay near 1, as in training. With numbers near 1 a softmax over their products saturates, and
CPUs multiply its subnormal gradients ten to thirty times slower than training does."""


class Arena:
    """Memory full of normal numbers, made once, from which probes take their inputs.

    Making inputs anew would take longer than timing them. Mutable: it grows by dtype, and
    `forget` drops what an op that writes to its inputs has spoilt.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = ARENA_BYTES[device.type]
        self._of_dtype: dict[torch.dtype, Tensor] = {}

    def take(self, dtype: torch.dtype, numel: int, *, at_byte: int) -> Tensor:
        """Return `numel` numbers (flat) from `at_byte` on, or new ones if it has too few."""
        start = at_byte // dtype.itemsize
        if (start + numel) * dtype.itemsize > self.num_bytes:
            return self._normal(numel, dtype)
        if dtype not in self._of_dtype:
            self._of_dtype[dtype] = self._normal(self.num_bytes // dtype.itemsize, dtype)
        return self._of_dtype[dtype][start : start + numel]

    def forget(self) -> None:
        """Give up all memory."""
        self._of_dtype.clear()

    def _normal(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(numel, device=self.device).mul_(SCALE).to(dtype)


class Functions:
    """What probes call: an ATen overload, or the program of a block, or of an op of ours, as one
    module.

    Blocks are kept, because building (and even more, compiling) them takes far longer than
    a visit. Mutable: it is that memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[str, Callable[..., Any]] = {}

    def of(
        self, probe: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Return function, arguments and keyword arguments (with Refs)."""
        op = from_json(probe["op"]) if "op" in probe else None
        if op is not None and not op.target.startswith("planner."):
            return aten_overload(op.target), op.args, op.kwargs
        key = json.dumps(probe, sort_keys=True)
        if key not in self._blocks:
            program = from_json(probe["program"]) if op is None else _alone(op, probe["tensors"])
            block: Callable[..., Any] = to_graph_module(program, {}, self._device)
            if probe.get("compiled"):
                halves = cut(trace(program, {}, self._device))
                block = CompiledBlock(halves, compiled, eager=block, queue=None)
            self._blocks[key] = block
        args = tuple(Ref(f"t{position}") for position in range(len(probe["tensors"])))
        return self._blocks[key], args, ()


class Calls:
    """Calls of one function: on storage that rotates, or always on the same.

    Each call of a sample has its own leaves, so that gradients of shared weights are not
    summed, which the op alone would not do. Mutable: it remembers where the rotation is.
    """

    def __init__(
        self, function: Any, *, cold: list[Call], warm: list[Call], device: torch.device
    ) -> None:
        self.device = device
        self.differentiable = bool(cold[0][2])
        self._function = function
        self._calls, self._warm = cold, warm
        self._next = 0
        self._leaves: list[Tensor] = []
        self._gradients: list[Tensor] = []

    @classmethod
    def of(cls, probe: Mapping[str, Any], arena: Arena, functions: Functions) -> Calls:
        """Return the calls of an op, or of a whole program (``probe["program"]``)."""
        function, args, kwargs = functions.of(probe)
        forms, device = probe["tensors"], arena.device
        op = from_json(probe["op"]) if "op" in probe else None
        indices = {
            position: _made_up(form, _numbers(op, forms, position), device)
            for position, form in enumerate(forms)
            if not getattr(torch, form["dtype"]).is_floating_point
        }

        def tensors(at_byte: int) -> tuple[list[Tensor], int]:
            made = []
            for position, form in enumerate(forms):
                if position in indices:
                    made.append(indices[position])
                    continue
                dtype, numel = getattr(torch, form["dtype"]), prod(form["shape"])
                flat = arena.take(dtype, numel, at_byte=at_byte)
                made.append(_shaped(flat, form["shape"], transposed=form["transposed"]))
                # Tensors begin on aligned boundaries, as an allocator's do.
                at_byte += -(-flat.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return made, at_byte

        def call_on(storage: list[Tensor]) -> Call:
            own = [tensor.detach() for tensor in storage]
            needing = zip(own, forms, strict=True)
            leaves = [t.requires_grad_() for t, form in needing if form["requires_grad"]]
            named = {f"t{position}": tensor for position, tensor in enumerate(own)}
            plain = [_plain(arg, named, device) for arg in args]
            return plain, {k: _plain(v, named, device) for k, v in kwargs}, leaves

        first, num_bytes = tensors(0)
        # What the arena can't hold twice is large enough to be cold on the same storage.
        apart = max(1, min(MAX_CALLS, arena.num_bytes // max(num_bytes, 1)))
        sets = [first, *(tensors(i * num_bytes)[0] for i in range(1, apart))]
        cold = [call_on(sets[i % apart]) for i in range(MAX_CALLS)]
        warm = [call_on(first) for _ in range(MAX_CALLS)]
        return cls(function, cold=cold, warm=warm, device=device)

    def stay_warm(self) -> None:
        """From now on call on the same storage every time."""
        self._calls = self._warm

    def forward(self, count: int) -> list[Any]:
        """Run the op `count` times and return the results, all alive."""
        function = self._function
        chosen = [self._calls[(self._next + i) % len(self._calls)] for i in range(count)]
        self._next += count
        self._leaves = [leaf for _, _, leaves in chosen for leaf in leaves]
        return [function(*args, **kwargs) for args, kwargs, _ in chosen]

    def backward(self, results: list[Any], *, keep: bool = False) -> None:
        """Run the backward of the results of the latest `forward`, in one sweep.

        `keep` leaves the autograd graph alive for another backward.
        """
        if not self.differentiable:
            return
        outputs = [_differentiable(result) for result in results]
        # Made at the first backward, which no sample times.
        if not self._gradients:
            self._gradients = [torch.ones_like(part) for part in outputs[0]]
        torch.autograd.grad(
            [part for parts in outputs for part in parts],
            self._leaves,
            self._gradients * len(outputs),
            allow_unused=True,
            retain_graph=keep,
        )


def _differentiable(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, Tensor) and part.requires_grad]


def _plain(arg: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if isinstance(arg, Ref):
        return tensors[arg.name]
    if isinstance(arg, tuple):
        return [_plain(item, tensors, device) for item in arg]
    if isinstance(arg, Symbol):
        return arg.constant(torch, device)
    return arg


def _shaped(flat: Tensor, shape: list[int], *, transposed: bool) -> Tensor:
    if not transposed:
        return flat.view(shape)
    return flat.view([*shape[:-2], shape[-1], shape[-2]]).transpose(-2, -1)


def _alone(op: Op, forms: Sequence[Mapping[str, Any]]) -> Program:
    """Return the program of one op: it takes a probe's tensors in their order."""
    metas = _metas(forms)
    names = tuple(meta.name for meta in metas)
    return Program(
        name=op.name, inputs=(), params=names, outputs=op.outputs, tensors=metas, ops=(op,)
    )


def _metas(forms: Sequence[Mapping[str, Any]]) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(
            name=f"t{position}",
            shape=tuple(form["shape"]),
            dtype=form["dtype"],
            kind="param",
            requires_grad=form["requires_grad"],
        )
        for position, form in enumerate(forms)
    )


def _numbers(op: Op | None, forms: Sequence[Mapping[str, Any]], position: int) -> Numbers:
    """Return which whole numbers an input may hold."""
    told = None if op is None else family_of(op.target).numbers
    if op is not None and told is not None:
        metas = _metas(forms)
        call = OpCall(op, {meta.name: meta for meta in metas}, 1)
        return told(call, metas[position].name)
    # Where they can only be indices, the least size is safe.
    floating = [form["shape"] for form in forms if "float" in form["dtype"] and form["shape"]]
    return Numbers("any", min(map(min, floating), default=0))


def _made_up(form: Mapping[str, Any], numbers: Numbers, device: torch.device) -> Tensor:
    """Make up what is not a floating number."""
    dtype, shape, limit = getattr(torch, form["dtype"]), form["shape"], numbers.limit
    if dtype == torch.bool or limit == 0:
        return torch.ones(shape, dtype=dtype, device=device)
    match numbers.kind:
        case "any":
            return torch.randint(limit, shape, dtype=dtype, device=device)
        case "order":
            return torch.randperm(limit, device=device).to(dtype).view(shape)
        case "ends":
            count = prod(shape)
            ends = torch.arange(1, count + 1, device=device) * limit // count
            return ends.to(dtype).view(shape)
