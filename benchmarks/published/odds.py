"""Whether odds of fitting come true: of runs whose end is known, how many ran of those that were
said to fit with some odds.

nanotron's runs of the Ultra-Scale Playbook ran or crashed, not always for memory. Two things tell
the others apart:

- A crash of a layout that ran in another row was not for memory, which is the same each time.
- Of runs that need less than `FAR_FROM_FULL` of their device a part crashes, as large at a tenth of
  it as at four tenths, and of one model seven times as large as of the other. As many of those that
  fit are taken to crash near a full device.

So of runs said to fit with odds q, (1 - b) q should run: b the part of the model's runs far from
full that crashed. The fit takes the same:

    P(ran) = (1 - b) N((log(room / live) - m) / s)        m, s of each model, maximum likelihood

    reserved_factor   exp(m) of all runs together
    reserved_sigma    of hypot(rms of s, spread of m), the value that leaves a tenth beyond 1.28
                      of it where tails are as heavy as Student's t with 3 degrees of freedom has
                      them: the next model is another one
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import norm

from benchmarks.published.accuracy import FAR_FROM_FULL, STALLING, Case, load_cases
from costmodel.table.rows.row_plan import RowPrices
from costmodel.uncertainty import TENTH, Z, odds_of_fit
from planner.errors import PlannerError

PARTS = (
    *((0.5, 1.01), (0.8, 1.01), (0.9, 1.01), (0.95, 1.01)),
    *((0.0, 0.5), (0.5, 0.7), (0.7, 0.85), (0.85, 0.95), (0.95, 0.99), (0.99, 1.01)),
)
"""Ranges of odds that are told: those of so much and more, then parts."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run whose end is known."""

    layout: tuple
    """What its memory depends on."""
    layers: int
    """Of its model, which tells it from others."""
    ran: bool
    """Whether it ran; else it crashed, for memory or for something else."""
    is_far: bool
    """Whether it needs less than `FAR_FROM_FULL` of its device."""
    room: float
    """Of the device beside the context, over live tensors."""
    odds: float
    """Odds of fitting, as they are told."""


def ended_runs(folder: Path, every: int = 1) -> list[EndedRun]:
    """Return the runs whose end is known, without crashes of layouts that ran; of one row of so
    many.
    """
    prices, found = RowPrices(), []
    for case in load_cases(folder / f"{STALLING}.csv", every=every)[0]:
        try:
            memory = prices.estimate(case.run, case.profile, case.rates).memory
        except PlannerError:
            continue
        fullest = max(memory, key=lambda parts: float(parts.total))
        room = (case.room_bytes - float(fullest.context_bytes)) / float(fullest.tensor_bytes)
        found.append(
            EndedRun(
                layout=_layout(case),
                layers=case.run.sizes.layers,
                ran=case.ran,
                is_far=float(fullest.total) < FAR_FROM_FULL * case.room_bytes,
                room=room,
                odds=odds_of_fit(fullest, case.profile, case.run.stack, case.room_bytes),
            )
        )
    that_ran = {run.layout for run in found if run.ran}
    return [run for run in found if run.ran or run.layout not in that_ran]


def _layout(case: Case) -> tuple:
    run = case.run
    return (run.sizes, run.dp, run.tp, run.pp, run.micro_batch, run.global_batch, run.zero_stage)


def other_crashes(runs: Iterable[EndedRun]) -> dict[int, float]:
    """Return, by layers of the model, the part of runs that fit which crash for something else."""
    far: dict[int, list[bool]] = defaultdict(list)
    for run in runs:
        if run.is_far:
            far[run.layers].append(not run.ran)
    return {layers: float(np.mean(crashed)) for layers, crashed in far.items()}


def reliability(runs: Sequence[EndedRun]) -> list[dict[str, float]]:
    """Return a line for each range of odds: the mean of the odds, what part ran, and what part
    fitted, other crashes apart. Crashed runs far from full crashed for something else.
    """
    other = other_crashes(runs)
    near = [run for run in runs if run.ran or not run.is_far]
    odds, ran = np.array([run.odds for run in near]), np.array([run.ran for run in near])
    fits = ran / np.array([1 - other.get(run.layers, 0.0) for run in near])
    lines = []
    for low, high in PARTS:
        inside = (low <= odds) & (odds < high)
        if inside.any():
            lines.append(
                {"odds_from": low, "odds_to": high, "runs": int(inside.sum()),
                 "odds_pct": 100 * float(odds[inside].mean()),
                 "ran_pct": 100 * float(ran[inside].mean()),
                 "fit_pct": 100 * min(1.0, float(fits[inside].mean()))}
            )  # fmt: skip
    return lines


def needed_over_live(runs: Sequence[EndedRun]) -> tuple[float, float]:
    """Return what runs need of a device beside the context over their live tensors, and one sigma
    of that of another model (`reserved_factor`, `reserved_sigma`).
    """
    other = other_crashes(runs)
    x, ran = np.array([log(run.room) for run in runs]), np.array([run.ran for run in runs])
    left = np.array([1 - other.get(run.layers, 0.0) for run in runs])
    models = np.array([run.layers for run in runs])
    fitted = [_threshold(x[of], ran[of], left[of]) for of in (models == m for m in set(models))]
    middle, _ = _threshold(x, ran, left)
    medians, within = zip(*fitted, strict=True)
    between = float(np.std(medians, ddof=1)) if len(medians) > 1 else 0.0
    # What k models tell of the next is 1 + 1/k times as uncertain, in squares (`sigma_of`).
    next_model = between**2 * (1 + 1 / len(medians))
    deviation = sqrt(float(np.mean(np.square(within))) + next_model)
    # The standard deviation of Student's t with 3 degrees of freedom is sqrt(3).
    return exp(middle), deviation / sqrt(3) * TENTH / Z


def _threshold(x: Floats, ran: NDArray[np.bool_], left: Floats) -> tuple[float, float]:
    """Return middle and deviation of log(needed / live), where runs ran or crashed."""

    def loss(middle_and_log: Floats) -> float:
        middle, deviation = middle_and_log[0], exp(middle_and_log[1])
        part = np.clip(left * norm.cdf((x - middle) / deviation), 1e-9, 1 - 1e-9)
        return -float(np.log(np.where(ran, part, 1 - part)).sum())

    found = minimize(loss, [0.2, -2.3], method="Nelder-Mead")
    return float(found.x[0]), exp(float(found.x[1]))
