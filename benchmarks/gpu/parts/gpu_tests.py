"""The tests that are marked gpu: each one's outcome."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.results import Result, Setting

ROOT = Path(__file__).parents[3]

FILES = (
    "tests/runtime/test_gpu.py",
    "tests/runtime/test_gpu_host.py",
    "tests/profiles/test_gpu_benchmark.py",
)
"""Where such tests are; collecting all others takes longer than running these."""


def run(setting: Setting) -> Iterator[Result]:
    """Yield a result for each test that was run or left out."""
    if importlib.util.find_spec("pytest") is None or not (ROOT / "tests").is_dir():
        note = "pytest or the tests are not here"
        yield Result(part="gpu_tests", check="pytest", status="not run", note=note)
        return
    report = setting.out / "gpu_tests.xml"
    # The measurement of a whole profile is a part of its own.
    chosen = "gpu and not slow"
    command = [
        sys.executable,
        "-m",
        "pytest",
        *_files(),
        "-m",
        chosen,
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-k", "not is_measured", f"--junitxml={report}", f"--rootdir={ROOT}"]
    if importlib.util.find_spec("pytest_timeout") is None:
        command += ["-W", "ignore", "-o", "timeout=0"]
    subprocess.run(command, cwd=ROOT, check=False)
    if not report.exists():
        note = "pytest wrote no report; see gpu_tests.log"
        yield Result(part="gpu_tests", check="pytest", status="fail", note=note)
        return
    for case in ElementTree.parse(report).iter("testcase"):
        yield _result(case)


def _files() -> list[str]:
    return [name for name in FILES if (ROOT / name).exists()]


def _result(case: ElementTree.Element) -> Result:
    wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
    left_out = case.find("skipped")
    status, note = "pass", ""
    if wrong is not None:
        status, note = "fail", wrong.get("message", "")
    elif left_out is not None:
        status, note = "not run", left_out.get("message", "")
    return Result(
        part="gpu_tests",
        check=case.get("name", ""),
        status=status,  # type: ignore[arg-type]
        seconds=float(case.get("time", 0)),
        note=note.splitlines()[0][:300] if note else "",
    )
