"""Running a script of one process on the ranks of a plan."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from planner.capture.diagnose import is_users
from planner.errors import PlanError, PlannerError
from planner.files import is_local
from planner.integrations.script.ranks import Variables, as_follower
from planner.integrations.script.replaced import replaced
from planner.integrations.script.running import Running
from planner.language.plan import Plan


def run_unmodified(script: str, args: list[str], plan: Plan) -> None:
    """Run a script on this rank. Raises PlannerError, with the script's line, for what can't be
    taken over.
    """
    variables = Variables()
    running = Running(plan, variables)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    variables.hide()
    try:
        with ExitStack() as inside:
            if variables.rank:
                inside.enter_context(as_follower())
            inside.enter_context(replaced(running))
            inside.enter_context(_noting(running))
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as error:
                if error.code in (None, 0):  # (ranks that follow wait for the end)
                    _end(running, script)
                raise
            else:
                _end(running, script)
    except PlannerError as error:
        raise type(error)(_with_line(error)) from error
    finally:
        variables.restore()


@contextmanager
def _noting(running: Running) -> Iterator[None]:
    """Inside, what is refused of the script is noted, as it may catch every exception."""

    def init(error: PlanError, *args: Any) -> None:
        super(PlanError, error).__init__(*args)
        if running.is_hidden and running.refused is None:
            running.refused = error

    PlanError.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del PlanError.__init__


def _with_line(error: PlannerError) -> str:
    """Return an error with the innermost line of the user's own files that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename) and is_local(frame.filename)]
    if not own or f"{own[-1].filename}:{own[-1].lineno}" in str(error):
        return str(error)
    return f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`: {error}"


def _end(running: Running, script: str) -> None:
    running.refuse_again()
    if running.has_loop and running.loop.is_begun:
        running.loop.end()
        return
    raise PlanError(
        f"{script} ended without a training step: no module was called in training mode whose "
        "parameters a torch optimizer has; is it the script that trains?"
    )
