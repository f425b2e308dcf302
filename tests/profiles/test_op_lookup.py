"""P-op lookups: exact hit, else interpolation, else roofline; each says which (M16)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import OpQuery
from profiles.lookup.fit import fit_ops
from tests.profiles.samples import linear_record, op_fit, op_record, profile


def linear(m, n, k, **changes):
    query = OpQuery(
        target="aten.linear.default",
        shapes=((m, k), (n, k)),
        dtype="float32",
        direction="forward",
        flop=2.0 * m * n * k,
        num_bytes=4.0 * (m * k + n * k + m * n),
    )
    return replace(query, **changes)


GRID = [
    linear_record(m, n, k) for m in (32, 128, 512) for n in (64, 256, 1024) for k in (64, 256, 1024)
]
MEASURED = profile(GRID, op_fits=fit_ops(GRID))


def test_a_measured_op_is_answered_with_its_record():
    """M16: what was measured is not modelled."""
    noted = [linear_record(128, 64, 32, seconds=0.125, visits=(0.125,) * 4), *GRID]
    answer = profile(noted).op_seconds(linear(128, 64, 32))
    assert (answer.seconds, answer.source) == (0.125, "measured")
    # spread 0.01 over the square root of 4 visits
    assert answer.relative_error == pytest.approx(0.005)


def test_rows_are_counted_whatever_dims_they_come_in():
    query = linear(128, 64, 64, shapes=((4, 32, 64), (64, 64)))
    assert MEASURED.op_seconds(query).source == "measured"


def test_two_records_that_differ_in_a_flag_are_told_apart_by_their_work():
    shapes = ((1, 4, 64, 32),) * 3
    target = "aten.scaled_dot_product_attention.default"
    causal = op_record(target, seconds=1.0, shapes=shapes, flop=1e6, arguments="[true]")
    full = op_record(target, seconds=2.0, shapes=shapes, flop=2e6, arguments="[false]")
    query = OpQuery(
        target=target, shapes=shapes, dtype="float32", direction="forward", flop=2e6, num_bytes=1.0
    )
    assert profile([causal, full]).op_seconds(query).seconds == 2.0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(m=st.integers(32, 512), n=st.integers(64, 1024), k=st.integers(64, 1024))
def test_between_measured_sizes_the_rate_carries_over(m, n, k):
    """M16: every record ran at 1e11 flop/s, so everything between them does, within 3%."""
    answer = MEASURED.op_seconds(linear(m, n, k))
    assert answer.seconds == pytest.approx(2 * m * n * k / 1e11, rel=0.03)
    assert answer.source in ("measured", "interpolated")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 4096), n=st.integers(1, 4096), k=st.integers(1, 4096), seed=st.integers(0, 9)
)
def test_an_answer_never_contradicts_a_measured_smaller_or_larger_op(m, n, k, seed):
    """Records whose rates differ threefold: larger than a measured op is never cheaper."""
    rates = [5e10 + 1e10 * ((index * 7 + seed) % 10) for index in range(len(GRID))]
    records = [
        linear_record(*_sizes(record), rate=rate) for record, rate in zip(GRID, rates, strict=True)
    ]
    # Keep the records themselves free of contradictions, which interpolation can't mend.
    records = [r for r in records if not any(_contradicts(r, other) for other in records)]
    answer = profile(records, op_fits=fit_ops(records)).op_seconds(linear(m, n, k))
    if answer.source != "interpolated":
        return
    for record in records:
        a, b, c = _sizes(record)
        if a <= m and b <= n and c <= k:
            assert answer.seconds >= record.seconds * (1 - 1e-9)
        if a >= m and b >= n and c >= k:
            assert answer.seconds <= record.seconds * (1 + 1e-9)


def _sizes(record):
    (m, k), (n, _) = record.shapes
    return m, n, k


def _contradicts(a, b):
    below = all(x <= y for x, y in zip(_sizes(a), _sizes(b), strict=True))
    return below and a.seconds > b.seconds


def test_far_from_all_measurements_the_fit_answers():
    answer = MEASURED.op_seconds(linear(2**20, 2**16, 2**16))
    assert answer.source.startswith("roofline")
    assert answer.seconds == pytest.approx(2 * 2.0**52 / 1e11, rel=0.05)


def test_an_unmeasured_target_uses_its_family():
    query = linear(128, 64, 64, target="aten.mm.default", shapes=((128, 64), (64, 64)))
    assert MEASURED.op_seconds(query).seconds == pytest.approx(2 * 128 * 64 * 64 / 1e11, rel=0.05)


def test_another_dtype_is_scaled_by_peak_rates_and_says_so():
    """bfloat16 peaks at 4 times float32 in the sample; 1e12 flop at 1e11 flop/s takes 10 s."""
    fitted = profile(op_fits=[op_fit("matmul", s_per_flop=1e-11)])
    answer = fitted.op_seconds(linear(1, 1, 1, dtype="bfloat16", flop=1e12, num_bytes=0.0))
    assert answer.seconds == pytest.approx(2.5)
    assert "scaled to bfloat16" in answer.source
    assert answer.relative_error > 0.3


def test_without_any_fit_the_data_sheet_answers_and_says_so():
    """1e12 flop at a peak of 1e12 flop/s; 50 GB at 10 GB/s."""
    bare = profile()
    assert bare.op_seconds(linear(1, 1, 1, flop=1e12, num_bytes=0.0)).seconds == 1.0
    answer = bare.op_seconds(linear(1, 1, 1, flop=1e12, num_bytes=50e9))
    assert answer.seconds == 5.0
    assert (answer.source, answer.relative_error) == ("roofline, peak rates", 1.0)


def test_a_gap_in_the_measurements_shows_in_the_error_bar():
    near = MEASURED.op_seconds(linear(130, 256, 256))
    records = [r for r in GRID if _sizes(r)[0] != 128]
    far = profile(records, op_fits=fit_ops(records)).op_seconds(linear(130, 256, 256))
    assert far.relative_error > near.relative_error
