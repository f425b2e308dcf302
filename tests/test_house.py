"""The house: who imports whom. Imports for types and inside functions count as any other.

`docs/architecture.md` has the figure that `figure` draws; WRITE_PAGES=1 writes it there.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("planner", "profiles", "costmodel", "search", "commands")
PAGE = ROOT / "docs" / "architecture.md"
DIVIDED = ("planner.language", "planner.runtime")
"""Packages whose rooms are drawn one by one."""
DOZEN = 12

Imports = Mapping[str, frozenset[str]]


@cache
def imports() -> Imports:
    """By module, the modules of ours that it imports anywhere."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    return {
        module: frozenset(imported_by(file, files)) - {module} for module, file in files.items()
    }


def imported_by(file: Path, modules: Iterable[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                # What a package hands on is imported from the package.
                inside = f"{node.module}.{alias.name}"
                if inside in modules:
                    yield inside
                elif node.module in modules:
                    yield node.module


def room_of(module: str) -> str:
    """The package a module belongs to, by the names of the figure."""
    first, *rest = module.split(".")
    if first != "planner":
        return first
    if not rest:
        return ""  # its doors, above all
    if rest[0] in ("language", "runtime") and len(rest) > 1:
        return f"{rest[0]}.{rest[1]}"
    if rest[0] in ("language", "runtime"):
        return ""
    if (ROOT / "planner" / rest[0]).is_dir():
        return rest[0]
    return "" if rest[0] in ("worker", "__main__") else "base"


def rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, others in imports().items():
        room = room_of(module)
        if (
            room
            and room != "base"
            and not module.endswith("__main__")
            and module != "planner.worker"
        ):
            found.setdefault(room, set()).update(map(room_of, others))
    return {room: others - {room, "base", ""} for room, others in found.items()}


def arrows() -> list[tuple[str, str]]:
    """Imports between rooms, without those that follow from others."""
    direct = rooms()

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(direct[room]).union(*map(below, direct[room]))

    return sorted(
        (room, other)
        for room, others in direct.items()
        for other in others
        if not any(other in below(between) for between in others - {other})
    )


def figure() -> str:
    """The rooms as Mermaid draws them: an arrow from who imports to what is imported."""
    names = {room: re.sub(r"\W", "_", room) for room in rooms()}
    lines = ["flowchart TD"]
    grouped: dict[str, list[str]] = {}
    for room in sorted(names):
        grouped.setdefault(room.partition(".")[0] if "." in room else "", []).append(room)
    for group, members in grouped.items():
        inside = [f"{names[room]}[{room.rpartition('.')[2]}]" for room in members]
        if group:
            inside = [f"subgraph {group}", *(f"    {line}" for line in inside), "end"]
        lines += [f"    {line}" for line in inside]
    lines += [f"    {names[a]} --> {names[b]}" for a, b in arrows()]
    return "\n".join(lines)


def test_no_import_leads_in_a_circle():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rooms_are_in_no_circle():
    try:
        TopologicalSorter(rooms()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_page_has_the_figure_of_the_house():
    text = PAGE.read_text()
    before, fence, rest = text.partition("```mermaid\nflowchart TD\n")
    assert fence, "the page has lost its figure"
    _, end, after = rest.partition("```")
    wanted = f"{before}```mermaid\n{figure()}\n{end}{after}"
    if os.environ.get("WRITE_PAGES"):
        PAGE.write_text(wanted)
        return
    assert text == wanted, "imports between rooms have changed: WRITE_PAGES=1 draws the figure anew"


def test_a_folder_of_many_modules_has_rooms():
    """A dozen modules; a folder of commands has a module for each."""
    crowded = {}
    for package in PACKAGES:
        for folder in (ROOT / package, *(ROOT / package).rglob("*")):
            modules = [file for file in folder.glob("*.py") if file.stem != "__init__"]
            if len(modules) > DOZEN and folder.name != "commands":
                crowded[folder.relative_to(ROOT).as_posix()] = len(modules)
    assert not crowded


def test_each_package_says_what_it_is_for():
    silent = [
        module
        for package in PACKAGES
        for file in (ROOT / package).rglob("__init__.py")
        if not ast.get_docstring(ast.parse(file.read_text()))
        for module in [file.parent.relative_to(ROOT).as_posix()]
    ]
    assert not silent
