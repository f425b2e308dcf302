"""How worker ranks come to life: all on this machine, or one by each of several processes.

On one machine the measuring process starts all workers. On a cluster the same command runs
once per rank under torchrun, srun or mpirun. Rank 0 then measures; every rank, 0 included,
starts one worker, and again a new one (a new *generation*) whenever rank 0 announces it in
the rendezvous store, which is how a crash anywhere is survived everywhere.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from planner.errors import ProfileError

if TYPE_CHECKING:
    from torch.distributed import Store

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_POLL_S = 0.2
_DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRank:
    """The place of this process among those that a launcher started together."""

    rank: int
    world_size: int
    local_rank: int


def cluster_rank(environment: Mapping[str, str]) -> ClusterRank | None:
    """Return the place that torchrun, srun or mpirun gave this process; None when alone.

    Raises ProfileError when the place is no place, or is given but not where to meet.
    """
    for rank, world_size, local_rank in _RANK_VARIABLES:
        place = ClusterRank(
            rank=_whole_number(environment, rank, default=0),
            world_size=_whole_number(environment, world_size, default=1),
            local_rank=_whole_number(environment, local_rank, default=0),
        )
        if rank in environment and place.world_size > 1:
            if place.rank >= place.world_size:
                raise ProfileError(
                    f"{rank}={place.rank} and {world_size}={place.world_size} were given; ranks "
                    f"count from 0 to {place.world_size - 1}; start all by one launcher"
                )
            missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in environment]
            if missing:
                raise ProfileError(
                    f"{rank} says this is one of {environment[world_size]} processes, but "
                    f"{' and '.join(missing)} is not set; set it to the host of rank 0 and a "
                    "free port there"
                )
            _whole_number(environment, "MASTER_PORT", default=0)  # refused here, not at the meeting
            return place
    return None


def _whole_number(environment: Mapping[str, str], name: str, *, default: int) -> int:
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        raise ProfileError(f"{name}={text} was given; launchers set it to a whole number from 0 on")
    return int(text)


class Launcher(Protocol):
    """Starts one generation of workers that connect to a port of this process."""

    num_ranks: int
    listen_on: str

    def start(self, port: int, token: str, log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Start workers and return those that are children of this process."""

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

    def close(self) -> None:
        """Nobody else to tell."""


class ClusterLauncher:
    """Rank 0's side on a cluster: starts its own worker and announces it to the others."""

    listen_on = "0.0.0.0"

    def __init__(self, place: ClusterRank, *, device: str, threads: int) -> None:
        self.num_ranks = place.world_size
        self._place = place
        self._device = device
        self._threads = threads
        self._store = _meet(place)
        self._generation = 0

    def start(self, port: int, token: str, log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Announce a generation and start this rank's worker of it."""
        host = os.environ["MASTER_ADDR"]
        call = {
            "address": f"{host}:{port}",
            "token": token,
            "master": host,
            "master_port": free_port(),
            "device": self._device,
            "threads": self._threads,
        }
        self._store.set(_key(self._generation), json.dumps(call))
        self._generation += 1
        return [_spawn(self._place, call, log)]

    def close(self) -> None:
        """End the other ranks."""
        self._store.set(_key(self._generation), json.dumps(_DONE))


def serve(place: ClusterRank) -> None:
    """Start a worker for every generation that rank 0 announces, until it is done."""
    store = _meet(place)
    generation = 0
    worker: subprocess.Popen[bytes] | None = None
    try:
        while True:
            try:
                store.wait([_key(generation)], timedelta(seconds=_POLL_S))
            except Exception as error:
                # torch raises DistStoreError on time-out; a lost store is another error.
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise ProfileError(f"rank 0 is gone: {error}".splitlines()[0]) from None
                continue
            call = json.loads(store.get(_key(generation)))
            if worker is not None:
                worker.kill()
                worker.wait()
            if call == _DONE:
                return
            worker = _spawn(place, call, None)
            generation += 1
    finally:
        if worker is not None:
            worker.kill()
            worker.wait()


def _meet(place: ClusterRank) -> Store:
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.world_size))
    return store


def _key(generation: int) -> str:
    return f"planner/profiles/{generation}"


def _spawn(
    place: ClusterRank, call: Mapping[str, object], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
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
    """Return a port that nobody listens on."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
