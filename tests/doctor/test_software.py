"""The doctor on libraries: what planner declares beside what is installed."""

from __future__ import annotations

from importlib import metadata

import pytest

from planner.doctor import software
from planner.doctor.software import check_requirements, check_software

TORCH = metadata.version("torch")


def test_what_is_right_is_one_line():
    found = list(check_requirements(["torch>=2", "numpy>=1", "no-such-thing>=1; extra == 'hf'"]))
    assert [finding.state for finding in found] == ["ok"]
    assert f"torch {TORCH}" in found[0].found


@pytest.mark.parametrize(
    ("declared", "state", "says", "advice"),
    [
        ("torch<1", "problem", f"{TORCH} is installed; planner was tested with torch<1", "torch<1"),
        ("no-such-thing>=3", "problem", "is not installed", "pip install 'no-such-thing>=3'"),
        ("numpy<1; extra == 'gpu'", "warning", "is installed", "pip install 'numpy<1'"),
    ],
)
def test_what_is_wrong_names_the_command_that_mends_it(declared, state, says, advice):
    first, *_ = check_requirements([declared])
    assert first.state == state
    assert says in first.found
    assert advice in first.advice


def test_a_requirement_of_another_platform_does_not_count():
    (found,) = check_requirements(["no-such-thing>=1; sys_platform == 'plan9'"])
    assert (found.name, found.found) == ("libraries", "none")


def test_a_module_called_like_ours_is_named(tmp_path, monkeypatch):
    (tmp_path / "search.py").write_text("")
    monkeypatch.chdir(tmp_path)
    (found,) = software._shadowed_names()
    assert "a module called search" in found.found
    assert found.state == "warning"


def test_a_source_tree_is_told(monkeypatch):
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert [finding.name for finding in check_software()] == ["Python", "planner"]
