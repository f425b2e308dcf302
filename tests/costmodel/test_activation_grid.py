"""P18: what 1F1B saves over FThenB, over a grid of pp and microbatches (`benchmarks`)."""

import pytest

from benchmarks.machine.activation_memory import build_model, grid, model_graph


@pytest.mark.slow
def test_activations_are_predicted_over_a_grid():
    """Bytes of both schedules within 2%; 1F1B's do not grow with the microbatches."""
    rows = grid(model_graph(), build_model, [(2, 4), (2, 12), (4, 8), (4, 16)])
    assert max(row.largest_error for row in rows) < 0.02
    for few, many in (rows[:2], rows[2:]):
        assert few.one_f_one_b_measured_bytes == many.one_f_one_b_measured_bytes
        assert few.fthenb_measured_bytes < 0.7 * many.fthenb_measured_bytes
