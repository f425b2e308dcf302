"""All checks of this node, one after the other; a check that breaks is a problem itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.nodes.check import Check, judged

Checking = Callable[[], Iterable[Check]]


def diagnose(
    progress: Callable[[float, str], None] | None = None, checks: dict[str, Checking] | None = None
) -> list[Check]:
    """Return what every check found, in the order in which one depends on another.

    `checks` are those of this folder where none are given, by names that `progress` is told.
    """
    checks = _all_checks() if checks is None else checks
    found: list[Check] = []
    for done, (name, check) in enumerate(checks.items()):
        if progress:
            progress(done / len(checks), name)
        try:
            found += check()
        except Exception as error:  # a broken library is what a doctor is for
            brief = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            advice = "this check itself failed: mend what its message names, then run again"
            found.append(judged(name, brief, problem=advice))
    return found


def _all_checks() -> dict[str, Checking]:
    from planner.doctor import devices, machine, network, pair, software

    return {
        "software": software.check_software,
        "machine": machine.check_machine,
        "devices": devices.check_devices,
        "network": network.check_network,
        "two ranks": pair.check_pair,
    }
