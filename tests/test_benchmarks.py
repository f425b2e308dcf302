"""Benchmarks are run by hand; what they import moves nevertheless."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_benchmark_finds_what_it_imports():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert "predict_cpu" in names
    # A script's own folder is on its path.
    code = (
        "import importlib, sys\nsys.path.append('benchmarks')\n"
        "for name in {!r}: importlib.import_module('benchmarks.' + name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(names)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
