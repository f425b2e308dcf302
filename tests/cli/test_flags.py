"""Rooms name fields, the command line names flags."""

import ast
import re
from dataclasses import fields
from functools import cache

import pytest
import typer

import cli
from commands.render.flags import SPELLINGS, with_flags
from planner.files import ROOT
from search import SearchRequest

ROOMS = ("planner", "profiles", "costmodel", "search")


@cache
def flags() -> frozenset[str]:
    group = typer.main.get_command(cli.app)
    return frozenset(
        name
        for command in (group, *group.commands.values())  # type: ignore[attr-defined]
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    )


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("`num_devices` 0 was given", "--gpus 0 was given"),
        ("try `memory_limit_bytes` 2.5 GiB, more", "try --memory-limit 2.5, more"),
        ("a larger `microbatch_size` helps", "a larger --microbatch-size helps"),
        ("without `pins`", "without --pin"),
        ("at line 3: `x.view(size)`", "at line 3: `x.view(size)`"),
        ("must return `size` samples", "must return `size` samples"),
    ],
)
def test_names_in_backticks_become_flags(message, printed):
    assert with_flags(message) == printed


def test_every_spelling_exists():
    """A flag that is renamed or a command that is gone must not be suggested."""
    for spelling in SPELLINGS.values():
        *command, last = spelling.split()
        assert last in flags() if last.startswith("--") else command == ["planner"], spelling


def test_every_field_of_a_request_has_a_flag():
    """A new field needs its name there. `model_file` is the argument; `axes` are those that an
    extension registers, which have no option.
    """
    own = {field.name for field in fields(SearchRequest)} - {"model_file", "axes"}
    assert own <= SPELLINGS.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_names_a_flag(room):
    ours = flags()
    found = []
    emit = ROOT / "planner" / "emit"  # which writes command lines of other programs
    for file in set((ROOT / room).rglob("*.py")) - set(emit.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str):
                found += [f"{file}: {flag}" for flag in re.findall(r"--[a-z-]+", text)]
    assert [line for line in found if line.rpartition(" ")[2] in ours] == []
