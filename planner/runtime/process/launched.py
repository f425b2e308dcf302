"""Which plan an engine follows where `planner launch` started the ranks.

The launched plan is that of the engine that the script makes with its file. A script for one engine
may name another file: its first engine then follows the launched plan in that file's place, and so
does what is made with that file later. All other files and plans are their own.

    script names                  launched     follows
    plan.json                     plan.json    plan.json, or what an elastic run has chosen since
    plan.json, first              fast.json    fast.json, with a warning where plan.json is another
    actor.json, then critic.json  actor.json   each its own
    critic.json, then actor.json  actor.json   each its own, where they are plans of two models;
                                               else refused: the first was given actor.json
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from planner.errors import PlanError
from planner.language.plan import Plan, load_plan
from planner.runtime.process.environment import KERNELS, LAUNCHED, PLAN

_stands_for: dict[str, str] = {}
"""By launched file, the file of the script whose place it has."""


class LaunchedPlanWarning(UserWarning):
    """An engine follows the launched plan, and not the one in the file that the script names."""


def followed_plan(given: Plan | str | os.PathLike[str]) -> Plan:
    """Return the plan that an engine made with `given` follows, with the kernels of the launch.

    Raises PlanError where it can't be told which engine the launched plan is for.
    """
    plan, kernels = _followed(given), os.environ.get(KERNELS)
    return plan if kernels is None else plan.model_copy(update={"kernels": kernels})


def _followed(given: Plan | str | os.PathLike[str]) -> Plan:
    launched = os.environ.get(LAUNCHED)
    if launched is None:
        return given if isinstance(given, Plan) else load_plan(given)
    chosen = os.environ.get(PLAN) or launched
    if isinstance(given, Plan):
        is_launched = chosen != launched and given == load_plan(launched)
        return load_plan(chosen) if is_launched else given
    launched, name = os.path.realpath(launched), os.path.realpath(given)
    if name != launched and (own := _readable(name)) is not None:
        first = load_plan(launched)
        if own == first:
            name = launched
        elif (own.model.name, own.model.file) != (first.model.name, first.model.file):
            return own
    stands_for = _stands_for.setdefault(launched, name)
    if name == stands_for:
        if name != launched:
            _warn_of_another(given, launched)
        return load_plan(chosen)
    if name == launched:
        or_launch = f", or launch {stands_for}" if os.path.isfile(stands_for) else ""
        raise PlanError(
            f"planner.apply names {given}, which was launched, and the script's first engine, made "
            f"with {stands_for}, was given it in that file's place; make the engine of {given} "
            f"first{or_launch}"
        )
    return load_plan(given)


def launched_plan() -> Plan:
    """Return the plan that `planner launch` was given. Raises PlanError where it can't be read."""
    return load_plan(os.environ.get(PLAN) or os.environ[LAUNCHED])


def _readable(path: str) -> Plan | None:
    try:
        return load_plan(path)
    except PlanError:  # told where it is followed
        return None


def _warn_of_another(given: str | os.PathLike[str], launched: str) -> None:
    if Path(given).is_file() and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            LaunchedPlanWarning(
                f"this engine follows {launched}, which was launched, and not {given}; a script of "
                "several engines names the launched file for the one that it is for"
            ),
            stacklevel=5,
        )


def where_ranks_come_from() -> str:
    """Return why the running ranks are as many as they are, and what to do for a plan of another
    number, in words.
    """
    launched = os.environ.get(LAUNCHED)
    if launched is None:
        return "start it with: planner launch plan.json script.py"
    if os.environ.get(PLAN, launched) != launched:
        return (
            f"the run goes on with those that are left (`elastic`), for which a plan was "
            f"searched in place of {launched} alone; a script of several plans needs all its ranks"
        )
    return (
        f"those of {launched}, and all engines of a script run on the same ranks; search both "
        "plans with the same `num_devices`"
    )
