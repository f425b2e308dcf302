"""Capturing a model with few of its layers, where that shows all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import nn

from planner.capture.repeats.expand import NotRepeated, expand
from planner.capture.repeats.find import (
    LEAST_SAVED,
    PERIODS,
    Repeat,
    does_the_same,
    find_repeat,
)
from planner.capture.repeats.trace import (
    Trace,
    held_by,
    is_tied,
    layer_lists,
    layers_of,
    truncated,
)
from planner.errors import PlannerError
from planner.graph.blocks import RawGraph

Fresh = Callable[[], nn.Module]
TraceOf = Callable[[nn.Module, tuple[str, ...]], Trace | None]


def capture_in_part(
    fresh: Fresh,
    *,
    trace: TraceOf,
    export: Callable[[Fresh], RawGraph],
    reached: Collection[str],
) -> RawGraph | None:
    """Return all ops of a model of which a part was exported; None where all must be.

    `fresh` returns a copy of the module on the meta device, `trace` what the forward of such a
    copy does, `export` the ops of a module that it is given the maker of. `reached` names the
    parameters that a gradient reaches.
    """
    module = fresh()
    sizes = {
        path: len(layers_of(layers))
        for path, layers in layer_lists(module, least=PERIODS + LEAST_SAVED)
    }
    paths = tuple(sorted(sizes, key=lambda path: -sizes[path]))
    if not paths:
        return None
    whole = trace(module, paths)
    return None if whole is None else _shortened(fresh, whole, paths, trace, export, reached)


def _shortened(
    fresh: Fresh,
    whole: Trace,
    paths: tuple[str, ...],
    trace: TraceOf,
    export: Callable[[Fresh], RawGraph],
    reached: Collection[str],
) -> RawGraph | None:
    """Leave layers out of the first list that repeats, then of the others."""
    for number, path in enumerate(paths):
        module = fresh()
        layers = layers_of(module.get_submodule(path))
        repeat = find_repeat(whole, path, len(layers))
        if repeat is None or is_tied(module, path) or not _alike(layers, repeat, reached):
            continue

        def short(path: str = path, repeat: Repeat = repeat) -> nn.Module:
            return truncated(fresh(), path, repeat.kept)

        others = paths[number + 1 :]
        fewer = trace(short(), (path, *others))
        if fewer is None or not does_the_same(whole, fewer, repeat):
            continue
        order = [name for name, _ in module.named_parameters()]
        try:
            found = _shortened(short, fewer, others, trace, export, reached) or export(short)
            return expand(found, repeat, order)
        except (NotRepeated, PlannerError):
            # Exported whole, the model is captured, or the error is told of all of it.
            continue
    return None


def _alike(layers: Sequence[nn.Module], repeat: Repeat, reached: Collection[str]) -> bool:
    """Whether layers a period apart hold the same, and gradients reach the same of it."""

    def told(number: int) -> dict[str, object]:
        path = f"{repeat.path}.{number}"
        return {
            name: (what, f"{path}.{name}" in reached)
            for name, what in held_by(layers[number]).items()
        }

    said = [told(number) for number in range(repeat.first, repeat.layers)]
    return said[: -repeat.period] == said[repeat.period :]
