"""Fit a device's few rates to measured runs, and say how well they hold for others.

Least squares on the logarithm of predicted over measured time, every run counting alike, with
a loss that grows only linearly beyond a few percent (soft L1), so that rows which are wrong
for reasons of their own pull little; beside a weak pull of each rate towards its usual value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodel.table.kernels import DeviceRates
from costmodel.table.published import estimate_run
from costmodel.table.rows.run_row import RunRow
from profiles import Profile

RANGES = {
    "matmul_efficiency": (0.40, 0.75, 0.98),
    "memory_efficiency": (0.30, 0.80, 1.0),
    "attention_efficiency": (0.20, 0.75, 1.3),
    "portable_attention_efficiency": (0.10, 0.33, 1.0),
    "low_precision_efficiency": (0.40, 1.0, 1.25),
    "misaligned_efficiency": (0.10, 0.50, 1.0),
    "kernel_s": (1e-6, 6e-6, 1e-5),
    "host_op_s": (2.5e-5, 4.5e-5, 8e-5),
    "host_backward_op_s": (8e-6, 2e-5, 6e-5),
    "launch_wait_s": (3e-5, 1.2e-4, 3e-4),
    "skew_s": (1e-6, 3e-5, 5e-4),
    "node_spread": (1e-4, 1e-2, 3e-2),
    "exposed_part": (0.02, 0.50, 1.0),
    "link_efficiency": (0.30, 1.0, 1.2),
    "network_efficiency": (0.30, 0.95, 2.0),
}
"""Rates that runs tell, each with its physical range and, between its ends, a usual value: about
the middle of what the devices with runs of their own told. `matmul_half_k` is told by tables of
single products instead."""

SPREADS_OF_A_RANGE = 4.0
"""Standard deviations of a device's rate that its range is wide, on a logarithmic scale."""

PULL = 0.1
"""Relative error of one run that weighs as much as one standard deviation from the usual value.
So a rate that a device's few rows hardly tell leans on the other devices."""

KINK = 0.03
"""Relative error beyond which the loss grows linearly."""

LEAST_EFFECT = 1e-3
"""A rate whose doubling changes no run by this part is not told by them."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run, the machine it ran on, and how long its step took."""

    run: RunRow
    profile: Profile
    rates: DeviceRates
    step_s: float


def relative_errors(
    runs: Sequence[MeasuredRun], values: Mapping[str, float] | None = None
) -> np.ndarray:
    """Return predicted over measured step times, minus one; `values` replace rates."""
    changed: dict[int, DeviceRates] = {}
    if values:
        # Runs of one machine share their rates.
        new: dict[str, Any] = dict(values)
        changed = {id(r.rates): replace(r.rates, **new) for r in runs}
    return np.array(
        [
            estimate_run(r.run, r.profile, changed.get(id(r.rates), r.rates)).step_s / r.step_s - 1
            for r in runs
        ]
    )


def fit_rates(
    runs: Sequence[MeasuredRun],
    *,
    start: Mapping[str, float] | None = None,
    evaluations: int = 25,
    pull: float = PULL,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return every fitted rate, and the names of those the runs told.

    `start` is where the search begins, else a usual value of each; a rate that no run depends
    on stays there. `evaluations` counts Jacobians; `pull` is PULL, or 0 for runs without error.
    """
    from scipy.optimize import least_squares

    begin = {name: usual for name, (_, usual, _) in RANGES.items()}
    begin |= dict(start or {})
    reference = relative_errors(runs, begin)
    told = [
        name
        for name, value in begin.items()
        if np.abs(relative_errors(runs, {**begin, name: 2 * value}) - reference).max()
        > LEAST_EFFECT
    ]
    low, high = (np.log([RANGES[name][end] for name in told]) for end in (0, 2))
    inside = 1e-3

    def values_of(x: np.ndarray) -> dict[str, float]:
        return begin | dict(zip(told, map(float, np.exp(x)), strict=True))

    usual = np.log([RANGES[name][1] for name in told])
    weights = pull * SPREADS_OF_A_RANGE / (high - low)

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = np.log1p(relative_errors(runs, values_of(x)))
        return np.concatenate([errors, weights * (x - usual)])

    found = least_squares(
        residuals,
        np.clip(np.log([begin[name] for name in told]), low + inside, high - inside),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=KINK,
        diff_step=1e-3,
        max_nfev=evaluations,
    )
    return values_of(found.x), tuple(told)


def held_out_errors(
    runs: Sequence[MeasuredRun],
    parts: Sequence[str],
    *,
    start: Mapping[str, float],
    pull: float = PULL,
) -> np.ndarray:
    """Return each run's relative error under rates fitted to all runs of other parts.

    `parts` names the part each run belongs to: its source, or one of a few folds.
    """
    errors = np.zeros(len(runs))
    for out, seen in _partitions(parts):
        values = start
        if len(seen):
            chosen = [runs[i] for i in seen]
            values, _ = fit_rates(chosen, start=start, evaluations=6, pull=pull)
        errors[out] = relative_errors([runs[i] for i in out], values)
    return errors


def _partitions(parts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    names = np.array(parts)
    for name in sorted(set(parts)):
        yield np.flatnonzero(names == name), np.flatnonzero(names != name)
