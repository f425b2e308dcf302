"""How far an estimate may be off: an interval that the step lies in four times out of five.

    step_s * exp(-w) .. step_s * exp(w)      w = Z * max(r, q)

    Z: 1.28, the quantile of a normal distribution that leaves a tenth on each side
    r: one sigma of the steps that the profile's kind was held against, relative
    q: by how much the step grows when every answer of the profile takes one sigma of its own
       longer: an answer that extrapolates has a large one, so the interval grows with it

r has the common errors of answers in it, so the larger of both counts and not their sum. It is

    shipped      the runs that its rates were fitted to: 1.25 times the root of the mean square of
                 their mean absolute errors by source (1.25: sigma over mean, normal)
    measured     plans run on the machine that was profiled (`benchmarks/machine/predict_cpu.py`)
    runtime      of an estimate for another runtime: the published runs that were priced for it, of
                 models of its kind (dense, experts, adapters); `residuals` of its record
    calibrated   what the fit leaves of k recorded runs, with the machine's drift between them:
                 hypot(1.48 e, DRIFT) * sqrt(1 + 1/k), e: their median absolute error

Memory has an interval of as many cases. Of the fullest rank, with t bytes of live tensors,

    t * (1 + a) * (1 - hypot(1 - exp(-Z s), a - l)) + c  ..  the same with + and h - a

    s        one sigma of t: what dry runs, or published runs of the runtime, leave of it
    a, l, h  what the allocator holds beyond live tensors, as a fraction of them: the profile's
             figure, and where it lies from run to run
    c        the context, which a profile measures or assumes

Of a runtime whose logs were read for the profile (`costmodel.runtime_calibration`) both are those
of its next run; t is multiplied by what its runs typically held over their estimates.

The two widths are independent, so their squares add up. The odds of other limits follow with
another quantile in the place of Z, by which the allocator's share grows as well. Errors of memory
have heavy tails, as few sources tell them and models differ: quantiles are those of Student's t
with 3 degrees of freedom, so scaled that a tenth lies beyond Z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import atan, exp, hypot, inf, log, pi, sqrt
from typing import Literal

from costmodel.cache import CostCache, costs_of_groups
from costmodel.estimate import step_seconds
from costmodel.execution.executed import in_training
from costmodel.execution.execution import (
    Execution,
    RunKind,
    find_execution,
    memory_residuals,
    residuals_of_runs,
)
from costmodel.memory.parts import MemoryParts
from costmodel.table.kernels import residuals_of
from planner.language.graph import ModelGraph
from planner.language.lowering.experts import grouped_products
from planner.language.plan import Plan
from profiles import Group, Lookup, OpQuery, Profile
from profiles.calibration import DRIFT
from profiles.records import StepWork

COVERAGE = 0.8
USUAL_ODDS = 0.9
"""Odds with which a plan fits that a search answers with where nothing else is said."""
EVEN_ODDS = 0.5
"""Odds with which an estimate may take all of a limit."""
Z = 1.2816
"""Quantile of a normal distribution that leaves a tenth on each side."""
TENTH = 1.6377
"""Quantile of Student's t with 3 degrees of freedom that does."""
_FARTHEST = 80.0
"""Quantiles of memory beyond which nothing lies: one run in a million."""
_SIGMA_OF_MEDIAN = 1.48
_SIGMA_OF_MEAN = 1.25

_MEASURED_MEDIAN = 0.043
"""Of 90 plans of three models on two CPU ranks; docs/decisions/0018 has the table."""

NOTHING_KNOWN = 0.3
"""Of a device of which no runs are published: what others were off by before rates were fitted."""

_ALLOCATOR_LOW, _ALLOCATOR_HIGH = 0.029, 0.078
"""Reserved over allocated memory, minus 1: the first and the last tenth of 26 published runs of
Megatron-LM on B200 that print both (simumax_b200); their median is 0.043."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where a step's seconds lie with a probability of `COVERAGE`."""

    low_s: float
    """Seconds that it is below one time in ten."""
    high_s: float
    """Seconds that it is above one time in ten."""
    basis: str
    """What the width stands on."""

    @property
    def relative(self) -> float:
        """Half of its width over its middle."""
        return (self.high_s - self.low_s) / (self.high_s + self.low_s)

    def holds(self, step_s: float) -> bool:
        """Whether a time lies in it."""
        return self.low_s <= step_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInterval:
    """Where a device's bytes at its fullest lie with a probability of `COVERAGE`."""

    low_bytes: int
    """Bytes that it is below one time in ten."""
    high_bytes: int
    """Bytes that it is above one time in ten."""
    basis: str
    """What the width stands on."""

    def holds(self, num_bytes: float) -> bool:
        """Whether an amount lies in it."""
        return self.low_bytes <= num_bytes <= self.high_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemorySpread:
    """How what a device holds beside its context lies about the estimate, relative to it."""

    typical: float
    """What is typically held, over the estimate: not 1 where logs of the runtime tell, or where
    published runs tell what its allocator reserves."""
    sigma: float
    """One sigma of live tensors."""
    allocator_less: float
    """By how much the allocator's share is smaller one time in ten."""
    allocator_more: float
    """By how much it is larger one time in ten."""

    def factor(self, z: float) -> float:
        """Return what is held over the estimate, z sigmas from what is typical (`_odds_within`)."""
        if z < 0:
            less = hypot(1 - exp(z * self.sigma), z / Z * self.allocator_less)
            return self.typical * (1 - less)
        return self.typical * (1 + hypot(exp(z * self.sigma) - 1, z / Z * self.allocator_more))


def _memory_spread(profile: Profile, execution: Execution) -> _MemorySpread:
    typical, sigma = _tensors_spread(profile, execution)
    share, (low, high) = profile.allocator_overhead_fraction, profile.allocator_range
    low = _ALLOCATOR_LOW if low is None else low
    high = _ALLOCATOR_HIGH if high is None else high
    # The estimate itself always lies in its interval.
    return _MemorySpread(
        typical=typical,
        sigma=sigma,
        allocator_less=max(0.0, share - low) / (1 + share),
        allocator_more=max(0.0, high - share) / (1 + share),
    )


def memory_ratios(profile: Profile, execution: Execution) -> tuple[float, ...]:
    """Return what runs of a runtime held whose logs were read, over the estimate of each."""
    found = profile.calibration_of(execution.name)
    runs = () if found is None else found.runs
    return tuple(run.memory_ratio for run in runs if run.memory_ratio is not None)


def _tensors_spread(profile: Profile, execution: Execution) -> tuple[float, float]:
    """Return what a rank typically holds over its estimate, and one sigma of that, relative.

    Logs of k runs with ratios r: their mean logarithm, drawn towards 0 by what other runs of the
    runtime scatter from source to source, S, and within one, W: mean log r * k / (k + W^2 / S^2).
    """
    # Runs that crashed tell what is needed; what others print was reserved, and may be freed.
    sigma = execution.reserved_sigma or sigma_of(memory_residuals(execution.name))
    ratios = memory_ratios(profile, execution)
    if not ratios:
        # Where runs tell what the allocator reserves, a device holds that.
        usual = 1 + profile.allocator_overhead_fraction
        return max(1.0, execution.reserved_factor / usual), sigma
    within, between = split_sigma(sigma)
    information = len(ratios) / within**2 + between**-2
    middle = sum(map(log, ratios)) / within**2 / information
    return exp(middle), hypot(within, information**-0.5)


WITHIN_SOURCE = 0.77
"""Of one sigma of runs of a source that nobody has seen, what is left within a source: the runs of
one cluster and stack differ so much less than those of several
(`python -m benchmarks calibrated_groups` prints it, of 223 runs in 58 groups)."""


def split_sigma(sigma: float) -> tuple[float, float]:
    """Return one sigma of runs within a source and of sources, of that of both together."""
    return WITHIN_SOURCE * sigma, sqrt(1 - WITHIN_SOURCE**2) * sigma


def usable_bytes(limit_bytes: float, profile: Profile, execution: Execution, odds: float) -> float:
    """Return what an estimate may take of a device so that a run stays within a limit with these
    odds.

    The context is what the profile says: a rank that has more stays within the limit all the more.
    """
    context = min(profile.context_bytes, limit_bytes)
    return (limit_bytes - context) / _room_factor(profile, execution, odds) + context


def needed_limit_bytes(
    estimate_bytes: float, profile: Profile, execution: Execution, odds: float
) -> float:
    """Return the least limit that leaves an estimate so much: the inverse of `usable_bytes`."""
    context = min(profile.context_bytes, estimate_bytes)
    return (estimate_bytes - context) * _room_factor(profile, execution, odds) + context


def _room_factor(profile: Profile, execution: Execution, odds: float) -> float:
    """Return how much of a limit stands for a byte of an estimate, the context apart: at odds of
    0.5 one, unless logs of the runtime tell that more or less is held than is estimated.
    """
    if odds <= EVEN_ODDS and not memory_ratios(profile, execution):
        # Of a runtime whose allocator is known to reserve more, too: the limit is the estimate's.
        return 1.0
    return _memory_spread(profile, execution).factor(_sigmas_of(odds))


def odds_of_fit(
    parts: MemoryParts, profile: Profile, execution: Execution, limit_bytes: float
) -> float:
    """Return the odds that a rank estimated as `parts` stays within a limit."""
    spread = _memory_spread(profile, execution)
    held = float(parts.tensor_bytes) * (1 + profile.allocator_overhead_fraction)
    most = (limit_bytes - float(parts.context_bytes)) / held if held else inf
    return _odds_within(_last(lambda z: spread.factor(z) <= most))


def _odds_within(z: float) -> float:
    """Return the odds that memory lies below z sigmas above what is typical: Student's t with 3
    degrees of freedom.
    """
    u = z * TENTH / Z / sqrt(3)
    return 0.5 + (u / (1 + u * u) + atan(u)) / pi


def _sigmas_of(odds: float) -> float:
    """Return the sigmas above what is typical within which memory lies with these odds."""
    return _last(lambda z: _odds_within(z) <= odds)


def _last(holds: Callable[[float], bool]) -> float:
    """Return the largest quantile at which something holds that holds of all below it."""
    low, high = -_FARTHEST, _FARTHEST
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def typical_bytes(parts: MemoryParts, profile: Profile, execution: Execution) -> float:
    """Return what a rank estimated as `parts` typically holds beside its context."""
    held = float(parts.tensor_bytes) * (1 + profile.allocator_overhead_fraction)
    return held * _memory_spread(profile, execution).typical


def memory_interval(parts: MemoryParts, profile: Profile, execution: Execution) -> MemoryInterval:
    """Return where the memory of a rank lies that was estimated as `parts` on a device."""
    residuals, spread = memory_residuals(execution.name), _memory_spread(profile, execution)
    ratios = memory_ratios(profile, execution)
    logs = f"{len(ratios)} log{'s' * (len(ratios) > 1)} of its own runs and " if ratios else ""
    held = float(parts.tensor_bytes) * (1 + profile.allocator_overhead_fraction)
    context = float(parts.context_bytes)
    return MemoryInterval(
        low_bytes=round(held * spread.factor(-Z) + context),
        high_bytes=round(held * spread.factor(Z) + context),
        basis=f"{logs}{_spelled_sources(residuals)}; the allocator's share "
        + ("as measured" if profile.allocator_range[1] is not None else "as in 26 published runs")
        # A process's resident memory grows while it trains: 41 MiB in the demo.
        + (
            "; without growth of the process itself" if profile.cluster.device_type == "cpu" else ""
        ),
    )


def _spelled_sources(residuals: Mapping[str, float]) -> str:
    """Say what residuals are from: their names are words already, or those of published data."""
    published = ", ".join(name for name in residuals if " " not in name)
    named = [name for name in residuals if " " in name]
    named += [f"published runs ({published})"] if published else []
    return " and ".join(named) or "no runs of this runtime"


def plan_memory_interval(plan: Plan, profile: Profile) -> MemoryInterval | None:
    """Return where the memory of a plan's fullest device lies, from the estimate that the plan
    carries; None where that has no parts.
    """
    ranks = _ranks_of(plan, profile)
    if not ranks:
        return None
    parts, machine = max(ranks, key=lambda rank: float(rank[0].total))
    return memory_interval(parts, machine, find_execution(plan.execution))


def plan_odds_of_fit(plan: Plan, profile: Profile, limit_bytes: float | None = None) -> float:
    """Return the odds that every device of a plan holds what its rank needs: those of the device
    that is worst off, as all err alike. `limit_bytes` takes the place of what devices have.
    """
    runtime = find_execution(plan.execution)
    return min(
        odds_of_fit(parts, machine, runtime, limit_bytes or machine.memory_bytes)
        for parts, machine in _ranks_of(plan, profile)
    )


def _ranks_of(plan: Plan, profile: Profile) -> list[tuple[MemoryParts, Profile]]:
    """Return what each pipeline rank holds, by the estimate that a plan carries, and its device."""
    ranks: Sequence[Mapping[str, int]] = plan.estimate.get("memory", ())
    if not ranks:
        return []
    groups = {group.name: group.profile for group in profile.groups}
    return [
        (
            MemoryParts(**{name: held for name, held in rank.items() if name != "total_bytes"}),
            # (Which of several groups the fullest replica is on is not in the file.)
            min(
                (groups.get(name, profile) for name in group.split("+")),
                key=lambda machine: machine.memory_bytes,
            ),
        )
        for rank, group in zip(ranks, plan.device_groups, strict=True)
    ]


def step_interval(
    graph: ModelGraph, profile: Profile, plan: Plan, execution: Execution | None = None
) -> Interval:
    """Return where the step of a plan lies, as far as can be told from the profile's own errors.

    `profile` as it was loaded, `execution` one that is priced with it (None: this project's
    runtime, op by op); raises as `estimate` does.
    """

    def step_s_of(answers: Callable[[Profile], Profile]) -> float:
        """Return the step with these answers of the profile in training."""

        def on(profile: Profile) -> CostCache:
            return CostCache(
                graph, answers(in_training(profile, plan.world_size)), execution=execution
            )

        return step_seconds(plan, costs_of_groups(profile, on))

    step_s = step_s_of(lambda profile: profile)
    # All answers late at once: the most that errors of one sigma can add up to.
    of_answers = step_s_of(_OneSigmaLater) / step_s - 1.0
    of_steps, basis = step_sigma(profile)
    if of_answers > of_steps:
        basis = "errors of the profile's own answers"
    return _interval(step_s, max(of_answers, of_steps), basis)


def row_interval(step_s: float, profile: Profile) -> Interval:
    """Return where the step of a run described by a row lies, from what its device's rates miss."""
    return _interval(step_s, *step_sigma(profile))


def _interval(step_s: float, sigma: float, basis: str) -> Interval:
    width = exp(Z * sigma)
    return Interval(low_s=step_s / width, high_s=step_s * width, basis=basis)


def step_sigma(profile: Profile) -> tuple[float, str]:
    """Return one sigma of a profile's steps, relative, and what it is from."""
    # A plan on several groups is as uncertain as the least known of them.
    if profile.groups:
        return max(step_sigma(group.profile) for group in profile.groups)
    found = profile.file.calibration
    if found is not None:
        runs = len(found.runs)
        left = hypot(_SIGMA_OF_MEDIAN * found.error_after, DRIFT) * sqrt(1 + 1 / runs)
        return left, f"{runs} recorded run{'s' * (runs > 1)} it was calibrated with"
    if profile.source == "measured":
        return _SIGMA_OF_MEDIAN * _MEASURED_MEDIAN, "plans run on a machine that was measured"
    residuals = residuals_of(profile)
    if not residuals:
        return NOTHING_KNOWN, "no published runs of this device"
    return _of_sources(residuals), _published(residuals)


def _of_sources(residuals: Mapping[str, float]) -> float:
    return _SIGMA_OF_MEAN * sqrt(sum(error**2 for error in residuals.values()) / len(residuals))


def interval_about(step_s: float, sigma: float, basis: str) -> Interval:
    """Return where a step lies of which one sigma is known, relative, and what that is from."""
    return _interval(step_s, sigma, basis)


def runtime_interval(graph: ModelGraph, execution: Execution, step_s: float) -> Interval:
    """Return where a step lies that was estimated for a runtime priced with rates."""
    found = residuals_of_runs(execution.name, run_kind(graph))
    basis = _published(found) if found else "no published runs of its kind"
    return _interval(step_s, sigma_of(found), basis)


def _published(residuals: Mapping[str, float]) -> str:
    return f"published runs of {len(residuals)} source{'s' * (len(residuals) > 1)}"


def run_kind(graph: ModelGraph) -> RunKind:
    """Return what kind of run a model's training is."""
    if any(grouped_products(program) for program in graph.classes):
        return "experts"
    trained = {meta.requires_grad for meta in graph.tensors if meta.kind == "param"}
    return "adapters" if trained == {True, False} else "dense"


def sigma_of(residuals: Mapping[str, float]) -> float:
    """Return one sigma of a run of another source; a usual value where there are none.

    As of calibrations, what k sources tell of the next is 1 + 1/k times as uncertain, in squares.
    """
    if not residuals:
        return NOTHING_KNOWN
    return _of_sources(residuals) * sqrt(1 + 1 / len(residuals))


class _OneSigmaLater(Profile):
    """A profile all of whose answers take one sigma of theirs longer."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile.file, profile.ops, profile.collectives)
        self._typical = profile

    def op_seconds(self, query: OpQuery) -> Lookup:
        """Return an operator's time, one sigma longer."""
        return _later(self._typical.op_seconds(query))

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return a collective's time, one sigma longer."""
        return _later(self._typical.collective_seconds(kind, num_bytes, group))

    def step_seconds(
        self, work: StepWork, *, num_bytes: float, num_tensors: int = 1, num_calls: int = 1
    ) -> Lookup:
        """Return the time of work beside the blocks, one sigma longer."""
        return _later(
            self._typical.step_seconds(
                work, num_bytes=num_bytes, num_tensors=num_tensors, num_calls=num_calls
            )
        )

    def overlap_slowdown(self, part: Literal["compute", "communication"]) -> float:
        """Return by how much a part slows while both run together."""
        return self._typical.overlap_slowdown(part)


def _later(answer: Lookup) -> Lookup:
    return answer.times(1.0 + answer.relative_error)
