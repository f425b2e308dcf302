"""The generated page of figures by source."""

import datetime

from docs.build.accuracy_page import Section, page_of


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
