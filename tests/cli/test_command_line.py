"""The command line itself: help, usage errors, what it loads."""

import re
import resource
import subprocess
import sys

import pytest

COMMANDS = (
    *("profile", "search", "show", "why", "estimate", "simulate", "dryrun", "verify"),
    *("launch", "emit", "check", "timeline", "compare", "convert", "diff", "what-if", "doctor"),
    *("ui", "calibrate"),
)


def test_help_names_every_command(planner):
    done = planner("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


def test_no_arguments_is_help(planner):
    assert planner().stdout == planner("--help").stdout


def test_version_names_planner_and_torch(planner):
    import torch

    done = planner("--version")
    assert done.code == 0, done.stderr
    told = re.fullmatch(r"planner (\S+|of a source tree), torch (\S+)\n", done.stdout)
    assert told is not None, done.stdout
    assert torch.__version__.startswith(told[2].partition("+")[0])


def cpu_seconds_of_processes() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_seconds_of(code: str) -> float:
    began = cpu_seconds_of_processes()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return cpu_seconds_of_processes() - began


def test_help_is_quick():
    """Twenty times Python alone, whatever the machine: 0.3 s where that takes 0.015 s."""
    code = "import cli, sys; sys.argv = ['planner', '--help']; cli.main()"
    pairs = [(cpu_seconds_of("pass"), cpu_seconds_of(code)) for _ in range(5)]
    assert any(helped < 20 * bare for bare, helped in pairs), pairs


def test_help_loads_nothing_heavy():
    """Of a command, too, whose options typer reads with pydantic; and no room of ours."""
    code = (
        "import cli, sys; cli.run(['--help']); cli.run(['search', '--help']);"
        "heavy = {'torch', 'numpy', 'pandas', 'scipy', 'ortools', 'plotly',"
        "'planner.language.graph', 'search', 'profiles', 'costmodel'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["search"], "Missing argument"),
        (["serach"], "No such command 'serach'"),
        (["search", "model.py", "--gpus", "two"], "'--gpus'"),
        (["search", "model.py", "--gpsu", "2"], "No such option"),
        (["verify", "plan.json", "model.py", "--steps", "0"], "'--steps'"),
    ],
)
def test_usage_error_is_one_line(planner, arguments, says):
    complaint = planner(*arguments).complaint
    assert says in complaint
    assert "--help" in complaint
    assert "Input should" not in complaint  # pydantic's words
