"""The text of a rule: letters for the dims of an op's tensors, as ``...d, df, +f -> ...f``.

`read_equation` takes a text apart; `Equation.on` finds the letters of one call's dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from planner.errors import LayoutError
from planner.language.ops.call import Shape

WHOLE = "_"
"""Stands for a dim that is never cut."""

DOTS = "..."
"""Stands for any leading dims."""

Dims = tuple[str | None, ...]
"""A letter for each dim of a tensor, or `DOTS` and a number; None for a dim that stays whole."""


class GivenTensor(NamedTuple):
    """A tensor as functions of a rule are given it: its whole shape, and the name of its dtype."""

    shape: Shape
    dtype: str

    def numel(self) -> int:
        """Return the number of entries."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Equation:
    """A rule's text: for each tensor its dims, as letters, `WHOLE` and, leading, `DOTS`."""

    text: str
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    addends: frozenset[int]
    """Positions of inputs that are added after the sum."""

    @property
    def letters(self) -> frozenset[str]:
        """Every letter, once."""
        dims = {dim for tensor in (*self.inputs, *self.outputs) for dim in tensor}
        return frozenset(dims - {WHOLE, DOTS})

    @property
    def summed(self) -> frozenset[str]:
        """Letters that an output lacks."""
        return frozenset(x for x in self.letters if any(x not in out for out in self.outputs))

    def on(
        self, inputs: Sequence[Shape], outputs: Sequence[Shape], target: str, uneven: frozenset[str]
    ) -> Letters:
        """Return the letters of a call's dims.

        A dim of size one that is stretched, as in broadcasting, is a whole one. Letters in `uneven`
        may have several sizes. Raises LayoutError where tensors are not what the text says.
        """
        if (len(self.inputs), len(self.outputs)) != (len(inputs), len(outputs)):
            raise LayoutError(
                f"the rule {self.text!r} of {target} has {len(self.inputs)} tensors and "
                f"{len(self.outputs)} results; here it is given {len(inputs)} and returns "
                f"{len(outputs)}: name them all, or let a function return the text of each call"
            )
        named = [*zip(self.inputs, inputs, strict=True), *zip(self.outputs, outputs, strict=True)]
        dims = [self._of(tensor, shape, target) for tensor, shape in named]
        sizes: dict[str, int] = {}
        for tensor, (_, shape) in zip(dims, named, strict=True):
            for dim, size in zip(tensor, shape, strict=True):
                sizes[dim] = max(size, sizes.get(dim, 1))
        found: list[Dims] = []
        for tensor, (_, shape) in zip(dims, named, strict=True):
            for dim, size in zip(tensor, shape, strict=True):
                if size not in (1, sizes[dim]) and dim != WHOLE and dim not in uneven:
                    raise LayoutError(
                        f"{dim!r} of the rule {self.text!r} of {target} runs over {sizes[dim]} "
                        f"entries and over {size} here (shapes {_shapes(inputs)} -> "
                        f"{_shapes(outputs)}); give dims of two sizes two letters"
                    )
            stretched = zip(tensor, shape, strict=True)
            found.append(
                tuple(
                    None if dim == WHOLE or (size == 1 != sizes[dim]) else dim
                    for dim, size in stretched
                )
            )
        return Letters(tuple(found[: len(inputs)]), tuple(found[len(inputs) :]), sizes)

    def _of(self, tensor: tuple[str, ...], shape: Shape, target: str) -> tuple[str, ...]:
        """The dims of one tensor, where leading ones are numbered from the last."""
        more = len(shape) - len(tensor)
        if tensor[:1] == (DOTS,):
            leading = tuple(f"{DOTS}{place}" for place in range(more + 1, 0, -1))
            tensor, more = (*leading, *tensor[1:]), min(more + 1, 0)
        if more:
            raise LayoutError(
                f"the rule {self.text!r} of {target} has {len(tensor)} dims for a tensor of shape "
                f"{list(shape)}; write a letter for each dim, '{WHOLE}' for one that is never cut, "
                f"or '{DOTS}' for the leading ones"
            )
        return tensor


class Letters(NamedTuple):
    """The letters of a call's dims, and how many entries each runs over."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[str, int]

    def only(self, letter: str) -> tuple[list[Dims], list[Dims]]:
        """Return inputs and outputs where all other dims are whole."""
        return tuple(  # type: ignore[return-value]
            [tuple(dim if dim == letter else None for dim in tensor) for tensor in tensors]
            for tensors in (self.inputs, self.outputs)
        )


def read_equation(text: str, target: str) -> Equation:
    """Take a rule's text apart. Raise ValueError where it is none."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"the rule {text!r} of {target} has no '->'; write it as 'bsd, df -> bsf'")
    given, made = ([tensor.strip() for tensor in side.split(",")] for side in sides)
    equation = Equation(
        text,
        tuple(tuple(_dims(tensor.removeprefix("+"), text, target)) for tensor in given),
        tuple(tuple(_dims(tensor, text, target)) for tensor in made),
        frozenset(i for i, tensor in enumerate(given) if tensor.startswith("+")),
    )
    unknown = sorted(equation.letters - {dim for tensor in equation.inputs for dim in tensor})
    if unknown:
        raise ValueError(
            f"the rule {text!r} of {target} has {unknown[0]!r} in a result, but in no tensor that "
            f"the op is given; write '{WHOLE}' for a dim that is made anew"
        )
    return equation


def _dims(tensor: str, text: str, target: str) -> Iterator[str]:
    """The dims of one tensor."""
    tensor = tensor.replace(" ", "")
    if tensor.startswith(DOTS):
        yield DOTS
    for dim in tensor.removeprefix(DOTS):
        if dim != WHOLE and not dim.isalpha():
            raise ValueError(
                f"the rule {text!r} of {target} has {dim!r}; a dim is a letter, '{WHOLE}' for one "
                f"that is never cut, or '{DOTS}' for the leading ones"
            )
        yield dim


def _shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
