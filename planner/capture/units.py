"""Which samples of a model's batch belong together: found by captures of other units.

Captured with each sample on its own, a model that computes inside groups of samples fails (three
samples make no pairs), or has findings (`planner.language.across`) on an op that takes some samples
apart from others. What fails or is found names the sizes to try: the numbers in the message, or
those of the op. A model is captured once for each size; how its samples lie (`Unit.runs`) changes
nothing of the graph, and is tried on it; first of all with samples as the script counts them, which
may be pairs already. The first unit by which no op mixes units is the model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import TypeVar

from planner.capture.align import UnlikeExports
from planner.capture.diagnose import causes, depends_on_values
from planner.errors import CaptureError, ModelError, PlannerError
from planner.language.across import Finding, across_samples
from planner.language.graph import Affine, ModelGraph, Op, Program, Unit

_MOST = 64
"""Samples of the largest unit that is tried."""
_USUAL = (2, 3, 4, 8)
"""Sizes to try where a failure does not tell more: pairs, triplets, groups."""
_MIXING = ("mixed", "pairs", "size")
"""Kinds of findings by which samples meet; a unit of several may hold them apart."""
_OF_SIZES = (RuntimeError, ValueError, IndexError, AssertionError)
"""What a forward raises where a number of samples does not suit it; einops has its own."""

Batches = TypeVar("Batches")


def capture_by_units(
    batches_of: Callable[[int], Batches],
    capture: Callable[[Batches, Unit], ModelGraph],
    *,
    runs_on: Callable[[Batches], bool],
) -> ModelGraph:
    """Return the graph of a model whose samples belong together as it computes with them.

    `batches_of` gives the batches to capture on for units of a size, `runs_on` says whether the
    model runs on each of them, captured or not. Where each sample can be on
    its own, or no unit keeps samples apart, that is the graph with each on its own. Raises what
    that raises where no unit can be captured.
    """
    try:
        batches = batches_of(1)
    except ModelError as error:
        return _captured(batches_of, capture, _sizes_told(error), otherwise=error)
    try:
        graph = capture(batches, Unit())
    except CaptureError as error:
        if not _may_be_of_groups(error) or (
            not isinstance(error, UnlikeExports) and runs_on(batches)
        ):
            raise
        shown = error.place if isinstance(error, UnlikeExports) else ""
        return _captured(batches_of, capture, _sizes_told(error), otherwise=error, shown=shown)
    found = _mixing(graph)
    sizes = _sizes_shown(graph, found) if found else ()
    shown = f"{found[0].op} at {found[0].line}" if found and found[0].line else ""
    for runs in sizes if _has_rows_for_runs(graph) else ():
        stacked = replace(graph, unit=Unit(runs=runs, shown_by=shown))
        if not _mixing(stacked):
            return stacked
    return _captured(batches_of, capture, sizes, otherwise=graph, shown=shown)


def _captured(
    batches_of: Callable[[int], Batches],
    capture: Callable[[Batches, Unit], ModelGraph],
    sizes: Sequence[int],
    *,
    otherwise: ModelGraph | ModelError,
    shown: str = "",
) -> ModelGraph:
    """Return the graph by the first unit that keeps its samples from all others.

    Where there is none it is the graph `otherwise`, or of an error the graph with the fewest
    findings that was captured. `shown` names what has shown that samples may belong together.
    """
    tried: list[tuple[int, ModelGraph]] = []
    for size in sizes:
        try:
            whole = capture(batches_of(size), Unit(size=size))
        except ModelError:
            continue
        by = _shown_by(whole, size) or shown
        for runs in (runs for runs in range(1, size + 1) if size % runs == 0):
            graph = replace(whole, unit=Unit(size=size, runs=runs, shown_by=by))
            count = len(_mixing(graph))
            if not count:
                return graph
            tried.append((count, graph))
    if isinstance(otherwise, ModelGraph):
        return otherwise
    if tried:
        return min(tried, key=lambda each: each[0])[1]
    raise otherwise


def _has_rows_for_runs(graph: ModelGraph) -> bool:
    """Whether each sample, as the script counts them, may have rows in several parts of the batch.

    What depends on values was tried on samples that lie together, which tells nothing of others.
    """
    several = (
        isinstance(size, Affine) and size.per_sample > 1
        for name in graph.batch_inputs
        for size in graph.tensor[name].shape
    )
    is_opaque = any(op.target.startswith("planner.opaque_module") for _, op in _ops(graph))
    return any(several) and not is_opaque


def _mixing(graph: ModelGraph) -> list[Finding]:
    return [finding for finding in across_samples(graph) if finding.kind in _MIXING]


def _may_be_of_groups(error: CaptureError) -> bool:
    """Whether a capture may have failed by the number of samples."""
    if isinstance(error, UnlikeExports):
        return True
    raised = [cause for cause in causes(error) if not isinstance(cause, PlannerError)]
    is_of_sizes = any(
        type(cause).__name__ == "EinopsError"
        or (isinstance(cause, _OF_SIZES) and not isinstance(cause, NotImplementedError))
        for cause in raised
    )
    return is_of_sizes and not depends_on_values(error) and "meta tensor" not in str(error)


def _sizes_told(error: ModelError) -> list[int]:
    """Return the sizes to try after a failure, the smallest first: numbers in its message."""
    text = re.sub(r"\.py:\d+", "", str(error))
    numbers = {int(number) for number in re.findall(r"(?<![\w.-])\d{1,3}(?![\w.])", text)}
    return sorted({*_USUAL, *(number for number in numbers if 2 <= number <= _MOST)})


def _sizes_shown(graph: ModelGraph, found: Sequence[Finding]) -> list[int]:
    """Return the sizes to try after findings, the smallest first: what their ops say of groups."""
    sizes: set[int] = set()
    sliced: dict[tuple[int, str], int] = {}
    for finding in found:
        op = next(op for op in _program(graph, finding).ops if op.name == finding.name)
        numbers = [arg for arg in op.args[1:] if type(arg) is int]
        packet = op.target.rpartition(".")[0].removeprefix("aten.")
        if packet in ("chunk", "tensor_split", "split", "split_with_sizes", "unbind"):
            sizes.add(len(op.outputs))
            sizes.update(numbers[:1] if packet == "chunk" else ())
        elif packet == "slice" and op.inputs:
            stride = op.args[4] if len(op.args) > 4 else 1
            place = finding.block_index, op.inputs[0]
            sliced[place] = sliced.get(place, 0) + 1
            sizes.add(stride if type(stride) is int and stride > 1 else max(2, sliced[place]))
        elif packet == "arange":
            sizes.update(number for number in numbers if number > 1)
        elif packet in ("roll", "unfold"):
            sizes.update((2, *numbers[1:]))
    fitting = {size for size in sizes if 2 <= size <= _MOST}
    together = lcm(*fitting)
    return sorted(fitting | ({together} if 2 <= together <= _MOST else set()))


def _program(graph: ModelGraph, finding: Finding) -> Program:
    if finding.block_index < 0:
        return graph.preamble
    return graph.classes[graph.blocks[finding.block_index].class_index]


def _shown_by(graph: ModelGraph, size: int) -> str:
    """Name the first op that takes the samples of a unit apart; empty where none does alone."""
    for program, op in _ops(graph):
        rows = [_rows(program, name) for name in op.inputs]
        if not any(number and number % size == 0 for number in rows):
            continue
        if any((number := _rows(program, name)) and number % size for name in op.outputs):
            called = op.target.split(".")[1]
            return f"{called} at {op.line}" if op.line else called
    return ""


def _ops(graph: ModelGraph) -> Iterator[tuple[Program, Op]]:
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        for op in program.ops:
            yield program, op
    for op in graph.preamble.ops:
        yield graph.preamble, op


def _rows(program: Program, name: str) -> int:
    """How many rows of a unit a tensor has; 0 for one that does not grow with the batch."""
    sizes = (size for size in program.tensor[name].shape if isinstance(size, Affine))
    return next((size.per_sample for size in sizes), 0)
