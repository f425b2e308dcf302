"""Help: in groups, an example for each command, and what a shell completes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import typer

import cli
from commands.common.help import GroupedCommands

APP = typer.main.get_command(cli.app)
COMMANDS = sorted(APP.commands)


def test_commands_stand_in_groups_the_common_ones_first(planner):
    told = planner("--help").stdout
    assert [line for line in told.splitlines() if re.match(r"\S.*:$", line)][1:] == [
        "Plan and train:", "Understand:", "Prove and check:", "Other systems:",
    ]  # fmt: skip
    assert told.index("  search ") < told.index("  what-if ") < told.index("  doctor ")
    assert isinstance(APP, GroupedCommands)
    listed = told.partition("Plan and train:")[2]
    assert "..." not in listed, "each command is told in a line"


@pytest.mark.parametrize("module", ["planner.__main__", "cli"])
def test_what_help_needs_loads_nothing_heavy(module):
    """``planner --help`` answers in under 0.3 s: torch alone takes seconds."""
    told = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "pandas", "scipy", "pydantic", "rich.table", "plotly"}
    assert not heavy & set(done.stdout.split())


def test_a_search_that_measures_nothing_loads_no_runtime():
    """The runtime takes as long to import as a small search does."""
    told = "import sys, commands.render.plans.search, search; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "commands.common.measured" in loaded
    assert not [name for name in loaded if name.startswith("planner.runtime.stage")]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_of_its_own_options(planner, name):
    told = " ".join(planner(name, "--help").stdout.split())
    example = told.partition("Example: ")[2].partition(" Arguments:")[0].partition(" Options:")[0]
    program, command, *words = shlex.split(example)
    assert (program, command) == ("planner", name)
    options = {option for parameter in APP.commands[name].params for option in parameter.opts}
    if name == "check":  # its argument is a line of flags of another system
        words = words[1:]
    assert {word for word in words if word.startswith("-")} <= options


def test_options_stand_in_groups_and_each_once(planner):
    told = planner("why", "--help").stdout
    order = [told.index(f"\n{panel}") for panel in ("Arguments:", "Options:", "Choices to fix")]
    assert order == sorted(order)
    assert told.index("--gpus") < told.index("--tp") < told.index("--execution")
    for option in ("--gpus", "--schedule", "--clip-gradients"):
        assert len(re.findall(rf"^  {option}\b", told, re.M)) == 1


@pytest.mark.parametrize(
    ("words", "at", "found"),
    [
        ("planner wha", 1, {"what-if"}),
        ("planner search --pro", 2, {"--profile"}),
        ("planner search --profile h2", 3, {"h200-sxm-141gb"}),
    ],
)
def test_a_shell_completes_commands_options_and_profiles(monkeypatch, capsys, words, at, found):
    monkeypatch.setenv("_PLANNER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(at))
    with pytest.raises(SystemExit):
        cli.run([])
    assert set(capsys.readouterr().out.split()) == found
