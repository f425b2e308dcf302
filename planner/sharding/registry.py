"""Which rule speaks for which op.

A rule is a function from a `Call` to the shardings that compute the right thing on local
shards. It need not list the all-replicated one nor check that sizes divide: the registry
does both. Where an op's own arguments must change on a shard (the sizes of a view), a
second function, its *local form*, returns the op or ops that run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from planner.errors import LayoutError
from planner.graph import Arg, Op, Program, TensorMeta
from planner.placement import OpSharding, Placement, Replicate
from planner.sharding.call import Call, local_shape

Rule = Callable[[Call], Iterable[OpSharding]]


@dataclass(frozen=True, slots=True)
class LocalForm:
    """What runs on one shard: ops in order, and metas of tensors only they know."""

    ops: tuple[Op, ...]
    tensors: tuple[TensorMeta, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A call with a sharding chosen for it; what a local form sees."""

    call: Call
    sharding: OpSharding
    axis: str

    @property
    def op(self) -> Op:
        """The op as captured."""
        return self.call.op

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of one rank's part of an output."""
        whole, placement = self.call.outputs[index], self.sharding.outputs[index]
        return local_shape(whole, placement, self.call.axis_size)

    def local_input(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of one rank's part of an input."""
        whole, placement = self.call.inputs[index], self.sharding.inputs[index]
        return local_shape(whole, placement, self.call.axis_size)

    def with_args(self, *args: Arg, target: str = "", kwargs: tuple = ()) -> LocalForm:
        """Return the op with other arguments (and another target)."""
        op = replace(self.op, args=args, kwargs=kwargs, target=target or self.op.target)
        return LocalForm((op,))


LocalRule = Callable[[Placed], LocalForm]

_RULES: dict[str, Rule] = {}
_LOCAL: dict[str, LocalRule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for op packets (``aten.add``) or single overloads (``aten.add.Tensor``)."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"two sharding rules for {name}")
            _RULES[name] = function
        return function

    return register


def local_form(*names: str) -> Callable[[LocalRule], LocalRule]:
    """Register what runs on a shard where that is not the op unchanged."""

    def register(function: LocalRule) -> LocalRule:
        for name in names:
            if name in _LOCAL:
                raise ValueError(f"two local forms for {name}")
            _LOCAL[name] = function
        return function

    return register


def _find(table: Mapping[str, object], target: str) -> object | None:
    found = table.get(target)
    return found if found is not None else table.get(target.rpartition(".")[0])


def has_rule(target: str) -> bool:
    """Whether an op has a sharding rule; without one it runs replicated."""
    return _find(_RULES, target) is not None


def strategies(op: Op, tensor: Mapping[str, TensorMeta], axis_size: int) -> tuple[OpSharding, ...]:
    """Return every sharding of an op that computes the right thing, all-replicated first.

    `tensor` has whole shapes as numbers. Only shardings whose sizes divide are offered.
    """
    call = Call(op, tensor, axis_size)
    found = {call.replicated(): None}
    function = _find(_RULES, op.target)
    if function is not None and axis_size > 1:
        for sharding in function(call):  # type: ignore[operator]
            if call.fits(sharding):
                found[sharding] = None
    return tuple(found)


def local_ops(
    op: Op, sharding: OpSharding, tensor: Mapping[str, TensorMeta], *, axis: str, axis_size: int
) -> LocalForm:
    """Return what runs on each rank for an op under one of its `strategies`.

    Raises LayoutError when the sharding is not one of them.
    """
    replicated = all(isinstance(p, Replicate) for p in (*sharding.inputs, *sharding.outputs))
    if not replicated:
        offered = strategies(op, tensor, axis_size)
        if sharding not in offered:
            shapes = ", ".join(str(list(tensor[name].shape)) for name in op.inputs)
            raise LayoutError(
                f"op {op.name} ({op.target} of {shapes}) can't run as {sharding} on "
                f"{axis}={axis_size}; use one of {'; '.join(map(str, offered))}"
            )
        form = _find(_LOCAL, op.target)
        if form is not None:
            return form(Placed(Call(op, tensor, axis_size), sharding, axis))  # type: ignore[operator]
    return LocalForm((op,))


def grad_is_partial(outputs: Iterable[Placement]) -> bool:
    """Whether an op leaves the gradient of its Replicate inputs as a Partial sum."""
    return any(not isinstance(placement, Replicate) for placement in outputs)


def ops_without_rule(program: Program) -> dict[str, int]:
    """Count the ops of a program that always run replicated, by target."""
    counts: dict[str, int] = {}
    for op in program.ops:
        if op.inputs and not has_rule(op.target):  # making a tensor needs no rule
            counts[op.target] = counts.get(op.target, 0) + 1
    return counts
