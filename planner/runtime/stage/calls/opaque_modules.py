"""Calling a user's module as it is, by the key that a graph names it by.

Nothing of what happens inside is kept for the backward but the op's inputs: the backward runs the
module again. So what a step holds of it is bounded ahead, whatever course the values take.

A module that draws random numbers is given a seed, which an op before it draws. It draws from that
seed alone: the same in its backward and on ranks with the same samples, however many numbers the
course takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from planner.capture.opaque.calls import SEED, advice_on_shapes, called
from planner.capture.opaque.functions import find_function
from planner.errors import PlanError
from planner.language.graph import ModelGraph, Op, Program, Ref
from planner.language.graph.module_keys import (
    OPAQUE_MODULE,
    class_of,
    module_key,
)
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.lowering import ONCE
from planner.language.ops.families.entries.routing import STACK_OF_RUNS
from planner.language.plan import Precision
from planner.runtime.process.device import forked_generators, is_accelerator, of

# ----------------------------------------------------------------------------------- finding


_kept: dict[str, nn.Module] = {}


def opaque_calls(program: Program) -> tuple[Op, ...]:
    """Return the ops of a program that call modules as they are."""
    return tuple(op for op in program.ops if op.target == OPAQUE_MODULE)


def keep_modules(graph: ModelGraph, model: nn.Module) -> None:
    """Keep copies, without values, of the modules of a model that its graph calls as they are,
    and the functions.

    Modules are found in training and in evaluation mode. Raises PlanError where one is missing.
    """
    keys = {str(op.args[0]) for program in graph.classes for op in opaque_calls(program)}
    classes = {class_of(key) for key in keys}
    for part in model.modules() if keys else ():
        if type(part).__qualname__ not in classes:
            continue
        for copied in _modes_of(part):
            _kept.setdefault(module_key(copied), copied)
    for key in sorted(keys - _kept.keys()):
        function = find_function(key)
        if function is not None:
            _kept[key] = function
    for key in sorted(keys):
        find_module(key)


def _modes_of(module: nn.Module) -> Iterator[nn.Module]:
    from planner.capture.export import meta_copy

    yield meta_copy(module)
    for mode in (True, False):
        yield meta_copy(module).train(mode)


def find_module(key: str) -> nn.Module:
    """Return the copy of a key's module. Raises PlanError where `keep_modules` found none."""
    if key not in _kept:
        raise PlanError(
            f"the plan's model calls {key} as it is, and the model that was given has no module "
            "or function of that code and those attributes; search again"
        )
    return _kept[key]


# ----------------------------------------------------------------------------------- calling


def opaque_module(
    key: str,
    precision: Precision,
    holds_samples: Sequence[bool],
    cost: Sequence[Sequence[int]],
    results: Sequence[Any],
    args: Sequence[Any],
    kwargs: Sequence[Any],
    own: Sequence[Tensor],
    own_names: Sequence[str | None] = (),
) -> Any:
    """Return the tensors that a module returns, one alone as it is.

    `results` are (shape, dtype, whether it has a gradient) of each; the others are as
    `planner.capture.opaque.ModuleCall` has them, tensors in their places. `own_names` are what the
    program calls the parameters of `own` (see `own_params`).

    Raises PlanError when no such module was kept, or when it returns other shapes than in its
    trial.
    """
    return _opaque_module(key, precision, cost, results, args, kwargs, own, own_names)


@torch.compiler.disable
def _opaque_module(
    key: str,
    precision: Precision,
    cost: Sequence[Sequence[int]],
    results: Sequence[Any],
    args: Sequence[Any],
    kwargs: Sequence[Any],
    own: Sequence[Tensor],
    own_names: Sequence[str | None],
) -> Any:
    leaves: list[Tensor] = []
    call = _Call(
        key=key,
        precision=precision,
        results=results,
        places=(_placed(args, leaves), _placed(kwargs, leaves)),
        num_own=len(own),
        own_names=tuple(own_names),
        scratch_bytes=(int(cost[0][4]), int(cost[1][4])),
        reached=noted(),
    )
    made: tuple[Tensor, ...] = _OpaqueCall.apply(call, *leaves, *own)
    return made[0] if len(made) == 1 else made


class _Place(int):
    """Stands for a tensor in the arguments."""


# (A function inside that calls itself is a cycle, which would hold tensors until it is collected.)
def _placed(value: Any, leaves: list[Tensor]) -> Any:
    """Return an argument with a place for each tensor, which `leaves` get."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return _Place(len(leaves) - 1)
    return [_placed(item, leaves) for item in value] if isinstance(value, list | tuple) else value


def _filled(place: Any, tensors: Sequence[Tensor]) -> Any:
    """Return an argument with tensors in their places."""
    if isinstance(place, list):
        return tuple(_filled(item, tensors) for item in place)
    return tensors[place] if isinstance(place, _Place) else place


class _Call:
    """What a call is beside its tensors."""

    def __init__(
        self,
        *,
        key: str,
        precision: Precision,
        results: Sequence[Any],
        places: tuple[Any, Any],
        num_own: int,
        own_names: tuple[str | None, ...],
        scratch_bytes: tuple[int, int],
        reached: set[str] | None,
    ) -> None:
        self.key, self.precision, self.results = key, precision, results
        self.places, self.num_own, self.own_names = places, num_own, own_names
        self.scratch_bytes, self.reached = scratch_bytes, reached

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that the module returns."""
        args, kwargs = (_filled(place, tensors) for place in self.places)
        own = tensors[len(tensors) - self.num_own :]
        named = dict(kwargs)
        seed = named.pop(SEED, None)
        with ExitStack() as modes:
            if seed is not None:
                # Its backward and the ranks with the same samples draw from the same seed again;
                # other draws of the step are left as they are.
                modes.enter_context(forked_generators(seed.device))
                torch.default_generator.manual_seed(int(seed))
                if is_accelerator(seed.device):
                    of(seed.device).manual_seed(int(seed))
            if _inside:
                modes.enter_context(_inside[-1]())
            if self.precision != "model":
                from planner.capture.modes.precision import mixed_dtypes

                modes.enter_context(mixed_dtypes(self.precision))
            module = find_module(self.key)
            result = called(module, own, args, named)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def check(self, made: Sequence[Tensor]) -> None:
        """Refuse results that what follows was not made for."""
        found = [(tuple(t.shape), t.dtype) for t in made]
        planned = [(tuple(shape), dtype) for shape, dtype, _ in self.results]
        if found != planned:
            raise PlanError(
                f"{class_of(self.key)}, which runs as it is, returned {found} and its "
                f"plan has {planned}: a shape or dtype that depends on values; "
                f"{advice_on_shapes(find_module(self.key))}"
            )


class _OpaqueCall(torch.autograd.Function):
    """A module's forward, and a backward that runs it again."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        if _are_empty(tensors):
            # A dry run counts what the module held for a time in its trial.
            scratch = tensors[0].new_empty(call.scratch_bytes[0], dtype=torch.uint8)
            made = [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype, _ in call.results]
            del scratch
        else:
            # (A recurrent layer moves the memory of the very tensors that it is given.)
            made = call.run([t.detach() for t in tensors])
            call.check(made)
        # Results are new: a module may return its input, or a view of it.
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        made = [t.clone() if t.untyped_storage()._cdata in given else t for t in made]
        constant = (t for t, (*_, has_grad) in zip(made, call.results, strict=True) if not has_grad)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, tensors, wanted = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        asked = [t for t, want in zip(tensors, wanted, strict=True) if want]
        if _are_empty(tensors):
            scratch = tensors[0].new_empty(call.scratch_bytes[1], dtype=torch.uint8)
            found: list[Tensor | None] = [torch.empty_like(t) for t in asked]
            del scratch
        else:
            # A graph of its own, made and walked here: the forward kept inputs alone.
            again = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
            with torch.enable_grad():
                made = call.run(again)
            ends = [
                (t, grad)
                for t, grad in zip(made, grads, strict=True)
                if t.requires_grad and grad is not None
            ]
            asked = [t for t in again if t.requires_grad]
            found = list(
                torch.autograd.grad(
                    [t for t, _ in ends], asked, [grad for _, grad in ends], allow_unused=True
                )
                if ends
                else [None] * len(asked)
            )
        of_wanted = iter(zip(asked, found, strict=True))
        result: list[Tensor | None] = []
        first_own = len(tensors) - call.num_own
        for index, want in enumerate(wanted):
            if not want:
                result.append(None)
                continue
            tensor, grad = next(of_wanted)
            if grad is not None and index >= first_own and call.reached is not None:
                name = call.own_names[index - first_own] if call.own_names else None
                call.reached.update(() if name is None else (name,))
            # Sums over ranks take a gradient of each; `reached` has whether it is one.
            result.append(torch.zeros_like(tensor) if grad is None else grad)
        return None, *result


def _are_empty(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


_inside: list[Callable[[], AbstractContextManager[Any]]] = []


@contextmanager
def calling_inside(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Have every call meanwhile, on any thread, run inside such a context."""
    _inside.append(context)
    try:
        yield
    finally:
        _inside.pop()


# ----------------------------------------------------------------- parameters that nothing reached


_reached: list[set[str]] = []


@contextmanager
def noting_reached(found: set[str]) -> Iterator[None]:
    """Have calls inside add to `found`, in their backward, what their program calls the parameters
    that a gradient reached.
    """
    _reached.append(found)
    try:
        yield
    finally:
        _reached.pop()


def noted() -> set[str] | None:
    """Return what calls add to, where they are inside of `noting_reached`."""
    return _reached[-1] if _reached else None


def own_params(program: Program, op: Op) -> tuple[str | None, ...]:
    """Return which parameter of a program each own tensor of an opaque op is, gathered or not; or
    each weight of a stack.
    """
    made_by = {name: each for each in program.ops for name in each.outputs}
    own = op.args[1 if op.target == STACK_OF_RUNS else 7]
    assert isinstance(own, tuple)

    def source(name: str) -> str | None:
        # A parameter may be gathered, or its gradient kept on one rank, on its way to the op.
        while name in made_by and made_by[name].target in (REDISTRIBUTE, ONCE):
            name = made_by[name].inputs[0]
        return name if name in program.params else None

    return tuple(source(ref.name) if isinstance(ref, Ref) else None for ref in own)


def only_opaque_params(program: Program) -> frozenset[str]:
    """Return the parameters of a program that nothing uses but modules called as they are, and
    loops that pass over experts without rows.
    """
    own: set[str] = set()
    others: set[str] = set()
    for op in program.ops:
        names: Iterable[str] = op.inputs
        if op.target == OPAQUE_MODULE:
            held = {ref.name for ref in op.args[7] if isinstance(ref, Ref)}  # type: ignore[union-attr]
            own |= held
            names = [name for name in op.inputs if name not in held]
        if op.target == STACK_OF_RUNS:
            own |= {*op.inputs[1:]}
            names = op.inputs[:1]
        others.update(names)
    return frozenset(own - others - set(program.outputs)) & frozenset(program.params)
