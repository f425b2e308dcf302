"""Finding layers that repeat in the trace of a forward.

Layer k begins at its call, and what is done between it and the next belongs to it. An op's inputs
are told relative to the layer: made in it, made in the layer before, its own parameter, or made
in the first layer or before it. Layers repeat with period p from layer a on if layers k and k + p
are equal in that for every k >= a: each is then computed from the one before it as its like is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from planner.capture.repeats.trace import Earlier, Event, Held, Made, Trace, relative

PERIODS = 3
"""Periods that are kept: the first may follow something else than a period, and the last precedes
something else."""

LEAST_SAVED = 4
"""Layers that leaving some out must save."""

_LONGEST = 12
"""A period may have so many layers."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Layers of a list that repeat.

    Attributes:
        path: of the list.
        first: the layer from which on they do.
        period: layers of a period.
        layers: of the list.
        kept: layers that are exported: the first so many.
    """

    path: str
    first: int
    period: int
    layers: int
    kept: int

    @property
    def left_out(self) -> int:
        """Layers that are not exported."""
        return self.layers - self.kept


Told = tuple[tuple[Event, ...], tuple[Event, ...]]
"""The ops of a layer, and those between it and the next."""


def find_repeat(trace: Trace, path: str, layers: int) -> Repeat | None:
    """Return how the layers of a list repeat; None where leaving some out saves too little."""
    told = layers_told(trace, path, layers)
    if told is None:
        return None
    best: Repeat | None = None
    # A number for each unlike layer: these are compared many times.
    inner = _numbered([inside for inside, _ in told])
    whole = _numbered([(number, between) for number, (_, between) in zip(inner, told, strict=True)])
    for period in range(1, min(_LONGEST, layers // (PERIODS + 1)) + 1):
        # Back from the end, as long as layers a period apart are equal.
        first = layers - period
        while first > 0:
            k, like = first - 1, first - 1 + period
            # What follows the last layer is no part of a repetition.
            is_equal = whole[k] == whole[like] if like < layers - 1 else inner[k] == inner[like]
            if not is_equal:
                break
            first -= 1
        periods = (layers - first) // period
        kept = layers - max(0, periods - PERIODS) * period
        if layers - kept >= LEAST_SAVED and (best is None or kept < best.kept):
            best = Repeat(path=path, first=first, period=period, layers=layers, kept=kept)
    return best


def _numbered(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def does_the_same(whole: Trace, short: Trace, repeat: Repeat) -> bool:
    """Whether a forward with the kept layers does the same in them, and around them."""
    path, last = repeat.path, repeat.kept - 1
    # Ops before the list must be the very same; the last kept layer plays the last of all, so only
    # its inside and what follows it are compared with that.
    before, fewer = whole.begins[path][0], short.begins[path]
    if not fewer or fewer[0] != before or whole.events[:before] != short.events[:before]:
        return False
    told = layers_told(whole, path, repeat.layers, first=repeat.kept)
    short_told = layers_told(short, path, repeat.kept)
    if told is None or short_told is None:
        return False
    if told[:last] != short_told[:last] or told[last][0] != short_told[last][0]:
        return False
    if _after(whole, path, repeat.layers) != _after(short, path, repeat.kept):
        return False
    if whole.earlier is None or short.earlier is None:
        return whole.earlier is short.earlier
    return does_the_same(whole.earlier, short.earlier, repeat)


_THEN = ("the forward after",)
"""Stands between what two forwards do."""


def layers_told(
    trace: Trace, path: str, layers: int, *, first: int | None = None
) -> list[Told] | None:
    """Return each layer's ops, told relative to it, of a forward after those of the earlier one;
    None where layers are not called in order. With `first`, of so many layers alone.
    """
    if trace.called[path] != list(range(layers)) or len(trace.ends[path]) != layers:
        return None
    begins, ends = trace.begins[path], trace.ends[path]
    if any(end > begin for end, begin in zip(ends, begins[1:], strict=False)):
        return None
    told = []
    for k in range(layers if first is None else first):
        nexts = begins[k + 1] if k + 1 < layers else len(trace.events)
        if k + 1 < layers:
            between = _told(trace, trace.events[ends[k] : nexts], k, path)
        else:
            between = ()
        told.append((_told(trace, trace.events[begins[k] : ends[k]], k, path), between))
    if trace.earlier is None:
        return told
    earlier = layers_told(trace.earlier, path, layers, first=first)
    if earlier is None:
        return None
    return [
        ((*inside, _THEN, *inside_then), (*between, _THEN, *between_then))
        for (inside, between), (inside_then, between_then) in zip(earlier, told, strict=True)
    ]


def _after(trace: Trace, path: str, layers: int) -> tuple[Event, ...]:
    """What follows the last layer: from it, and from before the first."""
    end = trace.ends[path][-1]
    return _told(trace, trace.events[end:], layers - 1, path)


def _told(trace: Trace, events: Sequence[Event], layer: int, path: str) -> tuple[Event, ...]:
    """Return ops of a layer with what they read told relative to it."""
    prefix = f"{path}.{layer}."

    def change(read: Made | Held | Earlier) -> Hashable:
        if isinstance(read, Held):
            name = read.name
            return ("own", name.removeprefix(prefix)) if name.startswith(prefix) else name
        if isinstance(read, Made):
            return _place(read, trace.begins[path], layer)
        if isinstance(read.what, Made) and trace.earlier is not None:
            return ("earlier", *_place(read.what, trace.earlier.begins[path], layer))
        return ("earlier", read.what)

    return tuple(relative(event, change) for event in events)


def _place(made: Made, begins: Sequence[int], layer: int) -> tuple[Hashable, ...]:
    """Tell a tensor relative to the layer that reads it, by where layers begin."""
    own, before = begins[layer], begins[layer - 1] if layer else begins[0]
    if made.event >= own:
        return ("made here", made.event - own, made.position)
    if made.event >= before:
        return ("made in the layer before", made.event - before, made.position)
    if made.event < begins[min(1, len(begins) - 1)]:
        return ("made first", made.event, made.position)
    # Of a layer between: said so that no other layer, and no other trace, says the same.
    return ("made between", layer, len(begins), made.event, made.position)
