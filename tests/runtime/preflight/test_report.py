"""Issue 19, 7: what preflight's report counts, and what of it is written as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.runtime.preflight.report import Rate, Report, check_of

RATE = Rate(
    axis="data", kind="all_reduce", ranks=(0, 1), nodes=("a", "b"), num_bytes=3_000_000,
    seconds=0.006, planned_s=0.002,
)  # fmt: skip
GOOD, BAD = check_of("clocks", "0.1 s apart", ()), check_of("versions", "alike", ["x", "y"])


def report(*checks) -> Report:
    return Report(
        nodes=("a", "b"), checks=checks, rates=(RATE,), start_s=1.0, checks_s=2.0, is_first=False
    )


def test_a_check_says_what_was_found_or_counts_its_problems():
    assert (GOOD.found, GOOD.problems) == ("0.1 s apart", ())
    assert (BAD.found, BAD.problems) == ("2 problems", ("x", "y"))
    assert check_of("versions", "alike", iter(["x"])).found == "1 problem"


def test_a_rate_is_beside_what_was_planned():
    assert RATE.bytes_per_s == pytest.approx(5e8)
    assert RATE.factor == pytest.approx(3.0)
    assert replace(RATE, planned_s=None).factor == 0.0


def test_a_report_is_good_without_problems_of_any_check():
    assert report(GOOD).problems == ()
    assert report(GOOD, BAD, BAD).problems == ("x", "y", "x", "y")
    good, bad = (json.loads(json.dumps(each.to_dict())) for each in (report(GOOD), report(BAD)))
    assert (good["is_good"], good["problems"]) == (True, [])
    assert (bad["is_good"], bad["problems"]) == (False, ["x", "y"])
    assert bad["checks"] == [
        {"name": "versions", "found": "2 problems", "planned": "", "problems": ["x", "y"]}
    ]
    assert bad["rates"][0]["planned_s"] == 0.002
    # All processes write the same.
    assert replace(report(BAD), is_first=True).to_dict() == report(BAD).to_dict()
