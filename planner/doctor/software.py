"""Python, PyTorch and the libraries, beside the versions that planner was tested with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from planner.files import ROOT
from planner.nodes.check import Check, judged

_ROOMS = ("planner", "profiles", "costmodel", "search", "commands", "cli")


def check_software() -> Iterator[Check]:
    """Yield findings on Python, on each library that planner declares, and on shadowed names."""
    yield judged("Python", f"{sys.version.split()[0]} at {sys.executable}")
    try:
        declared = metadata.requires("planner") or []
    except metadata.PackageNotFoundError:
        yield judged(
            "planner",
            "runs from a source tree, not installed",
            warning="pip install -e . in the tree, so that versions of libraries are held",
        )
        return
    yield judged("planner", f"{metadata.version('planner')} at {ROOT}")
    yield from check_requirements(declared)
    yield from _shadowed_names()


def check_requirements(declared: list[str]) -> Iterator[Check]:
    """Yield a finding for the declared libraries: one for all that are right, one for each other.

    A library of an extra counts where it is installed.
    """
    right: list[str] = []
    for text in declared:
        requirement = Requirement(text)
        marker = requirement.marker
        is_extra = marker is not None and "extra" in str(marker)
        if marker is not None and not is_extra and not marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not is_extra:
                yield _wrong(requirement, "is not installed")
            continue
        if not requirement.specifier.contains(Version(version), prereleases=True):
            yield _wrong(requirement, f"{version} is installed", is_extra=is_extra)
        else:
            right.append(f"{requirement.name} {version}")
    yield judged("libraries", ", ".join(dict.fromkeys(right)) or "none")


def _wrong(requirement: Requirement, found: str, *, is_extra: bool = False) -> Check:
    wanted = f"{requirement.name}{requirement.specifier}"
    found, advice = f"{found}; planner was tested with {wanted}", f"pip install '{wanted}'"
    if is_extra:
        return judged(requirement.name, found, warning=advice)
    return judged(requirement.name, found, problem=advice)


def _shadowed_names() -> Iterator[Check]:
    """Modules of the working folder that are called like ours: a script there imports them."""
    here = Path.cwd()
    if here.resolve() == ROOT:
        return
    for name in _ROOMS:
        if (here / f"{name}.py").exists() or (here / name / "__init__.py").exists():
            yield judged(
                "names",
                f"{here} has a module called {name}, as planner has",
                warning="commands and ranks load planner's own; a script of this folder that "
                f"imports {name} gets yours",
            )
