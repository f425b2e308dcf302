"""Pins: placements the user fixes, such as ``layers.*.mlp.up: S(0)@tp``.

A pin names parameters by a glob over their qualified names. A name without a parameter of
its own stands for the weight of the modules it matches.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.axes import split_axes
from planner.language.layout.placement import Own, Partial, Placement, parse_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One placement fixed by the user on one mesh axis; prints as it was written."""

    pattern: str
    placement: Placement
    axis: str

    def __str__(self) -> str:
        return f"{self.pattern}: {self.placement}@{self.axis}"


def parse_pin(text: str) -> Pin:
    """Parse ``NAME_GLOB: PLACEMENT@AXIS``; raise LayoutError on anything else.

    An axis on which every rank holds all parameters has no placements to fix.
    """
    pattern, colon, rest = text.rpartition(":")
    placement, at, axis = rest.strip().partition("@")
    known = axis.strip() in {split.name for split in split_axes()}
    if not colon or not at or not pattern.strip() or not known:
        raise LayoutError(
            f"pin {text!r} is not understood; write it like 'layers.*.mlp.up: S(0)@tp'"
        )
    parsed = parse_placement(placement.strip())
    if isinstance(parsed, Partial | Own):
        what = "a partial sum" if isinstance(parsed, Partial) else "a value of each rank's own"
        raise LayoutError(f"pin {text!r}: a parameter can't rest as {what}; use R or S(dim)")
    return Pin(pattern=pattern.strip(), placement=parsed, axis=axis.strip())


def class_pins(graph: ModelGraph, pins: Sequence[Pin]) -> dict[int, dict[str, Placement]]:
    """Return pinned params of each block class by the name the class program gives them.

    Raises LayoutError when a pin matches nothing, two pins disagree about a parameter, or
    they treat blocks of one class differently (equal blocks share a layout).
    """
    by_name = {t.name: _pins_of(t, pins) for t in graph.params}
    for pin in pins:
        if not any(pin in matched for matched in by_name.values()):
            raise LayoutError(f"pin {pin} matches no parameter{_suggestion(graph, pin)}")
    for tensor in graph.params:
        matched = by_name[tensor.name]
        if len({pin.placement for pin in matched}) > 1:
            raise LayoutError(
                f"pins {' and '.join(map(str, matched))} disagree about {tensor.fqn}; keep one"
            )
    found: dict[int, dict[str, tuple[str, Pin | None]]] = {}
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        here = found.setdefault(block.class_index, {})
        for name, local in zip(block.params, program.params, strict=True):
            mine = next(iter(by_name.get(name, ())), None)
            first, other = here.setdefault(local, (graph.tensor[name].fqn, mine))
            if (other and other.placement) != (mine and mine.placement):
                raise LayoutError(
                    f"pin {mine or other} holds for one of {first} and {graph.tensor[name].fqn} "
                    "only, but equal blocks share one layout; widen it with *"
                )
    return {
        index: {local: pin.placement for local, (_, pin) in names.items() if pin is not None}
        for index, names in found.items()
    }


def _pins_of(tensor: TensorMeta, pins: Sequence[Pin]) -> list[Pin]:
    return [
        pin
        for pin in pins
        if any(
            fnmatchcase(fqn, pin.pattern)
            or (fqn.endswith(".weight") and fnmatchcase(fqn.removesuffix(".weight"), pin.pattern))
            for fqn in (tensor.fqn, *tensor.aliases)
        )
    ]


def _suggestion(graph: ModelGraph, pin: Pin) -> str:
    names = [t.fqn for t in graph.params]
    near = difflib.get_close_matches(pin.pattern, names, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else "; see `planner show` for the names"
