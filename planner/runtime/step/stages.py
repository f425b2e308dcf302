"""Making a rank's stages: their weights get memory, as pieces, and ZeRO shards them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.placements import Placements
from planner.language.lowering.experts import params_of_rank
from planner.language.lowering.wiring import Edge, block_placements, wire_stage
from planner.language.plan import Plan, low_dtype
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.host import Host
from planner.runtime.stage.host_activations import ActivationsOnHost
from planner.runtime.stage.programs import Programs
from planner.runtime.stage.recompute import Keeper
from planner.runtime.stage.stage import StageModule
from planner.runtime.state import zero
from planner.runtime.state.masters import MasterParams, cast_params, rest_dtype
from planner.runtime.state.optimizers.host_optimizer import HostMasters
from planner.runtime.state.trained import Owner
from planner.runtime.state.weights import constant, materialized, own_piece, shape_of


def build_stages(
    indices: Sequence[int],
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    mesh: Mesh,
    *,
    edges: tuple[Edge, ...],
    placements: Mapping[str, Placements],
    zero_stage: int,
    programs: Programs,
    keeper: Keeper,
    host: Host,
    away: ActivationsOnHost | None,
    moved_once: frozenset[str],
) -> tuple[dict[int, StageModule], dict[int, Owner]]:
    """Return the stages of a rank by index, and by index who names what is trained of each.

    Weights lie in memory without values yet, on the device or, as shards of ZeRO 1 and above,
    where FSDP2 has them. `placements` are those of the rank's parameters and buffers; `zero_stage`
    is 0 where there is one replica; `moved_once` is that of
    `planner.language.across.cut.moved_once`.
    """
    stages: dict[int, StageModule] = {}
    owners: dict[int, Owner] = {}
    for index in indices:
        params = {
            block: params_of_rank(graph, graph.blocks[block], mesh.size("ep"), mesh.rank("ep"))
            for block in plan.stages[index].blocks
        }
        names = dict.fromkeys(name for each in params.values() for name in each.values())
        metas = [graph.tensor[name] for name in names]
        pieces = {
            meta.name: _piece(model, meta, plan, mesh, placements[meta.name]) for meta in metas
        }
        # FSDP2 keeps shards in fp32 and casts what it gathers.
        in_fp32 = bool(low_dtype(plan.precision)) and zero_stage > 0
        tensors = pieces if in_fp32 else cast_params(pieces, metas)
        by_fqn = {meta.fqn: placements[meta.name] for meta in metas}
        # What it leaves whole has a master of its own, or every forward would cast it.
        alone = zero.experts_alone(by_fqn, mesh) if in_fp32 else frozenset()
        cast = cast_params(pieces, [meta for meta in metas if meta.fqn in alone])
        tensors = {**tensors, **cast}
        for meta in metas:
            if meta.on_host:
                tensors[meta.name] = _stand_in(pieces[meta.name], meta, mesh)
                continue
            # What FSDP2 shards gets memory as shards.
            is_sharded = zero_stage and meta.kind == "param" and meta.fqn not in alone
            if meta.table or not is_sharded:
                tensors[meta.name] = materialized(tensors[meta.name], mesh.device)
        stage = StageModule(
            graph=graph,
            plan=plan.stages[index],
            wiring=wire_stage(graph, plan, edges, index),
            placements=lambda block: block_placements(graph, plan, block),
            params=params,
            programs=programs,
            tensors=tensors,
            groups={axis: mesh.group_name(axis) for axis in mesh.lowered_groups()},
            keeper=keeper,
            device=mesh.device,
            away=away,
            moved_once=moved_once,
        )
        stages[index] = owners[index] = stage
        if zero_stage:
            zero.shard_stage(
                stage,
                mesh,
                zero_stage,
                by_fqn,
                plan.precision,
                whole={meta.fqn for meta in metas if meta.table},
                on_host=plan.optimizer_on_host,
                devices_of_node=plan.cluster.devices_per_node,
            )
            if alone:
                values = _masters(
                    {m.fqn: m.name for m in metas if m.fqn in alone}, pieces, tensors, mesh
                )
                owners[index] = MasterParams(stage.named_params(), values)
            continue
        own = {m.fqn: m.name for m in metas if m.kind == "param" and not m.on_host}
        if plan.optimizer_on_host:
            values = {fqn: pieces[name] for fqn, name in own.items()}
            owners[index] = HostMasters(stage.named_params(), values, host)
        elif low_dtype(plan.precision):
            values = _masters(own, pieces, tensors, mesh)
            owners[index] = MasterParams(stage.named_params(), values)
    return stages, owners


def _masters(
    names: Mapping[str, str],
    pieces: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
) -> dict[str, Tensor]:
    """Return memory for the values that the optimizer steps on, by the user's name of each, whose
    name in the graph `names` gives: the stage's own where that is as wide.
    """
    return {
        fqn: tensors[name]
        if tensors[name].dtype == pieces[name].dtype
        else materialized(pieces[name], mesh.device)
        for fqn, name in names.items()
    }


def _stand_in(piece: Tensor, meta: TensorMeta, mesh: Mesh) -> Tensor:
    """Return what programs take for a table that the host has: its shape, and no memory."""
    dtype = getattr(torch, meta.dtype)
    return torch.zeros((), dtype=dtype, device=mesh.device).expand(piece.shape)


def _piece(
    model: nn.Module, meta: TensorMeta, plan: Plan, mesh: Mesh, placements: Placements
) -> Tensor:
    """Return a rank's piece of a tensor in the dtype it rests in, without values yet."""
    if meta.data is not None:
        return own_piece(constant(meta).to(mesh.device), placements, mesh, meta.fqn)
    whole = shape_of(model, meta).to(rest_dtype(meta, plan.precision))
    return own_piece(whole, placements, mesh, meta.fqn)
