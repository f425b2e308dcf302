"""A collective of ranks in several domains of a tier: in two levels, inside domains and across.

Of k domains with n ranks of the group in each, the ranks at the same place in their domains are k
ranks that talk across. With B bytes of the full tensor:

    all_reduce       reduce_scatter of B inside, all_reduce of B / n across, all_gather of B inside
    all_gather       all_gather of B / n across, then of B inside; reduce_scatter the other way
    all_to_all       all_to_all of B inside, then across
    broadcast        of B across, then inside
    send_recv        across

What lies across takes the tier's link, of which each device has its part while all of them send:
the groups of a domain share what leaves it. (Two levels: Jia et al., Highly Scalable Deep Learning
Training System with Mixed-Precision, 2018, sec. 4; trees and rings over nodes in NCCL do the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cluster import Link, Tier
from profiles.lookup.wire import num_steps, wire_share
from profiles.records import Group

_INSIDE = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all",),
    "broadcast": ("broadcast",),
    "send_recv": (),
}
_CUT_INSIDE = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds of which a rank sends the part across that it has of the ranks inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevels:
    """A collective of a group that lies in several domains."""

    inside_kinds: tuple[str, ...]
    """What the ranks of a domain do, on the full tensor each time."""
    inside: Group
    """The ranks of one domain."""
    link: Link
    """What leaves a domain takes it."""
    alpha_s: float
    """Seconds of the messages across, whatever their size."""
    s_per_byte: float
    """Seconds across for each byte of the full tensor."""

    def across_s(self, num_bytes: float) -> float:
        """Return the seconds of what goes across."""
        return self.alpha_s + num_bytes * self.s_per_byte


def two_levels(kind: str, group: Group, tiers: Sequence[Tier]) -> TwoLevels:
    """Split a collective at the outermost tier of which the group spans several domains.

    Raises ValueError for an unknown kind.
    """
    at = max(index for index, count in enumerate(group.domains) if count > 1)
    count, link = group.domains[at], tiers[at].link
    inside = inside_domain(group, at)
    # After the exchange inside, each of n ranks has 1/n of the tensor to send across.
    share = wire_share(kind, count) / (inside.size if kind in _CUT_INSIDE else 1)
    return TwoLevels(
        inside_kinds=_INSIDE[kind],
        inside=inside,
        link=link,
        alpha_s=link.alpha_s * num_steps(kind, count),
        s_per_byte=link.beta_s_per_byte * share,
    )


def inside_domain(group: Group, tier: int) -> Group:
    """Return the ranks of a group in one domain of a tier."""
    count = group.domains[tier]
    # Ranks are spread evenly: each domain has its part of the smaller domains, nodes or ranks.
    inner = tuple(-(-domains // count) for domains in group.domains[:tier])
    inside = replace(group, domains=inner + (1,) * (len(group.domains) - tier))
    if group.num_nodes > 1:
        inside = replace(inside, num_nodes=-(-group.num_nodes // count))
    else:
        inside = replace(inside, ranks_per_node=-(-group.ranks_per_node // count))
    return inside if max(inside.domains) > 1 else replace(inside, domains=())
