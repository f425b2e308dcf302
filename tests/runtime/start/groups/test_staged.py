"""The backend `staged`: what it computes, and what it holds ranks to as NCCL does."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from planner.errors import PlanError
from planner.runtime.process.device import backend, p2p_needs_own_groups
from planner.runtime.process.groups.exchange import exchange
from planner.runtime.process.groups.staged import Stuck
from tests.spawn import run_ranks

CPU = torch.device("cpu")


def every_operation() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0) + 10 * rank
    found: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = value.tolist()

    total = x.clone()
    dist.all_reduce(total)
    keep("all_reduce", total)
    largest = x.clone()
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.is_completed()
    keep("max", largest)
    mean = x.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    keep("mean", mean)
    waves = torch.complex(x, -x)
    dist.all_reduce(waves)
    keep("complex", torch.view_as_real(waves))
    given = x.clone()
    dist.broadcast(given, 1)
    keep("broadcast", given)
    pieces = [torch.empty(4) for _ in range(world)]
    dist.all_gather(pieces, x)
    keep("all_gather", torch.stack(pieces))
    whole = torch.empty(4 * world)
    dist.all_gather_into_tensor(whole, x)
    keep("all_gather_into_tensor", whole)
    piece = torch.empty(4 // world)
    dist.reduce_scatter_tensor(piece, x)
    keep("reduce_scatter", piece)
    turned = torch.empty(4)
    dist.all_to_all_single(turned, x)
    keep("all_to_all", turned)
    group = dist.group.WORLD
    keep("functional", funcol.all_reduce(x, "sum", group))
    keep("functional_gather", funcol.all_gather_tensor(x, 0, group))
    keep("functional_scatter", funcol.reduce_scatter_tensor(x, "sum", 0, group))
    own = dist.new_group([rank]) if world == 1 else dist.new_group([0, 1])
    dist.all_reduce(x, group=own)
    keep("group", x)
    numbers = [None] * world
    dist.all_gather_object(numbers, rank)
    found["objects"] = numbers
    dist.barrier()
    # Each sends to the other and receives from it: at once, and one after the other.
    sent, taken = torch.full((3,), float(rank)), torch.empty(3)
    other = 1 - rank
    operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, taken, other)]
    if backend(CPU) == "staged":
        exchange(operations)
    else:
        for message in dist.batch_isend_irecv(operations):
            message.wait()
    keep("exchange", taken)
    empty = torch.empty(0, 5)
    if rank == 0:
        dist.send(torch.ones(2, dtype=torch.int64), 1)
        dist.send(empty, 1)
    else:
        numbers_taken = torch.empty(2, dtype=torch.int64)
        dist.recv(numbers_taken, 0)
        dist.recv(empty, 0)
        keep("recv", numbers_taken)
    return found


def test_every_operation_gives_what_gloo_gives():
    on_gloo = run_ranks(every_operation_of_gloo, 2)
    assert run_ranks(every_operation, 2, backend="staged") == on_gloo
    assert on_gloo[0]["all_reduce"] == [10.0, 12.0, 14.0, 16.0]


def every_operation_of_gloo() -> dict[str, Any]:
    """(gloo has no mean.)"""
    all_reduce = dist.all_reduce

    def with_mean(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op, **rest)
        all_reduce(tensor, **rest)
        tensor /= dist.get_world_size()
        return None

    dist.all_reduce = with_mean
    try:
        return every_operation()
    finally:
        dist.all_reduce = all_reduce


def greet() -> None:
    """Connect both ways."""
    first, second = (0, 1) if dist.get_rank() == 0 else (1, 0)
    for source in (0, 1):
        if source == dist.get_rank():
            dist.send(torch.zeros(1), second)
        else:
            dist.recv(torch.zeros(1), 1 - first)


def both_send_first() -> str:
    greet()
    other = 1 - dist.get_rank()
    dist.isend(torch.ones(2, 3), other)
    work = dist.irecv(torch.empty(2, 3), other)
    with pytest.raises(Stuck) as stuck:
        work.wait()
    return str(stuck.value)


def test_two_sends_that_come_before_their_receives_are_stuck_and_both_queues_told():
    """NCCL runs what a communicator is given in order: each send waits for a receive behind one."""
    for text in run_ranks(both_send_first, 2, backend="staged", timeout_s=5):
        lines = text.splitlines()
        assert re.match(r"the communicator of ranks 0, 1 has not moved for \d+ s; given", lines[0])
        assert lines[1:] == [
            "rank 0 gave to ranks 0, 1: send to 1 [2, 3] float32, "
            "then receive from 1 [2, 3] float32",
            "rank 1 gave to ranks 0, 1: send to 0 [2, 3] float32, "
            "then receive from 0 [2, 3] float32",
        ]


def swapped() -> str:
    greet()
    big, small = torch.ones(4), torch.ones(2)
    if dist.get_rank() == 0:
        works = [dist.isend(big, 1), dist.isend(small, 1)]
    else:
        works = [dist.irecv(small, 0), dist.irecv(big, 0)]
    with pytest.raises(RuntimeError) as stuck:
        works[-1].wait()
    return str(stuck.value)


def test_messages_of_another_order_are_named():
    by_rank = run_ranks(swapped, 2, backend="staged", timeout_s=10)
    assert by_rank[1] == (
        "rank 0 sends 4 of torch.float32 where rank 1 receives [2] float32: they have messages in "
        "different orders"
    )


def other_collectives() -> str:
    x = torch.ones(4)
    dist.barrier()
    run = dist.all_reduce if dist.get_rank() == 0 else partial(dist.broadcast, src=0)
    with pytest.raises(Stuck) as stuck:
        run(x)
    return str(stuck.value)


def test_unlike_collectives_are_named():
    first, second = run_ranks(other_collectives, 2, backend="staged", timeout_s=30)
    assert first == ("rank 0 is at all_reduce [4] float32 where rank 1 is at broadcast [4] float32")
    assert second.startswith("rank 1 is at broadcast")


def connect_in_a_ring() -> str:
    here = dist.get_rank()
    with pytest.raises(Stuck) as stuck:
        dist.isend(torch.ones(1), (here + 1) % 3)
    return str(stuck.value)


def test_the_first_message_of_a_pair_waits_on_the_host():
    """Ranks that connect in a ring wait for ever, though each send would have its receive."""
    texts = run_ranks(connect_in_a_ring, 3, backend="staged", timeout_s=1)
    assert texts[0].startswith(
        "the communicator of ranks 0, 1, 2 was to connect rank 0 with 1, whose host waits elsewhere"
    )


def refused() -> list[str]:
    texts = []
    for tensor in (
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int16),
        torch.ones(3, 2).t(),
    ):
        with pytest.raises((TypeError, ValueError)) as refusal:
            dist.group.WORLD.send([tensor], 1 - dist.get_rank(), 0)
        texts.append(str(refusal.value))
    return texts


def test_what_nccl_has_no_type_for_is_refused_by_name():
    texts, _ = run_ranks(refused, 2, backend="staged")
    assert texts == [
        "a message of [2] complex64: NCCL has no such type",
        "a message of [2] int16: NCCL has no such type",
        "a message of [2, 3] float32 is not contiguous, and NCCL takes no other",
    ]


def test_a_variable_of_the_environment_chooses_it(monkeypatch):
    monkeypatch.setenv("PLANNER_BACKEND", "staged")
    assert backend(CPU) == "staged"
    assert p2p_needs_own_groups(CPU)
    assert dist.is_backend_available("staged")
    monkeypatch.setenv("PLANNER_BACKEND", "mpi")
    with pytest.raises(PlanError, match="PLANNER_BACKEND=mpi is unknown; use staged, or leave"):
        backend(CPU)
    monkeypatch.delenv("PLANNER_BACKEND")
    assert backend(CPU) == "gloo"
