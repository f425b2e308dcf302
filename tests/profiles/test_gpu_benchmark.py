"""The GPU benchmark: its comparison on made-up records here, the measurement where there is one."""

import pytest
import torch

from benchmarks.gpu.measure import comparison, errors_by_family, kept_fits, measure
from profiles import load_profile
from profiles.fit import fit_ops
from profiles.records import OpFit
from tests.profiles.samples import linear_record, op_fit, profile


def test_the_shipped_profile_is_judged_by_family():
    """Shipped: 1e11 flop/s. Measured: half of that, so the shipped times are 50% short."""
    records = [linear_record(m, 256, 256, rate=5e10) for m in (64, 128, 256)]
    measured = profile(records, op_fits=fit_ops(records))
    shipped = profile(op_fits=[op_fit("matmul", s_per_flop=1e-11)])
    errors = errors_by_family(shipped, measured)
    assert errors == {("matmul", "float32", "forward"): pytest.approx([-0.5] * 3)}
    assert comparison(shipped, measured).row_count == 1


def test_kept_fits_say_where_they_were_measured():
    records = [linear_record(m, 256, 256) for m in (64, 128, 256)]
    (kept,) = kept_fits(profile(records, op_fits=fit_ops(records)))
    fit = OpFit.model_validate(kept)
    assert fit.origin == "measured"
    assert "test device, 2026-01-01" in fit.detail
    assert 1 / fit.s_per_flop == pytest.approx(1e11, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured(tmp_path):
    measured = measure(tmp_path / "p", 120.0)
    assert measured.cluster.device_type == "cuda"
    assert measured.file.skipped == ()
    bfloat16 = dict(measured.cluster.peak_flop_per_s)["bfloat16"]
    assert bfloat16 > 1e13
    loaded = load_profile(tmp_path / "p")
    assert {r.dtype for r in loaded.ops} >= {"bfloat16", "float16", "float32"}
