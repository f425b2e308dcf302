"""What `pip install` takes along, and whose modules are loaded beside others of the same names."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from planner.capture.source import model_file
from planner.files import ROOT

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
ONLY_HERE = {"benchmarks", "tests"}
"""Packages of the source tree that are not installed."""


def packages() -> set[str]:
    return {file.parent.name for file in ROOT.glob("*/__init__.py")} - ONLY_HERE


def test_every_package_is_installed():
    patterns = CONFIG["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(patterns) == {p for name in packages() for p in (name, f"{name}.*")}


def test_the_modules_of_the_command_are_installed():
    module, _, function = CONFIG["project"]["scripts"]["planner"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert CONFIG["tool"]["setuptools"]["py-modules"] == ["cli"]


def test_every_package_is_checked():
    assert set(CONFIG["tool"]["mypy"]["packages"]) == packages()
    assert set(CONFIG["tool"]["importlinter"]["root_packages"]) == packages()
    assert packages() < set(CONFIG["tool"]["ruff"]["lint"]["isort"]["known-first-party"])


def test_our_own_modules_are_not_files_of_the_users_model(monkeypatch):
    """A capture is kept until a local file changes; ours are covered by a digest of their own."""
    import cli
    import commands.search

    found = model_file.local_modules()
    for module in (cli, commands.search, model_file):
        assert Path(module.__file__).resolve() not in found
    assert Path(__file__).resolve() in found


def test_commands_take_a_model_among_modules_called_like_ours(planner, tmp_path, write_model):
    """Ours search, theirs define the model; the working folder has both names."""
    path = write_model(body="import search; x = search.twice(x)")
    for name in ("search", "cli", "costmodel", "profiles", "commands"):
        (tmp_path / f"{name}.py").write_text("def twice(x):\n    return 2 * x\n")
    done = planner("search", path.name, "--gpus", 2, "--global-batch", 4)
    assert done.code == 0, done.stderr
    done = planner("verify", "plan.json", path.name, "--device", "cpu")
    assert done.code == 0, done.stderr


def test_the_command_is_ours_whatever_is_on_pythonpath(tmp_path):
    """`planner` itself is the one name that a folder there must not have."""
    for name in ("cli", "commands", "costmodel", "profiles", "search"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for command in (
        ("-m", "planner", "search", "--help"),
        ("-c", "from planner.__main__ import main; main()"),
    ):
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, text=True,
            capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (
        "Usage: planner"
        in subprocess.run(
            [sys.executable, "-m", "planner"], env=environment, capture_output=True, text=True
        ).stdout
    )
