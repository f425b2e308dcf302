"""The ledger of durations: what is run before each commit, and that it is up to date."""

from __future__ import annotations

from tests.ledger import QUICK_PART, ROOT, Line, ledger, long_files

MOST_UNKNOWN = 0.1
"""Part of the files that may be missing from the ledger before it is written anew."""


def test_quick_files_are_those_of_the_shortest_tests_and_fit_their_part() -> None:
    lines = {"a": Line(10, 1.0), "b": Line(1, 7.0), "c": Line(4, 3.0), "d": Line(1, 0.9)}
    assert QUICK_PART * 11.9 > 1.0
    assert long_files(lines) == {"b", "c", "d"}
    assert not long_files({})


def test_the_ledger_names_the_files_that_there_are() -> None:
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    gone = ledger().keys() - there
    assert not gone, "make ledger"
    assert len(there - ledger().keys()) <= MOST_UNKNOWN * len(there), "make ledger"


def test_the_quick_tier_takes_its_part_of_the_seconds() -> None:
    left_out = long_files(ledger())
    quick = sum(line.seconds for name, line in ledger().items() if name not in left_out)
    whole = sum(line.seconds for line in ledger().values())
    assert 0.9 * QUICK_PART < quick / whole <= QUICK_PART
