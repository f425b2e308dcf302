"""The generated page of figures by source."""

import datetime

from docs.build.accuracy_page import Section, hosts_section, odds_section, page_of


def test_a_page_has_a_line_a_source_and_its_verdicts():
    line = {"source": "one", "rows": 3, "mape_pct": 4.567, "bias_pct": -1.0, "kendall_tau": None}
    section = Section(
        title="Runs",
        file="runs.csv",
        lines=[line],
        fits={
            "one": {
                "ran, said: fits": 3,
                "crashed, said: does not fit": 6,
                "crashed, said: nearly full": 1,
                "crashed, said: fits": 1,
                "crashed, said: far from full": 9,
            }
        },
    )
    text = page_of([section], date=datetime.date(2026, 1, 2))
    assert "Generated on 2026-01-02" in text
    assert "| one | 3 | 4.57 | -1.00 | - |" in text
    assert "| source | rows | MAPE | bias | tau |" in text
    # Of eight that may have crashed for memory six were told.
    assert "6 of 8 (75.0%; of all that crashed 35.3%)" in text
    assert "| one | 3 | 0 | 0 | 1 | 1 | 6 | 9 |" in text


def test_odds_and_hosts_have_sections_of_their_own():
    parts = [(0.5, 1.01, 50, 90), (0.0, 0.5, 40, 5), (0.5, 0.7, 10, 60), (0.99, 1.01, 100, 99)]
    odds = odds_section(
        [
            {
                "odds_from": low,
                "odds_to": high,
                "runs": runs,
                "odds_pct": 50,
                "ran_pct": ran,
                "fit_pct": 97,
            }
            for low, high, runs, ran in parts
        ]
    )
    # 38 + 4 + 1 crashed, 2 + 6 + 99 ran.
    assert "38 of 43 (88.4%)" in odds
    assert "2 of 107 (1.9%)" in odds
    assert "| 99 to 100% | 100 | 50% | 99% | 97% |" in odds
    assert "| 50 to 101%" not in odds
    line = {
        "gpu": "H100",
        "kind": "cp",
        "half": "aside",
        "cases": 1,
        "mape_pct": 3.27,
        "bias_pct": 1,
    }
    hosts = hosts_section([line])
    assert "| H100 | cp | aside | 1 | 3.27 | 1.00 |" in hosts
    page = page_of([], date=datetime.date(2026, 1, 2), more=[odds, hosts])
    assert page.index("## Odds of fitting") < page.index("## Runs that hosts set")
