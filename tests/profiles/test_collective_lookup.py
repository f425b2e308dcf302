"""Collective lookups: measured, interpolated, scaled to another group, or from the link (M11)."""

import pytest

from profiles import Group
from profiles.lookup.fit import fit_collectives
from tests.profiles.samples import collective_record, profile

PAIR = Group(ranks_per_node=2)
SIZES = [2**k for k in range(10, 27, 2)]


def alpha_beta_records(kind, alpha_s, beta, group=PAIR):
    return [
        collective_record(
            kind,
            n,
            alpha_s + beta * n,
            ranks_per_node=group.ranks_per_node,
            num_nodes=group.num_nodes,
        )
        for n in SIZES
    ]


def measured(*records):
    return profile(collectives=records, collective_fits=fit_collectives(records))


LINE = measured(*alpha_beta_records("all_reduce", 1e-4, 1e-9))


def test_a_measured_size_is_answered_with_its_record():
    answer = LINE.collective_seconds("all_reduce", 2**20, PAIR)
    assert answer.source == "measured"
    assert answer.seconds == pytest.approx(1e-4 + 1e-9 * 2**20)


def test_between_and_beyond_measured_sizes():
    """M11: larger is never cheaper, and beyond the last size the fitted slope goes on."""
    answers = [LINE.collective_seconds("all_reduce", 1000 * 1.3**k, PAIR) for k in range(50)]
    seconds = [answer.seconds for answer in answers]
    assert seconds == sorted(seconds)
    assert LINE.collective_seconds("all_reduce", 3 * 2**20, PAIR).source == "interpolated"
    far = LINE.collective_seconds("all_reduce", 2**32, PAIR)
    assert far.seconds == pytest.approx(1e-4 + 1e-9 * 2**32, rel=0.02)
    assert far.source.startswith("measured for all_reduce")


def test_noise_that_falls_with_size_is_levelled():
    noisy = [
        collective_record("all_reduce", n, s)
        for n, s in zip(SIZES, [5, 2, 3, 4, 6, 8, 16, 32, 64], strict=True)
    ]
    machine = measured(*noisy)
    seconds = [machine.collective_seconds("all_reduce", n, PAIR).seconds for n in SIZES]
    assert seconds == sorted(seconds)
    assert seconds[4:] == pytest.approx([6, 8, 16, 32, 64])


def test_another_kind_is_scaled_by_its_share_of_the_wire():
    """A ring all-reduce sends 2(n-1)/n of the tensor through each link, an all-gather half that."""
    answer = LINE.collective_seconds("all_gather", 2**26, PAIR)
    assert answer.seconds == pytest.approx(0.5e-9 * 2**26 + 0.5e-4, rel=0.02)
    assert answer.source.startswith("scaled from measured all_reduce")
    assert answer.relative_error >= 0.2


def test_a_larger_group_is_scaled_by_its_share_of_the_wire():
    """From 2 to 8 ranks the share grows from 1 to 7/4."""
    answer = LINE.collective_seconds("all_reduce", 2**30, Group(ranks_per_node=8))
    assert answer.seconds == pytest.approx(1.75e-9 * 2**30, rel=0.02)


def test_without_measurements_the_link_answers():
    """One byte in 8 ranks: all_gather moves 7/8 of it through 100 GB/s."""
    bare = profile()
    inside = bare.collective_seconds("all_gather", 1e9, Group(ranks_per_node=8))
    assert inside.seconds == pytest.approx(7 / 8 / 100)
    assert "inside" in inside.source
    # Between nodes, 8 ranks of a node use their 8 links of 10 GB/s together.
    across = bare.collective_seconds("all_gather", 1e9, Group(ranks_per_node=8, num_nodes=2))
    assert across.seconds == pytest.approx(15 / 16 / 80)
    alone = bare.collective_seconds("all_gather", 1e9, Group(ranks_per_node=1, num_nodes=2))
    assert alone.seconds == pytest.approx(1 / 2 / 10)


def test_each_rank_sends_its_own_to_other_nodes_over_its_own_link():
    """Of 16 ranks on 2 nodes, each sends half of what it has through 10 GB/s; a ring on the same
    nodes, which crosses once for all, says nothing of that.
    """
    group = Group(ranks_per_node=8, num_nodes=2)
    rings = measured(*alpha_beta_records("all_reduce", 0.0, 1e-12, group))
    for machine in (profile(), rings):
        answer = machine.collective_seconds("all_to_all", 1e9, group)
        assert answer.seconds == pytest.approx(1 / 2 / 10, rel=1e-3)
    own = measured(*alpha_beta_records("all_to_all", 0.0, 1e-10, group))
    assert own.collective_seconds("all_to_all", 1e9, group).seconds == pytest.approx(0.1, rel=0.01)


def test_scaling_never_beats_the_wire():
    """A fit made with reductions in the switch is not handed to a group of one rank a node."""
    group = Group(ranks_per_node=8, num_nodes=2)
    machine = measured(*alpha_beta_records("all_reduce", 0.0, 1e-12, group))
    alone = machine.collective_seconds("all_reduce", 1e9, Group(ranks_per_node=1, num_nodes=2))
    assert alone.seconds == pytest.approx(1 / 10)


def test_a_group_of_one_is_free_and_an_unknown_kind_is_refused():
    assert LINE.collective_seconds("all_reduce", 1e9, Group(ranks_per_node=1)).seconds == 0.0
    with pytest.raises(ValueError, match="all_reduce, all_gather"):
        LINE.collective_seconds("gather", 1e9, PAIR)
