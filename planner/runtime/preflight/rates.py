"""Which exchanges are slower than planned, and of which nodes the slow links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.language.plan import Plan
from planner.nodes.check import Check
from planner.nodes.node_links import SLOW, slow_nodes
from planner.runtime.preflight.exchanges import BETWEEN_NODES, PlannedRates, planned_rounds
from planner.runtime.preflight.rank import Finding
from planner.runtime.preflight.report import Rate, check_of
from planner.runtime.process.groups.alike import names
from planner.units import GB


def rates_of(
    hosts: Sequence[str],
    found: Mapping[int, Finding],
    planned: PlannedRates | None,
) -> tuple[Rate, ...]:
    """Return every exchange that ranks timed, beside what was planned. `hosts` are of ranks."""
    timed = {
        exchange: (num_bytes, seconds)
        for finding in found.values()
        for exchange, num_bytes, seconds in finding.timed
    }
    rates = []
    for exchange, (num_bytes, seconds) in timed.items():
        rates.append(
            Rate(
                axis=exchange.axis,
                kind=exchange.kind,
                ranks=exchange.ranks,
                nodes=tuple(dict.fromkeys(hosts[rank] for rank in exchange.ranks)),
                num_bytes=num_bytes,
                seconds=seconds,
                planned_s=None if planned is None else planned.seconds(exchange, num_bytes),
            )
        )
    return tuple(rates)


def judge_rates(plan: Plan, hosts: Sequence[str], rates: Sequence[Rate]) -> list[Check]:
    """Return a check of each axis, and one of where groups lie where that is not as planned."""
    axes = dict.fromkeys(rate.axis for rate in rates)
    checks = [_judge_axis([rate for rate in rates if rate.axis == axis]) for axis in axes]
    if misplaced := _misplaced(plan, hosts):
        checks.append(check_of("places of groups", "", misplaced))
    return checks


def _judge_axis(rates: Sequence[Rate]) -> Check:
    """The slowest group of an axis, and a line for each that is too slow; of pairs of nodes, a
    line for each node whose links are all slow, and for each other pair.
    """
    worst = max(rates, key=lambda rate: (rate.factor, rate.seconds / rate.num_bytes))
    fastest = max(rates, key=lambda rate: rate.bytes_per_s)
    slow = [rate for rate in rates if _is_slow(rate, fastest)]
    lines = []
    if worst.axis == BETWEEN_NODES:
        named = slow_nodes([rate.nodes for rate in rates], [rate.nodes for rate in slow])
        lines = [_slow_node(node, slow, fastest) for node in named]
        slow = [rate for rate in slow if not set(rate.nodes) & set(named)]
    lines += [_slow_group(rate, fastest) for rate in slow]
    where = "pairs of nodes" if worst.axis == BETWEEN_NODES else f"{worst.axis} groups"
    return Check(
        name=f"{where}, {worst.kind}",
        planned="" if worst.planned_s is None else _speed(worst.num_bytes / worst.planned_s),
        found=f"{_speed(worst.bytes_per_s)} at the slowest of {len(rates)}: {_place(worst)}",
        problems=tuple(lines),
    )


def _is_slow(rate: Rate, fastest: Rate) -> bool:
    """Against what is planned; without that, between nodes, against the fastest pair."""
    if rate.planned_s is not None:
        return rate.factor > SLOW
    return rate.axis == BETWEEN_NODES and rate.bytes_per_s * SLOW < fastest.bytes_per_s


def _slow_node(node: str, slow: Sequence[Rate], fastest: Rate) -> str:
    worst = min((rate for rate in slow if node in rate.nodes), key=lambda rate: rate.bytes_per_s)
    return f"all links of {node} to other nodes are slow: {_against(worst, fastest)}"


def _slow_group(rate: Rate, fastest: Rate) -> str:
    what = "link between nodes" if rate.axis == BETWEEN_NODES else f"{rate.axis} group"
    return f"slow {what}, {_place(rate)}: {_against(rate, fastest)}"


def _against(rate: Rate, fastest: Rate) -> str:
    """Measured and planned rates and their factor; the fastest of its like without a plan's."""
    measured = f"{rate.kind} of {rate.num_bytes / 2**20:.3g} MiB at {_speed(rate.bytes_per_s)}"
    if rate.planned_s is None:
        factor = fastest.bytes_per_s / rate.bytes_per_s
        return f"{measured}, {_speed(fastest.bytes_per_s)} at the fastest, {factor:.1f} times less"
    planned = _speed(rate.num_bytes / rate.planned_s)
    return f"{measured}, {planned} planned, {rate.factor:.1f} times less"


def _place(rate: Rate) -> str:
    ranks = ", ".join(map(str, rate.ranks[:8])) + (", ..." if len(rate.ranks) > 8 else "")
    return f"ranks {ranks} on {names(rate.nodes)}"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:.3g} GB/s"


def _misplaced(plan: Plan, hosts: Sequence[str]) -> list[str]:
    """Axes whose groups lie on more nodes than planned, a line each."""
    per_node = plan.cluster.devices_per_node
    lines: dict[str, str] = {}
    for exchange in (each for exchanges in planned_rounds(plan) for each in exchanges):
        nodes = dict.fromkeys(hosts[rank] for rank in exchange.ranks)
        if len(nodes) > exchange.shape(per_node)[2]:
            lines.setdefault(
                exchange.axis,
                f"{exchange.axis} group of ranks {', '.join(map(str, exchange.ranks[:8]))} "
                f"lies on {names(nodes)}, and the plan is for nodes of {per_node} devices; search "
                "for nodes as they are",
            )
    return list(lines.values())
