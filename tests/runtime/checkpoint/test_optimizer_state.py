"""An optimizer's state by parameter: taken apart, merged over ranks, put together again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from planner.errors import PlanError
from planner.language.graph import TensorMeta
from planner.language.layout.pieces import Piece
from planner.language.layout.placement import Shard
from planner.language.lowering.holdings import Holding
from planner.runtime.checkpoint.optimizer_state import Assembly, OptimizerNotes, take_apart
from planner.runtime.checkpoint.parts import Part


def notes(*groups: tuple[float, list[str]]) -> OptimizerNotes:
    return OptimizerNotes(
        groups=[{"params": list(names), "options": {"lr": lr}} for lr, names in groups]
    )


def part_of(name: str, param: nn.Parameter, *, tp: int = 1) -> Part:
    """The first of `tp` pieces along dim 0."""
    shape = (param.shape[0] * tp, *param.shape[1:])
    meta = TensorMeta(name=name, shape=shape, dtype="float32", kind="param", fqn=name)
    piece = Piece.whole(shape) if tp == 1 else Piece.whole(shape).cut(Shard(0), tp, 0)
    held = Holding(meta=meta, piece=piece, copies=1, copy=0)
    return Part(key=held.key, piece=piece, tensors=(param.detach(),), holding=held)


def stored(**shapes: tuple[int, ...]) -> Metadata:
    """What a checkpoint says of tensors; names have _of_ for a dot and __ for an @."""
    return Metadata(
        {
            name.replace("__", "@").replace("_of_", "."): TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.float32), size=torch.Size(shape), chunks=[]
            )
            for name, shape in shapes.items()
        }
    )


def test_groups_of_ranks_are_told_apart_by_their_options():
    """The first stage has matrices alone and the last vectors alone: each keeps its own rate."""
    merged = notes((0.02, ["w"]))
    for _ in range(3):  # replicas of the last stage
        merged.merge(notes((0.001, ["b"])))
    merged.merge(notes((0.02, ["v"]), (0.001, ["c"])))
    assert merged.groups == notes((0.02, ["w", "v"]), (0.001, ["b", "c"])).groups


def test_equal_groups_stay_apart_by_their_place():
    merged = notes((0.1, ["w"]), (0.1, ["b"]))
    merged.merge(notes((0.1, ["v", "w"]), (0.1, ["c"])))
    assert merged.groups == notes((0.1, ["w", "v"]), (0.1, ["b", "c"])).groups
    rate = torch.tensor(0.1)
    merged = OptimizerNotes(groups=[{"params": ["w"], "options": {"lr": rate}}])
    merged.merge(OptimizerNotes(groups=[{"params": ["v"], "options": {"lr": rate.clone()}}]))
    assert [group["params"] for group in merged.groups] == [["w", "v"]]


def test_values_of_the_first_rank_that_has_them_stay():
    merged = OptimizerNotes(values={"w": {"step": 1}}, states={"exp_avg"})
    merged.merge(OptimizerNotes(values={"w": {"step": 2}, "b": {"step": 3}}, states={"row"}))
    assert merged.values == {"w": {"step": 1}, "b": {"step": 3}}
    assert merged.states == {"exp_avg", "row"}


class Rows(torch.optim.Optimizer):
    """Keeps a number, a tensor like the parameter, a sum of rows, and what is no tensor."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "foreach": None})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] |= {
                    "step": torch.tensor(3.0),
                    "like": param.detach() + 1,
                    "rows": param.detach().sum(0, keepdim=True)[0][:1],
                    "kind": {"by": 1},
                }


def taken(tp: int):
    param = nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = Rows([param], lr=0.5)
    optimizer.step()
    parts = {"w": part_of("w", param, tp=tp)}
    return param, take_apart(optimizer, {"w": [param]}, parts), parts


@pytest.mark.parametrize(("tp", "own"), [(1, "@whole"), (2, "@0+2;0+3")])
def test_what_is_like_a_parameter_is_cut_as_it_is_and_the_rest_belongs_to_its_piece(tp, own):
    _, (found, kept), _ = taken(tp)
    by_key = {part.key: part for part in found}
    assert set(by_key) == {"optim.like.w", f"optim.rows.w{own}"}
    assert by_key["optim.like.w"].piece.shape == (2 * tp, 3)
    assert by_key[f"optim.rows.w{own}"].piece == Piece.whole((1,))
    assert kept.values["w"] == {"step": torch.tensor(3.0), "kind": {"by": 1}}
    assert kept.states == {"like", "rows"}
    # How the update is computed is the script's own affair.
    assert kept.groups == [{"params": ["w"], "options": {"lr": 0.5}}]


def test_a_state_comes_back_with_the_rates_of_its_group():
    param, (_, kept), parts = taken(1)
    fresh = Rows([param], lr=0.9)
    metadata = stored(model_of_w=(2, 3), optim_of_like_of_w=(2, 3), optim_of_rows_of_w__whole=(1,))
    assembly = Assembly(fresh, {"w": [param]}, parts, kept, metadata)
    for part in assembly.parts:
        part.tensors[0].fill_(7)
    assembly.finish()
    state = fresh.state[param]
    assert torch.equal(state["like"], torch.full((2, 3), 7.0))
    assert torch.equal(state["rows"], torch.tensor([7.0]))
    assert (state["step"].item(), state["kind"]) == (3.0, {"by": 1})
    assert state["kind"] is not kept.values["w"]["kind"]
    assert fresh.param_groups[0]["lr"] == 0.5
    # What another rank steps on has no state here.
    other = Rows([nn.Parameter(torch.zeros(1))])
    params = {"w": [param], "b": other.param_groups[0]["params"]}
    assert Assembly(other, params, parts | {"b": parts["w"]}, kept, metadata).parts == []


def test_a_state_of_another_piece_is_refused():
    param, (_, kept), parts = taken(1)
    metadata = stored(model_of_w=(2, 3), optim_of_like_of_w=(2, 3))
    there = metadata.state_dict_metadata
    there["optim.rows.w@0+1;0+3"] = there["optim.like.w"]
    with pytest.raises(PlanError, match="rows of w was saved for a piece of it"):
        Assembly(Rows([param]), {"w": [param]}, parts, kept, metadata)


def test_a_state_follows_the_dtype_of_its_parameter_where_it_did():
    param = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    parts = {"w": part_of("w", param)}
    kept = OptimizerNotes(states={"like"})
    metadata = stored(model_of_w=(2, 3), optim_of_like_of_w=(2, 3))
    (part,) = Assembly(Rows([param]), {"w": [param]}, parts, kept, metadata).parts
    assert part.tensors[0].dtype == torch.bfloat16
    model = metadata.state_dict_metadata["model.w"]
    metadata.state_dict_metadata["model.w"] = SimpleNamespace(
        properties=TensorProperties(dtype=torch.bfloat16), size=model.size
    )
    (part,) = Assembly(Rows([param]), {"w": [param]}, parts, kept, metadata).parts
    assert part.tensors[0].dtype == torch.float32  # kept wider than the weights
