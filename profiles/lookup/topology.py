"""Where ranks are and how they are linked, as measured; what is slower than its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from planner.nodes.node_links import SLOW, slow_nodes
from planner.units import GB
from profiles.records import Group, NodeLinkRecord

MAX_PAIRS = 36
"""More pairs than this are sampled: those of the first node."""

LEVEL_STEP = 1.8
"""A rate this many times another belongs to another link level."""

SLOW_LINK = 0.7
SLOW_RANK = 1.15
SLOW_LATENCY = 10.0
"""A short message between nodes that takes so many times the quickest one is slow: where ranks
share cores, latencies vary by a few times."""

PAIR_LATENCY_BYTES = 4 * 2**10
PAIR_RATE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRate:
    """What was measured between two ranks."""

    ranks: tuple[int, int]
    latency_s: float
    bytes_per_s: float


def nodes_of(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, from each rank's host name, in order of first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


def groups_to_measure(nodes: Sequence[Sequence[int]]) -> tuple[Group, ...]:
    """Return the group shapes a search can form: inside a node, and across 2 or all nodes.

    Across nodes with 1, 2, … ranks of each. Nodes of unequal size count as the smallest.
    """
    per_node = min(len(ranks) for ranks in nodes)
    divisors = [n for n in range(1, per_node + 1) if per_node % n == 0]
    inside = [Group(ranks_per_node=n) for n in divisors if n > 1]
    # Between 2 and all nodes, times follow from the wire's share (`collective_model`).
    spans = sorted({2, len(nodes)}) if len(nodes) > 1 else []
    return (*inside, *(Group(ranks_per_node=n, num_nodes=s) for s in spans for n in divisors))


def concrete_groups(group: Group, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return all disjoint groups of a shape, which run at the same time, as in training.

    The ranks of a group are neighbours in their node; raises ValueError when the shape can't
    be formed.
    """
    per_node = min(len(ranks) for ranks in nodes)
    if group.ranks_per_node > per_node or group.num_nodes > len(nodes):
        raise ValueError(f"group {group} can't be formed on {len(nodes)} nodes of {per_node} ranks")
    size = group.ranks_per_node
    found = []
    # Disjoint groups that run at once share links as replicas do in training.
    for first in range(0, len(nodes) - group.num_nodes + 1, group.num_nodes):
        members = nodes[first : first + group.num_nodes]
        for at in range(0, per_node - size + 1, size):
            found.append([rank for ranks in members for rank in ranks[at : at + size]])
    return found


def pairs_to_measure(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return pairs of ranks: all of them if few, else all of one node; of nodes see
    `planner.nodes.node_links`.
    """
    ranks = [rank for node in nodes for rank in node]
    everyone = list(combinations(ranks, 2))
    return tuple(everyone if len(everyone) <= MAX_PAIRS else combinations(nodes[0], 2))


def link_levels(pairs: Sequence[PairRate]) -> list[list[PairRate]]:
    """Return the pairs by link level, fastest first: a level ends where the rate drops."""
    levels: list[list[PairRate]] = []
    for pair in sorted(pairs, key=lambda p: -p.bytes_per_s):
        if levels and levels[-1][-1].bytes_per_s < LEVEL_STEP * pair.bytes_per_s:
            levels[-1].append(pair)
        else:
            levels.append([pair])
    return levels


def describe_links(pairs: Sequence[PairRate], hosts: Sequence[str]) -> list[str]:
    """Return a line per link level."""
    lines = []
    for index, level in enumerate(link_levels(pairs)):
        rate = median(pair.bytes_per_s for pair in level)
        latency = median(pair.latency_s for pair in level)
        inside = sum(hosts[p.ranks[0]] == hosts[p.ranks[1]] for p in level)
        lines.append(
            f"link level {index}: {len(level)} pairs ({inside} inside a node), "
            f"{rate / GB:.3g} GB/s, {latency * 1e6:.3g} us"
        )
    return lines


def describe_slow_links(pairs: Sequence[PairRate], hosts: Sequence[str]) -> list[str]:
    """Return a line per link that is slower than its like: those inside nodes, those between."""
    lines = []
    for within in (True, False):
        like = [p for p in pairs if (hosts[p.ranks[0]] == hosts[p.ranks[1]]) == within]
        usual = median(p.bytes_per_s for p in like) if like else 0.0
        lines += [
            f"slow link: rank {a} on {hosts[a]} to rank {b} on {hosts[b]}: "
            f"{p.bytes_per_s / GB:.3g} GB/s, others {usual / GB:.3g}"
            for p in like
            for a, b in [p.ranks]
            if p.bytes_per_s < SLOW_LINK * usual
        ]
    return lines


def describe_slow_nodes(links: Sequence[NodeLinkRecord]) -> list[str]:
    """Return a line per node whose links to all others are slow, and per other slow link.

    A link is slow by the best one: of three nodes a slow one has two of the three links.
    """
    if len(links) < 2:
        return []
    rate = max(link.bytes_per_s for link in links)
    latency = min(link.latency_s for link in links)
    slow = [
        link
        for link in links
        if link.bytes_per_s * SLOW < rate or link.latency_s > SLOW_LATENCY * latency
    ]
    named = slow_nodes([link.nodes for link in links], [link.nodes for link in slow])
    lines = []
    for node in named:
        mine = [link for link in slow if node in link.nodes]
        lines.append(
            f"slow node: the links of {node} to all other nodes: "
            f"{_link(min(x.bytes_per_s for x in mine), max(x.latency_s for x in mine))} at worst, "
            f"{_link(rate, latency)} the best of others"
        )
    lines += [
        f"slow link: {' to '.join(link.nodes)}: {_link(link.bytes_per_s, link.latency_s)}, "
        f"{_link(rate, latency)} the best of others"
        for link in slow
        if not set(link.nodes) & set(named)
    ]
    return lines


def _link(bytes_per_s: float, latency_s: float) -> str:
    return f"{bytes_per_s / GB:.3g} GB/s, {latency_s * 1e6:.3g} us"


def describe_stragglers(seconds: Mapping[int, float], hosts: Sequence[str]) -> list[str]:
    """Return a line per rank whose compute is slower than the median of all ranks; one for a node
    of which that holds for all ranks, two or more.
    """
    usual = median(seconds.values())
    slow = {rank: s / usual for rank, s in sorted(seconds.items()) if s > SLOW_RANK * usual}
    lines = []
    for host in dict.fromkeys(hosts[rank] for rank in slow):
        mine = [rank for rank in slow if hosts[rank] == host]
        if len(mine) > 1 and mine == [rank for rank in sorted(seconds) if hosts[rank] == host]:
            factor = median(slow[rank] for rank in mine)
            lines.append(f"slow node: the devices of {host} take {factor:.2f} times the median")
        else:
            lines += [
                f"slow device: rank {rank} on {host} takes {slow[rank]:.2f} times the median"
                for rank in mine
            ]
    return lines
