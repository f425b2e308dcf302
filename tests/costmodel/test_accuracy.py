"""N16: Predictions against published runs, where the table of them lies beside the project."""

import numpy as np
import pytest

from benchmarks.published import PUBLISHED, accuracy

ROWS = PUBLISHED / "measured.csv"

pytestmark = pytest.mark.skipif(
    not ROWS.exists(), reason=f"needs {ROWS}, which is not part of the project"
)


@pytest.fixture(
    scope="module", params=[3, pytest.param(1, marks=pytest.mark.slow)], ids=["a third", "all"]
)
def lines(request):
    """The errors of each source, of every third run (and the few that are ranked) or of all."""
    cases, _ = accuracy.load_cases(ROWS)
    ran = [case for case in cases if case.ran]
    cases, errors = accuracy.estimated_errors(
        [c for at, c in enumerate(ran) if at % request.param == 0 or c.source == "vtrain_multi"]
    )
    lines = {line["source"]: line for line in accuracy.report(cases, errors)}
    return request.param, lines


@pytest.mark.parametrize(
    ("source", "mape_pct"),
    [
        ("ALL single node", 6.5),
        ("ALL multi node", 6.0),
        ("dgxc_2411", 4.0),
        ("llmfoundry", 5.0),
        ("ALL in 8 bits", 6.0),
    ],
)
def test_mean_error_stays_where_it_is(lines, source, mape_pct):
    """M16: mean absolute error of step times, a little above what the fit leaves."""
    every, by_source = lines
    assert by_source[source]["rows"] >= 70 // every
    assert by_source[source]["mape_pct"] < mape_pct


def test_runs_of_nanotron_up_to_eight_nodes():
    """M16: the Ultra-Scale Playbook's runs with tp in a node, an eighth of them."""
    cases, _ = accuracy.load_cases(ROWS.parent / "ultrascale_playbook.csv")
    chosen = [case for case in cases if case.ran and case.nodes <= 8 and case.run.tp <= 8][::8]
    assert len(chosen) > 40
    _, errors = accuracy.estimated_errors(chosen)
    assert np.median(abs(errors)) < 0.08


def test_adapters_of_a_frozen_model():
    """MLPerf's LoRA submissions, to which nothing is fitted."""
    cases, _ = accuracy.load_cases(ROWS.parent / "mlperf.csv")
    tuned = [case for case in cases if case.run.lora_rank]
    assert len(tuned) == 84
    _, errors = accuracy.estimated_errors(tuned)
    assert np.median(abs(errors)) < 0.12


def test_mixtures_of_experts():
    """Rows with experts, to whose steps no rate is fitted."""
    errors = []
    for file in ("measured.csv", "moe_cp.csv"):
        cases, _ = accuracy.load_cases(ROWS.parent / file, experts=True)
        errors.extend(accuracy.estimated_errors(cases)[1])
    assert len(errors) == 90
    assert np.abs(errors).mean() < 0.12


def test_ranking_and_memory(lines):
    """M16: little is lost by trusting the ranking; max-allocated memory within 5%."""
    _, by_source = lines
    assert by_source["vtrain_single"]["regret_pct"] < 2.0
    assert by_source["vtrain_multi"]["regret_pct"] < 2.0
    assert by_source["simumax_b200"]["memory_mape_pct"] < 5.0
