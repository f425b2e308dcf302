"""Joining a plan: process groups, one capture for all ranks, and each rank's engine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from planner.capture.checks.hooks import refuse_lost
from planner.graph import ModelGraph, from_json, to_json
from planner.plan import Plan, load_plan, validate_model
from planner.plan.batch_statistics import BatchStatisticsWarning, cut_batch_messages
from planner.plugins import load_plugins
from planner.runtime.check import out_of_memory
from planner.runtime.start.course import PLAN
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
    check_values: bool = True,
) -> Engine:
    """Join the plan's ranks, capture the model, and return its engine; see `planner.apply`."""
    load_plugins()
    # The launcher of an elastic run may have chosen another plan than the script names.
    plan = os.environ.get(PLAN) or plan
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    mesh = build_mesh(plan, choose_device())
    refuse_lost(model)  # on each rank: rank 0 alone captures
    graph = shared_capture(plan, model, loss, mesh)
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
        check_values=check_values,
    )
    if weights is not None:
        engine.load_weights(weights)
    # Each rank has its pieces; the whole model would stay in memory beside them.
    model.to_empty(device="meta")
    engine.watch(model)
    out_of_memory.watch(engine)
    return engine


def shared_capture(
    plan: Plan, model: nn.Module, loss: Callable[[Any, Any], Any] | None, mesh: Mesh
) -> ModelGraph:
    """Capture on rank 0 and hand the graph, which is plain JSON, to the others.

    Raises PlanError when the model is not the one the plan was made for.
    """
    payload: list[str | None] = [None]
    graph = None
    if dist.get_rank() == 0:
        from planner.capture import batch_from_spec, capture_module

        spec, tree = plan.model.inputs, plan.model.batch_tree
        two, three = (batch_from_spec(spec, tree, size) for size in (2, 3))
        graph = capture_module(
            model, two, three, loss=loss, name=plan.model.name, precision=plan.precision
        )
        validate_model(plan, graph)
        payload = [json.dumps(to_json(graph))]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(payload, src=0, group=mesh.control)
    if graph is None:
        assert payload[0] is not None
        graph = from_json(json.loads(payload[0]))
    return graph
