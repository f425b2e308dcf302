"""What a rank checks, in the order of `PHASES`, and leaves in the store as its `Finding`.

A check that fails for a rank does not end the others' checks before they have said so, too: each
rank leaves what it has, with the phase that it came to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlannerError
from planner.language.plan import Plan, load_plan
from planner.nodes.interface import take_interface
from planner.runtime.preflight.exchanges import Exchange, Round, node_rounds, planned_rounds
from planner.runtime.preflight.reach import Unreached, listen, own_address, reach_all

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from planner.runtime.preflight.pairs import Stuck
    from planner.runtime.process.groups.mesh import Mesh

START_S = 120.0
"""Seconds in which all ranks must have come up: torch loads slowly from a shared file system."""

STEP_S = 20.0
"""Seconds that a single exchange may take, and in which all must have come to it."""

PHASES = ("start", "reach", "backend", "pairs", "groups", "times", "done")
_NUM_CLOCKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a launcher asks its ranks.

    Attributes:
        plan: path of the plan.
        host: where the store is.
        port: its port.
        room: the part of the store that is this preflight's.
        nodes: global ranks of each node.
    """

    plan: str
    host: str
    port: int
    room: str
    nodes: tuple[tuple[int, ...], ...]


@dataclass(kw_only=True)
class Finding:
    """What a rank found. Mutable: it grows from phase to phase.

    Attributes:
        phase: the phase it came to, of `PHASES`.
        address: under which the backend takes its connections.
        unreached: ranks that did not answer.
        stuck: where the backend's messages stopped.
        timed: exchanges with the bytes of their message and seconds.
        free_bytes: memory that its device has left: on a CPU, its node.
        shares_memory: whether that is the memory of its node's other ranks, too.
        checks_s: seconds from when all ranks had come.
        clocks: seconds since the epoch, each right after all ranks met.
        trouble: why it did not go on, in one line.
    """

    phase: str = PHASES[0]
    address: str = ""
    unreached: list[Unreached] = field(default_factory=list)
    stuck: Stuck | None = None
    timed: list[tuple[Exchange, int, float]] = field(default_factory=list)
    free_bytes: int | None = None
    shares_memory: bool = False
    checks_s: float = 0.0
    clocks: list[float] = field(default_factory=list)
    trouble: str = ""

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Finding:
        """Return it again."""
        from planner.runtime.preflight.pairs import Stuck

        data: dict[str, Any] = json.loads(text)
        data["unreached"] = [Unreached(**each) for each in data["unreached"]]
        data["stuck"] = None if data["stuck"] is None else Stuck(**data["stuck"])
        data["timed"] = [
            (Exchange(**{**exchange, "ranks": tuple(exchange["ranks"])}), num_bytes, seconds)
            for exchange, num_bytes, seconds in data["timed"]
        ]
        return cls(**data)


def preflight_worker(request: Path) -> None:
    """Do a rank's part of `preflight`."""
    from torch.distributed import PrefixStore, TCPStore

    from planner.runtime.start.node_watch import end_dead_connections

    data = json.loads(request.read_text())
    data["nodes"] = tuple(map(tuple, data["nodes"]))
    asked = Request(**data)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=START_S)
    store = TCPStore(asked.host, asked.port, None, is_master=False, timeout=limit)
    end_dead_connections(asked.port, STEP_S)
    checked = _Rank(PrefixStore(asked.room, store), asked, rank=rank, count=count)
    try:
        checked.run()
    except (PlannerError, RuntimeError, OSError) as error:
        from planner.runtime.preflight.pairs import reason_of

        checked.finding.trouble = reason_of(error)
    if checked.came_at is not None:
        checked.finding.checks_s = time.monotonic() - checked.came_at
    checked.store.set(f"found/{rank}", checked.finding.to_json())
    checked.store.set("a finding", "")
    if checked.finding.phase != PHASES[-1]:
        # Groups that do not work are not taken apart in turn.
        sys.stderr.flush()
        os._exit(0)


class _Rank:
    """One rank's checks. Mutable: its finding grows."""

    def __init__(self, store: Store, asked: Request, *, rank: int, count: int) -> None:
        self.store, self._asked = store, asked
        self._rank, self._count = rank, count
        self.finding = Finding()
        self.came_at: float | None = None

    def run(self) -> None:
        from planner.runtime.process import device as devices
        from planner.runtime.process.groups.mesh import build_mesh

        plan = load_plan(self._asked.plan)
        device = devices.choose_device()
        devices.prepare(device)
        backend = devices.backend(device)
        self._reach(backend)
        if self.finding.unreached or self._others("unreached"):
            return
        self._begin("backend")
        self._start(backend, device)
        from planner.runtime.preflight.pairs import exchange_with_all

        self._begin("pairs")
        self.finding.stuck = exchange_with_all(device)
        if self.finding.stuck:
            self.store.set("stuck", "")
        self._meet("paired", 2 * STEP_S)  # a pair that is stuck takes one
        if self.finding.stuck or self._others("stuck"):
            return
        self._begin("groups")
        mesh = build_mesh(plan, device)
        self._begin("times")
        self._time(plan, mesh)
        self._begin("done")
        mesh.close()

    def _reach(self, backend: str) -> None:
        """Connect to every rank; tell the others whether any did not answer."""
        self._meet("came", START_S)
        take_interface(self.store, rank=self._rank, count=self._count, towards=self._asked.host)
        self.finding.address = own_address(backend, self._asked.host)
        server = listen(self.finding.address)
        told = self._tell("at", json.dumps(server.getsockname()[:2]), START_S)
        self._begin("reach")
        self.came_at = time.monotonic()
        addresses = [(at[0], at[1]) for at in map(json.loads, told)]
        self.finding.unreached = reach_all(
            server,
            addresses,
            rank=self._rank,
            sends_long=self._has_same_place,
            all_done=lambda: self._meet("reached", STEP_S),
        )
        if self.finding.unreached:
            self.store.set("unreached", "")
        self._meet("reach told", STEP_S)

    def _has_same_place(self, peer: int) -> bool:
        """Whether a rank is on another node what this one is on its own: first, second, ..."""
        (own,) = (ranks.index(self._rank) for ranks in self._asked.nodes if self._rank in ranks)
        return any(ranks[own : own + 1] == (peer,) for ranks in self._asked.nodes)

    def _start(self, backend: str, device: torch.device) -> None:
        import torch.distributed as dist

        from planner.runtime.process.device import bound_to

        dist.init_process_group(
            backend,
            store=dist.PrefixStore("backend", self.store),
            rank=self._rank,
            world_size=self._count,
            timeout=timedelta(seconds=STEP_S),
            device_id=bound_to(device),
        )

    def _time(self, plan: Plan, mesh: Mesh) -> None:
        import torch.distributed as dist

        from planner.runtime.preflight.timing import time_round
        from planner.runtime.process.device import is_accelerator

        rounds: Sequence[Round] = (*planned_rounds(plan), *node_rounds(self._asked.nodes))
        for exchanges in rounds:
            self.finding.timed += time_round(exchanges, mesh)
        for _ in range(_NUM_CLOCKS):
            dist.barrier(group=mesh.control)
            self.finding.clocks.append(time.time())
        self.finding.free_bytes = _free_bytes(mesh.device)
        self.finding.shares_memory = not is_accelerator(mesh.device)

    def _begin(self, phase: str) -> None:
        self.finding.phase = phase
        self.store.set(f"phase/{self._rank}", phase)

    def _others(self, what: str) -> bool:
        return bool(self.store.check([what]))

    def _meet(self, room: str, within_s: float) -> None:
        self._tell(room, "", within_s)

    def _tell(self, room: str, text: str, within_s: float) -> list[str]:
        """Return what each rank tells; raise PlannerError with those that did not in time."""
        keys = [f"{room}/{rank}" for rank in range(self._count)]
        self.store.set(keys[self._rank], text)
        try:
            self.store.wait(keys, timedelta(seconds=within_s))
        except RuntimeError:
            missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
            raise PlannerError(
                f"rank {self._rank} waited {within_s:.0f} s for ranks {', '.join(missing)}"
            ) from None
        return [each.decode() for each in self.store.multi_get(keys)]


def _free_bytes(device: torch.device) -> int | None:
    """Return the memory that a device, or this node's host, has left; None where none tells."""
    from planner.runtime.process import device as devices

    if devices.is_accelerator(device):
        return int(devices.of(device).mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
