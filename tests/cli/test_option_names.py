"""The same option has the same name, meaning and kind of value on every command that has it."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any, get_args, get_type_hints

import typer

import cli

BY_COMMAND = {
    "accept": "`emit` accepts what a system does otherwise; others, what cuts of the batch change",
    "cluster": "`launch` reads it for --preflight alone",
    "device": "`emit` has no machine to look at: its default is the plan's",
    "execution": "`what-if` takes others, with commas; defaults differ: `estimate` has a plan",
    "expert_imbalance": "`what-if` takes others, with commas; `check` has a line, no profile",
    "global_batch": "`what-if` takes others, with commas",
    "gpu": "runs that `calibrate` reads say it",
    "gpus": "`what-if` takes others; `profile`, `check`, `calibrate` say what their count is for",
    "kernels": "`launch` has a plan, which says them",
    "memory_limit": "`what-if` takes others, with commas",
    "model": "`check` has no plan: names and sizes are models there, too",
    "num_nodes": "`launch` reads its launcher's",
    "out": "what is written differs by command",
    "precision": "`what-if` takes both; `profile` measures what the search will ask for",
    "profile": "plans have one; `what-if` takes others",
    "rendezvous": "`launch` reads its launcher's",
    "time_limit": "Ctrl-C ends a search with a plan, and the page without a question",
    "to": "into what differs by command",
}
"""Options that say something else on some commands, and why they may."""


COMMANDS = typer.main.get_command(cli.app).commands


def _options() -> dict[str, dict[str, Any]]:
    """Return each option's declaration by its name and command."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                found[parameter.name][name] = parameter
    return found


@cache
def _hints(command: str) -> dict[str, Any]:
    """Return the types of a command's options, those of groups as well, see `spread`."""
    from commands.common.long_run import LongRun
    from commands.common.models import GivenModel
    from commands.common.question import Question

    callback = COMMANDS[command].callback
    own = getattr(callback, "__wrapped__", callback)
    every = (Question, LongRun, GivenModel, own)
    return {name: hint for each in every for name, hint in get_type_hints(each).items()}


def _value_of(command: str, name: str) -> str:
    """Return the kind of value: str, int, float, Path, bool, or a list of one."""
    hint = _hints(command)[name]
    kinds = [each for each in get_args(hint) if each is not type(None)] or [hint]
    return str(kinds[0])


def test_the_same_name_means_the_same():
    differing = {
        name for name, uses in _options().items() if len({each.help for each in uses.values()}) > 1
    }
    assert differing == set(BY_COMMAND)


def test_two_names_never_mean_the_same():
    names: dict[str, set[str]] = defaultdict(set)
    for name, uses in _options().items():
        for each in uses.values():
            names[each.help].add(name)
    assert {text: found for text, found in names.items() if len(found) > 1} == {}


def test_the_same_name_takes_the_same_kind_of_value():
    """But on `what-if`, which takes several values with commas between them, and `check --model`,
    which takes names and sizes.
    """
    for name, uses in _options().items():
        kinds = {
            _value_of(command, name) for command in uses if command not in ("what-if", "check")
        }
        assert len(kinds) <= 1, (name, kinds)


def test_names_are_whole_words():
    for name in _options():
        assert name == name.lower()
        (option,) = {max(each.opts, key=len) for each in _options()[name].values()}
        assert option == "--json" or option == "--set" or option[2:].replace("-", "_") == name
