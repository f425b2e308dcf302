"""`register_rule`: a rule of the user's becomes the record of an op family."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from planner.errors import LayoutError
from planner.language.graph import Ref, Symbol, bind_arg
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, Placed
from planner.language.ops.flops import output_numel, product_backward
from planner.language.ops.letters import by_letters
from planner.language.ops.record import (
    FOREIGN,
    Arithmetic,
    OpFamily,
    ShardRule,
    register,
    unregister,
)
from planner.language.ops.users.equation import Equation, GivenTensor, Letters, read_equation

Dims = str | Callable[..., str | None]
"""The text of a rule, or a function of the op's arguments that returns it for a call."""


def register_rule(
    op: Any,
    dims: Dims,
    *,
    flop: Callable[..., float] | None = None,
    divided: Mapping[str, str] | None = None,
    contiguous: bool = False,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Say how a custom op is divided, and what it costs; see `planner.register_rule`."""
    target = target_of(op)
    divided = dict(divided or {})
    equation = read_equation(dims, target) if isinstance(dims, str) else None
    rule = UserRule(
        target=target,
        dims=read_equation(dims, target) if isinstance(dims, str) else dims,
        flop=flop,
        divided=divided,
        places=_places(target, divided),
    )
    for name, letter in divided.items():
        if equation is not None and letter not in equation.letters:
            raise ValueError(f"`divided` says {letter!r} of {name}; {dims!r} of {target} has none")
    sums = equation is not None and bool(equation.summed)
    if arithmetic is None:
        arithmetic = "matmul" if sums or flop is not None else "memory"
    digest = _digest(dims, flop, divided, contiguous, arithmetic)
    if (given := _RULES.get(target)) is not None:
        if given.digest == digest:
            return  # a model file is executed more than once
        unregister_rule(target)
    family = replace(
        FOREIGN,
        name=f"{target}, by a rule of the user's",
        targets=(target,),
        shard=(ShardRule(rule.shardings, contiguous=contiguous or bool(divided)),),
        local_form=rule.local_form if divided else None,
        worth_moving=arithmetic != "memory",
        arithmetic=arithmetic,
        flop=rule.flop_of,
        backward=product_backward if sums and flop is None else None,
        recomputed=arithmetic == "memory",
    )
    _RULES[target] = _Given(register(family), digest)


def unregister_rule(op: Any) -> None:
    """Take the rule of an op back. Raise KeyError where it has none."""
    unregister(_RULES.pop(target_of(op)).family)


def rule_digests() -> tuple[str, ...]:
    """Return what tells the rules of this process from others: answers differ by them."""
    return tuple(sorted(f"{target} {given.digest}" for target, given in _RULES.items()))


def has_user_rule(target: str) -> bool:
    """Whether an op such as ``mine.gated.default`` has a rule of the user's in this process."""
    return target in _RULES or target.rpartition(".")[0] in _RULES


def target_of(op: Any) -> str:
    """Return ``mine.gated`` of a custom op, an overload or a name such as ``mine::gated``.

    Raises ValueError for what is no op.
    """
    for attribute in ("_qualname", "_qualified_op_name", "_name"):
        if isinstance(name := getattr(op, attribute, None), str):
            return name.replace("::", ".")
    if isinstance(op, str) and op.replace("::", ".").count(".") in (1, 2):
        return op.replace("::", ".")
    raise ValueError(
        f"{op!r} is no op; give an op of torch.library, or its name, such as 'mine::gated'"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRule:
    """The functions of a record that follow from a rule.

    `divided` has letters by argument, `places` the positions of these arguments.
    """

    target: str
    dims: Equation | Callable[..., str | None]
    flop: Callable[..., float] | None
    divided: Mapping[str, str]
    places: Mapping[str, int]

    def shardings(self, call: Call) -> Iterator[OpSharding]:
        """Cut each letter in turn, where the counts that go with it divide, too."""
        for letter, sharding in self._by_letter(call):
            counts = [self._count(call, name) for name, of in self.divided.items() if of == letter]
            if all(count % call.axis_size == 0 for count in counts):
                yield sharding

    def local_form(self, placed: Placed) -> LocalForm:
        """The op with smaller counts of what the cut letter runs over."""
        call, cut = placed.call, _without_segments(placed.sharding)
        letters = [letter for letter, found in self._by_letter(call) if found == cut]
        args, kwargs = list(call.op.args), dict(call.op.kwargs)
        for name, letter in self.divided.items():
            if letter not in letters[:1]:
                continue
            part = self._count(call, name) // call.axis_size
            if name in kwargs:
                kwargs[name] = part
            else:
                args[self.places[name]] = part
        op = replace(call.op, args=tuple(args), kwargs=tuple(kwargs.items()))
        return LocalForm((op,))

    def flop_of(self, call: Call) -> float:
        """Flop of a forward: as the user says, else those of an einsum."""
        if self.flop is not None:
            return float(self._asked(self.flop, call))
        found = self._letters(call)
        if found is None:
            return float(output_numel(call))
        equation, letters = found
        kept = {dim for tensor in equation.outputs for dim in tensor}
        sums = [letters.sizes[letter] for letter in equation.summed - kept]
        return float(output_numel(call) * (2 * prod(sums) if sums else 1))

    def _by_letter(self, call: Call) -> Iterator[tuple[str, OpSharding]]:
        found = self._letters(call)
        if found is None:
            return
        equation, letters = found
        for letter in dict.fromkeys(
            dim for tensor in (*letters.inputs, *letters.outputs) for dim in tensor if dim
        ):
            for sharding in by_letters(
                *letters.only(letter), summed=equation.summed, addends=equation.addends
            ):
                yield letter, sharding

    def _letters(self, call: Call) -> tuple[Equation, Letters] | None:
        """The rule's text and the letters of a call; None where it can't be cut."""
        if isinstance(self.dims, Equation):
            equation = self.dims
        else:
            text = self._asked(self.dims, call)
            if text is None:
                return None
            try:
                equation = read_equation(text, self.target)
            except (ValueError, AttributeError) as error:
                raise LayoutError(str(error)) from None
        uneven = frozenset(self.divided.values())
        return equation, equation.on(call.inputs, call.outputs, self.target, uneven)

    def _asked(self, function: Callable[..., Any], call: Call) -> Any:
        """What a function of the user's returns for a call."""
        args = tuple(_given(arg, call) for arg in call.op.args)
        kwargs = {name: _given(arg, call) for name, arg in call.op.kwargs}
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise LayoutError(
                f"the rule of {self.target} failed in {function.__name__}: "
                f"{type(error).__name__}: {error}; it is given the op's arguments, with tensors "
                "by their shape and dtype"
            ) from error

    def _count(self, call: Call, name: str) -> int:
        value = bind_arg(call.arg(self.places[name], name), 1)
        if type(value) is not int:
            raise LayoutError(
                f"{name} of {self.target} is {value!r}, no count to be divided; leave it out of "
                "the rule's `divided`"
            )
        return value


class _Given(NamedTuple):
    """A rule of this process: its record, and what tells it from others."""

    family: OpFamily
    digest: str


_RULES: dict[str, _Given] = {}
"""By target without overload where the rule names none. Like the catalogue, one a process."""


def _given(arg: Any, call: Call) -> Any:
    """An argument as functions of a rule are given it."""
    if isinstance(arg, Ref):
        return GivenTensor(call.shape(arg), call.tensor[arg.name].dtype)
    if isinstance(arg, tuple):
        return tuple(_given(item, call) for item in arg)
    return arg.value if isinstance(arg, Symbol) else bind_arg(arg, 1)


def _places(target: str, names: Mapping[str, str]) -> dict[str, int]:
    """Positions of arguments, as the op's schema has them; raise ValueError where it has none."""
    if not names:
        return {}
    import torch

    library, packet, *overload = target.split(".")
    try:
        op = getattr(getattr(torch.ops, library), packet)
        schema = getattr(op, overload[0] if overload else op.overloads()[0])._schema
    except (AttributeError, RuntimeError):
        raise ValueError(f"no op {target}; define it before its rule, as `divided` needs") from None
    arguments = [argument.name for argument in schema.arguments]
    for name in names:
        if name not in arguments:
            told = ", ".join(arguments)
            raise ValueError(f"{target} has no argument {name}, as `divided` says; it has {told}")
    return {name: arguments.index(name) for name in names}


def _without_segments(sharding: OpSharding) -> OpSharding:
    inputs, outputs = (
        tuple(Shard(place.dim) if isinstance(place, Shard) else place for place in places)
        for places in (sharding.inputs, sharding.outputs)
    )
    return OpSharding(inputs=inputs, outputs=outputs)


def _digest(dims: Dims, flop: Callable[..., float] | None, *more: Any) -> str:
    digest = hashlib.sha256(repr(more).encode())
    for part in (dims, flop):
        digest.update(_code(part) if callable(part) else repr(part).encode())
    return digest.hexdigest()[:16]


def _code(function: Callable[..., Any]) -> bytes:
    """A function's code, with the file around it, on which it may depend."""
    code = inspect.unwrap(function).__code__
    own = repr((code.co_qualname, code.co_consts, getattr(function, "__defaults__", None)))
    try:
        around = Path(code.co_filename).read_bytes()
    except OSError:  # written at a prompt
        around = b""
    return around + code.co_code + own.encode()
