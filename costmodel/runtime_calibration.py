"""What logs of another stack's runs say of the rates of its device, and of its next run.

A run is priced as `planner check` prices it. By how much its step grows with the time of each kind
of work (`costmodel.table.kernels.TERMS`) is found by pricing it again with that kind a tenth
slower. All times of a step are sums and maxima of such times, so what they grow by adds up to the
step, but for what a runtime's record states in seconds:

    step = sum over terms of d step / d factor_t, at factor 1, + constants

`profiles.calibration` solves for the factors. What the model is off by before any run is known of
the runtime (`costmodel.uncertainty`): sigma, of published runs of sources left out. It has two
parts, of sources and of the runs of one:

    prior of the kernels' factor    S = sqrt(1 - w^2) sigma      w: `WITHIN_SOURCE`
    drift of each run               W = w sigma
    prior of all other factors      2 S: of small parts of a step less is known

A cluster and a stack are a source, so two or three of its runs leave W of the next, and little of
S. The factors divide and multiply rates (`DeviceRates.slowed`); all prices of the runtime on that
profile have them, bounds of a search too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import log, tanh
from statistics import median
from typing import get_args

from costmodel.cache import CostCache
from costmodel.estimate import step_seconds
from costmodel.execution.executed import rated_profile
from costmodel.execution.execution import Execution, RunKind, residuals_of_runs
from costmodel.table.kernels import HOST, KERNELS, LINKS, NETWORK, TERMS
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import PricedRow
from costmodel.uncertainty import (
    NOTHING_KNOWN,
    WITHIN_SOURCE,
    Interval,
    Z,
    interval_about,
    run_kind,
    sigma_of,
    split_sigma,
)
from planner.language.plan import Plan
from profiles import Profile
from profiles.calibration import DRIFT, calibrate, next_sigma
from profiles.logs import RunLog, Steady
from profiles.records import Calibration, CalibrationRun, Evidence, Observation

MORE = 0.1
"""By which a factor is raised to see what depends on it."""

STEP = "step"
COLLECTIVES, WAITING = "collectives", "waits"
PARTS = (KERNELS, COLLECTIVES, HOST, WAITING)
"""Parts of a step that a trace tells."""

COLLECTIVES_ERROR = 0.3
"""Of collectives in a trace, relative: a rank's are as long as it waits for the last of the
others."""

LEAST_SHARE = 0.002
"""Of a step: shorter parts are not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run of another stack beside its price."""

    name: str
    """What it is called: its folder or log."""
    stack: str
    """Whose log it is."""
    runtime: str
    """The record that it is priced for."""
    steady: Steady
    """Its step, measured."""
    predicted_s: float
    """Its step, priced without any factor."""
    parts_s: Mapping[str, tuple[float, float | None]]
    """By part, seconds predicted, and measured where a trace tells."""
    by_kind_s: Mapping[str, float]
    """Of a trace, seconds of kernels and collectives by kind."""
    predicted_bytes: float
    """Memory of the fullest device without its context: live tensors, or what the allocator holds,
    as was measured."""
    measured_bytes: float | None
    """The same, measured; None where no log tells."""
    memory_is: str
    """``allocated`` or ``reserved``."""
    run: CalibrationRun
    """What the regression takes of it."""


def compared(
    name: str,
    priced: PricedRow,
    log: RunLog,
    steady: Steady,
    *,
    trace: RunLog | None = None,
    prices: RowPrices | None = None,
) -> ComparedRun:
    """Return a run beside its price, which was made without factors; `steady` is what `log` says of
    its step, `trace` a trace of it where there is one.
    """
    prices = prices or RowPrices()
    plan, costs = prices.plan(priced.run, priced.profile, priced.rates)
    predicted_s = priced.predicted["predicted_step_time_s"]
    grown = growth(plan, costs)
    parts = _parts(priced, grown)
    observations = [_observation(STEP, steady.seconds, steady.standard_error, predicted_s, grown)]
    measured_parts: dict[str, float] = {}
    if trace is not None and trace.parts is not None:
        found = trace.parts
        working = found.kernels_s + found.collectives_s + found.waits_s
        measured_parts = {
            KERNELS: found.kernels_s,
            COLLECTIVES: found.collectives_s,
            WAITING: found.waits_s,
            # A profiler slows the host: of a run with a log the rest of its own step.
            HOST: max(0.0, steady.seconds - working),
        }
        observations += _observed_parts(measured_parts, parts, grown, predicted_s)
    fullest = max(priced.estimate.memory, key=lambda each: float(each.total))
    is_live = log.allocated_bytes is not None or log.reserved_bytes is None
    held = float(fullest.tensor_bytes) + (0.0 if is_live else float(fullest.allocator_bytes))
    measured_bytes = log.allocated_bytes if is_live else log.reserved_bytes
    kind = run_kind(costs.graph)
    logs = [log] if trace is None or trace is log else [log, trace]
    kinds: dict[str, float] = {}
    if trace is not None and trace.parts is not None:
        kinds = {**trace.parts.by_kernel_s, **trace.parts.by_collective_s}
    return ComparedRun(
        name=name,
        stack=log.stack,
        runtime=priced.run.stack.name,
        steady=steady,
        predicted_s=predicted_s,
        parts_s={part: (parts[part], measured_parts.get(part)) for part in PARTS},
        by_kind_s=kinds,
        predicted_bytes=held,
        measured_bytes=measured_bytes,
        memory_is="allocated" if is_live else "reserved",
        run=CalibrationRun(
            plan=_digest(plan.model_dump_json()),
            model=costs.graph.name,
            num_steps=steady.used,
            recording=_digest(" ".join(each.digest for each in logs)),
            observations=tuple(observations),
            memory_ratio=None if not measured_bytes else measured_bytes / held,
            drift=drift_of(priced.run.stack.name, kind),
            evidence=tuple(
                Evidence(
                    file=each.path.name,
                    stack=each.stack,
                    digest=each.digest,
                    readings=steady.used if each is log else len(each.readings),
                )
                for each in logs
            ),
        ),
    )


def _observation(
    what: str, measured_s: float, error: float, predicted_s: float, grown: Mapping[str, float]
) -> Observation:
    return Observation(
        what=what,
        measured_s=measured_s,
        standard_error=error,
        predicted_s=predicted_s,
        parts_s={term: part for term, part in grown.items() if part > 1e-6 * predicted_s},
    )


def _observed_parts(
    measured: Mapping[str, float],
    parts: Mapping[str, float],
    grown: Mapping[str, float],
    step_s: float,
) -> list[Observation]:
    """Return what a trace says of kernels and of collectives; the host and waits show in the
    step.
    """
    found = []
    for part, terms, error in (
        (KERNELS, (KERNELS,), 0.0),
        (COLLECTIVES, (LINKS, NETWORK), COLLECTIVES_ERROR),
    ):
        of_terms = {term: grown[term] for term in terms}
        whole = sum(of_terms.values())
        if min(parts[part], measured[part]) > LEAST_SHARE * step_s and whole > 0:
            shares = {term: parts[part] * grown / whole for term, grown in of_terms.items()}
            found.append(_observation(part, measured[part], error, parts[part], shares))
    return found


def growth(plan: Plan, costs: CostCache) -> dict[str, float]:
    """Return by term the seconds by which a plan's step grows when the term's factor grows by 1;
    `costs` are its prices, with the factors that their profile knows.
    """
    profile = rated_profile(costs.profile)
    known = profile.alone.factors_of(costs.execution.name)
    step_s = step_seconds(plan, costs)
    # (The programs of ranks are those of `costs`: no time changes them.)
    slowed = {
        term: step_seconds(plan, costs.on(profile.with_rates({term: 1 + MORE}))) for term in TERMS
    }
    return {term: (slowed[term] - step_s) / MORE / known.get(term, 1.0) for term in TERMS}


def _parts(priced: PricedRow, grown: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step on one device, as a trace of it shows them.

    What other stages are waited for is work of theirs, so it grows with the same factors: a device
    itself works the rest of the step.
    """
    path, step_s = priced.estimate.path, priced.estimate.step_s
    busy = 1.0 - (path.imbalance_s + path.fill_drain_s) / step_s
    found = {
        KERNELS: grown[KERNELS] * busy,
        COLLECTIVES: max(0.0, (grown[LINKS] + grown[NETWORK]) * busy - path.messages_s),
        HOST: grown[HOST] * busy,
    }
    # Where a factor changes which of two times is the longer, both are in what the step grows by.
    share = min(1.0, step_s / sum(found.values()))
    found = {part: share * seconds for part, seconds in found.items()}
    return {**found, WAITING: max(0.0, step_s - sum(found.values()))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def priors_of(
    runtime: str, runs: Sequence[CalibrationRun] = (), *, leave_out: Collection[str] = ()
) -> dict[str, float]:
    """Return one sigma of each factor before the regression on runs; `leave_out` are sources not
    counted.

    Where the runs are farther off than sources are, these tell nothing of them: priors are as wide
    as the median run is off.
    """
    kinds: tuple[RunKind, ...] = get_args(RunKind)
    told = [residuals_of_runs(runtime, kind, leave_out=leave_out) for kind in kinds]
    _, between = split_sigma(max(map(sigma_of, filter(None, told)), default=NOTHING_KNOWN))
    off = [
        abs(log(found.measured_s / found.predicted_s))
        for run in runs
        for found in run.observations
        if found.what == STEP
    ]
    between = max(between, median(off)) if off else between
    return {term: between if term == KERNELS else OTHERS * between for term in TERMS}


OTHERS = 2.0
"""Times as far as the kernels' factor that others may be off: of a usual step, of which they are a
quarter, the sum then is off by about as much as sources are."""


def drift_of(runtime: str, kind: RunKind, *, leave_out: Collection[str] = ()) -> float:
    """Return one sigma of what a run is off by when all factors are right, relative."""
    within, _ = split_sigma(sigma_of(residuals_of_runs(runtime, kind, leave_out=leave_out)))
    return within


def with_runs(profile: Profile, runs: Mapping[str, Sequence[CalibrationRun]]) -> Profile:
    """Return a profile that has learned from runs, by runtime, beside those that it knew; a
    recording that is read again counts once.
    """
    known = dict(profile.file.runtime_calibrations)
    for runtime, more in runs.items():
        before = known[runtime].runs if runtime in known else ()
        every = tuple({run.recording: run for run in (*before, *more)}.values())
        known[runtime] = calibrate(every, priors_of(runtime, every))
    file = profile.file.model_copy(update={"runtime_calibrations": known})
    return Profile(file, profile.ops, profile.collectives)


def without_runs(profile: Profile) -> Profile:
    """Return a profile without what logs taught it."""
    file = profile.file.model_copy(update={"runtime_calibrations": {}})
    return Profile(file, profile.ops, profile.collectives)


def next_run(runtime: str, known: Calibration) -> tuple[float, float]:
    """Return half of the interval of a next run like those known, relative, without and with what
    they tell.
    """
    steps = [found for run in known.runs for found in run.observations if found.what == STEP]
    shares = {
        term: sum(found.parts_s.get(term, 0.0) / found.predicted_s for found in steps) / len(steps)
        for term in TERMS
    }
    drift = max(run.drift or DRIFT for run in known.runs)
    before = drift / WITHIN_SOURCE
    after = next_sigma(known.runs, shares, drift=drift, priors=priors_of(runtime, known.runs))
    return tanh(Z * before), tanh(Z * after)


def told_runs(known: Calibration) -> str:
    """Return how many runs of which stacks are known: ``3 runs of Megatron-LM``."""
    stacks = dict.fromkeys(
        each.stack
        for run in known.runs
        for each in run.evidence[:1]  # (the log, then its trace)
    )
    number = len(known.runs)
    return f"{number} run{'s' * (number > 1)} of {' and '.join(stacks)}"


def row_interval_of(priced: PricedRow, prices: RowPrices) -> Interval | None:
    """Return where the step of a row lies by what is known of its runtime's runs; None where no log
    of them was read.
    """
    plan, costs = prices.plan(priced.run, priced.profile, priced.rates)
    return calibrated_interval(plan, costs, priced.predicted["predicted_step_time_s"])


def calibrated_interval(plan: Plan, costs: CostCache, step_s: float) -> Interval | None:
    """Return where a plan's step lies by what is known of its runtime's runs; None where no log of
    them was read. `costs` are its prices, of one group of devices.
    """
    runtime: Execution = costs.execution
    if runtime.prices != "rates" or costs.groups:
        return None
    known = rated_profile(costs.profile).alone.calibration_of(runtime.name)
    if known is None:
        return None
    sigma = next_sigma(
        known.runs,
        {term: seconds / step_s for term, seconds in growth(plan, costs).items()},
        drift=drift_of(runtime.name, run_kind(costs.graph)),
        priors=priors_of(runtime.name, known.runs),
    )
    return interval_about(step_s, sigma, f"{told_runs(known)} that it was calibrated by")
