"""The links of a profile: what made the messages comes back (M16)."""

from __future__ import annotations

import pytest

from profiles.measure.nodes.links import between_link, inside_link
from profiles.records import NodeLinkRecord
from tests.profiles.samples import collective_record

SIZES = [4**n for n in range(5, 13)]


def messages(alpha_s, bytes_per_s, **group):
    return [
        collective_record("send_recv", size, alpha_s + size / bytes_per_s, **group)
        for size in SIZES
    ]


INSIDE = messages(2e-6, 5e10)
BETWEEN = messages(3e-5, 1e9, ranks_per_node=1, num_nodes=2)
OTHERS = [
    *(collective_record("all_reduce", size, 1.0) for size in SIZES),
    *messages(0.5, 1e3, ranks_per_node=2, num_nodes=2),
]
"""Of another kind, and between other groups: no part of a link."""
NODES = [
    NodeLinkRecord(nodes=("a", "b"), latency_s=4e-5, bytes_per_s=9e8),
    NodeLinkRecord(nodes=("a", "c"), latency_s=6e-5, bytes_per_s=8e8),
    NodeLinkRecord(nodes=("b", "c"), latency_s=5e-5, bytes_per_s=2e8),
]


def alpha_beta(link):
    return link.alpha_s.value, link.beta_s_per_byte.value


def test_a_line_through_messages_gives_back_latency_and_rate():
    records = [*OTHERS, *INSIDE, *BETWEEN]
    inside, between = inside_link(records), between_link(records, NODES)
    assert alpha_beta(inside) == pytest.approx((2e-6, 2e-11), rel=1e-6)
    assert alpha_beta(between) == pytest.approx((3e-5, 1e-9), rel=1e-6)
    assert (inside.name, between.name) == ("inside the node", "between nodes")
    assert {inside.alpha_s.origin, between.beta_s_per_byte.origin} == {"measured"}


def test_a_disturbed_message_does_not_bend_the_line():
    disturbed = INSIDE[3].model_copy(update={"seconds": 50 * INSIDE[3].seconds})
    found = inside_link([*INSIDE[:3], disturbed, *INSIDE[4:]])
    assert alpha_beta(found) == pytest.approx((2e-6, 2e-11), rel=0.05)


def test_of_links_between_nodes_the_slowest_latency_and_rate_count():
    """Where no messages of all sizes were sent: a cluster moves at the pace of both."""
    found = between_link([*OTHERS, *INSIDE], NODES)
    assert alpha_beta(found) == (6e-5, 1 / 2e8)
    assert found.alpha_s.detail == "the slowest of 3 pairs of nodes"


def test_without_messages_a_link_is_free_and_says_so():
    for link in (inside_link([*OTHERS, *BETWEEN]), between_link([*OTHERS, *INSIDE], [])):
        assert alpha_beta(link) == (0.0, 0.0)
        assert link.alpha_s.origin == "assumed"
