"""Links between ranks, each alone, and between nodes, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.nodes.node_links import rounds_of_pairs
from profiles.lookup.topology import (
    PAIR_LATENCY_BYTES,
    PAIR_RATE_BYTES,
    PairRate,
    pairs_to_measure,
)
from profiles.measure.session import Session
from profiles.measure.workers import ProbeFailed, WorkerGroup
from profiles.records import NodeLinkRecord

TIMEOUT_S = 60.0
_SAMPLING_S = 0.03
_NODES_S = 0.1
"""Links between nodes are few rounds, and a node is named by them."""


def measure_pairs(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> list[PairRate]:
    """Measure links between ranks, each alone."""
    pairs = []
    for a, b in pairs_to_measure(session.ranks.nodes):
        report(f"link between ranks {a} and {b}")
        try:
            latency, large = (
                time_groups(workers, "send_recv", num_bytes, [[a, b]])[a, b]
                for num_bytes in (PAIR_LATENCY_BYTES, PAIR_RATE_BYTES)
            )
        except ProbeFailed as error:
            session.skip(f"link between ranks {a} and {b}", error)
            continue
        pairs.append(PairRate(ranks=(a, b), latency_s=latency, bytes_per_s=_rate(latency, large)))
    return pairs


def measure_node_links(
    workers: WorkerGroup, session: Session, report: Callable[[str], None]
) -> tuple[NodeLinkRecord, ...]:
    """Measure the link between each two nodes, as many at once as share no node.

    Of the messages there and back the quickest counts: what else a node's cores do is no part of
    its link.
    """
    nodes, hosts = session.ranks.nodes, session.ranks.hosts
    found = []
    rounds = rounds_of_pairs(len(nodes))
    for number, together in enumerate(rounds):
        report(f"links between nodes, round {number + 1} of {len(rounds)}")
        groups = [(nodes[a][0], nodes[b][0]) for a, b in together]
        try:
            latency, large = (
                time_groups(workers, "send_recv", num_bytes, groups, of=_quickest, seconds=_NODES_S)
                for num_bytes in (PAIR_LATENCY_BYTES, PAIR_RATE_BYTES)
            )
        except ProbeFailed as error:
            names = ", ".join(f"{hosts[a]} to {hosts[b]}" for a, b in groups)
            session.skip(f"links between nodes: {names}", error)
            continue
        found += [
            NodeLinkRecord(
                nodes=(hosts[a], hosts[b]),
                latency_s=latency[a, b],
                bytes_per_s=_rate(latency[a, b], large[a, b]),
            )
            for a, b in groups
        ]
    return tuple(found)


def _rate(latency_s: float, large_s: float) -> float:
    # The latency is in both messages.
    return PAIR_RATE_BYTES / max(large_s - latency_s, 1e-9)


def _quickest(samples: Sequence[float]) -> float:
    """Return half of the quickest message there and back: one way alone ends where the sender has
    handed it on.
    """
    both = [(there + back) / 2 for there, back in zip(samples[::2], samples[1::2], strict=False)]
    return min(both or samples)


def _mean(samples: Sequence[float]) -> float:
    return float(np.mean(samples))


def time_groups(
    workers: WorkerGroup,
    kind: str,
    num_bytes: int,
    groups: Sequence[Sequence[int]],
    *,
    of: Callable[[Sequence[float]], float] = _mean,
    seconds: float = _SAMPLING_S,
) -> dict[tuple[int, ...], float]:
    """Return the seconds of a collective that all groups do at once, by group: the mean over its
    ranks of what `of` makes of each one's samples.
    """
    task: dict[str, Any] = {"task": "collective", "kind": kind, "num_bytes": num_bytes}
    answers = workers.call(
        {**task, "groups": [list(g) for g in groups], "seconds": seconds}, timeout_s=TIMEOUT_S
    )
    return {
        tuple(group): _mean([of(answers[rank]["seconds"]) for rank in group]) for group in groups
    }
