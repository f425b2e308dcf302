"""The front door: a module or a model file in, a graph out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from planner.capture.align import BATCH_SIZES, align
from planner.capture.blocks import RawGraph, build_graph
from planner.capture.checks.hooks import refuse_lost
from planner.capture.checks.kept_calls import KeptCalls
from planner.capture.checks.on_meta.any_size import refuse_other_sizes, shapes_of
from planner.capture.checks.on_meta.rehearsal import Rehearsal
from planner.capture.checks.stays_on_meta import StaysOnMeta
from planner.capture.diagnose import first_line, user_line
from planner.capture.export import (
    export_batch,
    meta_copy,
    rehearse_batch,
    run_on_meta,
    trace_batch,
    trace_calls,
)
from planner.capture.loops import Unlike, with_told_loops
from planner.capture.masks import with_told_masks
from planner.capture.modes.precision import cast_parameters
from planner.capture.narrow import with_narrow_products
from planner.capture.norms import with_told_momentum, without_sync
from planner.capture.opaque import OpaqueModules
from planner.capture.outside import outside_bytes
from planner.capture.reading.libraries import libraries_of
from planner.capture.repeats.find import Repeat
from planner.capture.repeats.in_part import capture_in_part, is_steady, long_lists
from planner.capture.repeats.trace import Trace
from planner.capture.routing import with_told_routing
from planner.capture.source.model_file import ModelSource
from planner.capture.units import capture_by_units
from planner.errors import CaptureError, ModelError
from planner.language.across import with_whole_values
from planner.language.graph import SAMPLE, ModelGraph, Unit
from planner.language.graph.batch import (
    Tree,
    classes_in,
    difference,
    flatten_batch,
    unflatten_batch,
)
from planner.language.graph.batch_classes import importable
from planner.language.plan import Precision
from planner.users_modules import users_modules


def capture_source(
    source: ModelSource, *, precision: Precision = "model", length: int | None = None
) -> ModelGraph:
    """Capture the model of a model file, as it computes in a precision.

    With a `length` its batches are ``batch(size, length)``. Raises CaptureError naming the user's
    line, or ModelError when model() or batch() themselves fail or do not fit together.
    """
    module = build_source(source)

    def batches_of(unit_size: int) -> list[Any]:
        batches = []
        for size in (unit_size * count for count in BATCH_SIZES):
            try:
                batches.append(source.batch(*((size,) if length is None else (size, length))))
            except (Exception, SystemExit) as error:
                where = user_line(error)
                called = f"batch({size})" if length is None else f"batch({size}, {length})"
                raise ModelError(
                    f"{source.path.name}: the example {called} failed{where}: {first_line(error)}"
                ) from error
        _leaves_of(*batches, name=source.name, unit_size=unit_size)
        return batches

    def capture(batches: list[Any], unit: Unit) -> ModelGraph:
        return _captured(
            module, *batches, loss=source.loss, name=source.name, precision=precision, unit=unit
        )

    def runs_on(batches: list[Any]) -> bool:
        return all(
            trace_batch(meta_copy(module), *flatten_batch(batch), source.loss, (), OpaqueModules())
            for batch in batches
        )

    with users_modules(source.path.parent):  # a forward may import what it needs
        return with_whole_values(capture_by_units(batches_of, capture, runs_on=runs_on))


def build_source(source: ModelSource) -> torch.nn.Module:
    """Return the model of a model file, its tensors on the meta device.

    Raises ModelError where model() fails, or returns none.
    """
    try:
        module = build_without_values(source.build)
    except (Exception, SystemExit) as error:
        where = user_line(error)
        raise ModelError(
            f"{source.path.name}: model() failed{where}: {first_line(error)}"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{source.path.name}: model() returned {type(module).__name__}; return an nn.Module"
        )
    return module


def build_without_values(build: Callable[[], Any]) -> Any:
    """Return what `build` does, its tensors on the meta device: no weight takes memory or time.

    A constructor that computes with values runs for real, and what it returns may hold them.
    """
    try:
        with torch.device("meta"), StaysOnMeta():
            return build()
    except Exception:
        return build()


def capture_module(
    module: torch.nn.Module,
    batch2: Any,
    batch3: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    name: str = "model",
    precision: Precision = "model",
    unit: Unit = SAMPLE,
) -> ModelGraph:
    """Capture a module on example batches of two and of three samples.

    Where samples belong together these are two and three units of them. The module may hold real
    or meta tensors; it is not changed, and its weights are not copied. Precisions "bf16" and
    "fp16" capture it cast (see `planner.capture.modes.precision`), which is another graph with
    another fingerprint.

    Raises CaptureError when it can't be captured at all, or not as a function of the batch size;
    ModelError when the batches do not fit.
    """
    graph = _captured(module, batch2, batch3, loss=loss, name=name, precision=precision, unit=unit)
    return with_whole_values(graph)


def _captured(
    module: torch.nn.Module,
    batch2: Any,
    batch3: Any,
    *,
    loss: Callable[[Any, Any], Any] | None,
    name: str,
    precision: Precision,
    unit: Unit,
) -> ModelGraph:
    """Return the graph as it is captured, without what parts of a batch take of the whole."""
    refuse_lost(module)
    leaves = _leaves_of(batch2, batch3, name=name, unit_size=unit.size)

    kept_calls = KeptCalls()

    def fresh(of: torch.nn.Module = module) -> torch.nn.Module:
        # For each run anew: what one leaves in its module, another must not find.
        kept_calls.forget()
        try:
            meta = with_told_momentum(without_sync(meta_copy(of)))
        except Exception as error:
            raise CaptureError(
                f"{name} can't be captured, because it can't be copied ({first_line(error)}); "
                "leave out of its attributes what copy.deepcopy does not take (locks, files, "
                "nodes of an autograd graph)"
            ) from error
        return cast_parameters(meta, precision) if of is module else meta

    paths = long_lists(module)
    opaque = OpaqueModules(precision=precision, unit=unit.size)

    def captured() -> RawGraph:
        def exported(make: Callable[[], torch.nn.Module], rehearsal: Rehearsal) -> RawGraph:
            aligned = align(
                *(
                    export_batch(make(), tensors, tree, loss, rehearsal, opaque, size)
                    for (tensors, tree), size in zip(leaves, BATCH_SIZES, strict=True)
                )
            )
            refuse_other_sizes(
                shapes_of(*(tensors for tensors, _ in leaves)),
                lambda given: run_on_meta(
                    make(), dict(zip(leaves[0][0], given, strict=True)), leaves[0][1], loss, opaque
                ),
            )
            return aligned

        # Where few layers show all, these alone are rehearsed and exported.
        calls = paths and trace_calls(fresh(), *leaves[0], loss, paths, opaque)
        if calls:
            kept_calls.find()  # a forward may import what it needs
            last: list[tuple[Rehearsal, Trace | None]] = []

            def rehearsed(make: Callable[[], torch.nn.Module]) -> RawGraph:
                last.append(rehearse_batch(make, *leaves[0], loss, paths, opaque))
                return exported(make, last[-1][0])

            def reaches_alike(repeat: Repeat) -> bool:
                rehearsal, trace = last[-1]
                return trace is not None and is_steady(
                    repeat, rehearsal.visited, trace.nodes[repeat.path]
                )

            in_part = capture_in_part(
                module,
                calls,
                paths,
                copy=fresh,
                trace=lambda module, paths: trace_calls(module, *leaves[0], loss, paths, opaque),
                export=rehearsed,
                reached=None,
                is_steady=reaches_alike,
            )
            if in_part is not None:
                return in_part
        rehearsal, whole = rehearse_batch(fresh, *leaves[0], loss, paths, opaque)
        kept_calls.find()
        in_part = None
        if whole is not None:
            in_part = capture_in_part(
                module,
                whole,
                paths,
                copy=fresh,
                trace=lambda module, paths: trace_batch(module, *leaves[0], loss, paths, opaque),
                export=lambda make: exported(make, rehearsal),
                reached=rehearsal.reached,
            )
        return in_part or exported(fresh, rehearsal)

    try:
        while True:
            try:
                merged = with_told_loops(captured(), partial(_passes_over, module, opaque))
                break
            except Unlike as unlike:
                # (Which of several loops it is, is not told: all of them run as they are.)
                if not opaque.not_a_loop({*opaque.loops}, str(unlike)):
                    raise
            except CaptureError as error:
                if opaque.branches.turn(error) or opaque.add_from(error, module):
                    continue
                # (What a traced loop does may be no op, where its module may be one.)
                if not opaque.not_a_loop({*opaque.loops}, str(error)):
                    raise
    finally:
        kept_calls.forget()
    told = with_told_routing(with_told_masks(merged))
    graph = build_graph(told, name=name, batch_tree=leaves[0][1])
    graph = with_narrow_products(graph, precision)
    return replace(
        graph,
        unit=unit,
        outside_bytes=outside_bytes(graph, module),
        libraries=libraries_of(graph),
    )


def _passes_over(module: torch.nn.Module, opaque: OpaqueModules, path: str) -> bool:
    """Whether the loop of a module, or of one around it, passes over experts without rows."""
    while path:
        kind = type(module.get_submodule(path))
        if kind in opaque.loops:
            return opaque.loops[kind].passes_over
        path = path.rpartition(".")[0]
    return any(course.passes_over for course in opaque.loops.values())


def _leaves_of(
    small: Any, large: Any, *, name: str, unit_size: int
) -> list[tuple[dict[str, Any], Tree]]:
    """Return the leaves and structure of two example batches, which tell which sizes count samples.

    Raises ModelError where they do not.
    """
    leaves = [flatten_batch(batch) for batch in (small, large)]
    (ones, one_tree), (others, other_tree) = leaves
    first, second = (f"batch({count * unit_size})" for count in BATCH_SIZES)
    if not ones:
        raise ModelError(
            f"{first} of {name} returned {type(small).__name__} without a tensor in it; "
            "batch(size) must return a tuple or dict of tensors"
        )
    apart = difference(one_tree, other_tree)
    if apart:
        raise ModelError(
            f"{first} and {second} of {name} differ in structure: {apart}; batch(size) must "
            "return the same keys and values for every size, and what differs from sample to "
            "sample in tensors, along a dim of samples"
        )
    for called, path in classes_in(one_tree).items():
        if importable(called) is None:
            raise ModelError(
                f"batch entry {path!r} of {name} is a {called}, which other processes can't "
                "import; define the class at the top of a module, under its own name"
            )
    if all(a.shape == b.shape for a, b in zip(ones.values(), others.values(), strict=True)):
        raise ModelError(
            f"{first} and {second} of {name} have the same shapes; "
            "batch(size) must return `size` samples, usually as the first dim of each tensor"
        )
    return leaves


def batch_from_spec(spec: Any, tree: Tree, size: int) -> Any:
    """Return a meta batch of `size` samples (units of them, where they belong together) from what
    a plan stores of its inputs.
    """
    leaves = {
        path: torch.empty(
            [s[0] * size + s[1] if isinstance(s, tuple | list) else s for s in shape],
            dtype=getattr(torch, dtype),
            device="meta",
        )
        for path, dtype, shape in spec
    }
    return unflatten_batch(tree, leaves)
