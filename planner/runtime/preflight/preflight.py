"""A node's part of preflight: meet the others, compare, start ranks, and judge what they found."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanError, PlannerError
from planner.language.plan import Plan, load_plan
from planner.nodes.launchers import Started, started
from planner.nodes.meeting import (
    host_and_port,
    meet_as_nodes,
    meet_as_started,
    port_of,
    tell_all,
)
from planner.nodes.waiting import described, waiting_at
from planner.runtime.preflight.children import OUT_OF_REACH, await_findings, children
from planner.runtime.preflight.exchanges import PlannedRates
from planner.runtime.preflight.facts import (
    Facts,
    facts_of_this_node,
    in_order_of_ranks,
    same_plan,
)
from planner.runtime.preflight.judge import judge_nodes, judge_ranks
from planner.runtime.preflight.rank import STEP_S, Finding, Request
from planner.runtime.preflight.rates import judge_rates, rates_of
from planner.runtime.preflight.report import Rate, Report, check_of
from planner.runtime.process.device import device_types
from planner.runtime.start.launch import check_node
from planner.runtime.start.node_watch import NodeWatch, end_dead_connections
from planner.runtime.start.workers import rank_environment

if TYPE_CHECKING:
    from torch.distributed import Store

MEET_S = 60.0
"""Seconds in which the launchers of all nodes must have come."""

_LEAVE_S = 10.0
"""Seconds that the process with the store waits for the others to have read it."""


def preflight(
    plan_path: Path,
    script: Path,
    device: str | None = None,
    *,
    num_nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    devices: Sequence[int] | None = None,
    planned: PlannedRates | None = None,
    meet_s: float = MEET_S,
) -> Report:
    """Check all nodes for a plan and a script; every node runs this, as it would `launch`.

    The arguments are those of `launch`; `planned` has the rates that the plan was priced with
    (None: links are only compared with each other). Each node gets the same report. Raises
    PlannerError where nodes can't meet in `meet_s`, with the names of those that came, and where
    the only node can't run the plan.
    """
    place = None if num_nodes is not None else started(os.environ)
    count = place.count if place is not None else num_nodes or 1
    plan, facts, variables = _this_node(plan_path, script, device, place, count, node_rank, devices)
    if count == 1 and facts.refusal:
        raise PlanError(facts.refusal)  # of several nodes each is told, with its name
    store, number, host = _meet(place, count, rendezvous)
    end_dead_connections(port_of(store), STEP_S)
    room = f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    told = tell_all(
        store, room, json.dumps(asdict(facts)), number=number, count=count, name=facts.node,
        within_s=meet_s,
    )  # fmt: skip
    began = time.monotonic()
    nodes, disorder = in_order_of_ranks([_facts(text) for text in told])
    world_size = None if plan is None else plan.world_size
    checks = judge_nodes(nodes, world_size, disorder)
    rates: tuple[Rate, ...] = ()
    found: dict[int, Finding] = {}
    if plan is not None and not checks[0].problems and same_plan(nodes):
        hosts = [each.node for each in nodes for _ in range(each.ranks_here)]
        request = Request(
            plan=os.path.abspath(plan_path),
            host=host,
            port=port_of(store),
            room=room,
            nodes=_ranks_of_nodes(hosts),
        )
        first = sum(each.ranks_here for each in nodes[: nodes.index(facts)])
        own = range(first, first + facts.ranks_here)
        watch = _watch(store, host, room, number=number, count=count)
        with children(request, own, len(hosts), variables) as ranks:
            found, ended = await_findings(store, room, len(hosts), ranks, lambda: watch.lost)
            lost = watch.lost  # of now: who has left is not lost
            if not lost:
                _leave_together(store, room, number=number, count=count)
        if not lost and OUT_OF_REACH in ended.values():
            meeting = described(f"{host}:{port_of(store)}")
            lost = f"the node that all meet at, {meeting}, does not answer"
        if lost:
            checks.append(check_of("all nodes to the end", "", [lost]))
        watch.stop()
        rates = rates_of(hosts, found, planned)
        checks += judge_ranks(plan, hosts, found, ended) + judge_rates(plan, hosts, rates)
    else:
        _leave_together(store, room, number=number, count=count)
    total_s = time.monotonic() - began
    checks_s = max((each.checks_s for each in found.values()), default=0.0)
    return Report(
        nodes=tuple(dict.fromkeys(each.node for each in nodes)),
        checks=tuple(checks),
        rates=rates,
        start_s=total_s - checks_s,
        checks_s=checks_s,
        is_first=number == 0,
    )


def _this_node(
    plan_path: Path,
    script: Path,
    device: str | None,
    place: Started | None,
    count: int,
    node_rank: int | None,
    devices: Sequence[int] | None,
) -> tuple[Plan | None, Facts, dict[str, str]]:
    """Return the plan if it can be read, this node's facts, and the variables of its ranks."""
    plan, refusal, ranks_here = None, "", 0
    node_rank = node_rank if place is None else place.number
    extra: dict[str, str] = {}
    try:
        plan = load_plan(plan_path)
        node = check_node(
            plan, script, device, place=place, num_nodes=count, node_rank=node_rank, devices=devices
        )
        ranks_here, device, extra = node.ranks, node.device, node.variables
    except PlannerError as error:
        refusal = str(error)
        if device not in device_types():  # which may be what is refused
            device = None
    facts = facts_of_this_node(
        plan=plan,
        plan_path=plan_path,
        script=script,
        device=device or "cpu",
        ranks_here=ranks_here,
        number=node_rank,
        refusal=refusal,
    )
    return plan, facts, rank_environment(max(1, ranks_here), device or "cpu") | extra


def _facts(text: str) -> Facts:
    data = json.loads(text)
    for field in ("versions", "files"):
        data[field] = tuple((what, value) for what, value in data[field])
    return Facts(**data)


def _meet(place: Started | None, count: int, rendezvous: str | None) -> tuple[Store, int, str]:
    """Return the store of all nodes, this one's number there, and the host that has it."""
    from torch.distributed import TCPStore

    limit = timedelta(seconds=MEET_S)
    if place is not None:
        with waiting_at(place.meeting, f"process {place.number}"):
            return meet_as_started(place, limit), place.number, place.address
    if count == 1:
        own = "127.0.0.1"
        return TCPStore(own, 0, None, is_master=True, timeout=limit, wait_for_workers=False), 0, own
    meeting = rendezvous or ""
    host, _ = host_and_port(meeting)
    with waiting_at(meeting, "this node"):
        store, is_first = meet_as_nodes(meeting, limit)
    return store, 0 if is_first else store.add("planner/nodes", 1), host


def _watch(store: Store, host: str, room: str, *, number: int, count: int) -> NodeWatch:
    """Return what says which node is gone; of a lone node it says nothing."""
    meeting = f"{host}:{port_of(store)}"
    watch = NodeWatch(meeting, f"{room}/there", number=number, count=count)
    if count > 1:
        watch.start()
    return watch


def _leave_together(store: Store, room: str, *, number: int, count: int) -> None:
    """Return when all have what they need of the store, which ends with its process."""
    keys = [f"{room}/left/{each}" for each in range(count)]
    with suppress(RuntimeError):  # the others have it, or are gone
        store.set(keys[number], "")
        if number == 0:
            store.wait(keys, timedelta(seconds=_LEAVE_S))


def _ranks_of_nodes(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return tuple(map(tuple, ranks.values()))
