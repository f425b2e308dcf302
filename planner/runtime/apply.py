"""Joining a plan: process groups, one capture for all ranks, and each rank's engine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from planner.capture.checks.hooks import refuse_lost
from planner.errors import CaptureError, ModelError, PlanError, PlannerError
from planner.language.across.cut.batch_statistics import BatchStatisticsWarning, batch_norm_messages
from planner.language.across.cut.whole_batch import refuse_cut
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.lowering.match_model import validate_model
from planner.language.lowering.narrow_products import EmulatedWarning
from planner.language.plan import Plan
from planner.language.plan.accepted import accepted_names
from planner.language.plan.buckets import validate_bucket
from planner.language.plan.parts import scaling_named
from planner.language.plan.short_sums import ShortSumsWarning, short_sums_messages
from planner.plugins import load_plugins
from planner.runtime.batches.inputs.loss_weights import LossWeight
from planner.runtime.initial.build import without_values
from planner.runtime.initial.values import RecordedValues
from planner.runtime.process.device import choose_device
from planner.runtime.process.groups.mesh import Mesh, build_mesh
from planner.runtime.process.groups.process_group import take_place
from planner.runtime.process.groups.together import together
from planner.runtime.process.launched import followed_plan
from planner.runtime.stage.calls.narrow import check_device
from planner.runtime.stage.calls.rows.narrow_runs import emulated_experts
from planner.runtime.state import out_of_memory
from planner.runtime.state.users_module.away import plain, refuse_away, take_away
from planner.runtime.step.engine import Engine
from planner.runtime.step.evaluation import reads_mode


def apply_plan(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module],
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    max_grad_norm: float | None = None,
    deferred_batch_norm: bool = False,
    loss_weight: LossWeight | None = None,
    accept: Iterable[str] = (),
    weights: str | os.PathLike[str] | None = None,
    check_values: bool = True,
    pad: Mapping[str, float] | None = None,
    balance_documents: bool = True,
) -> Engine:
    """Join the plan's ranks, capture the model, and return its engine; see `planner.apply`."""
    load_plugins()
    # (Not made a part of the plan: with it other ops than the plan's might run.)
    accept = accepted_names(accept)
    plan = followed_plan(plan)
    if isinstance(model, nn.Module):
        refuse_away(model)
    take_place()
    mesh = build_mesh(plan, choose_device())
    model, recording = without_values(model, has_weights=weights is not None)
    values = None
    if recording is not None:
        values = RecordedValues(recording, mesh, to_the_end=weights is None)
    refuse_lost(model)  # on each rank: rank 0 alone captures
    graph, *buckets = shared_captures(plan, model, loss, mesh)
    emulated = ""
    if scaling := scaling_named(plan.precision):
        emulated = check_device(mesh.device, scaling) or emulated_experts(mesh.device, graph)
    # On all ranks alike: each has the graph, so none waits for another.
    refuse_cut(graph, plan, accept=accept, weighted_loss=callable(loss_weight))
    if dist.get_rank() == 0:
        for message in () if deferred_batch_norm else batch_norm_messages(graph, plan):
            warnings.warn(BatchStatisticsWarning(message), stacklevel=3)
        for message in short_sums_messages(graph, plan):
            warnings.warn(ShortSumsWarning(message), stacklevel=3)
        if emulated:
            warnings.warn(EmulatedWarning(emulated), stacklevel=3)
    engine = Engine(
        plan,
        graph,
        model,
        mesh,
        optimizer=optimizer,
        scheduler=scheduler,
        max_grad_norm=max_grad_norm,
        deferred_batch_norm=deferred_batch_norm,
        loss_weight=loss_weight,
        may_be_empty=weights is not None,
        values=values,
        check_values=check_values,
        buckets=tuple(buckets),
        pad=pad,
        capture_evaluation=_evaluation_captures(plan, model, loss, mesh),
        accept=accept,
        balance_documents=balance_documents,
    )
    if weights is not None:
        engine.load_weights(weights)
    # Each rank has its pieces; the whole model would stay in memory beside them.
    take_away(model)
    engine.watch(model, loss)
    out_of_memory.watch(engine.state)
    return engine


def shared_capture(
    plan: Plan, model: nn.Module, loss: Callable[[Any, Any], Any] | None, mesh: Mesh
) -> ModelGraph:
    """Capture on the plan's own shapes; see `shared_captures`."""
    own = plan.model.model_copy(update={"buckets": ()})
    return shared_captures(plan.model_copy(update={"model": own}), model, loss, mesh)[0]


def shared_captures(
    plan: Plan, model: nn.Module, loss: Callable[[Any, Any], Any] | None, mesh: Mesh
) -> tuple[ModelGraph, ...]:
    """Capture on rank 0 and hand the graphs, which are plain JSON, to the others.

    The first is on the plan's own shapes, the others on those of its buckets. Raises PlanError
    when the model is not the one the plan was made for.
    """

    def captured() -> tuple[ModelGraph, ...]:
        try:
            graph, *others = graphs = _captures(plan, model, loss)
        except (
            CaptureError,
            ModelError,
        ) as error:  # the plan's own model was captured when it was searched
            raise CaptureError(
                f"{error} (the plan is for {plan.model.name} from {plan.model.file or 'no file'} "
                f"and its batches; a {type(model).__name__} was given)"
            ) from error
        validate_model(plan, graph)
        for bucket, other in zip(plan.model.buckets, others, strict=True):
            validate_bucket(bucket, graph, other)
        return graphs

    return _of_rank_0(captured, mesh)


def _evaluation_captures(
    plan: Plan, model: nn.Module, loss: Callable[[Any, Any], Any] | None, mesh: Mesh
) -> Callable[[], tuple[ModelGraph, ...]] | None:
    """Return what captures the model in evaluation mode; None where no part reads its mode."""
    if not reads_mode(model):
        return None

    def captured() -> tuple[ModelGraph, ...]:
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        try:
            with plain(model):
                return _captures(plan, model, loss)
        finally:
            for part, mode in modes:
                part.training = mode

    return lambda: _of_rank_0(captured, mesh)


def _captures(
    plan: Plan, model: nn.Module, loss: Callable[[Any, Any], Any] | None
) -> tuple[ModelGraph, ...]:
    """Capture on the plan's own shapes, then on those of its buckets."""
    from planner.capture import batch_from_spec, capture_module

    def on(spec: Any) -> ModelGraph:
        two, three = (batch_from_spec(spec, plan.model.batch_tree, size) for size in (2, 3))
        return capture_module(
            model,
            two,
            three,
            loss=loss,
            name=plan.model.name,
            precision=plan.precision,
            unit=plan.unit,
        )

    return tuple(
        on(spec) for spec in (plan.model.inputs, *(each.inputs for each in plan.model.buckets))
    )


def _of_rank_0(make: Callable[[], tuple[ModelGraph, ...]], mesh: Mesh) -> tuple[ModelGraph, ...]:
    """Return what rank 0 makes, on every rank; raise there what it raises."""
    own: list[ModelGraph] = []

    def as_text() -> str | None:
        if dist.get_rank() != 0:
            return None
        # (Rank 0 keeps the graphs themselves, the others read them from text.)
        own.extend(make())
        return json.dumps([to_json(graph) for graph in own])

    try:
        text, *_ = together(mesh.control, as_text)
    except PlanError as error:
        if isinstance(error.__cause__, PlannerError):  # rank 0's own
            raise error.__cause__ from None
        raise
    assert text is not None
    return tuple(own or from_json(json.loads(text)))
