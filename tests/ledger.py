"""How long each test took, and which files of tests are run before each commit.

A plugin of pytest (`tests/conftest.py` names it). It writes the seconds of each test to the file
that PLANNER_DURATIONS names, with several workers in the process that deals tests to them; seconds
are of a test with its fixtures, on the wall's clock. `tests/durations.csv` is the ledger of files,
written from these by ``python -m tests.ledger FILE...`` (`make ledger`).

By the ledger ``--tier quick`` takes the files whose tests are the quickest, as many as a tenth
of all seconds has room for; ``--tier long`` takes the others, and no tier all. A file that is not
in the ledger is quick. What the other tier has is not even imported.
"""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = "PLANNER_DURATIONS"
"""Environment variable: where to write."""
MOST_TOLD = 40

LEDGER = Path(__file__).with_name("durations.csv")
ROOT = LEDGER.parents[1]

QUICK_PART = 1 / 10
"""Part of all seconds that quick files take together: with two workers five minutes of fifty."""

_seconds: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Line:
    """A file of tests in the ledger."""

    tests: int
    """Its tests that are not marked slow."""
    seconds: float
    """What they took together."""


@cache
def ledger() -> Mapping[str, Line]:
    """Return the ledger by file, from the root of the project."""
    with LEDGER.open(newline="") as file:
        return {
            row["file"]: Line(int(row["tests"]), float(row["seconds"]))
            for row in csv.DictReader(file)
        }


def long_files(lines: Mapping[str, Line]) -> frozenset[str]:
    """Return the files that are left out of the quick tier: those with the longest tests."""
    left = QUICK_PART * sum(line.seconds for line in lines.values())
    found = set()
    for name, line in sorted(lines.items(), key=lambda item: item[1].seconds / item[1].tests):
        left -= line.seconds
        if left < 0:
            found.add(name)
    return frozenset(found)


def pytest_addoption(parser: Any) -> None:
    """Add --tier."""
    parser.addoption(
        "--tier", choices=("quick", "long"), help="files of short tests alone, or the others"
    )


def pytest_ignore_collect(collection_path: Path, config: Any) -> bool | None:
    """Leave out files of the other tier."""
    tier = config.getoption("tier")
    if tier is None or collection_path.suffix != ".py" or collection_path.is_dir():
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    if not collection_path.name.startswith("test_"):
        return None
    return True if (name in long_files(ledger())) != (tier == "long") else None


def pytest_runtest_logreport(report: Any) -> None:
    """Add up a test's fixtures and its call."""
    _seconds[report.nodeid] += report.duration


def by_file(seconds: Mapping[str, float]) -> Counter[str]:
    """Return the seconds of each file's tests."""
    files: Counter[str] = Counter()
    for test, each in seconds.items():
        files[test.partition("::")[0]] += each
    return files


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell which files took longest."""
    if FILE not in os.environ:
        return
    terminalreporter.section(f"seconds by file, of {sum(_seconds.values()):.0f} in all")
    for name, seconds in by_file(_seconds).most_common(MOST_TOLD):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")


def pytest_sessionfinish(session: Any) -> None:
    """Write all of them, slowest first."""
    name = os.environ.get(FILE)
    if not name or hasattr(session.config, "workerinput"):
        return
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("seconds", "test"))
        writer.writerows((f"{seconds:.3f}", test) for test, seconds in _seconds.most_common())


def write_ledger(sources: Iterable[Path]) -> None:
    """Write the ledger from what runs wrote: each test of all tiers once."""
    seconds: dict[str, float] = {}
    for source in sources:
        with source.open(newline="") as file:
            seconds |= {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}
    tests = Counter(test.partition("::")[0] for test in seconds)
    with LEDGER.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("file", "tests", "seconds"))
        for name, each in sorted(by_file(seconds).items()):
            writer.writerow((name, tests[name], f"{each:.1f}"))


if __name__ == "__main__":
    write_ledger(map(Path, sys.argv[1:]))
