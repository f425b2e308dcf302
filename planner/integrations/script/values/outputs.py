"""What a model returns, and how it is made of what its modules return.

The engine hands out what modules return (`fetch`). What forward does behind them, such as a
`log_softmax` of the last layer's output, is found by a forward on the meta device, and done again
on the values that were fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)
from torch.utils._pytree import keystr as path_text

from planner.capture.export import on_meta as as_on_meta
from planner.integrations.script.values.left import Left, as_plain


@dataclass(frozen=True, slots=True, eq=False)
class OfModule:
    """What a module of the model returns, by its name."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class OfInput:
    """A tensor that the model was given, by its number among all of the call."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class OfFunction:
    """What a function makes; in its arguments are others of these in the place of tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int


Source = OfModule | OfInput | OfFunction


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a call returns: leaves in the order of their structure.

    Attributes:
        leaves: tensors on the meta device, and what is no tensor.
        spec: the structure, which `torch.utils._pytree` builds again.
        names: how a script names each.
        sources: what each is made of; None where that can't be told.
        loss: which of them is the model's loss; None: none.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    names: tuple[str, ...]
    sources: tuple[Source | None, ...]
    loss: int | None


def outputs_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
    """Return what a module on the meta device returns for arguments, whose tensors count by shape.

    Raises what forward raises.
    """
    made: list[ref[Tensor]] = []
    # (Writes are told by version counters.)
    with torch.inference_mode(False), torch.no_grad(), as_plain():
        outputs = _outputs_of(module, args, kwargs, made)
    handed = {id(leaf) for leaf in outputs.leaves}
    for each in made:  # (What the forward made and still is there, something else holds.)
        tensor = each()
        if tensor is not None and type(tensor) is Tensor and id(tensor) not in handed:
            tensor.__class__ = Left
    return outputs


def _outputs_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[ref[Tensor]]
) -> Outputs:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_meta = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in given}
    inputs = {id(on_meta[id(tensor)]): number for number, tensor in enumerate(given)}

    def placed(value: Any) -> Any:
        return on_meta[id(value)] if isinstance(value, Tensor) else value

    args, kwargs = tree_map(placed, (args, kwargs))
    returned: dict[str, _Seen] = {}
    hooks = [
        part.register_forward_hook(_noting(name, returned))
        for name, part in module.named_modules()
        if name
    ]
    notes = _Notes()
    try:
        with as_on_meta(), notes:
            output = module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    made += map(ref, chain(on_meta.values(), notes.tensors))
    # (The innermost that returned it: of a module around it, others may use more.)
    modules: dict[int, str] = {}
    for name, seen in returned.items():
        kept = modules.get(id(seen.tensor))
        if seen.is_unchanged and (kept is None or len(name) > len(kept)):
            modules[id(seen.tensor)] = name
    find = _Finding(modules, inputs, notes.made)
    leaves, spec = tree_flatten(output)
    paths, _ = tree_flatten_with_path(output)
    return Outputs(
        leaves=tuple(leaves),
        spec=spec,
        names=tuple(f"output{path_text(path)}" for path, _ in paths),
        sources=tuple(find(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves),
        loss=_loss_among(output, leaves),
    )


def modules_in(source: Source) -> set[str]:
    """Return the names of the modules whose values an output is made of."""
    if isinstance(source, OfFunction):
        inner = (leaf for leaf in tree_leaves((source.args, source.kwargs)))
        found = (modules_in(leaf) for leaf in inner if isinstance(leaf, Source))
        return set().union(*found)
    return {source.name} if isinstance(source, OfModule) else set()


def made_of(source: Source, fetched: Mapping[str, Tensor], inputs: list[Tensor]) -> Tensor:
    """Return an output, made of what was fetched and of the call's tensors."""
    if isinstance(source, OfModule):
        return fetched[source.name]
    if isinstance(source, OfInput):
        return inputs[source.number]
    args, kwargs = tree_map(
        lambda leaf: made_of(leaf, fetched, inputs) if isinstance(leaf, Source) else leaf,
        (source.args, source.kwargs),
    )
    made: Tensor = tree_leaves(source.function(*args, **kwargs))[source.item]
    return made


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor, and how often it had been written into."""

    tensor: Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written into it since."""
        return self.tensor._version == self.version


def _noting(name: str, returned: dict[str, _Seen]) -> Callable[..., None]:
    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            returned[name] = _Seen(output, output._version)
        else:
            returned.pop(name, None)

    return note


class _Notes(TorchFunctionMode):
    """Notes which function made which tensor. Mutable; tensors stay, so that ids are theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[_Seen, Any, Any, Any, int]] = {}
        self.tensors: list[Tensor] = []
        self._held: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._held.append((args, kwargs, made))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for item, leaf in enumerate(tree_leaves(made)):
            # (What is handed through, or written in place, is not made here.)
            if isinstance(leaf, Tensor) and id(leaf) not in given:
                self.tensors.append(leaf)
                self.made[id(leaf)] = (_Seen(leaf, leaf._version), func, args, kwargs, item)
        return made


class _Finding:
    """Finds what a tensor is made of."""

    def __init__(
        self, modules: Mapping[int, str], inputs: Mapping[int, int], made: Mapping[int, Any]
    ) -> None:
        self._modules, self._inputs, self._made = modules, inputs, made

    def __call__(self, tensor: Tensor) -> Source | None:
        try:
            return self._source(tensor)
        except LookupError:
            return None

    def _source(self, tensor: Tensor) -> Source:
        if id(tensor) in self._modules:
            return OfModule(self._modules[id(tensor)])
        if id(tensor) in self._inputs:
            return OfInput(self._inputs[id(tensor)])
        seen, func, args, kwargs, item = self._made[id(tensor)]
        if not seen.is_unchanged:
            raise LookupError
        args, kwargs = tree_map(
            lambda leaf: self._source(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        return OfFunction(func, args, kwargs, item)


def _loss_among(output: Any, leaves: list[Any]) -> int | None:
    """Return which leaf is the loss, by the rule of model files."""
    from planner.errors import ModelError
    from planner.language.graph.batch import loss_of

    try:
        loss = loss_of(output, None)
    except ModelError:
        return None
    return next((n for n, leaf in enumerate(leaves) if leaf is loss), None)
