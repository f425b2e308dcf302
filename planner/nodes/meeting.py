"""Processes of several nodes meet in a store: that of a launcher, or of one of the nodes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from planner.errors import PlannerError
from planner.nodes.launchers import Started
from planner.nodes.waiting import REACHED_S, TOLD_AFTER_S, is_here, reach

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.1


def host_and_port(rendezvous: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT; raise PlannerError where it is not that."""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise PlannerError(
            f"`rendezvous` {rendezvous!r} was given; it is HOST:PORT of one of the nodes, the same "
            "on all"
        )
    return host, int(port)


def meet_as_nodes(rendezvous: str, timeout: timedelta) -> tuple[Store, bool]:
    """Return the store of all nodes, and whether this one has it: the host's address is its own,
    and no other process of this machine was first.

    `timeout` is that of a question to the store. Raises OSError where the host does not answer.
    """
    host, port = host_and_port(rendezvous)
    if is_here(host):
        try:
            return _store(host, port, is_master=True, timeout=timeout), True
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "in use" not in str(error):
                raise
    reach(rendezvous, REACHED_S)
    return _store(host, port, is_master=False, timeout=timeout), False


def meet_as_started(place: Started, timeout: timedelta) -> Store:
    """Return the store of the processes that a launcher started.

    Raises OSError where process 0 does not answer.
    """
    if place.is_rank:  # the launcher has a store there
        from torch.distributed import rendezvous

        store, _, _ = next(
            rendezvous("env://", rank=place.number, world_size=place.count, timeout=timeout)
        )
        return store
    if place.number > 0:
        reach(place.meeting, REACHED_S)
    return _store(place.address, place.port, is_master=place.number == 0, timeout=timeout)


def tell_all(
    store: Store, room: str, text: str, *, number: int, count: int, name: str, within_s: float
) -> list[str]:
    """Return what each of `count` processes tells, by their numbers; `name` is this one's.

    Says who has not come when that takes long. Raises PlannerError that names those who came and
    counts the others after `within_s`, or where the store is gone.
    """
    if number >= count:
        raise PlannerError(
            f"{name} is number {number} of processes that count from 0, and {count} are to meet; "
            "start as many as `num_nodes` says, at an address of their own"
        )
    keys = [f"planner/{room}/{each}" for each in range(count)]
    began, is_told = time.monotonic(), False
    try:
        store.set(keys[number], json.dumps([name, text]))
        while not store.check(keys):
            waited_s = time.monotonic() - began
            if waited_s > within_s:
                raise PlannerError(
                    f"{_who_came(store, keys)} after {within_s:.0f} s; start the same command on "
                    "the others, and give all the same address"
                )
            if waited_s > TOLD_AFTER_S and not is_told:
                is_told = True
                told = f"planner: {name} still waits: {_who_came(store, keys)}"
                print(told, file=sys.stderr, flush=True)
            time.sleep(_POLL_S)
        return [json.loads(store.get(key))[1] for key in keys]
    except RuntimeError as error:  # torch's: the store does not answer
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PlannerError(
            f"{name} has lost the process that all meet at: {reason}; see what that one wrote"
        ) from error


def _who_came(store: Store, keys: Sequence[str]) -> str:
    """Say how many came, who they are, and the numbers of the others."""
    came = {at: json.loads(store.get(key))[0] for at, key in enumerate(keys) if store.check([key])}
    missing = ", ".join(str(at) for at in range(len(keys)) if at not in came)
    names = ", ".join(dict.fromkeys(came.values()))
    return f"{len(came)} of {len(keys)} have come ({names}; not number {missing})"


def in_order(numbers: Sequence[int | None], hosts: Sequence[str]) -> list[int]:
    """Return the places of nodes that met, sorted by the numbers they were told; where none was
    told a number they stay as they are.

    Raises PlannerError where only some were told a number, or several the same.
    """
    told = [(number, at) for at, number in enumerate(numbers) if number is not None]
    if not told:
        return list(range(len(numbers)))
    if len(told) < len(numbers):
        untold = ", ".join(hosts[at] for at, number in enumerate(numbers) if number is None)
        raise PlannerError(
            f"`node_rank` was given on some nodes and not on {untold}; give it on all, from 0"
        )
    told.sort()
    for (number, first), (other, second) in pairwise(told):
        if number == other:
            raise PlannerError(
                f"`node_rank` {number} was given on {hosts[first]} and on {hosts[second]}; give "
                "each node a number of its own, from 0"
            )
    return [at for _, at in told]


def port_of(store: Store) -> int:
    """Return the port of a store, which a launcher's may hold inside another."""
    from torch.distributed import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    return store.port


def _store(host: str, port: int, *, is_master: bool, timeout: timedelta) -> Store:
    from torch.distributed import TCPStore

    # Without a number of workers: else it would wait for them all, and could not say for whom.
    return TCPStore(host, port, None, is_master=is_master, timeout=timeout, wait_for_workers=False)
