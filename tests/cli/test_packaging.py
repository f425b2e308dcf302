"""What `pip install` takes along: every package of the tree, and `cli.py`."""

import tomllib
from pathlib import Path

from planner.graph import model_file

TREE = Path(model_file.__file__).parents[2]
CONFIG = tomllib.loads((TREE / "pyproject.toml").read_text())
ONLY_HERE = {"tests"}
"""Packages of the source tree that are not installed."""


def packages() -> set[str]:
    return {file.parent.name for file in TREE.glob("*/__init__.py")} - ONLY_HERE


def test_every_package_is_installed():
    patterns = CONFIG["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(patterns) == {p for name in packages() for p in (name, f"{name}.*")}


def test_the_module_of_the_command_is_installed():
    module = CONFIG["project"]["scripts"]["planner"].partition(":")[0]
    assert module in CONFIG["tool"]["setuptools"]["py-modules"]


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
