"""Programs in the shape of public reports: one process's training, or a line that says why not."""

from __future__ import annotations

import pytest

from tests.runtime.reports import PROGRAMS, outcomes, program, table


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_reports(name: str):
    found = outcomes(name)
    print(table({name: found}))
    names = getattr(program(name), "REFUSED", "")
    wrong = [outcome for outcome in found if not outcome.is_right(names)]
    assert not wrong, "\n".join(map(str, wrong))
