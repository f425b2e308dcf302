"""Fit a device's few rates to measured runs, and say how well they hold for others.

Least squares on the logarithm of predicted over measured time, every run counting alike, with
a loss that grows only linearly beyond a few percent (soft L1), so that rows which are wrong
for reasons of their own pull little; beside a weak pull of each rate towards its usual value.

    minimise over x   sum of soft_l1(r(x)) + soft_l1(w (x - u))         (Gauss-Newton, damped)

    x: logarithms of the rates    u: their usual values    w: weights of the pull
    r: log of predicted over measured step, linear around the latest x: r(x + d) = r(x) + J d

A row is lowered to programs once; each set of rates prices these programs again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.cache import CostCache
from costmodel.estimate import step_seconds
from costmodel.execution.executed import ExecutedProfile, rated_profile
from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.row_plan import RowPrices
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

DIFFERENCE = 5e-3
"""Change of a rate's logarithm by which its effect on steps is measured."""

LONGEST_STEP = 0.5
"""Most that a rate's logarithm changes at once: the linear model is of the neighbourhood."""

LEAST_GAIN = 2e-3
"""Part by which the loss must shrink for another step."""


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run, the machine it ran on, and how long its step took."""

    run: RunRow
    profile: Profile
    rates: DeviceRates
    step_s: float


class PricedRuns:
    """Measured runs, each as a plan and programs that are priced again for other rates.

    Raises PlannerError for a run that makes no plan.
    """

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        prices = RowPrices(kept_models=len(runs))
        self.runs = tuple(runs)
        self._plans = [prices.plan(run.run, run.profile, run.rates) for run in runs]

    def relative_errors(
        self, values: Mapping[str, float] | None = None, *, chosen: Iterable[int] | None = None
    ) -> Floats:
        """Return predicted over measured step times, minus one; `values` replace rates.

        Of all runs, or of those at the positions `chosen`.
        """
        changed: dict[int, CostCache] = {}
        errors = []
        for index in range(len(self.runs)) if chosen is None else chosen:
            plan, costs = self._plans[index]
            if values:
                if id(costs) not in changed:
                    changed[id(costs)] = _with_rates(costs, values)
                costs = changed[id(costs)]
            errors.append(step_seconds(plan, costs) / self.runs[index].step_s - 1)
        return np.array(errors)


def _with_rates(costs: CostCache, values: Mapping[str, float]) -> CostCache:
    profile = rated_profile(costs.profile)
    new: dict[str, Any] = dict(values)
    return costs.on(
        ExecutedProfile(
            profile.alone,
            replace(profile.rates, **new),
            num_nodes=profile.num_nodes,
            execution=profile.execution,
            product_dtype=profile.product_dtype,
        )
    )


def fit_rates(
    runs: PricedRuns,
    *,
    start: Mapping[str, float] | None = None,
    free: Collection[str] = tuple(RANGES),
    rounds: int = 10,
    pull: float = PULL,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return every fitted rate, and the names of those the runs told.

    `start` is where the search begins, else a usual value of each; a rate that no run depends on,
    or that is not in `free`, stays there. `rounds` counts Jacobians; `pull` is PULL, or 0 for runs
    without error.
    """
    begin = {name: usual for name, (_, usual, _) in RANGES.items()} | dict(start or {})
    may_change = [index for index, name in enumerate(RANGES) if name in free]
    x = np.clip(np.log([begin[name] for name in RANGES]), _LOW, _HIGH)
    errors = _log_errors(runs, x)
    slopes = _slopes(runs, x, errors, may_change)
    told = np.flatnonzero(np.abs(slopes).max(axis=0) * np.log(2) > LEAST_EFFECT)
    for turn in range(rounds):
        if turn:
            slopes = _slopes(runs, x, errors, told)
        before = _loss(errors, x, told, pull)
        step = _best_step(errors, slopes, x, told, pull)
        for part in (1.0, 0.5, 0.25):
            tried = np.clip(x + part * step, _LOW, _HIGH)
            found = _log_errors(runs, tried)
            after = _loss(found, tried, told, pull)
            if after < before:
                x, errors = tried, found
                break
        if after > before * (1 - LEAST_GAIN):
            break
    fitted = dict(zip(RANGES, map(float, np.exp(x)), strict=True))
    names = tuple(name for index, name in enumerate(RANGES) if index in told)
    return begin | {name: fitted[name] for name in names}, names


_LOW, _USUAL, _HIGH = (np.log([ends[i] for ends in RANGES.values()]) for i in range(3))
_PULLS = SPREADS_OF_A_RANGE / (_HIGH - _LOW)


def _log_errors(runs: PricedRuns, x: Floats) -> Floats:
    values = dict(zip(RANGES, map(float, np.exp(x)), strict=True))
    return np.log1p(runs.relative_errors(values))


def _slopes(runs: PricedRuns, x: Floats, errors: Floats, of: Iterable[int]) -> Floats:
    """Return the change of each run's error (a row) with each rate (columns), logarithms of both;
    0 for rates that are not in `of`.
    """
    slopes = np.zeros((len(errors), len(x)))
    for index in of:
        moved = x.copy()
        moved[index] += DIFFERENCE
        slopes[:, index] = (_log_errors(runs, moved) - errors) / DIFFERENCE
    return slopes


def _residuals(errors: Floats, x: Floats, told: NDArray[np.int64], pull: float) -> Floats:
    return np.concatenate([errors, pull * (_PULLS * (x - _USUAL))[told]])


def _loss(errors: Floats, x: Floats, told: NDArray[np.int64], pull: float) -> float:
    scaled = _residuals(errors, x, told, pull) / KINK
    return float((np.sqrt(1 + scaled**2) - 1).sum())


def _best_step(
    errors: Floats, slopes: Floats, x: Floats, told: NDArray[np.int64], pull: float
) -> Floats:
    """Return the change of the rates that is best where errors are linear in it."""
    from scipy.optimize import least_squares

    def residuals(step: Floats) -> Floats:
        whole = np.zeros(len(x))
        whole[told] = step
        return _residuals(errors + slopes @ whole, x + whole, told, pull)

    # A rate at an end of its range has an interval all the same.
    low = np.minimum(np.maximum(_LOW - x, -LONGEST_STEP), -1e-9)[told]
    high = np.maximum(np.minimum(_HIGH - x, LONGEST_STEP), 1e-9)[told]
    found = least_squares(
        residuals, np.zeros(len(told)), bounds=(low, high), loss="soft_l1", f_scale=KINK
    )
    step = np.zeros(len(x))
    step[told] = found.x
    return step


def held_out_errors(
    runs: PricedRuns,
    parts: Sequence[str],
    *,
    start: Mapping[str, float],
    pull: float = PULL,
) -> Floats:
    """Return each run's relative error under rates fitted to all runs of other parts.

    `parts` names the part each run belongs to: its source, or one of a few folds. `start` are rates
    fitted to all runs, around which errors are taken to be linear in the fits; a rate that other
    parts do not tell has its usual value.
    """
    x = np.clip(np.log([start[name] for name in RANGES]), _LOW, _HIGH)
    all_errors = _log_errors(runs, x)
    slopes = _slopes(runs, x, all_errors, range(len(RANGES)))
    errors = np.zeros(len(runs.runs))
    for out, seen in _partitions(parts):
        effects = np.abs(slopes[seen]).max(axis=0, initial=0.0)
        told = np.flatnonzero(effects * np.log(2) > LEAST_EFFECT)
        fitted = _USUAL.copy()
        if len(told):
            step = _best_step(all_errors[seen], slopes[seen], x, told, pull)
            fitted[told] = np.clip(x + step, _LOW, _HIGH)[told]
        values = dict(zip(RANGES, map(float, np.exp(fitted)), strict=True))
        errors[out] = runs.relative_errors(values, chosen=out)
    return errors


def _partitions(parts: Sequence[str]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    names = np.array(parts)
    for name in sorted(set(parts)):
        yield np.flatnonzero(names == name), np.flatnonzero(names != name)
