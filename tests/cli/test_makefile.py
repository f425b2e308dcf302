"""The virtual environment of `make demo`: made once, and never trusted half made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
# Stands for python3: says it is version $VERSION; "-m venv" makes a .venv whose pip
# writes a line to installs.txt and exits with $PIP_EXIT.
case "$1 $2" in
  "-c "*) exit {too_old};;
  "--version "*) echo "Python {version}";;
  "-m venv")
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "$@" >> installs.txt; exit $PIP_EXIT\\n' > .venv/bin/python
    chmod +x .venv/bin/python;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Run make on a copy of the Makefile with a stand-in for Python; return what it did."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    python = tmp_path / "fakepython"

    def run(target, *, pip_exit=0, version="3.12.0"):
        too_old = int(tuple(map(int, version.split("."))) < (3, 11))
        python.write_text(FAKE_PYTHON.format(too_old=too_old, version=version))
        python.chmod(0o755)
        return subprocess.run(
            ["make", target, f"PYTHON={python}"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PIP_EXIT": str(pip_exit)},
            capture_output=True,
            text=True,
        )

    return run


def installs(tmp_path):
    file = tmp_path / "installs.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_venv_is_made_once(make, tmp_path):
    assert make(".venv/ready").returncode == 0
    assert make(".venv/ready").returncode == 0
    assert len(installs(tmp_path)) == 1


def test_interrupted_install_is_started_anew(make, tmp_path):
    assert make(".venv/ready", pip_exit=1).returncode != 0
    left_over = tmp_path / ".venv" / "left-over"
    left_over.touch()
    assert make(".venv/ready").returncode == 0
    assert not left_over.exists()
    assert len(installs(tmp_path)) == 2


def test_interrupted_update_is_not_trusted(make, tmp_path):
    """A venv that was good is not good while an update of it is unfinished."""
    assert make(".venv/ready").returncode == 0
    (tmp_path / "pyproject.toml").write_text("changed")
    future = (tmp_path / ".venv" / "ready").stat().st_mtime + 10
    os.utime(tmp_path / "pyproject.toml", (future, future))
    assert make(".venv/ready", pip_exit=1).returncode != 0
    assert not (tmp_path / ".venv" / "ready").exists()


def test_old_python_is_refused_with_what_to_try(make, tmp_path):
    done = make(".venv/ready", version="3.10.4")
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()
