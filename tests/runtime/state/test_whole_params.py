"""Parameters made whole for the optimizer: who owns which, and what comes back to the pieces."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.language.graph import TensorMeta
from planner.language.layout.pieces import Piece
from planner.language.layout.placement import Shard
from planner.language.layout.placements import WHOLE
from planner.language.lowering.holdings import Holding
from planner.runtime.state.optimizers import whole_params
from planner.runtime.state.optimizers.whole_params import WholeParams, cutting_axes, stepped_on
from tests.runtime.alone import Parts

CUT = WHOLE.on("tp", Shard(0))


def pieces(rank: int, *rows: int) -> list[tuple]:
    """Half of parameters of so many rows each, whose elements are their numbers."""
    found = []
    for number, size in enumerate(rows):
        meta = TensorMeta(name="w", shape=(size, 2), dtype="float32", kind="param", fqn="w")
        box = Piece.whole((size, 2)).cut(Shard(0), 2, rank)
        whole = torch.arange(2.0 * size).view(size, 2)
        piece = nn.Parameter(whole.chunk(2)[rank].clone())
        held = Holding(meta=meta, piece=box, copies=1, copy=0)
        found.append((f"w{number}", piece, held, CUT))
    return found


@pytest.fixture
def gathered(monkeypatch):
    """The other of two ranks has nines for its pieces, and sends fives; who sent is noted."""

    def whole(piece, placements, mesh):
        halves = [piece.detach(), torch.full_like(piece.detach(), 9.0)]
        return torch.cat(halves if mesh.rank("tp") == 0 else halves[::-1])

    monkeypatch.setattr(whole_params, "whole", whole)
    sent: list[int] = []

    def broadcast(message, group, group_src):
        sent.append(group_src)
        if group_src == 1:  # from the other rank
            message.fill_(5.0)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    return sent


def test_axes_that_cut():
    mesh = Parts({"tp": 2, "shards": 4}, {})
    assert cutting_axes(CUT, mesh, sharded=False) == ("tp",)
    assert cutting_axes(CUT, mesh, sharded=True) == ("tp", "shards")
    assert cutting_axes(WHOLE, mesh, sharded=False) == ()
    assert cutting_axes(CUT, Parts({"tp": 1}, {}), sharded=False) == ()


@pytest.mark.usefixtures("gathered")
def test_owners_are_dealt_by_size_and_each_parameter_has_a_single_one():
    """The large is the first's, the next two together are the second's."""
    owned = []
    for rank in range(2):
        mesh = Parts({"tp": 2}, {"tp": rank})
        made = WholeParams(pieces(rank, 8, 4, 4, 2), mesh, sharded=False)
        assert [param.owner for param in made.params] == [(0,), (1,), (1,), (0,)]
        owned.append([param.fqn for param in made.params if param.value is not None])
        assert {tuple(p.value.shape) for p in made.params if p.value is not None} == (
            {(8, 2), (2, 2)} if rank == 0 else {(4, 2)}
        )
    assert owned == [["w0", "w3"], ["w1", "w2"]]
    # What no axis cuts is left as it is.
    alone = Parts({"tp": 1}, {})
    assert WholeParams(pieces(0, 8), alone, sharded=False).params == []


def test_the_owner_steps_on_the_whole_and_others_take_their_pieces(gathered):
    mesh = Parts({"tp": 2}, {"tp": 0})
    given = pieces(0, 4, 4)
    made = WholeParams(given, mesh, sharded=False)
    (own, other), biases = [piece for _, piece, *_ in given], [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([own, other, *biases], lr=1.0)
    made.take_over(optimizer)
    value = made.params[0].value
    assert optimizer.param_groups[0]["params"] == [value, *biases]
    params = {"w0": [own], "w1": [other], "b": biases}
    assert stepped_on(params, made) == {"w0": [value], "b": biases}
    assert stepped_on(params, None) == params
    own.grad, before = torch.ones_like(own), other.detach().clone()
    made.gather_gradients()
    assert value.grad.shape == (4, 2)
    optimizer.step()
    made.hand_out()
    assert torch.equal(own.detach(), torch.arange(4.0).view(2, 2) - 1)
    assert torch.equal(other.detach(), before)  # passed over: it had no gradient
    assert value.grad is None
    assert gathered == [0]
    other.grad = torch.ones_like(other)
    own.grad = None
    made.hand_out()
    assert torch.equal(other.detach(), torch.full((2, 2), 5.0))  # its owner's
    made.refresh()
    assert torch.equal(value.detach()[:2], own.detach())


@pytest.mark.usefixtures("gathered")
def test_a_state_made_before_is_of_the_wholes_size():
    given = pieces(0, 4)
    made = WholeParams(given, Parts({"tp": 2}, {"tp": 0}), sharded=False)
    piece, value = given[0][1], made.params[0].value
    optimizer = torch.optim.Adagrad([piece], initial_accumulator_value=0.25)
    made.take_over(optimizer)
    assert list(optimizer.state) == [value]
    assert torch.equal(optimizer.state[value]["sum"], torch.full((4, 2), 0.25))


@pytest.mark.usefixtures("gathered")
def test_names_in_groups_go_with_the_wholes():
    mesh = Parts({"tp": 2}, {"tp": 0})
    parts = pieces(0, 8, 4, 4, 2)
    optimizer = torch.optim.AdamW([(fqn, piece) for fqn, piece, _, _ in parts])
    WholeParams(parts, mesh, sharded=False).take_over(optimizer)
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["w0", "w3"]
    assert [len(param) for param in group["params"]] == [8, 2]
