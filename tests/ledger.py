"""How long each test took: written to the file that PLANNER_DURATIONS names, slowest files told.

A plugin of pytest (`tests/conftest.py` names it). With several workers the process that deals tests
to them writes. Seconds are of a test with its fixtures, on the wall's clock.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

FILE = "PLANNER_DURATIONS"
"""Environment variable: where to write."""
MOST_TOLD = 40

_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: Any) -> None:
    """Add up a test's fixtures and its call."""
    _seconds[report.nodeid] += report.duration


def by_file() -> Counter[str]:
    """Return the seconds of each file's tests."""
    files: Counter[str] = Counter()
    for test, seconds in _seconds.items():
        files[test.partition("::")[0]] += seconds
    return files


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell which files took longest."""
    if FILE not in os.environ:
        return
    terminalreporter.section(f"seconds by file, of {sum(_seconds.values()):.0f} in all")
    for name, seconds in by_file().most_common(MOST_TOLD):
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
