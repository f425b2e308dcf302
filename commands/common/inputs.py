"""What commands read before they work: graphs, profiles, durations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlannerError, ProfileError
from planner.units import DAY_S, HOUR_S

if TYPE_CHECKING:
    from planner.language.graph import ModelGraph
    from planner.language.plan import Plan, Precision
    from profiles import Profile


def graph_of(model: Path, precision: Precision = "model", length: int | None = None) -> ModelGraph:
    """Return the graph of a model file, captured now or kept; on batches of a length, if given."""
    from planner.capture.source.capture_cache import load_graph

    return load_graph(model, precision=precision, length=length)


def parse_precision(text: str, *beside: str) -> Precision:
    """Return the precision of that name; a refusal names the words that are taken `beside`."""
    from planner.language.plan import precision_named  # loads pydantic

    return precision_named(text, *beside)


def graph_of_plan(plan: Plan, model: Path) -> ModelGraph:
    """Return the graph of a model file; raise unless the plan was made for that model."""
    from planner.language.lowering.match_model import validate_model

    graph = graph_of(model, plan.precision)
    validate_model(plan, graph)
    return graph


def profile_named(name: str | None, cluster: Path | None = None) -> tuple[Profile, str]:
    """Load the named profile or cluster file, or choose a profile; with a line for the user if that
    is not this machine's.

    The line is for after the work: a refused command prints its refusal alone.
    """
    import profiles

    if cluster is not None:
        if name is not None:
            raise PlannerError(
                f"--cluster {cluster} and --profile {name} were given; a cluster file names the "
                "profile of each of its groups: drop one of them"
            )
        return profiles.load_cluster(cluster), ""
    if name is not None:
        return profiles.load_profile(name), ""
    return profiles.default_profile(None)


def machine_options(name: str | None, cluster: Path | None) -> str:
    """Return the options that name a machine which a plan's file alone does not lead to."""
    if cluster is not None:
        return f" --cluster {cluster}"
    return f" --profile {name}" if name is not None and Path(name).is_dir() else ""


def profile_of_plan(plan: Plan) -> tuple[Profile, str]:
    """Return the profile that a plan was searched for, else this machine's, and a line on it."""
    import profiles

    try:
        return profiles.load_profile(plan.cluster.name), ""
    except ProfileError:
        if any(plan.device_groups):  # which a cluster file describes
            raise
        machine, note = profiles.default_profile(None)
        if machine.name == plan.cluster.name:
            return machine, note
        return machine, (
            f"the plan was searched for {plan.cluster.name!r}, of which there is no profile here; "
            f"using {machine.name}"
        )


def parse_price(text: str | None) -> float:
    """Parse money per device and hour: 2.5 or 2.5/gpu-hour; 0 where none is given."""
    if text is None:
        return 0.0
    try:
        price = float(text.removesuffix("/gpu-hour").removesuffix("/device-hour"))
    except ValueError:
        price = -1.0
    if not 0 <= price < math.inf:
        raise PlannerError(
            f"--price {text} is not understood; it is money per device and hour, such as 2.5"
        )
    return price


def parse_seconds(text: str | None, what: str = "duration") -> float | None:
    """Parse a duration: seconds, or a number followed by s, m, h or d; `what` names its option."""
    if text is None:
        return None
    factors = {"s": 1.0, "m": 60.0, "h": HOUR_S, "d": DAY_S}
    number, unit = (text[:-1], text[-1]) if text[-1:] in factors else (text, "s")
    try:
        value = float(number) * factors[unit]
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise PlannerError(f"{what} {text} is not a time; write it like 90s, 5m, 1h or 30d")
    return value
