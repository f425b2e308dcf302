"""A wheel, installed where the source tree is not: what it holds, and that its command plans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planner.files import ROOT
from tests.cli.conftest import MODEL_FILE

LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", "tests", "*.egg-info", "build", "__pycache__", ".*_cache"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what the wheel installs, built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT)
    run = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = [*run, "wheel", "--no-deps", "-w", folder, folder / "tree"]
    subprocess.run(wheel, check=True, capture_output=True, text=True)
    (built,) = folder.glob("planner-*.whl")
    install = [*run, "install", "--no-deps", "--target", folder / "site", built]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_plans_without_the_source_tree(installed, tmp_path):
    """Libraries are this environment's, planner is the wheel's; beside it, names as ours."""
    (tmp_path / "model.py").write_text(
        MODEL_FILE.format(layers=4, width=8, body="import search; x = search.twice(x)")
    )
    (tmp_path / "search.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "where.py").write_text("import planner\nprint(planner.__file__)\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("where.py").strip() == str(installed / "planner" / "__init__.py")
    words = ("search", "model.py", "--gpus", "2", "--global-batch", "8")
    run("-m", "planner", *words, "--profile", "h100-sxm5-80gb", "--dp", "2")
    assert "parameters" in run("-m", "planner", "show", "plan.json", "model.py")
    run("-m", "planner", "verify", "plan.json", "model.py", "--device", "cpu")
    run("-m", "planner", "estimate", "plan.json", "model.py", "--execution", "megatron-core")


@pytest.mark.slow
def test_all_packages_of_a_wheel_are_typed(installed):
    for room in ("planner", "profiles", "costmodel", "search", "commands"):
        assert (installed / room / "py.typed").exists()
    assert (installed / "cli.py").exists()
    assert not (installed / "tests").exists()
