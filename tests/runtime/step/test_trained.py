"""A rank's trained parameters: their names, their gradients, and what counts for the norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.language.layout.axes import split_axes
from planner.language.layout.placement import Replicate, Shard
from planner.language.layout.placements import WHOLE as WHOLE_MODEL
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.defaults import default_plan
from planner.runtime.stage.host import Host
from planner.runtime.state import trained
from planner.runtime.state.trained import TrainedParams
from tests.captures import capture_tiny
from tests.runtime.alone import Parts


class Owner:
    def __init__(self, graph) -> None:
        self.params = {m.fqn: nn.Parameter(torch.ones(m.shape_at(1))) for m in graph.params}

    def named_params(self) -> dict[str, nn.Parameter]:
        return self.params


def build(monkeypatch, placement, *, sharded: bool = False) -> TrainedParams:
    graph = capture_tiny("mlp")
    monkeypatch.setattr(trained, "tied_copies", lambda *_, **__: [])
    if sharded:  # what FSDP2 shards are DTensors, which need ranks
        monkeypatch.setattr(trained, "DTensor", nn.Parameter)
    own = ProcessMesh(axes=("dp", "tp"), shape=(4, 2), ranks=tuple(range(8)))
    mesh = Parts({"data": 4, "tp": 2}, {}, own=own)
    placements = {m.name: WHOLE_MODEL.on("tp", placement) for m in graph.params}
    owners = {0: Owner(graph)}
    host = Host(torch.device("cpu"))
    plan = default_plan(graph)
    return TrainedParams(graph, plan, mesh, owners, owners, placements, sharded=sharded, host=host)


@pytest.mark.parametrize(
    ("placement", "sharded", "share"),
    [
        (Shard(0), False, 1 / 4),  # four replicas hold this piece
        (Replicate(), False, 1 / 8),  # and both ranks of tp the whole
        (Shard(0), True, 1),  # ZeRO: each replica holds a part of its own
        (Replicate(), True, 1 / 2),
    ],
)
def test_every_element_of_the_model_counts_once_over_all_ranks(
    monkeypatch, placement, sharded, share
):
    assert [axis.name for axis in split_axes()] == ["tp"]
    found = build(monkeypatch, placement, sharded=sharded)
    shares, of_tables = found._shares()
    assert {part for _, part in shares} == {share}
    assert not of_tables


def test_a_step_begins_without_gradients_and_moves_the_parameters(monkeypatch):
    found = build(monkeypatch, Replicate())
    (params, *_) = found.by_name().values()
    params[0].grad = torch.ones_like(params[0])
    optimizer = torch.optim.SGD(params, lr=0.5)
    found.step(optimizer)
    assert torch.equal(params[0].detach(), torch.full_like(params[0], 0.5))
    found.zero_gradients()
    assert params[0].grad is None
    assert found.stepped_by_name().keys() == found.by_name().keys()
