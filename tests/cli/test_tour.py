"""The tour of the documentation, typed as it stands there; and the site that it is built into."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
PLANNER = str(Path(sys.executable).with_name("planner"))


def commands() -> list[str]:
    return [
        line
        for block in re.findall(r"```console\n(.*?)```", TOUR, re.S)
        for line in block.strip().splitlines()
    ]


def test_the_tour_names_commands_that_there_are():
    names = [shlex.split(line)[:2] for line in commands()]
    assert len(names) >= 8
    for name, command in names:
        assert name == "planner"
        assert (ROOT / "commands" / f"{command}.py").exists(), command


@pytest.mark.slow
def test_the_tour_runs_as_it_stands(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    folder = tmp_path / "tour"
    folder.mkdir()
    for line in commands():
        arguments = shlex.split(line)
        done = subprocess.run(
            [PLANNER, *arguments[1:]], cwd=folder, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    report = (folder / "report.html").read_text()
    assert "measured (" in report


def test_the_documentation_is_built_strictly(tmp_path):
    pytest.importorskip("material", reason="the docs extra is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
