"""A rank's stages are made with memory for its pieces, whose values come later."""

from __future__ import annotations

import torch

from planner.language.lowering.defaults import default_plan
from planner.language.lowering.wiring import build_edges, param_placements, stage_params
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.stage.host import Host
from planner.runtime.stage.programs import Programs
from planner.runtime.stage.recompute import Keeper
from planner.runtime.state.masters import MasterParams
from planner.runtime.step.stages import build_stages
from tests.builders import PlainGPT
from tests.captures import capture_tiny


def test_a_model_on_the_meta_device_gets_pieces_in_memory():
    graph = capture_tiny("gpt", precision="bf16")
    plan = default_plan(graph, num_microbatches=1).model_copy(update={"precision": "bf16"})
    mesh = build_mesh(plan, torch.device("cpu"))
    keeper = Keeper()
    with torch.device("meta"):
        model = PlainGPT()
    stages, owners = build_stages(
        [0],
        model,
        graph,
        plan,
        mesh,
        edges=build_edges(graph, plan),
        placements=param_placements(graph, plan, 0),
        zero_stage=0,
        programs=Programs((graph,), plan, mesh, keeper=keeper, weight_queue=None),
        keeper=keeper,
        host=Host(mesh.device),
        away=None,
        moved_once=frozenset(),
    )
    mesh.close()
    used = {name for name in stage_params(graph, plan)[0] if graph.tensor[name].kind == "param"}
    params = dict(stages[0].named_params())
    assert params.keys() == {graph.tensor[name].fqn for name in used}
    assert {(p.device.type, p.dtype) for p in params.values()} == {("cpu", torch.bfloat16)}
    assert isinstance(owners[0], MasterParams)
    masters = dict(owners[0].named_params())
    assert masters.keys() == params.keys()
    assert all(masters[name].shape == param.shape for name, param in params.items())
