"""Capturing a model with few of its layers, where that shows all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise

from torch import nn

from planner.capture.blocks import RawGraph
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

Copy = Callable[[nn.Module], nn.Module]
Make = Callable[[], nn.Module]
TraceOf = Callable[[nn.Module, tuple[str, ...]], Trace | None]


def long_lists(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of lists of layers that may be captured in part, the longest first."""
    sizes = {
        path: len(layers_of(layers))
        for path, layers in layer_lists(module, least=PERIODS + LEAST_SAVED)
    }
    return tuple(sorted(sizes, key=lambda path: -sizes[path]))


def capture_in_part(
    module: nn.Module,
    whole: Trace,
    paths: tuple[str, ...],
    *,
    copy: Copy,
    trace: TraceOf,
    export: Callable[[Make], RawGraph],
    reached: Collection[str] | None,
    is_steady: Callable[[Repeat], bool] = lambda repeat: True,
) -> RawGraph | None:
    """Return all ops of a model of which a part was exported; None where all must be.

    Layers are left out of the first list of `paths` that repeats in `whole`, what the forward of
    `module` does, then of the others. `copy` returns a copy of a module on the meta device, `trace`
    what the forward of such a copy does, `export` the ops of a module that it is given the maker
    of. `reached` names the parameters that a gradient reaches; where it is None, `is_steady` says
    after an export whether gradients reach the same in all of a repetition's layers.
    """
    for number, path in enumerate(paths):
        layers = layers_of(module.get_submodule(path))
        repeat = find_repeat(whole, path, len(layers))
        if repeat is None or is_tied(module, path) or not _alike(layers, repeat, reached):
            continue
        with truncated(module, path, repeat.kept):
            short = copy(module)
        others = paths[number + 1 :]
        fewer = trace(copy(short), (path, *others))
        if fewer is None or not does_the_same(whole, fewer, repeat):
            continue
        try:
            found = capture_in_part(
                short,
                fewer,
                others,
                copy=copy,
                trace=trace,
                export=export,
                reached=reached,
                is_steady=is_steady,
            ) or export(partial(copy, short))
            if not is_steady(repeat):
                raise NotRepeated("gradients do not reach the same in each layer")
            return expand(found, repeat, [name for name, _ in module.named_parameters()])
        except (NotRepeated, PlannerError):
            # Exported whole, the model is captured, or the error is told of all of it.
            continue
    return None


def _alike(layers: Sequence[nn.Module], repeat: Repeat, reached: Collection[str] | None) -> bool:
    """Whether layers a period apart hold the same, and gradients reach the same of it, if it is
    told what they reach.
    """

    def told(number: int) -> dict[str, object]:
        path = f"{repeat.path}.{number}"
        return {
            name: (what, reached is not None and f"{path}.{name}" in reached)
            for name, what in held_by(layers[number]).items()
        }

    said = [told(number) for number in range(repeat.first, repeat.layers)]
    return said[: -repeat.period] == said[repeat.period :]


def is_steady(repeat: Repeat, visited: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether gradients that reach two periods alike reach all layers that are left out alike.

    `visited` are the numbers of the nodes of autograd's graph that a backward goes through, in
    order, `nodes` the number of the first node of each kept layer. Which tensors of a layer have
    gradients follows from which of the layer after have: where that is the same for P0 as for P1,
    it stays the same however many are between P1 and P2.
    """
    begins = [nodes[repeat.first + number * repeat.period] for number in range(PERIODS)]
    told = [
        [number - begin for number in visited if begin <= number < end]
        for begin, end in pairwise(begins)
    ]
    return told[0] == told[1]
