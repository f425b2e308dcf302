"""A rank of a plan on a fake CUDA, among ranks that do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.runtime import apply
from planner.runtime.initial.values import NoValues
from planner.runtime.process import device as devices
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.dryrun import _empty_copy, _fake_batch, _fake_ranks, _without_values
from planner.runtime.step.engine import Engine
from tests.fake_cuda.device import DEVICE
from tests.fake_cuda.host import Host


def _gather(found: list[Any], own: Any, group: Any = None) -> None:
    """As if each rank said the same."""
    found[:] = [own] * len(found)


def _gather_on_first(own: Any, found: list[Any] | None = None, **_: Any) -> None:
    if found is not None:
        _gather(found, own)


@contextmanager
def fake_rank(plan: Plan, rank: int) -> Iterator[tuple[Any, Host]]:
    """Inside, this process is a rank of a plan, and tensors have no values; yields its mesh, and
    the host.
    """
    # (Fake groups carry any backend's messages; gloo needs no second group for the host's.)
    with (
        patch.object(devices, "backend", lambda device: "gloo"),
        patch.object(dist, "all_gather_object", _gather),
        patch.object(dist, "gather_object", _gather_on_first),
        _fake_ranks(rank, plan.world_size),
        _without_values(),
    ):
        mesh = build_mesh(plan, DEVICE)
        with FakeTensorMode(allow_non_fake_inputs=True), Host() as host:
            yield mesh, host


@contextmanager
def fake_engine(
    plan: Plan,
    graph: ModelGraph,
    model: nn.Module,
    rank: int,
    **options: Any,
) -> Iterator[tuple[Engine, Host]]:
    """Yield the engine of a rank, whose model has no values, and the host."""
    with fake_rank(plan, rank) as (mesh, host):
        empty = _empty_copy(model)
        options = {"check_values": True} | options
        engine = Engine(plan, graph, empty, mesh, values=NoValues(), **options)
        yield engine, host
        engine.close()


def fake_batch(plan: Plan) -> Any:
    """A whole batch of a plan in host memory, which is not pinned."""
    return _fake_batch(plan)


@contextmanager
def fake_start(plan: Plan, graphs: Sequence[ModelGraph], rank: int) -> Iterator[Host]:
    """Inside, `planner.apply` makes the engine of a rank for the model of these captures."""
    with fake_rank(plan, rank) as (mesh, host), _applied(graphs, mesh):
        yield host


@contextmanager
def _applied(graphs: Sequence[ModelGraph], mesh: Any) -> Iterator[None]:
    changes: dict[str, Any] = {
        "take_place": lambda: None,
        "choose_device": lambda: DEVICE,
        "build_mesh": lambda plan, device: mesh,
        # Export runs in modes of its own, so the model was captured before.
        "shared_captures": lambda *_: tuple(graphs),
        "_evaluation_captures": lambda *_: lambda: tuple(graphs),
        "without_values": lambda model, has_weights: (model, None),
        # (It puts parameters of a subclass in place, which has no fake form.)
        "take_away": lambda model: None,
        "Engine": lambda *args, **options: Engine(*args, **options | {"values": NoValues()}),
    }
    with patch.multiple(apply, **changes):
        yield
