"""One rank of a measurement: `python -m profiles.measure.worker`, started by `launchers`.

It joins a process group with its peers, then takes tasks from the measuring process, one
JSON line each, and answers with one line. Whatever goes wrong in a task is answered as an
error, or ends this process, which the other side notices; it never ends the measurement.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from planner.language.ops.families.products.narrow import CAPABILITY
from planner.nodes.interface import take_interface
from planner.runtime.process.device import p2p_needs_own_groups
from planner.runtime.process.groups.gloo_threads import put_socket_threads_last
from planner.runtime.process.host.cores import available_cores, own_cores, stay_on
from planner.runtime.process.host.heap import keep_freed_memory
from planner.runtime.stage.program_fx import import_libraries
from profiles.lookup.memory import allocator_overheads, load_training, used_bytes
from profiles.measure.driver import clock_state, driver_version
from profiles.measure.timing.clock import Clock, Pace, settle_clocks
from profiles.measure.timing.collective_timing import time_collective
from profiles.measure.timing.host_timing import time_host_work
from profiles.measure.timing.overlap_timing import measure_overlap
from profiles.measure.timing.step_timing import time_launch, time_step_work
from profiles.measure.timing.sustained_timing import time_sustained
from profiles.measure.timing.timing import OpTimer
from profiles.measure.timing.wait_timing import time_waits


def main() -> None:
    """Serve tasks until the measuring process hangs up."""
    host, port = os.environ["PLANNER_PROFILE_ADDRESS"].rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        lines = connection.makefile("rw", encoding="utf-8", newline="\n")
        rank = int(os.environ["RANK"])
        _say(lines, {"rank": rank, "token": os.environ["PLANNER_PROFILE_TOKEN"]})
        worker = Worker(rank=rank, device_type=os.environ["PLANNER_PROFILE_DEVICE"])
        gc.disable()  # a collection in the middle of a sample would count
        for line in lines:
            try:
                answer = worker.run(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            _say(lines, answer)
            worker.tidy()
    # Peers may already be gone, so the process group is not torn down in turn.
    sys.stdout.flush()
    os._exit(0)


class Worker:
    """A rank with its device and process groups. Mutable: groups are made when first used."""

    def __init__(self, *, rank: int, device_type: str) -> None:
        self.rank = rank
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if device_type == "cuda":
            local_rank, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local_rank >= found:
                raise SystemExit(
                    f"rank {rank} on {socket.gethostname()} needs GPU {local_rank}, but torch "
                    f"sees {found} there; start fewer ranks, or measure with `device` cpu"
                )
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
            settle_clocks(self.device)
        else:
            keep_freed_memory()
            self.device = torch.device(device_type)
        if device_type == "cuda":
            dist.init_process_group("nccl", device_id=self.device)
        else:
            store, rank, count = next(dist.rendezvous("env://"))
            take_interface(store, rank=rank, count=count, towards=os.environ["MASTER_ADDR"])
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        put_socket_threads_last()
        self.clock = Clock(self.device, own_core=device_type == "cpu" and _take_own_cores())
        self._timer = OpTimer(self.clock)
        self._pace = Pace(self.clock)
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._plan_groups: dict[tuple[str, int], Any] = {}
        self._tasks: Mapping[str, Callable[[Any], Any]] = {
            "describe": lambda _: describe(self.device),
            "op": self._time_op,
            "collective": self._time_collective,
            "memory": self._memory,
            "step": self._time_step_work,
            "launch": lambda _: time_launch(self.device),
            "host": self._time_host_work,
            "sustained": lambda task: time_sustained(self.clock, seconds=task["seconds"]),
            "zero": self._time_zero_work,
            "overlap": lambda _: measure_overlap(self.clock),
            "waits": lambda _: time_waits(self.clock),
        }

    def run(self, task: Mapping[str, Any]) -> Any:
        """Do one task, such as ``{"task": "op", …}``, and return its JSON answer."""
        return self._tasks[task["task"]](task)

    def tidy(self) -> None:
        """Between tasks: collect garbage, and give unused memory back to a GPU."""
        gc.collect(0)
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _time_op(self, task: Mapping[str, Any]) -> dict[str, Any]:
        import_libraries(task["libraries"])
        samples: dict[str, Any] = self._timer.visit(
            task["probe"],
            seconds=task["seconds"],
            warm=task["warm"],
            begin_together=dist.barrier,
        )
        if self.device.type == "cuda":
            # Right behind the work: what clocks did beside it, as nothing else tells.
            state = clock_state(str(torch.cuda.get_device_properties(self.device).uuid))
            samples["clock"] = None if state is None else asdict(state)
        return samples

    def _time_collective(self, task: Mapping[str, Any]) -> dict[str, Any]:
        layout = tuple(tuple(ranks) for ranks in task["groups"])
        if layout not in self._groups:
            # Every rank makes every group, in the same order.
            made = [dist.new_group(list(ranks)) for ranks in layout]
            mine = [g for g, ranks in zip(made, layout, strict=True) if self.rank in ranks]
            self._groups[layout] = mine[0] if mine else None
            # New groups have socket threads of their own.
            put_socket_threads_last()
        group = self._groups[layout]
        if group is None:
            return {"seconds": []}
        return time_collective(
            task["kind"], task["num_bytes"], group, clock=self.clock, seconds=task["seconds"]
        )

    def _time_step_work(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return self._beside_paces(
            partial(
                time_step_work,
                task["work"],
                num_tensors=task["num_tensors"],
                numel=task["numel"],
                clock=self.clock,
                seconds=task["seconds"],
            )
        )

    def _time_host_work(self, task: Mapping[str, Any]) -> dict[Any, list[float]]:
        everyone = dist.group.WORLD
        assert everyone is not None
        return time_host_work(self.device, everyone.group_name)

    def _time_zero_work(self, task: Mapping[str, Any]) -> Any:
        from profiles.measure.timing.zero_timing import time_zero_work

        return self._beside_paces(
            partial(
                time_zero_work,
                num_tensors=task["num_tensors"],
                numel=task["numel"],
                clock=self.clock,
                seconds=task["seconds"],
            )
        )

    def _beside_paces(self, timed: Callable[[], Mapping[Any, list[float]]]) -> dict[str, Any]:
        """Return samples, and the core's paces before and after them."""
        before = self._pace.take()
        samples = timed()
        after = self._pace.take()
        return {**samples, **{kind: found + after[kind] for kind, found in before.items()}}

    def _memory(self, task: Mapping[str, Any]) -> dict[str, Any]:
        load_training(self.device)
        self._open_groups_of_a_plan()
        self.tidy()  # what warming up the clocks left in reserve is no part of the context
        context = used_bytes(self.device)
        return {
            "context_bytes": context,
            "allocator_overheads": allocator_overheads(self.device),
        }

    def _open_groups_of_a_plan(self) -> None:
        """Open the groups that ranks of a plan hold, and send through each: communicators take
        their memory, hundreds of MB on GPUs, from their first message on.

        Beside the group of all: one for tp, one for data, and to each neighbour in the pipeline one
        for each direction, where directions need groups of their own.
        """
        count = dist.get_world_size()
        if count == 1:
            return
        everyone = list(range(count))
        groups = [everyone, everyone]
        if p2p_needs_own_groups(self.device):
            pairs = [[rank, (rank + 1) % count] for rank in range(count if count > 2 else 1)]
            groups += [sorted(pair) for pair in pairs for _ in ("forward", "backward")]
        for index, ranks in enumerate(groups):
            key = ("plan", index)
            if key not in self._plan_groups:
                self._plan_groups[key] = dist.new_group(ranks)
            if self.rank in ranks:
                dist.all_reduce(torch.ones(1, device=self.device), group=self._plan_groups[key])


def describe(device: torch.device) -> dict[str, Any]:
    """Return what this rank runs on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "shares_memory": False,
            "driver": f"{driver_version() or 'unknown driver'}, CUDA {torch.version.cuda}",
            "float8": torch.cuda.get_device_capability(device) >= CAPABILITY["tensorwise"][0],
            "blocks": torch.cuda.get_device_capability(device) >= CAPABILITY["blocks"][0],
            "torch": torch.__version__,
            "node": socket.gethostname(),
        }
    return {
        "device": _cpu_name(),
        "memory_bytes": _host_memory_bytes(),
        "shares_memory": True,
        "driver": f"{sys.platform} {os.uname().release}",
        "float8": False,
        "blocks": False,
        "torch": torch.__version__,
        "node": socket.gethostname(),
    }


def _take_own_cores() -> bool:
    """Share the node's cores out among its ranks; return whether each has one to itself."""
    mine = socket.gethostname(), available_cores()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    here = [rank for rank, (host, _) in enumerate(everyone) if host == mine[0]]
    cores = own_cores(
        mine[1],
        peers=[everyone[rank][1] for rank in here],
        local_rank=here.index(dist.get_rank()),
    )
    stay_on(cores)
    # No core is shared where the ranks of a node are no more than the cores they may run on.
    return len(here) <= len(set().union(*(everyone[rank][1] for rank in here)))


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return names[0]
    except (OSError, IndexError):
        import platform

        return platform.processor() or platform.machine() or "CPU"


def _host_memory_bytes() -> int:
    """Return the memory of this machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return total


def _say(lines: Any, answer: Any) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
