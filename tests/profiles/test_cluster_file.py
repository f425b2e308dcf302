"""Issue 19, points 4 and 5: cluster files, and what is wrong with them in one line."""

from __future__ import annotations

import pytest

from planner.errors import ProfileError
from profiles.cluster_file import load_cluster

TWO = """
name = "two halls"
[[group]]
profile = "a100-sxm4-80gb"
nodes = 32
[[group]]
name = "new"
profile = "h100-sxm5-80gb"
nodes = 4
memory_gib = 60
[[tier]]
name = "spine"
group = "a100-sxm4-80gb"
devices = 128
gb_per_s = 25
uplink_gb_per_s = 800
latency_us = 12
[between]
gb_per_s = 5
uplink_gb_per_s = 100
latency_us = 30
"""


def written(tmp_path, text: str):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_file_of_two_groups(tmp_path):
    cluster = load_cluster(written(tmp_path, TWO))
    assert cluster.name == "two halls"
    old, new = cluster.groups
    assert (old.name, old.num_devices) == ("a100-sxm4-80gb", 256)
    assert (new.name, new.num_devices) == ("new", 32)
    assert new.profile.memory_bytes == 60 * 2**30
    spine, way_out = old.profile.cluster.tiers
    # 128 devices share 800 GB/s: 6.25 GB/s each, less than the 25 of a device's own link.
    assert spine.link.beta_s_per_byte == pytest.approx(1 / 6.25e9)
    assert way_out.devices == 256
    assert way_out.link.beta_s_per_byte == pytest.approx(256 / 100e9)
    (only,) = new.profile.cluster.tiers
    assert only.devices == 32
    assert only.link.beta_s_per_byte == pytest.approx(1 / 3.125e9)


def test_a_file_of_a_single_group_is_a_profile_with_tiers(tmp_path):
    text = '[[group]]\nprofile = "gb200"\nnodes = 2\ndevices_per_node = 72\n'
    text = text.replace("gb200", "b200-sxm")
    text += '[[tier]]\nname = "site"\ndevices = 72\ngb_per_s = 20\nlatency_us = 9\n'
    profile = load_cluster(written(tmp_path, text))
    assert profile.groups == ()
    assert profile.cluster.devices_per_node == 72
    assert profile.cluster.max_devices == 144
    assert [tier.link.name for tier in profile.cluster.tiers] == ["site"]


def test_units_are_decimal_rates_and_microseconds(tmp_path):
    """25 GB/s are 25e9 bytes; a link that is slower than its part of the uplink keeps its rate."""
    text = TWO.replace("uplink_gb_per_s = 800", "uplink_gb_per_s = 6400")
    spine = load_cluster(written(tmp_path, text)).groups[0].profile.cluster.tiers[0]
    assert spine.devices == 128
    assert spine.link.beta_s_per_byte == pytest.approx(1 / 25e9)
    assert spine.link.alpha_s == pytest.approx(12e-6)


def test_tiers_are_those_of_the_group_or_of_all_from_the_innermost_out(tmp_path):
    """A tier that joins more devices than there are is left out: nothing leaves it."""
    tier = '[[tier]]\nname = "{}"\ndevices = {}\ngb_per_s = 9\nlatency_us = 9\n'
    text = TWO + tier.format("all", 16) + tier.format("huge", 256)
    old, new = load_cluster(written(tmp_path, text)).groups
    assert [tier.link.name for tier in old.profile.cluster.tiers][:2] == ["all", "spine"]
    assert [tier.devices for tier in old.profile.cluster.tiers] == [16, 128, 256]
    assert [tier.devices for tier in new.profile.cluster.tiers] == [16, 32]
    # Links between groups are outermost, and have a name where none was given.
    assert {g.profile.cluster.tiers[-1].link.name for g in (old, new)} == {"between groups"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('name = "new"', 'name = "a+b"'), r"a group called 'a\+b'; plans join names"),
        (("nodes = 4", "nodes = 0"), "wrong at group.1.nodes"),
        (
            ("nodes = 4", "nodes = 4\ndevices_per_node = 99999999"),
            "wrong at group.1.devices_per_node: Input should be less than or equal to 1048576",
        ),
        (("gb_per_s = 5", "gbps = 5"), "wrong at between"),
        (('name = "new"', 'name = "a100-sxm4-80gb"'), "several groups called 'a100-sxm4-80gb'"),
        (('group = "a100-sxm4-80gb"', 'group = "old"'), "a tier of group 'old'; its groups are"),
        (('profile = "h100-sxm5-80gb"', 'profile = "h1"'), "no profile 'h1'"),
        (("[between]", "[between"), "not a readable TOML file"),
        (
            ("[between]\ngb_per_s = 5\nuplink_gb_per_s = 100\nlatency_us = 30\n", ""),
            r"has 2 groups; say in \[between\] what links them",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, change, message):
    with pytest.raises(ProfileError, match=message) as told:
        load_cluster(written(tmp_path, TWO.replace(*change)))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ProfileError, match="no cluster file"):
        load_cluster(tmp_path / "none.toml")
