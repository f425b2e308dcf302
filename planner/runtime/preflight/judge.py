"""What of nodes and ranks is a problem: facts, ways between ranks, memory, clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from planner.language.plan import Plan
from planner.nodes.check import Check
from planner.runtime.preflight.facts import Facts, facts_that_differ
from planner.runtime.preflight.rank import PHASES, Finding
from planner.runtime.preflight.report import check_of
from planner.runtime.process.groups.alike import names
from planner.units import format_bytes, format_seconds

SKEW_S = 1.0
"""Clocks this far apart put files and messages of nodes in a wrong order."""


def judge_nodes(nodes: Sequence[Facts], world_size: int | None, disorder: str = "") -> list[Check]:
    """Return the checks of what nodes refuse, and of versions and files.

    `world_size` is the plan's, if it can be read; `disorder` says why nodes are in no order.
    """
    refused = [f"{each.node} can't run the plan: {each.refusal}" for each in nodes if each.refusal]
    if disorder:
        refused.append(disorder)
    started = sum(each.ranks_here for each in nodes)
    if not refused and world_size is not None and started != world_size:
        told = ", ".join(f"{each.ranks_here} on {each.node}" for each in nodes)
        refused.append(
            f"nodes start {started} ranks ({told}) and the plan has {world_size}; give the same "
            "`num_nodes` on all"
        )
    what = ", ".join(name for name, _ in nodes[0].versions)
    return [
        check_of("nodes", names((each.node for each in nodes), most=4), refused),
        check_of("versions and files", f"equal: {what}, plan, script", facts_that_differ(nodes)),
    ]


def judge_ranks(
    plan: Plan, hosts: Sequence[str], found: Mapping[int, Finding], ended: Mapping[int, str]
) -> list[Check]:
    """Return the checks of what ranks found. `hosts` are their nodes; `ended` says what became of
    those without a finding.
    """
    troubles: dict[str, list[int]] = {}
    for rank in range(len(hosts)):
        if rank not in found:
            text = ended.get(rank, "told nothing")
        elif found[rank].trouble:
            about = found[rank].trouble.removeprefix(f"rank {rank} ")
            text = f"{about} ({found[rank].phase})"
        else:
            continue
        troubles.setdefault(text, []).append(rank)
    lines = [f"{_ranks(ranks, hosts)}: {text}" for text, ranks in troubles.items()]
    checks = [check_of("ranks", f"{len(hosts)} came", lines)]
    unreached, stuck = _unreached(hosts, found), _stuck(hosts, found)
    if unreached or stuck or all(each.phase in PHASES[2:] for each in found.values()):
        pairs = f"{len(hosts) * (len(hosts) - 1)} pairs"
        checks.append(check_of("each rank to each rank", pairs, [*unreached, *stuck]))
    if any(each.free_bytes is not None for each in found.values()):
        checks += _memory(plan, hosts, found)
    if 0 in found and found[0].clocks:
        checks.append(_clocks(hosts, found))
    return checks


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks and their nodes, the first few of many."""
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {numbers} on {names(hosts[rank] for rank in ranks)}"


def _unreached(hosts: Sequence[str], found: Mapping[int, Finding]) -> list[str]:
    """Pairs that failed, one line for equal failures between two nodes."""
    failed: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for rank, finding in sorted(found.items()):
        for each in finding.unreached:
            key = hosts[rank], hosts[each.rank], each.why
            failed.setdefault(key, []).append((rank, each.rank))
    lines = []
    for (asking, asked, why), pairs in failed.items():
        first, second = pairs[0]
        more = f" and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
        address = found[second].address if second in found else "no address"
        hint = ""
        if address.startswith("127.") and asking != asked:
            hint = (
                f"; {asked} gives an address that only it can reach: name its interface in "
                "GLOO_SOCKET_IFNAME, or mend its own name in /etc/hosts"
            )
        lines.append(
            f"{asking} ({found[first].address}) does not reach {asked} ({address}), rank {first} "
            f"to rank {second}{more}: {why}{hint}"
        )
    return lines


def _stuck(hosts: Sequence[str], found: Mapping[int, Finding]) -> list[str]:
    """Ranks whose messages stopped in the first round in which any did."""
    stuck = [(rank, each.stuck) for rank, each in sorted(found.items()) if each.stuck is not None]
    first_round = min((each.round for _, each in stuck), default=0)
    return [
        f"rank {rank} on {hosts[rank]} ({found[rank].address}) connects, and the backend is stuck "
        f"sending to rank {each.to_rank} on {hosts[each.to_rank]} or receiving from rank "
        f"{each.from_rank} on {hosts[each.from_rank]}: {each.why}"
        for rank, each in stuck
        if each.round == first_round
    ]


def _memory(plan: Plan, hosts: Sequence[str], found: Mapping[int, Finding]) -> list[Check]:
    """Free memory of each device, or each node's host, against the plan's predicted peak.

    Both are without what a process of torch takes by itself: ranks have it already.
    """
    needs = [
        parts.get("total_bytes", 0) - parts.get("context_bytes", 0)
        for parts in plan.estimate.get("memory", ())
    ]
    if len(needs) != plan.pp:  # a plan that was not searched
        return []
    places: dict[str, list[int]] = {}
    for rank, finding in sorted(found.items()):
        if finding.free_bytes is not None:
            device = hosts[rank] if finding.shares_memory else f"rank {rank} on {hosts[rank]}"
            places.setdefault(device, []).append(rank)
    left: dict[str, tuple[float, float]] = {}
    for device, ranks in places.items():
        # Ranks of a node without devices of their own share its memory: their needs add up.
        free = min(found[rank].free_bytes or 0 for rank in ranks)
        left[device] = free, sum(needs[rank // plan.degrees.num_ranks] for rank in ranks)
    lines = [
        f"{device} has {format_bytes(free)} free and the plan needs {format_bytes(need)}; free "
        f"some, or search with `memory_limit_bytes`"
        for device, (free, need) in left.items()
        if free < need
    ]
    least, most = min(left.values(), key=lambda each: each[0] - each[1])
    text = f"{format_bytes(least)} free"
    return [check_of("memory of a device", text, lines, planned=format_bytes(most))]


def _clocks(hosts: Sequence[str], found: Mapping[int, Finding]) -> Check:
    """How far each node's clock is from rank 0's: the median over moments when all had met."""
    firsts = found[0].clocks
    skews = {
        hosts[rank]: median(own - first for own, first in zip(each.clocks, firsts, strict=True))
        for rank, each in found.items()
        if len(each.clocks) == len(firsts)
    }
    lines = [
        f"the clock of {node} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} that of "
        f"{hosts[0]}; let both follow a time server"
        for node, skew in skews.items()
        if abs(skew) > SKEW_S
    ]
    return check_of("clocks", f"{format_seconds(max(map(abs, skews.values())))} apart", lines)
