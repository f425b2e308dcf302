"""Calibration: factors on a profile's answers, learned from runs that were recorded.

A run shows what jobs, the exchange of gradients, the optimizer and whole steps took. Each is a sum
of what the profile answers, so a factor for each kind of work, a *term*, is found by regression:

    m_i = q_i (1 + u_r + e_i)    q_i = p_i + sum over t of c_it (f_t - 1)
    f_t ~ N(1, PRIOR^2)    u_r ~ N(0, DRIFT^2)    e_i ~ N(0, MODEL_ERROR^2 + s_i^2)

    i: an observation, of run r    m_i, p_i, q_i: seconds measured, predicted with all factors 1,
    and predicted with the factors
    t: a term    c_it: seconds by which p_i grows when f_t grows by 1    s_i: standard error of m_i
    f_t: its factor    u_r: by how much the machine was slower during run r than it usually is

The answer is the most probable one. A term of which a run says little stays near 1: few or
disturbed observations weigh little beside the prior. Two terms that only appear together share a
correction. An observation far from the others counts by its distance and not its square (Huber), so
what was disturbed for a while is hardly learned from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from profiles.records import (
    Calibration,
    CalibrationRun,
    CollectiveKind,
    Direction,
    Factor,
    Group,
    PaceKind,
    StepWork,
)

PRIOR = 0.5
"""Standard deviation of a factor before any run: how far a profile may be off in a kind of work."""

DRIFT = 0.05
"""The same of the machine's speed from run to run (`profiles.measure.visits` measured it)."""

MODEL_ERROR = 0.05
"""What is left of a job's error when all factors are right: the model's own simplifications."""

_HUBER = 1.5
"""Standard deviations beyond which an observation counts by its distance."""

_ROUNDS = 30
_LEAST, _MOST = 0.2, 5.0
"""Factors are held between these: beyond, it is not the profile of the machine that ran."""

WAIT = "wait"
LAUNCH = "launch"


def op_term(kind: PaceKind, direction: Direction) -> str:
    """Return the term of an op: how heavy it is, and which way it runs."""
    return f"{kind} {direction}"


def collective_term(kind: CollectiveKind | str, group: Group) -> str:
    """Return the term of a collective on a shape of group."""
    return f"{kind} {group}"


def step_term(work: StepWork) -> str:
    """Return the term of work beside the blocks."""
    return work


class Factors:
    """The factors of a profile. Mutable: remembers which terms were used."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)
        self.asked: set[str] = set()

    @classmethod
    def of(cls, calibration: Calibration | None) -> Factors:
        """Return those of a calibration; none is 1 for all."""
        found = {} if calibration is None else calibration.factors
        return cls({term: factor.value for term, factor in found.items()})

    def __getitem__(self, term: str) -> float:
        self.asked.add(term)
        return self._values.get(term, 1.0)


def add_run(
    known: Calibration | None, run: CalibrationRun, priors: Mapping[str, float] | None = None
) -> Calibration:
    """Return the calibration of all known runs and one more, which replaces itself."""
    before = () if known is None else known.runs
    return calibrate((*(each for each in before if each.recording != run.recording), run), priors)


def calibrate(
    runs: Sequence[CalibrationRun], priors: Mapping[str, float] | None = None
) -> Calibration:
    """Return the most probable factors of runs; see the module for what is solved. `priors` are
    standard deviations of factors before any run, where they are not `PRIOR`.
    """
    found = _solve(runs, priors or {})
    sigmas = np.sqrt(np.diag(found.covariance))
    return Calibration(
        factors={
            term: Factor(value=float(value), sigma=float(sigma))
            for term, value, sigma in zip(found.terms, found.values, sigmas, strict=True)
        },
        error_before=_median_error(found.predicted, found.measured),
        error_after=_median_error(found.fitted, found.measured),
        runs=tuple(runs),
    )


def next_sigma(
    runs: Sequence[CalibrationRun],
    shares: Mapping[str, float],
    *,
    drift: float,
    priors: Mapping[str, float],
) -> float:
    """Return one sigma, relative, of a step that is predicted with the factors of runs.

    sigma^2 = s' C s + sum over terms no run tells of (s_t prior_t)^2 + b d^2

    s: by how much of the step it grows with each factor    C: covariance of the factors
    d: what such a run is off by beside them (`drift`)
    b: by how much more than expected the runs themselves were, of `_SEEN` runs' weight before
    """
    found = _solve(runs, priors)
    of_terms = np.array([shares.get(term, 0.0) for term in found.terms])
    told = float(of_terms @ found.covariance @ of_terms)
    untold = sum(
        (share * priors.get(term, PRIOR)) ** 2
        for term, share in shares.items()
        if term not in found.terms
    )
    return float(np.sqrt(found.scatter * (told + drift**2) + untold))


_SEEN = 4.0
"""Runs that what is expected of the scatter between runs is worth: with two or three at hand it
counts more than they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """The most probable factors of some runs."""

    terms: tuple[str, ...]
    """What they are of."""
    values: np.ndarray
    """The factors."""
    covariance: np.ndarray
    """Of the factors."""
    predicted: np.ndarray
    """Seconds of each observation with all factors 1."""
    fitted: np.ndarray
    """The same with the factors."""
    measured: np.ndarray
    """What it took."""
    scatter: float
    """Variance of runs about what is predicted of them, over what is expected of it."""


def _solve(runs: Sequence[CalibrationRun], priors: Mapping[str, float]) -> _Solved:
    rows = [(at, found) for at, run in enumerate(runs) for found in run.observations]
    terms = sorted({term for _, found in rows for term in found.parts_s})
    predicted = np.array([found.predicted_s for _, found in rows])
    measured = np.array([found.measured_s for _, found in rows])
    parts = np.array([[found.parts_s.get(term, 0.0) for term in terms] for _, found in rows])
    of_run = np.array([[float(at == run) for run in range(len(runs))] for at, _ in rows])
    errors = np.array([np.hypot(MODEL_ERROR, found.standard_error) for _, found in rows])
    # Unknowns (terms, runs): f_t - 1 of each term, u_r of each run; observations are rows.
    drifts = [DRIFT if run.drift is None else run.drift for run in runs]
    spreads = np.array([priors.get(term, PRIOR) for term in terms] + drifts)
    fitted, weights = predicted, np.ones(len(rows))
    for _ in range(_ROUNDS):
        # Errors are parts of what is predicted, so each round divides by the last one's prediction.
        shares = np.hstack([parts / fitted[:, None], of_run])
        misses = (measured - predicted) / fitted
        weighed = shares * (weights / errors**2)[:, None]
        # The normal equations of a Gaussian prior: information of the data plus that of the prior.
        precision = weighed.T @ shares + np.diag(spreads**-2)
        solved = np.linalg.solve(precision, weighed.T @ misses)
        off = np.abs(misses - shares @ solved) / errors
        # Huber's weights: a square up to 1.5 deviations, a distance beyond.
        weights = np.minimum(1.0, _HUBER / np.maximum(off, _HUBER))
        values = np.clip(1.0 + solved[: len(terms)], _LEAST, _MOST)
        fitted = predicted + parts @ (values - 1.0)
    # The posterior's covariance is the inverse of its precision.
    covariance = np.linalg.inv(precision)[: len(terms), : len(terms)]
    expected = np.array(
        [np.hypot(drifts[at], error) for (at, _), error in zip(rows, errors, strict=True)]
    )
    beyond = float((((measured - fitted) / fitted / expected) ** 2).sum())
    # What the factors were fitted to lies nearer: by as much as the data tell of them.
    of_terms = parts / fitted[:, None] / expected[:, None]
    fitted_away = float(np.trace(covariance @ of_terms.T @ of_terms))
    return _Solved(
        terms=tuple(terms),
        values=values,
        covariance=covariance,
        predicted=predicted,
        fitted=fitted,
        measured=measured,
        scatter=(_SEEN + beyond) / (_SEEN + max(0.0, len(rows) - fitted_away)),
    )


def _median_error(seconds: np.ndarray, measured: np.ndarray) -> float:
    return median(
        abs(s / m - 1.0) for s, m in zip(seconds.tolist(), measured.tolist(), strict=True)
    )
