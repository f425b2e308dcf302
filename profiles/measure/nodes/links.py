"""The links of a profile, from messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiles.lookup.fit import fit_nonnegative
from profiles.records import CollectiveRecord, Figure, Group, LinkRecord, NodeLinkRecord


def inside_link(collectives: Sequence[CollectiveRecord]) -> LinkRecord:
    """Return the link between two ranks of a node; free where they exchanged no messages."""
    group = Group(ranks_per_node=2)
    return _fitted(collectives, group, "inside the node") or _free("inside the node")


def between_link(
    collectives: Sequence[CollectiveRecord], node_links: Sequence[NodeLinkRecord]
) -> LinkRecord:
    """Return the link between nodes: from messages of all sizes, else the slowest of what was
    measured between each two nodes; a cluster moves at its pace.
    """
    name = "between nodes"
    fitted = _fitted(collectives, Group(ranks_per_node=1, num_nodes=2), name)
    if fitted is not None or not node_links:
        return fitted or _free(name)
    what = f"the slowest of {len(node_links)} pairs of nodes"
    return LinkRecord(
        name=name,
        alpha_s=_measured(max(link.latency_s for link in node_links), what),
        beta_s_per_byte=_measured(1 / min(link.bytes_per_s for link in node_links), what),
    )


def _fitted(collectives: Sequence[CollectiveRecord], group: Group, name: str) -> LinkRecord | None:
    """Return a line through send_recv between the two ranks of a group, if there was any."""
    messages = [
        record
        for record in collectives
        if record.kind == "send_recv"
        and (record.ranks_per_node, record.num_nodes) == (group.ranks_per_node, group.num_nodes)
    ]
    if not messages:
        return None
    terms = np.array([[1.0, record.num_bytes] for record in messages])
    line, _ = fit_nonnegative(terms, np.array([record.seconds for record in messages]))
    what = "one line through send_recv of all sizes"
    return LinkRecord(
        name=name, alpha_s=_measured(line[0], what), beta_s_per_byte=_measured(line[1], what)
    )


def _free(name: str) -> LinkRecord:
    free = Figure(value=0.0, origin="assumed", detail="no two ranks of it exchanged messages")
    return LinkRecord(name=name, alpha_s=free, beta_s_per_byte=free)


def _measured(value: float, detail: str) -> Figure:
    return Figure(value=value, origin="measured", detail=detail)
