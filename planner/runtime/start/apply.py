"""Joining a plan: process groups, one capture for all ranks, and each rank's engine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from planner.capture.checks.hooks import refuse_lost
from planner.graph import ModelGraph, from_json, to_json
from planner.plan import Plan, load_plan, validate_model
from planner.plan.batch_statistics import BatchStatisticsWarning, cut_batch_messages
from planner.plan.buckets import validate_bucket
from planner.plugins import load_plugins
from planner.runtime.start.device import choose_device
from planner.runtime.start.mesh import Mesh, build_mesh
from planner.runtime.step.engine import Engine
from planner.runtime.step.loss_weights import LossWeight


def apply_plan(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    max_grad_norm: float | None = None,
    deferred_batch_norm: bool = False,
    loss_weight: LossWeight | None = None,
    weights: str | os.PathLike[str] | None = None,
    pad: Mapping[str, float] | None = None,
) -> Engine:
    """Join the plan's ranks, capture the model, and return its engine; see `planner.apply`."""
    load_plugins()
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    mesh = build_mesh(plan, choose_device())
    refuse_lost(model)  # on each rank: rank 0 alone captures
    graph, *buckets = shared_captures(plan, model, loss, mesh)
    if dist.get_rank() == 0:
        for message in cut_batch_messages(
            graph,
            plan,
            deferred_batch_norm=deferred_batch_norm,
            weighted_loss=loss_weight is not None,
        ):
            warnings.warn(BatchStatisticsWarning(message), stacklevel=3)
    engine = Engine(
        plan,
        graph,
        model,
        mesh,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        deferred_batch_norm=deferred_batch_norm,
        loss_weight=loss_weight,
        may_be_empty=weights is not None,
        buckets=tuple(buckets),
        pad=pad,
    )
    if weights is not None:
        engine.load_weights(weights)
    # Each rank has its pieces; the whole model would stay in memory beside them.
    model.to_empty(device="meta")
    engine.watch(model)
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
    payload: list[str | None] = [None]
    graphs: tuple[ModelGraph, ...] = ()
    if dist.get_rank() == 0:
        from planner.capture import batch_from_spec, capture_module

        for spec in (plan.model.inputs, *(bucket.inputs for bucket in plan.model.buckets)):
            two, three = (batch_from_spec(spec, plan.model.batch_tree, size) for size in (2, 3))
            graph = capture_module(
                model, two, three, loss=loss, name=plan.model.name, precision=plan.precision
            )
            graphs = (*graphs, graph)
        validate_model(plan, graphs[0])
        for bucket, graph in zip(plan.model.buckets, graphs[1:], strict=True):
            validate_bucket(bucket, graphs[0], graph)
        payload = [json.dumps([to_json(graph) for graph in graphs])]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(payload, src=0, group=mesh.control)
    if not graphs:
        assert payload[0] is not None
        graphs = from_json(json.loads(payload[0]))
    return graphs
