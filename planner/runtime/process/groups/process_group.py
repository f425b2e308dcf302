"""Starting the default process group, once all ranks have said that they can and are alike."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.language.plan import Plan
from planner.nodes.interface import take_interface
from planner.nodes.launchers import started
from planner.nodes.waiting import waiting_at
from planner.runtime.process import device as devices
from planner.runtime.process.groups import staged
from planner.runtime.process.groups.alike import Told, differences, told_of_run


def start_process_group(plan: Plan, device: torch.device) -> None:
    """Start the default group on the device's backend, once every rank is known to have it.

    A backend that any rank lacks is told by every rank in the same words, instead of by that rank
    while the others wait for it.
    """
    if "WORLD_SIZE" not in os.environ:
        if plan.world_size > 1:
            raise PlanError(
                f"the plan is for {plan.world_size} ranks and this is a lone process; start it "
                "with: planner launch plan.json script.py"
            )
        backend = devices.backend(device)
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=group_timeout()
        )
        return
    timeout = group_timeout()
    meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with waiting_at(meeting, f"rank {os.environ.get('RANK')}"):
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    start = dist.PrefixStore("planner-start", store)
    backend = _shared_backend(start, rank, world_size, device, told_of_run(plan))
    take_interface(start, rank=rank, count=world_size, towards=os.environ.get("MASTER_ADDR", ""))
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("planner", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=devices.bound_to(device),
        )
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PlanError(
            f"rank {rank} on {device} can't start {backend}, through which ranks on "
            f"{device.type} talk ({reason}); mend that, or use `device` cpu"
        ) from error


def group_timeout() -> timedelta:
    """Return how long an operation of any group may take: PLANNER_TIMEOUT_S, else ten minutes.

    To be given to each group: torch takes a default of its backend's for another, whatever the
    default group has.
    """
    return timedelta(seconds=float(os.environ.get("PLANNER_TIMEOUT_S", "600")))


def take_place() -> None:
    """Set the variables by which torch knows this rank where a launcher that sets others (srun,
    mpirun) started it. Raises PlannerError when it told no place to meet.
    """
    place = None if "WORLD_SIZE" in os.environ else started(os.environ)
    if place is not None:
        os.environ.update(place.torch_variables())


def _shared_backend(
    store: dist.Store, rank: int, world_size: int, device: torch.device, told: Told
) -> str:
    """Return this rank's backend when all ranks have said that theirs is there, and that they have
    the same plan and software.

    It goes over the store that ranks met at, since no group exists yet: three messages a rank; the
    last to come compares. Raises PlanError on every rank where a rank has no backend, or others
    than the rest.
    """
    backend = ""
    try:
        backend = devices.backend(device)
    except PlanError as error:
        store.set("missing", f"rank {rank}: {error}")
    # (Ranks that share a GPU over `staged` do so on purpose.)
    own_device = "" if backend in ("", staged.NAME) else devices.identity(device)
    store.set(f"about/{rank}", json.dumps([told, own_device]))
    # The last to come sees what all have told, and lets them go on.
    if store.add("told", 1) == world_size:
        every = store.multi_get([f"about/{each}" for each in range(world_size)])
        abouts = [json.loads(each) for each in every]
        if differ := differences(node for node, _ in abouts):
            store.set("missing", f"{'; '.join(differ)}; give all nodes the same")
        elif shared := _sharing([own for _, own in abouts]):
            store.set("missing", shared)
        store.set("all told", "")
    store.wait(["all told"])
    if store.check(["missing"]):
        raise PlanError(store.get("missing").decode())
    return backend


def _sharing(devices_of: Sequence[str]) -> str:
    """Return which ranks have one and the same accelerator, in words; empty where none do."""
    by_device: dict[str, list[int]] = {}
    for rank, own in enumerate(devices_of):
        by_device.setdefault(own, []).append(rank)
    for own, ranks in by_device.items():
        if own and len(ranks) > 1:
            return (
                f"ranks {', '.join(map(str, ranks))} have one GPU ({own}), and each needs its own; "
                "start one rank for each GPU, or let the launcher show each rank another"
            )
    return ""
