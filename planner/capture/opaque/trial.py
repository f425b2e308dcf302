"""One call of a module, tried on random values on the CPU: what it makes, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from planner.capture.checks.functions import as_written
from planner.capture.checks.on_meta.outside_modes import outside_modes
from planner.capture.checks.on_meta.rehearsal import state_of
from planner.capture.diagnose import first_line
from planner.capture.modes.precision import mixed_dtypes
from planner.capture.opaque.calls import SEED, advice_on_shapes, called, tensors_of
from planner.capture.opaque.cost import Cost, counted, dearest
from planner.capture.opaque.draws import TrialDraws
from planner.capture.opaque.samples import (
    DRAWS,
    WHOLE_NUMBERS,
    Draw,
    are_apart,
    input_like,
    own_like,
    splits,
)
from planner.errors import CaptureError
from planner.language.graph.module_keys import attributes
from planner.language.plan import Precision

SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for a tensor in the arguments of a call."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """One tensor that a module returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of an opaque module.

    Attributes:
        key: names the module, see `module_key`.
        args: of its forward, `Place(i)` for the i-th tensor of the call; tuples for lists.
        kwargs: likewise.
        num_given: tensors in the arguments, with the seed of a module that draws random numbers as
            the last; the module's own follow them.
        results: the tensors that it returns.
        structure: what it returns, `Tensor` for each of them, and its tree.
        holds_samples: of each tensor in the arguments, whether its first dim runs over samples as
            that of each result does; empty where samples are not computed apart.
        cost: of forward and backward.
    """

    key: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    num_given: int
    results: tuple[Result, ...]
    structure: tuple[list[Any], Any]
    holds_samples: tuple[bool, ...]
    cost: Cost


class NotHeld(CaptureError):
    """What a module is given or returns is nothing that a graph can hold: one around it may do."""


class Unread:
    """Stands for what a module returns that no graph can hold (a cache of keys), and that training
    leaves unread. Raises NotHeld for any use, so that the module around becomes the op.
    """

    def __init__(self, who: str, kind: str) -> None:
        object.__setattr__(self, "_told", f"{who}, returns a {kind}; return tensors and numbers")

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotHeld(object.__getattribute__(self, "_told"))

    __getattribute__ = __setattr__ = __getitem__ = __setitem__ = __len__ = __iter__ = _refuse
    __bool__ = __contains__ = __call__ = __eq__ = __hash__ = __add__ = __radd__ = _refuse


@dataclass(kw_only=True)
class Trial:
    """A call that is to be tried.

    Attributes:
        module: what is called.
        precision: that the model is captured in.
        who: names the module and the user's line, in messages.
        key: names the module in a graph, see `module_key`.
        places: args and kwargs, in which a `Place` stands for a tensor of `given`.
        given: the tensors of the arguments, without values.
        num_samples: of the batch that the call is a part of; units of those that belong together.
        unit: samples of each of these.
        first: the same call on fewer samples, where that was tried: only shapes differ.
    """

    module: nn.Module
    precision: Precision
    who: str
    key: str
    places: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
    given: Sequence[Tensor]
    num_samples: int
    unit: int = 1
    first: ModuleCall | None
    _draws: TrialDraws = field(default_factory=TrialDraws)

    def run(self) -> ModuleCall:
        """Try it. Raises CaptureError for what a plan can't repeat, in one line."""
        self._refuse_loose_tensors("keeps")
        before = state_of(self.module)
        # The trial leaves the script's random numbers as they were.
        random_state = torch.random.get_rng_state()
        # Not torch.manual_seed: that seeds accelerators too, whose random numbers are the script's.
        torch.default_generator.manual_seed(0)
        try:
            with _plainly():
                call = self._tried()
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{self.who}, fails on random ones"
                f"{'' if self.precision == 'model' else f' in {self.precision}'} "
                f"({first_line(error)}); let it "
                "run on any, or use torch.where or a mask instead of what depends on values"
            ) from error
        finally:
            torch.random.set_rng_state(random_state)
        self._refuse_loose_tensors("stores")
        after = state_of(self.module)
        changed = [name for name, value in after.items() if value != before.get(name)]
        if changed:
            raise CaptureError(
                f"{self.who}, changes {changed[0]}; return what "
                "it computes, as a plan repeats one forward in every step"
            )
        return call

    def _refuse_loose_tensors(self, verb: str) -> None:
        parts = set(self.module.modules())
        for name, part in self.module.named_modules():
            for attribute, value in attributes(part):
                for leaf in tree_leaves(value):
                    is_other = isinstance(leaf, nn.Module) and leaf not in parts
                    if isinstance(leaf, Tensor) or is_other:
                        what = "a module" if is_other else "a tensor"
                        raise CaptureError(
                            f"{self.who}, {verb} {what} in "
                            f"{f'{name}.{attribute}'.lstrip('.')}, which is not registered; "
                            + (
                                "return it from forward"
                                if verb == "stores"
                                else "register it, as a buffer or a part"
                            )
                        )

    def _tried(self) -> ModuleCall:
        own = [own_like(tensor) for tensor in tensors_of(self.module)]
        whole, *others = self._whole_numbers(own)
        values = self._values(DRAWS[0], whole)
        result = self._untouched(values, own)
        leaves, spec = tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not made:
            raise NotHeld(f"{self.who}, returns no tensor; return tensors and numbers")
        structure = [self._told(leaf) for leaf in leaves]
        if self.first is None:
            has_gradient = [tensor.requires_grad for tensor in made]
            drawn = [self._values(draw, whole) for draw in DRAWS]
            drawn += [self._values(DRAWS[0], other) for other in others]
            holds = self._compare_draws(own, drawn, leaves, has_gradient)
            if not self._draws.are_apart:
                holds = ()
            cost = dearest([self._cost(each, own) for each in (values, *drawn[len(DRAWS) :])])
            if holds and self._draws.number:
                # The seed is the same for all samples.
                holds = (*holds, False)
        else:
            holds, cost = self.first.holds_samples, self.first.cost
            has_gradient = [result.is_differentiable for result in self.first.results]
        results = tuple(
            Result(shape=tuple(tensor.shape), dtype=tensor.dtype, is_differentiable=has)
            for tensor, has in zip(made, has_gradient, strict=True)
        )
        args, kwargs = self.places
        if self._draws.number:
            kwargs = (*kwargs, (SEED, Place(len(self.given))))
        return ModuleCall(
            key=self.key,
            args=args,
            kwargs=kwargs,
            num_given=len(self.given) + bool(self._draws.number),
            results=results,
            structure=(structure, spec),
            holds_samples=holds,
            cost=cost,
        )

    def _told(self, leaf: Any) -> Any:
        """What a call has of a part of its result."""
        if isinstance(leaf, Tensor):
            return Tensor
        return leaf if isinstance(leaf, SCALARS) else Unread(self.who, type(leaf).__name__)

    @property
    def _rows(self) -> int:
        """Samples one by one: which of them are neighbours is not known where units lie apart."""
        return self.num_samples * self.unit

    def _values(self, draw: Draw, whole: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [input_like(tensor, draw, self._rows, whole) for tensor in self.given]

    def _whole_numbers(self, own: Sequence[Tensor]) -> list[Callable[[Tensor], Tensor]]:
        """Return the makers of integers that the forward takes, at least one.

        Those of which it makes finite numbers come first.
        """
        first, *others = WHOLE_NUMBERS
        if all(
            t.is_floating_point() or t.is_complex() or t.dtype == torch.bool for t in self.given
        ):
            return [first]
        taken: list[tuple[bool, Callable[[Tensor], Tensor]]] = []
        for whole in (first, *others):
            try:
                made = self._tensors_of(own)(self._values(DRAWS[0], whole))
            except Exception:
                continue
            taken.append((all(bool(tensor.isfinite().all()) for tensor in made), whole))
        return [whole for _, whole in sorted(taken, key=lambda each: not each[0])] or [first]

    def _compare_draws(
        self,
        own: Sequence[Tensor],
        drawn: Sequence[Sequence[Tensor]],
        leaves: Sequence[Any],
        has_gradient: list[bool],
    ) -> tuple[bool, ...]:
        """See that shapes and numbers hold for other values; return which inputs hold samples.

        Results that have a gradient for some of the values are noted in `has_gradient`.
        """
        fixed = _fixed(leaves)
        possible: list[tuple[bool, ...]] | None = None
        for values in drawn:
            again = tree_leaves(self._result(values, own))
            if _fixed(again) != fixed:
                raise NotHeld(
                    f"{self.who}, returns a tensor whose shape, or a number, depends on values; "
                    f"{advice_on_shapes(self.module)}"
                )
            made = [leaf for leaf in again if isinstance(leaf, Tensor)]
            has_gradient[:] = (
                has or t.requires_grad for has, t in zip(has_gradient, made, strict=True)
            )
            self._compare_twice(values, own, made)
            if possible is None:
                possible = [*splits(values, self.num_samples)]
            elif not all(bool(tensor.isfinite().all()) for tensor in made):
                continue  # integers that other values do not go with
            # A split that a single draw contradicts is out: samples may seem apart by chance, never
            # not apart.
            possible = [
                split
                for split in possible
                if are_apart(self._tensors_of(own), values, made, split, self._rows)
            ]
        return possible[0] if possible else ()

    def _compare_twice(
        self, values: Sequence[Tensor], own: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        again = self._tensors_of(own)(values)
        if any(not torch.equal(_whole(a), _whole(b)) for a, b in zip(made, again, strict=True)):
            raise CaptureError(
                f"{self.who}, gives something else the second "
                "time; a plan repeats one forward in every step"
            )

    def _cost(self, values: Sequence[Tensor], own: Sequence[Tensor]) -> Cost:
        def forward() -> list[Tensor]:
            with torch.no_grad():
                return self._tensors_of(own)(values)

        def backward() -> list[Tensor]:
            given = [*values, *own]
            again = [t.detach().requires_grad_(t.requires_grad) for t in given]
            made = self._tensors_of(again[len(values) :])(again[: len(values)])
            ends = [t for t in made if t.requires_grad]
            asked = [t for t in again if t.requires_grad]
            if not ends or not asked:
                return []
            # (Any gradients of the right shapes do: the results themselves.)
            found = torch.autograd.grad(ends, asked, ends, allow_unused=True)
            return [t for t in found if t is not None]

        def num_bytes(tensors: Sequence[Tensor]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors)

        return Cost(
            forward=counted(forward, self.num_samples, num_bytes),
            backward=counted(backward, self.num_samples, num_bytes),
        )

    def _tensors_of(self, own: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        def run(values: Sequence[Tensor]) -> list[Tensor]:
            leaves = tree_leaves(self._result(values, own))
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        return run

    def _result(self, values: Sequence[Tensor], own: Sequence[Tensor]) -> Any:
        """Return what the forward returns for these values."""
        args, kwargs = (_filled(place, values) for place in self.places)
        with ExitStack() as modes:
            modes.enter_context(self._draws)
            modes.enter_context(mixed_dtypes(self.precision))
            return called(self.module, own, args, dict(kwargs))

    def _untouched(self, values: Sequence[Tensor], own: Sequence[Tensor]) -> Any:
        """Return the result; refuse writes into what the module is given."""
        before = [tensor.detach().clone() for tensor in (*values, *own)]
        result = self._result(values, own)
        for tensor, old in zip((*values, *own), before, strict=True):
            if not torch.equal(_whole(tensor), _whole(old)):
                raise CaptureError(
                    f"{self.who}, writes into an input, a "
                    "parameter or a buffer; return a new tensor"
                )
        return result


def _filled(place: Any, values: Sequence[Tensor]) -> Any:
    """Return an argument with values in their places."""
    if isinstance(place, tuple):
        return tuple(_filled(item, values) for item in place)
    return values[place.index] if isinstance(place, Place) else place


def _fixed(leaves: Sequence[Any]) -> list[Any]:
    """What of a result must not depend on values."""
    return [
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, SCALARS)
        else type(leaf)
        for leaf in leaves
    ]


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor in which nothing is NaN, which is unlike itself."""
    tensor = tensor.detach()
    return tensor.nan_to_num() if tensor.is_floating_point() or tensor.is_complex() else tensor


@contextmanager
def _plainly() -> Iterator[None]:
    """Run ops as they are, autograd functions among them."""
    with outside_modes(), as_written():
        yield
