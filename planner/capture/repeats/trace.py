"""What a forward does, op by op, and which ops belong to which layer of a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.capture.checks.on_meta.meta_results import MetaResults
from planner.capture.checks.on_meta.rehearsal import flattened, release_in_order
from planner.capture.checks.stays_on_meta import OnMeta


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that op number `event` made, as output `position`."""

    event: int
    position: int


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier forward of the same module made, or was given."""

    what: Hashable


Event = tuple[Hashable, ...]
"""An op: itself and whether autograd records it, the structure of its arguments, each of them,
and what it returned."""


@dataclass(slots=True)
class Trace:
    """The ops of a forward, in order. Mutable: grows while the forward runs.

    Attributes:
        events: the ops.
        begins: by list of layers, at which op each layer begins, in the order of calls.
        ends: the same for its ends.
        called: by list of layers, the numbers of the layers in the order of calls.
        nodes: by list of layers, how many nodes of autograd's graph this thread had made when each
            layer began.
        earlier: what the forward before of the same module does, where two are compared.
        is_whole: whether all that the forward does is told.
    """

    events: list[Event] = field(default_factory=list)
    begins: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[int]] = field(default_factory=dict)
    called: dict[str, list[int]] = field(default_factory=dict)
    nodes: dict[str, list[int]] = field(default_factory=dict)
    earlier: Trace | None = None
    is_whole: bool = True


def layer_lists(module: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost lists of at least so many layers, all of one class, with their paths."""
    found: list[str] = []
    for path, part in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        if not isinstance(part, nn.ModuleList | nn.Sequential) or not path:
            continue
        children = list(part.children())
        if len(children) >= least and len({type(child) for child in children}) == 1:
            found.append(path)
            yield path, part


def trace_forward(
    module: nn.Module,
    run: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    made: OnMeta,
    paths: tuple[str, ...],
) -> Trace:
    """Run a forward and return its ops; `paths` are the lists of layers to be told apart.

    The module is spent afterwards: it keeps what its forward leaves.
    """
    trace = Trace()
    with MetaResults(), noted_forward(trace, module, made, paths, inputs):
        run(*inputs)
    return trace


@contextmanager
def noted_forward(
    trace: Trace,
    module: nn.Module,
    made: OnMeta,
    paths: tuple[str, ...],
    inputs: tuple[Tensor, ...],
) -> Iterator[None]:
    """Note the ops of the forward inside, which reads `inputs`."""
    ops = _Ops(module, inputs, made, trace)
    try:
        with layers_noted(trace, module, paths), ops:
            yield
    finally:
        ops.release()


@contextmanager
def layers_noted(trace: Trace, module: nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
    """Note where the layers of some lists begin and end in the forward inside."""
    hooks = []
    for path in paths:
        trace.begins[path], trace.ends[path], trace.called[path] = [], [], []
        trace.nodes[path] = []
        for number, layer in enumerate(module.get_submodule(path).children()):
            hooks.append(layer.register_forward_pre_hook(_note_begin(trace, path, number)))
            hooks.append(layer.register_forward_hook(_note_end(trace, path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note_begin(trace: Trace, path: str, number: int) -> Callable[..., None]:
    def note(*_: Any) -> None:
        trace.begins[path].append(len(trace.events))
        trace.called[path].append(number)
        trace.nodes[path].append(torch._C._autograd._get_sequence_nr())

    return note


def _note_end(trace: Trace, path: str) -> Callable[..., None]:
    def note(*_: Any) -> None:
        trace.ends[path].append(len(trace.events))

    return note


class _Ops(TorchDispatchMode):
    """Notes each op. Tensors are known by identity, and held so that an id stays their own."""

    def __init__(
        self, module: nn.Module, inputs: tuple[Tensor, ...], made: OnMeta, trace: Trace
    ) -> None:
        super().__init__()
        self._made, self._trace = made, trace
        self._origin: dict[int, tuple[Tensor, Hashable]] = {}
        held = chain(
            module.named_parameters(remove_duplicate=True),
            module.named_buffers(remove_duplicate=True),
        )
        for name, tensor in held:
            self._origin[id(tensor)] = (tensor, Held(name))
        for index, tensor in enumerate(inputs):
            self._origin[id(tensor)] = (tensor, ("input", index))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and note it."""
        kwargs = kwargs or {}
        leaves: list[Any] = []
        structure = flattened((args, kwargs), leaves)
        read = tuple(map(self._told, leaves))
        result = func(*args, **kwargs)
        number = len(self._trace.events)
        shapes: list[Hashable] = []
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                shapes.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
                # (An op that returns its input itself, or writes into it, makes it anew for those
                # that read it later.)
                self._origin[id(leaf)] = (leaf, Made(number, position))
            else:
                shapes.append(repr(leaf))
        name = func, torch.is_grad_enabled()  # no op shows a region without gradients
        self._trace.events.append((name, structure, read, tuple(shapes)))
        return result

    def release(self) -> None:
        """Let go of all tensors."""
        tensors = [tensor for tensor, _ in self._origin.values()]
        self._origin.clear()
        release_in_order(tensors)

    def _told(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        known = self._origin.get(id(leaf))
        return ("constant", *self._made.told(leaf)) if known is None else known[1]


def relative(event: Event, change: Callable[[Made | Held | Earlier], Hashable]) -> Event:
    """Return an op with what it reads told in another way."""
    name, structure, read, shapes = event
    assert isinstance(read, tuple)
    told = tuple(change(each) if isinstance(each, Made | Held | Earlier) else each for each in read)
    return name, structure, told, shapes


def held_by(layer: nn.Module) -> Mapping[str, Hashable]:
    """Return what a layer holds: names of parameters and buffers, their shapes, what trains."""
    return {
        name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in chain(layer.named_parameters(), layer.named_buffers())
    }


def is_tied(module: nn.Module, path: str) -> bool:
    """Whether a layer of a list shares a parameter or a buffer with another place."""
    owners: dict[int, int] = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for _, tensor in tensors(remove_duplicate=False):
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    layers = module.get_submodule(path)
    held = chain(layers.parameters(), layers.buffers())
    parts: dict[int, int] = {}
    for part in layers.children():
        parts[id(part)] = parts.get(id(part), 0) + 1
    return any(owners[id(tensor)] > 1 for tensor in held) or len(parts) != len(layers_of(layers))


def layers_of(layers: nn.Module) -> list[nn.Module]:
    """Return a list's layers, repeats kept."""
    return [part for part in layers._modules.values() if part is not None]


@contextmanager
def truncated(module: nn.Module, path: str, count: int) -> Iterator[nn.Module]:
    """Inside, a list of a module has its first layers alone."""
    layers = module.get_submodule(path)
    whole = layers._modules
    layers._modules = dict(list(whole.items())[:count])
    try:
        yield module
    finally:
        layers._modules = whole
