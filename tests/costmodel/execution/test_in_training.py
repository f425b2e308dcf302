"""Captured graphs are priced with the rates fitted to whole runs, as rows are (M16)."""

import pytest

from costmodel.execution.executed import in_training
from costmodel.table.kernels import load_rates
from costmodel.time.communication import exposed_seconds
from profiles import Group, OpQuery, Profile, load_profile

SHIPPED = ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm")


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_hidden_is_what_the_rows_hide(name):
    """exposed_seconds of an overlapped message is DeviceRates.exposed_seconds, but for the first
    piece, which has nothing to hide behind."""
    rates, profile = load_rates(load_profile(name)), in_training(load_profile(name), 64)
    for compute_s in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0):
        ours = exposed_seconds(profile, 1.0, compute_s, num_pieces=1e9)
        assert ours == pytest.approx(rates.exposed_seconds(1.0, behind_s=compute_s), rel=1e-6)


@pytest.mark.parametrize("name", SHIPPED)
def test_many_nodes_wait_for_the_slowest(name):
    """Each doubling of nodes adds the same part of an op's time; links keep their rate."""
    alone = load_profile(name)
    query = OpQuery(
        target="aten.mm.default", shapes=((8192, 8192), (8192, 8192)), dtype="bfloat16",
        direction="forward", flop=2 * 8192**3, num_bytes=6 * 8192**2,
    )  # fmt: skip
    single, two, four = (
        in_training(alone, devices).op_seconds(query).seconds for devices in (8, 16, 32)
    )
    assert single < two
    assert four - two == pytest.approx(two - single)
    rates = load_rates(alone)
    assert single >= query.flop / (rates.peak_flop_per_s["bfloat16"] * rates.matmul_efficiency)
    for group, part in (
        (Group(ranks_per_node=8), rates.link_efficiency),
        (Group(ranks_per_node=8, num_nodes=4), rates.network_efficiency),
    ):
        times = [
            p.collective_seconds("all_gather", 1e9, group).seconds
            for p in (alone, in_training(alone, 32))
        ]
        assert times[1] == pytest.approx(times[0] / part)


def test_only_shipped_profiles_of_devices_with_runs_change():
    """A measured profile is the user's own machine; what is in training stays as it is."""
    shipped = load_profile("h100-sxm5-80gb")
    trained = in_training(shipped, 64)
    assert in_training(shipped, 60) is trained  # eight nodes too
    assert in_training(trained, 512) is trained
    measured = Profile(shipped.file.model_copy(update={"source": "measured"}))
    assert in_training(measured, 64) is measured
    assert trained.memory_bytes == shipped.memory_bytes
