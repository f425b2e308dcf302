"""X3: profiles with links between nodes slower or faster than described or measured."""

from __future__ import annotations

import pytest

from planner.errors import ProfileError
from profiles import Group, load_cluster, load_profile
from profiles.link_rates import with_link_rate
from profiles.profile import Profile
from tests.profiles.samples import collective_record

INSIDE, ACROSS = Group(ranks_per_node=8), Group(ranks_per_node=8, num_nodes=4)


def seconds(profile: Profile, group: Group, num_bytes: float = 2**30) -> float:
    return profile.collective_seconds("all_reduce", num_bytes, group).seconds


def test_half_the_rate_doubles_large_messages_between_nodes_alone():
    today = load_profile("h100-sxm5")
    slower = with_link_rate(today, 0.5)
    assert seconds(slower, INSIDE) == seconds(today, INSIDE)
    assert seconds(slower, ACROSS) == pytest.approx(2 * seconds(today, ACROSS), rel=0.1)
    link, before = slower.cluster.inter_node, today.cluster.inter_node
    assert link.beta_s_per_byte == pytest.approx(before.beta_s_per_byte * 2)
    assert link.alpha_s == before.alpha_s, "wires get no longer"
    assert slower.file.cluster.inter_node.beta_s_per_byte.origin == "assumed"


def test_links_between_nodes_gain_until_those_inside_hold_them_up():
    """Of 4 nodes 1.5 times the bytes cross; NVLink's 450 GB/s carries them at best."""
    today = load_profile("h100-sxm5")
    times = [seconds(with_link_rate(today, factor), ACROSS) for factor in (1, 1.5, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]
    assert times[3] == pytest.approx(1.5 * 2**30 / 450e9, rel=0.02)


def test_the_same_rate_is_the_same_profile():
    today = load_profile("h100-sxm5")
    assert with_link_rate(today, 1) is today


def test_of_what_was_measured_all_but_the_latency_scales():
    """1 ms of which 2 log2(4) messages of alpha are latency: the rest halves."""
    file = load_profile("h100-sxm5").file
    measured = [collective_record("all_reduce", 2**20, 1e-3, num_nodes=nodes) for nodes in (1, 2)]
    changed = with_link_rate(Profile(file, (), measured), 2).collectives
    latency_s = 2 * 2 * file.cluster.inter_node.alpha_s.value
    assert changed[0].seconds == 1e-3
    assert changed[1].seconds == pytest.approx(latency_s + (1e-3 - latency_s) / 2)


def test_tiers_beyond_a_node_and_groups_of_devices_follow(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        "".join(
            f'[[group]]\nname = "{name}"\nprofile = "h100-sxm5"\nnodes = 2\n'
            for name in ("old", "new")
        )
        + '[[tier]]\ndevices = 4\ngb_per_s = 100\nlatency_us = 1\ngroup = "old"\n'
        + "[between]\ngb_per_s = 5\nlatency_us = 30\n"
    )
    today = load_cluster(path)
    changed = with_link_rate(today, 4)
    assert [group.name for group in changed.groups] == ["old", "new"]
    assert changed.name == today.name
    for before, after in zip(today.groups, changed.groups, strict=True):
        for tier, other in zip(
            before.profile.cluster.tiers, after.profile.cluster.tiers, strict=True
        ):
            factor = 1 if tier.devices == 4 else 4
            assert other.link.beta_s_per_byte == pytest.approx(tier.link.beta_s_per_byte / factor)


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_a_positive_number(factor):
    with pytest.raises(ProfileError, match=r"`link_rate` .* above 0"):
        with_link_rate(load_profile("h100-sxm5"), factor)
