"""Rankings and plots of the benchmark `accuracy`, on made-up runs."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.published.groups import rankings, write_plot


def cases(*measured: float, name: str = "a") -> list[SimpleNamespace]:
    run = SimpleNamespace(dp=2, tp=1, pp=1, micro_batch=1)
    return [
        SimpleNamespace(run=run, source="paper", group=("paper", name), nodes=1, step_s=step_s)
        for step_s in measured
    ]


def test_regret_is_of_the_layout_predicted_best():
    measured = np.array([1.0, 2.0, 3.0])
    predicted = np.array([2.5, 2.0, 4.0])
    (found,) = rankings(cases(*measured), predicted / measured - 1)
    assert found.regret == pytest.approx(1.0)
    # Of the three pairs only the first is ordered wrongly.
    assert found.kendall_tau == pytest.approx(1 / 3)
    assert (found.layouts, found.model) == (3, "a")


def test_layouts_of_other_groups_are_not_compared():
    runs = cases(1.0, 2.0) + cases(5.0, name="b")
    (found,) = rankings(runs, np.zeros(3))
    assert found.layouts == 2
    assert found.regret == 0


def test_a_page_has_a_point_for_each_run(tmp_path):
    page = tmp_path / "accuracy.html"
    write_plot(cases(1.0, 2.0), np.array([0.1, -0.1]), page)
    text = page.read_text()
    assert "predicted against measured step" in text
    assert "dp 2 tp 1 pp 1 of 1" in text
