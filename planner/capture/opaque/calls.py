"""How a module is called as it is: with tensors of the caller's, and a seed where it draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from planner.language.graph.module_keys import CACHED_WEIGHTS

SEED = "planner.seed"
"""The name of a seed among the keyword arguments of a call; no forward has it."""


SEEDS = 2**31
"""Seeds are less."""


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, each once."""
    return [*module.parameters(), *module.buffers()]


def called(
    module: nn.Module, own: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the forward of a module with other tensors in place of `tensors_of` it.

    Hooks on the module itself do not run: they are ops around the call.
    """
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    named = dict(zip(names, own, strict=True))
    # A part that is in several places is swapped at each: put back from the last to the first.
    swapped = _reparametrize_module(module, named, tie_weights=True, stack_weights=True)
    with _cached_weights_kept(module), swapped:
        return module.forward(*args, **kwargs)


@contextmanager
def _cached_weights_kept(module: nn.Module) -> Iterator[None]:
    """Take back what recurrent layers of torch note of their parameters, when a call has ended.

    They make it anew by themselves where a parameter is another one; kept, it would hold the
    call's tensors.
    """
    held = [vars(part) for part in module.modules()]
    before = [(each, name, each[name]) for each in held for name in CACHED_WEIGHTS if name in each]
    try:
        yield
    finally:
        for each, name, value in before:
            each[name] = value


def advice_on_shapes(module: nn.Module) -> str:
    """Say what to do where a module returns a shape that depends on values."""
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    held = [
        vars(module).get("function"),
        *(each for kind in classes for each in vars(kind).values()),
    ]
    codes = [each.__code__ for each in held if isinstance(each, FunctionType)]
    if any("pad_packed_sequence" in names for code in codes for names in _names_in(code)):
        return (
            "pad_packed_sequence makes it as long as the longest sample that is there, of which "
            "a part of the batch has another: give it total_length, or put all that uses "
            "its result into the same module"
        )
    return "put all that uses it into the same module"


def _names_in(code: CodeType) -> Iterator[tuple[str, ...]]:
    yield code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
