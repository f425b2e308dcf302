"""What if: the best plan of other devices, links, batches or sizes, searched without profiling.

A case is a question that differs from a base in some choices. Its answer is the search's, for the
changed profile, the changed request and the model captured with the changed sizes. From a step
time follow, for a training of T tokens on n devices at a price p per device and hour:

    tokens_per_s = tokens of a step / step_s
    days         = T / tokens_per_s / 86,400
    cost         = p * n * T / tokens_per_s / 3,600

How many devices a deadline needs is searched among powers of two times the devices of a node, then
between the last two by halves: more devices of one kind are taken to be no slower in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from costmodel.uncertainty import MemoryInterval, plan_memory_interval
from planner.errors import LayoutError, PlannerError
from planner.language.graph import ModelGraph
from planner.language.graph.batch import tokens_per_sample
from planner.language.plan import Plan, Precision
from planner.units import DAY_S
from profiles import Profile
from profiles.link_rates import with_link_rate
from search.report.pareto import cost_of
from search.request import SearchRequest
from search.result_cache import find_plan_once

MOST_DEVICES = 2**17
"""More are not tried for a deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question about one model: what it is trained on, and what of it differs."""

    num_devices: int
    """All of them are used."""
    profile: str | None
    """Name of a profile; None: the base's own."""
    memory_limit_bytes: int | None
    """Per device; None: what the profile allows."""
    link_rate: float
    """Rate of the links between nodes, as a multiple of the profile's."""
    global_batch: int
    """Samples per step."""
    length: int | None
    """Of sequences; None: what batch(size) makes."""
    precision: Precision
    """What the model is captured in."""
    execution: str
    """The runtime that trains."""
    expert_imbalance: float | None = None
    """How uneven experts' rows are; None: as the profile or the runtime's record says."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Arguments of the model file's model(), by name."""

    def varied(self, **choices: Sequence[Any]) -> list[Case]:
        """Return the cases of all combinations of values; an empty choice stays as it is."""
        given = {name: values for name, values in choices.items() if values}
        return [
            replace(self, **dict(zip(given, values, strict=True)))
            for values in product(*given.values())
        ]

    def differences(self, base: Case) -> dict[str, Any]:
        """Return what differs from a base, by the names of the fields."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(base, field.name)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best plan of a case, or why there is none."""

    case: Case
    plan: Plan | None
    """None: nothing fits, or the question can't be asked."""
    reason: str
    """Why there is no plan; empty with one."""
    step_s: float
    """Predicted; infinity without a plan."""
    peak_bytes: float
    """Of the fullest device; 0 without a plan."""
    tokens_per_s: float
    """0 without a plan, or where the batch has no tokens."""
    gap: float = 0.0
    """Of the search's certificate."""
    memory: MemoryInterval | None = None
    """Where the bytes of the fullest device lie in four of five cases."""
    limit_bytes: float = inf
    """What a device may hold."""

    @property
    def may_not_fit(self) -> bool:
        """Whether memory may pass what a device may hold."""
        return self.memory is not None and self.memory.high_bytes > self.limit_bytes

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 without a plan."""
        return self.case.global_batch / self.step_s

    def days(self, tokens: float) -> float:
        """Return the days that a training of so many tokens takes; infinity without a plan."""
        return tokens / self.tokens_per_s / DAY_S if self.tokens_per_s else float("inf")

    def cost(self, price_per_device_hour: float, tokens: float) -> float:
        """Return what a training of so many tokens costs, in the currency of the price."""
        seconds = self.days(tokens) * DAY_S
        return cost_of(price_per_device_hour, self.case.num_devices, seconds)


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """Answers cases of one model.

    `graph_of` captures the model: (precision, length, arguments) -> graph. `profile_of` gives the
    profile of a name, None for the base's.
    `accept` is that of a request.
    """

    model: Path
    graph_of: Callable[[Precision, int | None, Mapping[str, Any]], ModelGraph]
    profile_of: Callable[[str | None], Profile]
    accept: tuple[str, ...] = ()

    def answer(self, case: Case, progress: Callable[[float, str], None] | None = None) -> Answer:
        """Search the best plan of a case.

        What can't be asked (a batch that no degrees divide, sizes that the model refuses) is the
        answer's reason, so that one case of many does not end the others.
        """
        try:
            graph = self.graph_of(case.precision, case.length, dict(case.arguments))
            profile = with_link_rate(self.profile_of(case.profile), case.link_rate)
            result = find_plan_once(graph, profile, self.request(case), progress=progress)
        except PlannerError as error:
            return _without_plan(case, str(error))
        if result.plan is None:
            return _without_plan(case, result.reasons[0])
        gap = 0.0 if result.certificate is None else result.certificate.gap
        return priced(case, result.plan, graph, profile, gap=gap)

    def request(self, case: Case) -> SearchRequest:
        """Return the request of a case: all layouts are searched."""
        return SearchRequest(
            num_devices=case.num_devices,
            global_batch=case.global_batch,
            memory_limit_bytes=case.memory_limit_bytes,
            model_file=str(self.model),
            precision=case.precision,
            execution=case.execution,
            expert_imbalance=case.expert_imbalance,
            accept=self.accept,
        )

    def answers(
        self, cases: Iterable[Case], progress: Callable[[float, str], None] | None = None
    ) -> Iterator[Answer]:
        """Yield the answer of each case, in their order."""
        cases = list(cases)
        for done, case in enumerate(cases):

            def tell(fraction: float, doing: str, done: int = done) -> None:
                if progress:
                    what = f"case {done + 1} of {len(cases)}: {doing}"
                    progress((done + fraction) / len(cases), what)

            yield self.answer(case, tell)

    def fewest_devices(
        self,
        case: Case,
        *,
        tokens: float,
        deadline_s: float,
        progress: Callable[[float, str], None] | None = None,
    ) -> list[Answer]:
        """Return the answers that were searched for a deadline, by rising numbers of devices.

        The first that is in time has the fewest devices; none may be. Raises LayoutError where
        the batch has no tokens, or no number of devices fits.
        """
        graph = self.graph_of(case.precision, case.length, dict(case.arguments))
        if not tokens_per_sample(graph):
            raise LayoutError(
                "the batch has no tokens (no [samples, length] tensor of whole numbers), so the "
                "days of a training can't be told; leave `deadline` and `tokens` out"
            )
        step = self.profile_of(case.profile).cluster.devices_per_node
        tried: list[Answer] = []

        def in_time(count: int) -> bool:
            if progress:
                progress(len(tried) / (len(tried) + 3), f"{count} devices")
            tried.append(self.answer(replace(case, num_devices=count)))
            return tried[-1].days(tokens) * DAY_S <= deadline_s

        count = step
        while not in_time(count):
            # Of a batch that so many devices can't share, more can't either.
            too_many = tried[-1].plan is None and any(answer.plan for answer in tried)
            if too_many or 2 * count > MOST_DEVICES:
                break
            count *= 2
        else:
            # `low` is late, or less than a node; `high` is in time. Halves, in whole nodes.
            low, high = count // 2, count
            while high - low > step:
                middle = (low + high) // 2 // step * step
                low, high = (low, middle) if in_time(middle) else (middle, high)
        if not any(answer.plan for answer in tried):
            raise LayoutError(f"no number of devices tried fits: {tried[-1].reason}")
        return sorted(tried, key=lambda answer: answer.case.num_devices)


def priced(
    case: Case, plan: Plan, graph: ModelGraph, profile: Profile, *, gap: float = 0.0
) -> Answer:
    """Return a plan as the answer of a case."""
    step_s = float(plan.estimate["step_s"])
    return Answer(
        case=case,
        plan=plan,
        reason="",
        step_s=step_s,
        peak_bytes=float(plan.estimate["peak_bytes"]),
        tokens_per_s=case.global_batch * tokens_per_sample(graph) / step_s,
        gap=gap,
        memory=plan_memory_interval(plan, profile),
        limit_bytes=float(case.memory_limit_bytes or profile.memory_bytes),
    )


def _without_plan(case: Case, reason: str) -> Answer:
    return Answer(
        case=case,
        plan=None,
        reason=reason,
        step_s=float("inf"),
        peak_bytes=0.0,
        tokens_per_s=0.0,
    )
