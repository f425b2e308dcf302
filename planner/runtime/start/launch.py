"""`planner launch`: check a plan, then run a script on its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlanError
from planner.language.plan import Plan, load_plan
from planner.language.plan.node_runs import described, node_runs, ranks_of_nodes
from planner.language.plan.schedule_of import schedule_of
from planner.nodes.launchers import Started, started
from planner.runtime.checkpoint.kept import KEEP, SAVE_EVERY
from planner.runtime.process.environment import DEVICES, KERNELS, LAUNCHED, TIMELINE_DIR, UNMODIFIED
from planner.runtime.process.watchdog import ENDS_S
from planner.runtime.start.course import Keeping
from planner.runtime.start.workers import become_rank, run_workers
from planner.units import MIB, format_bytes

_PROCESS_BYTES = 256 * MIB
"""What a rank on a CPU holds at least: Python, torch, gloo (220 to 330 MiB on Linux)."""

_STALL_ENDS_S = 60.0
"""How long a kept run may stay stalled after it was told: a slow disk has come back by then."""


def launch(
    plan_path: str | os.PathLike[str],
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    device: str | None = None,
    *,
    num_nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    timeline: str | os.PathLike[str] | None = None,
    devices: Sequence[int] | None = None,
    keeping: Keeping | None = None,
    unmodified: bool = False,
    kernels: str | None = None,
) -> int:
    """Run `script` on every rank of the plan; return the run's exit code.

    Everything that can be checked is checked before a process starts: raises PlanError or
    ScheduleError for a plan that can't run here. Ranks get RANK, WORLD_SIZE and LOCAL_RANK,
    this process's working directory, and the script's folder as the first import path. On
    several nodes, run the same on each, `rendezvous` being host:port of one of them, and
    `node_rank` its number in the order of the plan's ranks, which nodes of unlike devices need;
    where srun, mpirun or a PyTorchJob runs it, one for each node or each rank, all three are
    theirs, and under torchrun this process becomes the rank that it is. With
    `timeline`, every rank records its jobs in that folder (see `planner.timeline`). `devices` are
    the numbers of the accelerators that this node's ranks take, in their order. A run of which
    `keeping` is given starts again after failures, from its newest checkpoint. An `unmodified`
    script is one for a single process, whose model and loop are taken over. `kernels` run blocks
    instead of those of the plan.
    """
    if unmodified and keeping is not None:
        raise PlanError(
            "`keep` saves and resumes a script's engine, and an `unmodified` script has none: it "
            "saves by torch.save itself; leave one of them out"
        )
    plan = load_plan(plan_path)
    place = None if num_nodes is not None else started(os.environ)
    is_host = None
    if place is not None:
        num_nodes, rendezvous, is_host = place.count, place.meeting, place.number == 0
        node_rank = place.number
    num_nodes, rendezvous = num_nodes or 1, rendezvous or "localhost:0"
    node = check_node(
        plan, Path(script), device, place=place, num_nodes=num_nodes, node_rank=node_rank,
        devices=devices, restarts_by_plan=keeping is not None and keeping.replan is not None,
    )  # fmt: skip
    device, extra = node.device, node.variables
    extra[LAUNCHED] = os.path.abspath(plan_path)
    if kernels is not None:
        extra[KERNELS] = kernels
    if unmodified:
        extra[UNMODIFIED] = "1"
    if timeline is not None:
        extra[TIMELINE_DIR] = os.path.abspath(timeline)
    if keeping is not None:
        if keeping.min_ranks is not None and keeping.min_ranks > plan.world_size:
            raise PlanError(
                f"`elastic` {keeping.min_ranks} is more than the plan's {plan.world_size} ranks; "
                "it is the fewest that the run goes on with"
            )
        extra[KEEP] = os.path.abspath(keeping.folder)
        extra[SAVE_EVERY] = str(keeping.save_every)
        extra[ENDS_S] = os.environ.get(ENDS_S, str(_STALL_ENDS_S))
    if place is not None and place.is_rank:
        become_rank([str(script), *args], device=device, extra=extra)
    return run_workers(
        [str(script), *args],
        num_ranks=plan.world_size,
        device=device,
        num_nodes=num_nodes,
        ranks_here=node.ranks,
        node_rank=node_rank,
        rendezvous=rendezvous,
        extra=extra,
        plan=Path(os.path.abspath(plan_path)),
        keeping=keeping,
        is_host=is_host,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """What a node starts: `ranks` on this type of device, with these variables of theirs."""

    ranks: int
    device: str
    variables: dict[str, str]


def check_node(
    plan: Plan,
    script: Path,
    device: str | None,
    *,
    place: Started | None,
    num_nodes: int,
    node_rank: int | None,
    devices: Sequence[int] | None,
    restarts_by_plan: bool = False,
) -> NodeRanks:
    """Return what this node starts; its variables tell ranks which devices they take.

    `restarts_by_plan` says that ranks may start again under another plan. Raises PlanError or
    ScheduleError for what can't run here.
    """
    from planner.runtime.process.device import refuse_blocking_launches

    _check_script(script)
    if place is not None:
        _check_place(place, plan, restarts_by_plan=restarts_by_plan)
    schedule_of(plan)
    ranks = ranks_of_node(plan, num_nodes, node_rank, restarts_by_plan=restarts_by_plan)
    device = check_ranks(ranks, device)
    refuse_blocking_launches(plan.pp, device)
    variables = {}
    if devices is not None:
        check_listed(devices, ranks, device)
        variables[DEVICES] = ",".join(map(str, devices))
    elif place is not None and device != "cpu" and not place.is_rank:
        variables[DEVICES] = ",".join(map(str, _own_devices(place, ranks, device)))
    return NodeRanks(ranks=ranks, device=device, variables=variables)


def ranks_of_node(
    plan: Plan, num_nodes: int, node_rank: int | None, *, restarts_by_plan: bool = False
) -> int:
    """Return the ranks that this node starts.

    `node_rank` is its number in the order of ranks; None where it was told none. Raises PlanError
    where the plan's ranks can't lie so on that many nodes.
    """
    sizes = ranks_of_nodes(plan, num_nodes)
    if node_rank is not None and not 0 <= node_rank < num_nodes:
        raise PlanError(
            f"`node_rank` {node_rank} was given; {num_nodes} nodes have the numbers from 0 to "
            f"{num_nodes - 1}"
        )
    runs = node_runs(plan) if num_nodes > 1 else ()
    if len(runs) > 1 and node_rank is None:
        raise PlanError(
            f"the plan's ranks lie on unlike nodes ({described(runs)}); say with `node_rank` "
            "which of them this is, counted from 0 in this order"
        )
    if restarts_by_plan and len(set(sizes)) > 1:
        raise PlanError(
            f"`elastic` and `on_oom` replan search plans for nodes with equally many ranks, and "
            f"this plan is for {described(runs)}; leave them away"
        )
    return sizes[node_rank or 0]


def _check_place(place: Started, plan: Plan, *, restarts_by_plan: bool) -> None:
    """Raise PlanError where the processes that a launcher started can't be the plan's ranks."""
    if place.is_rank and place.count != plan.world_size:
        raise PlanError(
            f"{place.launcher} started {place.count} ranks and the plan has {plan.world_size}; "
            f"start {plan.world_size}, or run `planner launch` once a node without it"
        )
    of_groups = sum(run.nodes for run in node_runs(plan))
    if plan.world_size % place.count and place.count != of_groups:
        raise PlanError(
            f"{place.launcher} started {place.count} processes and the plan has "
            f"{plan.world_size} ranks; start as many processes, or one a node"
        )
    if place.is_rank and restarts_by_plan:
        raise PlanError(
            f"`elastic` and `on_oom` replan start ranks again under another plan, and "
            f"{place.launcher} starts them here; run `planner launch` once a node without it"
        )


def _own_devices(place: Started, ranks: int, device: str) -> list[int]:
    """Return the numbers of the accelerators of this process's ranks, which share a node with
    those of other processes unless the launcher shows each only its own.
    """
    from planner.runtime.process.device import num_devices

    first = place.local_number * ranks
    return list(range(first, first + ranks) if num_devices(device) > ranks else range(ranks))


def _check_script(script: Path) -> None:
    """Raise PlanError for a script that is not there or that Python can't read."""
    if not script.is_file():
        raise PlanError(f"no script {script}; give the Python file that trains the model")
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise PlanError(f"script {script} is not Python{where}: {what}; mend it first") from error


def check_listed(listed: Sequence[int], ranks_here: int, device: str) -> None:
    """Raise PlanError when a list of accelerators is not what a node's ranks can take."""
    from planner.runtime.process.device import num_devices

    given = ",".join(map(str, listed))
    if device == "cpu":
        raise PlanError(f"`devices` {given} lists GPUs, and ranks run on the CPU; leave it away")
    if len(listed) != ranks_here or len(set(listed)) != len(listed):
        raise PlanError(
            f"`devices` {given} must name {ranks_here} different GPUs, one for each rank of this "
            "node; give as many"
        )
    here = num_devices(device)
    if missing := [number for number in listed if not 0 <= number < here]:
        raise PlanError(f"`devices` {given}: there is no GPU {missing[0]}; {here} are here")


def check_runnable(plan: Plan, device: str | None) -> str:
    """Return the type of device ("cpu", "cuda") the plan will run on, all its ranks being here.

    Raises ScheduleError when its schedule does not take its numbers, PlanError when this machine
    has too few GPUs or too little memory.
    """
    schedule_of(plan)
    return check_ranks(plan.world_size, device)


def check_ranks(here: int, device: str | None) -> str:
    """Return the type of device ("cpu", "cuda") of so many ranks on this machine.

    Raises PlanError when it has too few GPUs or too little memory for their processes.
    """
    from planner.runtime.process.device import device_type, is_staged, num_devices

    device = device_type(device)
    gpus = num_devices(device)
    # (Over `staged` ranks share them.)
    if device != "cpu" and gpus < (1 if is_staged() else here):
        raise PlanError(
            f"the plan needs {here} GPUs on this node and {gpus} are here; "
            "use `device` cpu, or search with `num_devices` for what is here"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu" and here * _PROCESS_BYTES > memory:
        raise PlanError(
            f"the plan needs {here} processes on this node, each of "
            f"{format_bytes(_PROCESS_BYTES)} before its model, and the node has "
            f"{format_bytes(memory)}; search with `num_devices` for what is here"
        )
    return device
