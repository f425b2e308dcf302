"""N6: ranks in one process meet at collectives, which do what a network does, or are told apart."""

from __future__ import annotations

import pytest
import torch

from planner.language.layout.process_mesh import ProcessMesh
from planner.runtime.process import collectives
from planner.runtime.proofs.by_block.simulate.lockstep import LockStep, OutOfStep

MESH = ProcessMesh(axes=("cp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))


def moves(world, axis, *ways):
    """What each rank runs: redistributions of a matrix of its own, and the gradients."""

    def body(rank):
        group = world.groups(rank)[axis].group_name
        made = []
        for src, dst, is_partial in ways:
            x = torch.full((4, 4), float(rank)).requires_grad_()
            y = collectives.redistribute(x, group, src, dst, is_partial)
            y.backward(torch.full_like(y, rank + 1.0))
            made.append((y.detach(), x.grad))
        return made

    return body


@pytest.mark.parametrize(("axis", "other"), [("tp", 1), ("cp", 2)])
def test_collectives_are_those_of_the_axis(axis, other):
    with LockStep(MESH) as world:
        made = world.run(
            moves(world, axis, ("P", "R", True), ("S(0)", "R", True), ("S(0)", "S(1)", False))
        )
    summed, gathered, turned = made[0]
    assert torch.equal(summed[0], torch.full((4, 4), float(other)))
    assert torch.equal(summed[1], torch.full((4, 4), 1.0 + (other + 1)))
    assert gathered[0].shape == (8, 4)
    assert gathered[0][:, 0].tolist() == [0.0] * 4 + [float(other)] * 4
    assert torch.equal(gathered[1], torch.full((4, 4), 1.0 + (other + 1)))
    assert turned[0].shape == (8, 2)
    assert [call.kind for call in world.calls(0)] == [
        "all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all",
    ]  # fmt: skip
    assert world.calls(0) == world.calls(3)


def test_messages_go_round_a_group():
    """B10: to the next rank, whose size both must have."""
    mesh = ProcessMesh(axes=("cp",), shape=(3,), ranks=(0, 1, 2))

    def shifted(by, odd=0):
        def body(rank):
            x = torch.full((2,), float(rank))
            group = world.groups(rank)["cp"].group_name
            shift = collectives.start_shift(x, group, by + odd * (rank == 2))
            return collectives.finish_shift(shift).tolist()

        return body

    with LockStep(mesh) as world:
        assert world.run(shifted(1)) == {0: [2.0] * 2, 1: [0.0] * 2, 2: [1.0] * 2}
        assert world.run(shifted(2)) == {0: [1.0] * 2, 1: [2.0] * 2, 2: [0.0] * 2}
        with pytest.raises(OutOfStep, match=r"rank 0 sends \[0\] rows to rank 2, which expects"):
            world.run(shifted(1, odd=1))


def test_a_group_that_brings_different_collectives_is_told():
    with LockStep(MESH) as world:

        def body(rank):
            group = world.groups(rank)["tp"].group_name
            dst = "S(1)" if rank == 3 else "R"
            return collectives.redistribute(torch.ones(4, 4), group, "S(0)", dst, False)

        with pytest.raises(OutOfStep, match=r"on tp rank 2 runs all_gather.*rank 3 all_to_all"):
            world.run(body)


@pytest.mark.parametrize(
    ("last", "says"),
    [("", "rank 2 waits on tp.*rank 3 has ended after 0"), ("cp", "rank 2 .*rank 3 on cp")],
)
def test_a_rank_that_never_comes_is_told(last, says):
    with LockStep(MESH) as world:

        def body(rank):
            axis = last if rank == 3 else "tp"
            if not axis:
                return None
            group = world.groups(rank)[axis].group_name
            return collectives.redistribute(torch.ones(4, 4), group, "P", "R", False)

        with pytest.raises(OutOfStep, match=says):
            world.run(body)
        # The next run is not disturbed by threads of the one that failed.
        assert len(world.run(moves(world, "tp", ("P", "R", False)))) == 4


def test_an_error_names_its_rank():
    with LockStep(MESH) as world:

        def body(rank):
            if rank == 2:
                raise ValueError("broken")
            group = world.groups(rank)["tp"].group_name
            return collectives.redistribute(torch.ones(4), group, "P", "R", False)

        with pytest.raises(ValueError, match="broken") as caught:
            world.run(body)
    assert "on simulated rank 2" in caught.value.__notes__
