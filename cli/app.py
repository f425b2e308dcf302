"""The commands in the order help lists them, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from cli import find, measure, predict, train
from planner.errors import PlannerError

app = typer.Typer(
    name="planner",
    help="Find, prove and run the fastest way to train a PyTorch model on a cluster.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(measure.profile)
app.command()(find.search)
app.command()(predict.show)
app.command()(find.why)
app.command()(predict.estimate)
app.command()(predict.simulate)
app.command()(predict.dryrun)
app.command()(train.verify)
app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(train.launch)
app.command()(train.timeline)
app.command()(train.compare)


def main() -> None:
    """Entry point of the `planner` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; a user's mistake becomes one stderr line."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="planner", standalone_mode=False)
    except PlannerError as error:
        return _refuse(str(error))
    except OSError as error:  # a full disk, a missing folder, no permission
        if error.filename is None:
            raise
        return _refuse(f"{error.filename}: {error.strerror}; name another file or folder")
    except Exception as error:
        # Usage errors come from the click that typer uses, its own copy in newer versions;
        # what marks them in all versions is format_message.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "planner"
        message = error.format_message().rstrip(".")
        return _refuse(f"{_with_what_was_given(message, error.__cause__)}; see {command} --help")
    return code if isinstance(code, int) else 0


def _with_what_was_given(message: str, cause: BaseException | None) -> str:
    """Name the refused value where the message does not: newer typers leave it in the cause."""
    errors = getattr(cause, "errors", None)
    given = repr(errors()[0]["input"]) if errors else ""
    return message if given in message else f"{message}; {given} was given"


def _refuse(message: str) -> int:
    print("planner: " + " ".join(message.split()), file=sys.stderr)
    return 2
