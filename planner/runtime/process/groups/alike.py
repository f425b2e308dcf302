"""What must be equal on all nodes of a run: told by each, compared, named with all its values."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Iterable, Sequence
from importlib import metadata

from planner.language.plan import Plan

Told = tuple[str, Sequence[tuple[str, str]]]
"""A node's name, and (what, value) of what must be equal."""


def told_of_run(plan: Plan) -> Told:
    """Return what this rank's node tells at the start of a run: releases, and the plan.

    What a search predicted of the plan is no part of it.
    """
    import torch

    text = plan.model_dump_json(exclude={"estimate"})
    return socket.gethostname(), (
        ("planner", release()),
        ("torch", torch.__version__),
        ("Python", ".".join(platform.python_version_tuple()[:2])),
        ("the plan", hashlib.sha256(text.encode()).hexdigest()[:16]),
    )


def release() -> str:
    """Return this package's release."""
    try:
        return metadata.version("planner")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "not installed"


def differences(nodes: Iterable[Told]) -> list[str]:
    """Return a line for each thing in which nodes differ, with its values and their nodes."""
    values: dict[str, dict[str, list[str]]] = {}
    for node, told in nodes:
        for what, value in told:
            values.setdefault(what, {}).setdefault(value, []).append(node)
    lines = []
    for what, by_value in values.items():
        if len(by_value) > 1:
            told_values = (f"{value} on {names(hosts)}" for value, hosts in by_value.items())
            lines.append(f"{what} is not the same on all nodes: {'; '.join(told_values)}")
    return lines


def names(nodes: Iterable[str], most: int = 8) -> str:
    """Return the names of nodes, each once, the first few of many."""
    found = list(dict.fromkeys(nodes))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
