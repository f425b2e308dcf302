"""The `planner` command: its subcommands in the order help lists them, and their errors.

Results go to stdout; progress, notes and errors to stderr. Exit codes: 0 done, 1 a check failed
(`verify`, `doctor`, `profile --check`, `launch --preflight`), 2 bad input, in one line; 3 an error
of planner itself, in one line that names the file of its traceback; 130 interrupted, 141 when
nobody reads the output any more.
`python -m cli` is the command in a source tree that is not installed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.calibrate import calibrate
from commands.check import check
from commands.common.encoding import print_in_any_encoding
from commands.common.help import GroupedCommands, GroupedOptions
from commands.compare import compare
from commands.convert import convert
from commands.diff import diff
from commands.doctor import doctor
from commands.dryrun import dryrun
from commands.emit import emit
from commands.estimate import estimate
from commands.launch import launch
from commands.profile import profile
from commands.render.console import begin_stage, stage
from commands.render.flags import with_flags
from commands.search import search
from commands.show import show
from commands.simulate import simulate
from commands.timeline import timeline
from commands.ui import ui
from commands.verify import verify
from commands.what_if import what_if
from commands.why import why
from planner.collector import collect_seldom, leave_to_the_system
from planner.errors import PlannerError
from planner.plugins import load_plugins, name_files

_BRIEF = 300
"""Characters of an unexpected error that its line shows."""

app = typer.Typer(
    name="planner",
    help="Find, prove and run the fastest way to train a PyTorch model on a cluster.",
    cls=GroupedCommands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_versions(is_asked: bool) -> None:
    """Print the versions that an answer follows from, and leave; torch itself is not loaded."""
    if is_asked:
        print(f"planner {_version('planner')}, torch {_version('torch')}")
        raise typer.Exit


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed" if package != "planner" else "of a source tree"


@app.callback()
def load(
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A Python file that adds schedules of your own; repeatable."
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_versions,
            is_eager=True,
            help="Print the versions of planner and torch.",
        ),
    ] = False,
) -> None:
    """Load what others add, before any command."""
    name_files(plugin or ())
    load_plugins()


_SECTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Plan and train": (profile, search, show, launch),
    "Understand": (ui, why, what_if, diff, estimate, simulate, timeline, compare, calibrate),
    "Prove and check": (verify, dryrun, check, doctor),
    "Other systems": (emit, convert),
}
"""Commands in the order help lists them, the common ones first."""

_SETTINGS: dict[Callable[..., Any], dict[str, bool]] = {
    launch: {"ignore_unknown_options": True, "allow_interspersed_args": False},
    check: {"ignore_unknown_options": True},  # FLAGS begin with --
}

for _section, _commands in _SECTIONS.items():
    for _command in _commands:
        app.command(
            cls=GroupedOptions,
            rich_help_panel=_section,
            context_settings=_SETTINGS.get(_command),
        )(_command)


def main() -> None:
    """Entry point of the `planner` command."""
    collect_seldom()
    print_in_any_encoding()
    code = run(sys.argv[1:])
    leave_to_the_system()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever goes wrong becomes one stderr line."""
    begin_stage("reading the command line and its files")
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="planner", standalone_mode=False)
        sys.stdout.flush()
    except PlannerError as error:
        return _refuse(with_flags(str(error)))
    except (BrokenPipeError, SystemExit) as error:
        # Typer and rich leave with 1 where output goes to a pipe that nobody reads.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Usage errors come from the click that typer uses, its own copy in newer versions;
        # what marks them in all versions is format_message.
        if hasattr(error, "format_message"):
            return _refuse_usage(error)
        if type(error).__name__ == "Abort":  # click's, for an interrupt
            return 128 + signal.SIGINT
        if isinstance(error, OSError) and (trouble := _trouble_with_files(error)):
            return _refuse(trouble)
        return _fail(error, arguments)
    return code if isinstance(code, int) else 0


def _refuse_usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "planner"
    message = error.format_message().rstrip(".")
    return _refuse(f"{_with_what_was_given(message, error.__cause__)}; see {command} --help")


def _trouble_with_files(error: OSError) -> str:
    """Return what to say of a missing folder, no permission, a full disk; nothing of others."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}; name another file or folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}; free some space, or write to another folder"
    return ""


def _fail(error: Exception, arguments: Sequence[str]) -> int:
    """Tell a mistake of ours in one line, with where all of it was written."""
    from commands.render.error_report import write_report  # loads pydantic

    command = " ".join(("planner", *arguments[:1]))
    brief = " ".join(f"{type(error).__name__}: {error}".split())
    if len(brief) > _BRIEF:
        brief = brief[:_BRIEF] + "..."
    try:
        where = f"please report it with {write_report(error, arguments, stage())}"
    except OSError as trouble:
        where = f"please report it; its traceback could not be written ({trouble})"
    print(
        f"planner: {command} failed while {stage()}: {brief}; nothing given should lead to this: "
        f"{where}",
        file=sys.stderr,
    )
    return 3


_SAID_PLAINLY = {
    "Input should be": "it should be",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
}
"""Words of pydantic, by which newer typers read values, and ours."""


def _with_what_was_given(message: str, cause: BaseException | None) -> str:
    """Say in our words what was refused, and name the value where the message does not: newer
    typers leave it in the cause.
    """
    for said, plainly in _SAID_PLAINLY.items():
        message = message.replace(said, plainly)
    errors = getattr(cause, "errors", None)
    given = repr(errors()[0]["input"]) if errors else ""
    return message if given in message else f"{message}; {given} was given"


def _refuse(message: str) -> int:
    print("planner: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
