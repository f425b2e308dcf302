"""What would make a model fit that does not: each answer with the plan that a search then found.

More memory, more devices, or a *remedy*: one thing of the request let go or taken up
(recompute, ZeRO, a smaller microbatch, offload, bf16, ...), two where no single one does. Free
choices are searched already, so only what the request fixes can be changed, and what a search
never tries by itself: another precision, tp across nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations

from planner.deadline import OutOfTime, check_time
from planner.language.graph import ModelGraph
from planner.language.plan import Plan, Precision
from planner.units import GIB
from profiles import Profile
from search.branch_and_bound import Progress
from search.candidates import Candidates
from search.find_plan import find_plan, search_among
from search.nodes.lean_plan import find_fitting
from search.on_host import offload_fallbacks
from search.report.infeasible import round_up
from search.request import CHOICES, LEAST_ODDS, SearchRequest, SearchResult
from search.space.request_checks import divisors

Recapture = Callable[[Precision], ModelGraph]
"""Returns the model captured in another precision."""

_MOST_COUNTS = 256
"""How many numbers of devices are tried, in ascending order."""
_MEMORY_STEPS = (1.0, 1.01, 1.03, 1.1)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A way to make it fit: what the request would be instead, and the plan found so."""

    what: str
    request: SearchRequest
    plan: Plan

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return float(self.plan.estimate["step_s"])

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest device."""
        return int(self.plan.estimate["peak_bytes"])


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What would do where nothing fits; None or empty where nothing of a kind does.

    `remedies` keep devices and memory as they are, fastest first.
    """

    memory: Remedy | None
    devices: Remedy | None
    remedies: tuple[Remedy, ...]


def find_advice(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    infeasible: SearchResult,
    *,
    recapture: Recapture | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Return what would make a request fit for which nothing does (`infeasible`: the answer).

    `recapture` allows to try another precision. A time limit leaves out what it left no time for.
    """
    trials = _Trials(graph=graph, profile=profile, request=request, recapture=recapture)

    def tell(fraction: float, doing: str) -> None:
        if progress:
            progress(fraction, doing)

    memory = devices = None
    remedies: tuple[Remedy, ...] = ()
    with suppress(OutOfTime):
        tell(0.0, "the least memory")
        memory = trials.more_memory(infeasible)
        tell(0.2, "more devices")
        devices = trials.more_devices()
        tell(0.6, "remedies")
        remedies = tuple(trials.remedies())
    return Advice(memory=memory, devices=devices, remedies=remedies)


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """Where changed requests are tried; those that share candidates share their prices."""

    graph: ModelGraph
    profile: Profile
    request: SearchRequest
    recapture: Recapture | None

    @property
    def limit_bytes(self) -> float:
        return self.request.limit_bytes(self.profile)

    def more_memory(self, infeasible: SearchResult) -> Remedy | None:
        """Return the smallest limit found under which a search succeeds."""
        least = infeasible.smallest_memory_bytes
        if least is None:  # it is not the devices' memory that is short
            return None
        for factor in _MEMORY_STEPS:
            gib = round_up(factor * least / GIB)
            changed = replace(self.request, memory_limit_bytes=int(gib * GIB))
            if plan := find_plan(self.graph, self.profile, changed).plan:
                return Remedy(what=f"`memory_limit_bytes` {gib} GiB", request=changed, plan=plan)
        return None

    def more_devices(self) -> Remedy | None:
        """Return the fewest devices that do: whole nodes where there is more than one."""
        candidates = self._candidates(self.graph, self.request)
        for count in more_counts(self.request.num_devices, self.profile):
            check_time()
            changed = replace(self.request, num_devices=count)
            if not self._may_fit(candidates, changed):
                continue
            alike = self._candidates(self.graph, changed)
            if plan := search_among(alike, changed, runners_up=False).plan:
                return Remedy(what=f"`num_devices` {count}", request=changed, plan=plan)
        return None

    def remedies(self) -> list[Remedy]:
        """Return the single changes that do, or the pairs where none does; fastest first."""
        # Pairs are tried only where no single change does.
        singles = dict(self._changes())
        for size in (1, 2):
            found = []
            for names in combinations(singles, size):
                check_time()
                changes = {k: v for name in names for k, v in singles[name].items()}
                if made := self._try_changes(changes):
                    found.append(made)
            if found:
                return sorted(found, key=lambda remedy: remedy.step_s)
        return []

    def _changes(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield named changes of the request's fields."""
        request = self.request
        for name in (*CHOICES, "split_rank"):
            if getattr(request, name) is not None:
                yield name, {name: None}
        for name in ("balance", "pins", "forbid", "allow"):
            if getattr(request, name):
                yield name, {name: ()}
        if request.odds > LEAST_ODDS:
            yield "memory_odds", {"memory_odds": LEAST_ODDS}
        if request.offload != "auto":
            yield "offload", {"offload": "auto"}
        if request.precision == "model" and self.recapture is not None:
            yield "precision", {"precision": "bf16"}
        node = self.profile.cluster.devices_per_node
        if request.tp is None:
            for tp in divisors(request.num_devices):
                if tp > node:
                    yield f"tp={tp}", {"tp": tp}

    def _try_changes(self, changes: dict[str, object]) -> Remedy | None:
        changed = replace(self.request, **changes)  # type: ignore[arg-type]
        graph = self.graph
        if changed.precision != self.request.precision:
            assert self.recapture is not None, "another precision is tried with its capture only"
            graph = self.recapture(changed.precision)
            # The model is as it was: the precision changes nothing.
            if graph.fingerprint == self.graph.fingerprint:
                return None
        if "offload" in changes:
            plan = find_plan(graph, self.profile, changed).plan
        else:
            plan = self._plan(self._candidates(graph, changed), changed)
        if plan is None:
            return None
        what = ", ".join(_as_asked(name, self.request, changed, plan) for name in changes)
        return Remedy(what=what, request=changed, plan=plan)

    def _candidates(self, graph: ModelGraph, request: SearchRequest) -> Candidates:
        """Return candidates that put on the host what the request names, by itself nothing."""
        on_host = offload_fallbacks(request.offload, self.profile, graph)[0][0]
        return Candidates.of(graph, self.profile, request, on_host)

    def _may_fit(self, candidates: Candidates, changed: SearchRequest) -> bool:
        if not candidates.has_shapes(changed):
            return False
        return find_fitting(candidates, candidates.shapes(changed), self.limit_bytes) is not None

    def _plan(self, candidates: Candidates, changed: SearchRequest) -> Plan | None:
        if not self._may_fit(candidates, changed):
            return None
        return search_among(candidates, changed, runners_up=False).plan


def more_counts(num_devices: int, profile: Profile) -> Sequence[int]:
    """Return the numbers of devices to try above one: in a node any, beyond whole nodes."""
    node, most = profile.cluster.devices_per_node, profile.cluster.max_devices
    inside = range(num_devices + 1, node + 1)
    first = max(num_devices // node + 1, 2)
    beyond = range(first * node, (first + _MOST_COUNTS) * node, node)
    return [count for count in (*inside, *beyond) if most is None or count <= most]


def _as_asked(name: str, given: SearchRequest, changed: SearchRequest, plan: Plan) -> str:
    """Return a change as the fields of the request that make it, with the value before."""
    before = getattr(given, name)
    if name in ("balance", "pins", "forbid", "allow"):
        return f"without `{name}`"
    if name == "offload":
        return f"`{name}` {_offloaded(plan)} instead of {before}"
    if getattr(changed, name) is not None:
        return f"`{name}` {getattr(changed, name)}"
    now = _value(name, plan)
    return f"`{name}` {now} instead of {before}" if now != str(before) else f"`{name}` free"


def _offloaded(plan: Plan) -> str:
    activations = any(stage.activations_on_host for stage in plan.stages)
    if plan.optimizer_on_host and activations:
        return "both"
    if plan.tables_on_host and not (plan.optimizer_on_host or activations):
        return "tables"
    return "optimizer" if plan.optimizer_on_host else "activations"


def _value(name: str, plan: Plan) -> str:
    if name == "recompute":
        return " or ".join(sorted(set(plan.recompute_by_block)))
    return str(getattr(plan, {"zero": "zero_stage"}.get(name, name)))
