"""Is a profile directory whole, and do its numbers hang together?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from planner.errors import ProfileError
from profiles.catalog import load_profile
from profiles.lookup.op_model import record_key
from profiles.profile import Profile

LARGE_SPREAD = 0.5
"""Relative standard error above which a record is noise rather than a number."""

POOR_FIT = 0.5


def check_profile(directory: str | Path) -> list[str]:
    """Return what is wrong with a profile, a line each; empty when nothing is."""
    try:
        profile = load_profile(directory)
    except ProfileError as error:
        return [str(error)]
    return [*_missing(profile), *_doubtful(profile)]


def _missing(profile: Profile) -> list[str]:
    problems = []
    if not profile.file.complete:
        problems.append("the budget ended before every probe: run the same command again")
    problems += [f"no number for {s.probe}: {s.reason}" for s in profile.file.skipped]
    keys = Counter((record_key(r), r.arguments, r.device) for r in profile.ops)
    problems += [f"ops.csv has {n} records of {key[0]}" for key, n in keys.items() if n > 1]
    if profile.source == "measured":
        torch_versions = {r.torch for r in profile.ops} | {r.torch for r in profile.collectives}
        if len(torch_versions) > 1:
            problems.append(
                f"records of several torch versions: {', '.join(sorted(torch_versions))}"
            )
    return problems


def _doubtful(profile: Profile) -> list[str]:
    noisy = [r for r in (*profile.ops, *profile.collectives) if r.standard_error > LARGE_SPREAD]
    problems = []
    if noisy:
        problems.append(
            f"{len(noisy)} records vary by more than {LARGE_SPREAD:.0%}: was the machine busy? "
            "delete their lines and run again on an idle one"
        )
    problems += [
        f"{fit.kind} on {fit.group} does not follow its fit: median residual "
        f"{fit.relative_error:.0%} over {fit.num_samples} records"
        for fit in profile.file.collective_fits
        if fit.relative_error > POOR_FIT
    ]
    return problems
