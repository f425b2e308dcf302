"""Shipped profiles against published measurements that their fits have not seen (M16)."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.gpu.kept import read_kept
from benchmarks.published import PUBLISHED
from benchmarks.published.fit_published import fitted_profile, held_out, layers
from profiles import Group, load_profile, shipped_names


@pytest.fixture(scope="module")
def tables():
    if not PUBLISHED.exists():
        pytest.skip(f"needs the published tables in {PUBLISHED}")
    return pd.read_csv(PUBLISHED / "ops.csv"), pd.read_csv(PUBLISHED / "nccl.csv")


def test_held_out_rows_are_predicted(tables):
    """M16: each fifth predicted from the others; median errors under 8% and 15%, table by
    table.
    """
    errors = held_out(*tables)
    for what, found in errors.items():
        if what.startswith(("matmul", "attention")):
            assert np.median(found) < 0.08, what
        else:
            assert np.median(found) < 0.15, what
    collectives = [e for what, found in errors.items() if "above 1 MiB" in what for e in found]
    assert len(collectives) > 100
    assert np.median(collectives) < 0.05


def test_published_layers_are_predicted(tables):
    """M16: forward and backward of five variants of one layer that nothing was fitted to."""
    found = list(layers(pd.read_csv(PUBLISHED / "layers.csv")))
    assert len(found) == 10
    for what, predicted_s, measured_s in found:
        assert predicted_s == pytest.approx(measured_s, rel=0.1), what


@pytest.mark.parametrize("name", shipped_names())
def test_what_is_shipped_is_what_the_script_makes(tables, name):
    made = fitted_profile(name, *tables).model_dump(mode="json")
    shipped = load_profile(name).file.model_dump(mode="json")
    assert _rounded(made) == _rounded(shipped)


def _rounded(value):
    """Forget the last digits, which differ between versions of the solver."""
    if isinstance(value, float):
        return float(f"{value:.2e}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def test_a_dgx_h100_reduces_a_gibibyte_as_published():
    """466 GB/s bus bandwidth at 1 GiB (dgxc-benchmarking): 2 * 7/8 * 1.0737 GB / 466 GB/s."""
    answer = load_profile("h100-sxm5").collective_seconds(
        "all_reduce", 2**30, Group(ranks_per_node=8)
    )
    assert answer.seconds == pytest.approx(2 * 7 / 8 * 2**30 / 466e9, rel=0.05)


def test_a_slower_link_between_nodes_slows_only_what_crosses_them():
    fast, slow = load_profile("h100-sxm5"), load_profile("h100-sxm5@ib-200")
    inside, across = Group(ranks_per_node=8), Group(ranks_per_node=8, num_nodes=4)
    same = [p.collective_seconds("all_reduce", 2**30, inside).seconds for p in (fast, slow)]
    assert same[0] == same[1]
    other = [p.collective_seconds("all_reduce", 2**30, across).seconds for p in (fast, slow)]
    assert other[1] == pytest.approx(2 * other[0], rel=0.1)


def test_no_shipped_number_passes_for_measured():
    for name in shipped_names():
        profile = load_profile(name)
        assert profile.source == "shipped"
        origins = {fit.origin for fit in (*profile.file.op_fits, *profile.file.collective_fits)}
        # What benchmarks/gpu measured says on what and when.
        assert "measured" not in origins or read_kept(name)
        assert all(fit.detail for fit in profile.file.op_fits)
