"""How worker ranks come to life: all on this machine, or some by each of several processes.

On one machine the measuring process starts all workers. On a cluster the same command runs
once per rank or per node, under torchrun, srun or mpirun or by hand. The first then measures;
every one, the first included, starts its workers, and again new ones (a new *generation*) whenever
the first announces it in the rendezvous store, which is how a crash anywhere is survived
everywhere.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Protocol

from planner.errors import ProfileError
from planner.files import ROOT
from planner.nodes.launchers import started
from planner.nodes.meeting import (
    host_and_port,
    meet_as_nodes,
    meet_as_started,
    port_of,
    tell_all,
)
from planner.nodes.waiting import described, waiting_at
from planner.runtime.start.node_watch import NodeWatch
from planner.runtime.start.workers import rank_environment

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.2
_DONE = "done"
_MEETING = timedelta(minutes=10)
"""How long the processes of a cluster wait for each other to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRank:
    """The place of a worker among all ranks."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of the processes that measure a cluster together.

    Attributes:
        number: of this process, from 0; the first measures, the others serve.
        count: of all processes.
        ranks_here: how many ranks each of them starts.
        local_number: this process's number on its node.
        store: where they meet.
        host: the name under which the others reach process 0.
    """

    number: int
    count: int
    ranks_here: int
    local_number: int
    store: Store
    host: str

    def watch(self) -> NodeWatch:
        """Return what tells the others that this one is there, and which of them is gone."""
        meeting = f"{self.host}:{port_of(self.store)}"
        watch = NodeWatch(meeting, "planner/there", number=self.number, count=self.count)
        watch.start()
        return watch

    def ranks(self) -> list[ClusterRank]:
        """Return the places of the ranks that this process starts."""
        return [
            ClusterRank(
                rank=self.number * self.ranks_here + at,
                world_size=self.count * self.ranks_here,
                local_rank=self.local_number * self.ranks_here + at,
            )
            for at in range(self.ranks_here)
        ]


def join(nproc: int, *, num_nodes: int = 1, rendezvous: str = "") -> Member | None:
    """Meet the processes that measure with this one; return None when it is alone.

    They are those of a launcher (torchrun, srun, mpirun, a PyTorchJob): one for each rank, or one
    for each node, which then starts `nproc` ranks. Else this command runs on `num_nodes` nodes with
    the same `rendezvous`, the host:port of one of them. Raises PlannerError where they can't meet,
    and ProfileError where they would start different numbers of ranks.
    """
    place = started(os.environ)
    if num_nodes > 1:
        host, _ = host_and_port(rendezvous)
        with waiting_at(rendezvous, "this node"):
            store, is_first = meet_as_nodes(rendezvous, _MEETING)
        # The store adds atomically, so each node gets a number of its own, from 1.
        number = 0 if is_first else store.add("planner/nodes", 1)
        member = Member(number=number, count=num_nodes, ranks_here=nproc, local_number=0,
                        store=store, host=host)  # fmt: skip
    elif place is not None:
        with waiting_at(place.meeting, f"process {place.number}"):
            store = meet_as_started(place, _MEETING)
        member = Member(number=place.number, count=place.count,
                        ranks_here=nproc if place.is_node else 1, local_number=place.local_number,
                        store=store, host=place.address)  # fmt: skip
    else:
        return None
    _check_alike(member)
    return member


def _check_alike(member: Member) -> None:
    """Raise ProfileError on all where the members would start different numbers of ranks."""
    told = tell_all(
        member.store,
        "ranks",
        f"{member.ranks_here} on {socket.gethostname()}",
        number=member.number,
        count=member.count,
        name=socket.gethostname(),
        within_s=_MEETING.total_seconds(),
    )
    if len({text.split()[0] for text in told}) > 1:
        raise ProfileError(
            f"nodes would start different numbers of ranks ({', '.join(told)}); give `nproc`, the "
            "same on all"
        )


class Launcher(Protocol):
    """Starts one generation of workers that connect to a port of this process."""

    num_ranks: int
    listen_on: str

    def start(self, port: int, token: str, log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Start workers and return those that are children of this process."""

    def lost(self) -> str:
        """Return which node is gone; nothing while all are there."""

    def close(self) -> None:
        """Tell whoever else starts workers that no more will be needed."""


class LocalLauncher:
    """Starts every rank on this machine."""

    listen_on = "127.0.0.1"

    def __init__(self, num_ranks: int, *, device: str, threads: int) -> None:
        self.num_ranks = num_ranks
        self._device = device
        self._threads = threads

    def start(self, port: int, token: str, log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Start all ranks."""
        call = {
            "address": f"127.0.0.1:{port}",
            "token": token,
            "master": "127.0.0.1",
            "master_port": free_port(),
            "device": self._device,
            "threads": self._threads,
        }
        return [
            _spawn(ClusterRank(rank=rank, world_size=self.num_ranks, local_rank=rank), call, log)
            for rank in range(self.num_ranks)
        ]

    def lost(self) -> str:
        """Nobody else to lose."""
        return ""

    def close(self) -> None:
        """Nobody else to tell."""


class ClusterLauncher:
    """The first process's side on a cluster: starts its own workers and announces them."""

    listen_on = "0.0.0.0"

    def __init__(self, member: Member, *, device: str, threads: int) -> None:
        self.num_ranks = member.count * member.ranks_here
        self._member = member
        self._device = device
        self._threads = threads
        self._generation = 0
        self._watch = member.watch()

    def lost(self) -> str:
        """Return which node gave no sign."""
        return self._watch.lost

    def start(self, port: int, token: str, log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Announce a generation and start this process's workers of it."""
        host = self._member.host
        call = {
            "address": f"{host}:{port}",
            "token": token,
            "master": host,
            "master_port": free_port(),
            "device": self._device,
            "threads": self._threads,
        }
        self._member.store.set(_key(self._generation), json.dumps(call))
        self._generation += 1
        return [_spawn(place, call, log) for place in self._member.ranks()]

    def close(self) -> None:
        """End the other ranks."""
        self._watch.stop()
        self._member.store.set(_key(self._generation), json.dumps(_DONE))


def serve(member: Member) -> None:
    """Start workers for every generation that rank 0 announces, until it is done.

    Raises ProfileError, with its name, where a node is gone.
    """
    store, watch = member.store, member.watch()
    generation = 0
    workers: list[subprocess.Popen[bytes]] = []
    try:
        while True:
            try:
                while not store.check([_key(generation)]):
                    if watch.lost:
                        raise ProfileError(
                            f"{watch.lost}; this node ends its ranks, so start all again"
                        )
                    time.sleep(_POLL_S)
            except RuntimeError as error:
                meeting = described(f"{member.host}:{port_of(store)}")
                why = str(error).splitlines()[0]
                raise ProfileError(
                    f"{socket.gethostname()} has lost the node that measures, {meeting}: {why}"
                ) from None
            call = json.loads(store.get(_key(generation)))
            # A new generation is announced when the one before is dead or stuck somewhere.
            _end(workers)
            if call == _DONE:
                return
            workers = [_spawn(place, call, None) for place in member.ranks()]
            generation += 1
    finally:
        _end(workers)
        watch.stop()


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()


def _key(generation: int) -> str:
    return f"planner/profiles/{generation}"


def _spawn(
    place: ClusterRank, call: Mapping[str, object], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        # What training ranks get, allocator settings among it: memory and its fragmentation are
        # measured under them.
        **rank_environment(place.world_size, str(call["device"])),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": str(call["master"]),
        "MASTER_PORT": str(call["master_port"]),
        # The workers' rendezvous is their own, not that of a torchrun around us.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": str(call["threads"]),
        "PLANNER_PROFILE_ADDRESS": str(call["address"]),
        "PLANNER_PROFILE_TOKEN": str(call["token"]),
        "PLANNER_PROFILE_DEVICE": str(call["device"]),
    }
    return subprocess.Popen(
        # -P: a folder of the user's called profiles must not shadow ours.
        [sys.executable, "-P", "-m", "profiles.measure.worker"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def new_token() -> str:
    """Return a secret by which a worker proves that it is one of ours."""
    return secrets.token_hex(16)


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
