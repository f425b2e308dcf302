"""The visits of one measurement: one pass over all probes, then rounds to the uncertain ones.

A pass goes heaviest first, so that what a budget leaves out weighs least; rounds go in any
order, so that what disturbs the machine for a while touches one visit of many probes instead
of all visits of one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from profiles.lookup.fit import MIN_SAMPLES_PER_TARGET
from profiles.lookup.topology import concrete_groups, describe_stragglers
from profiles.measure.grid import FIRST_SIZES, MESSAGE_BYTES
from profiles.measure.probes import BlockProbe, CollectiveProbe, OpProbe
from profiles.measure.session import Session
from profiles.measure.workers import ProbeFailed, WorkerGroup

Progress = Callable[[float, str], None]

VISIT_S = 0.05
"""Sampling time of a visit without a budget."""

LEAST_VISIT_S, MOST_VISIT_S = 0.01, 0.25

COLLECTIVE_VISIT_S = 0.05
"""Single calls of a collective vary more than those of an op."""

ROUNDS = 6
"""So many visits to every probe a budget is planned for."""

WARM_VISITS = 2
"""So many visits also time the op on inputs in cache."""

VISIT_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 300.0

PASSES = 4
"""So often every probe is visited, before the uncertain ones are visited further."""

MOST_VISITS = 16

COLLECTIVE_SHARE = 0.35
"""Share of a budget for collectives; ops are more numerous and weigh more in a step."""

LEAST_SIZES = MESSAGE_BYTES[:FIRST_SIZES]
"""These sizes of every collective are measured on every shape of group, and one probe of every op,
even if that takes longer than the budget: a profile without them would be no profile. (Links
between nodes that were not measured would be free.)"""

GOOD_STANDARD_ERROR = 0.02
"""What is known this well is not measured further."""

TYPICAL_BYTES_PER_S = 1e9
"""Rate of messages, only to weigh them against ops."""

AnyProbe = OpProbe | BlockProbe | CollectiveProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Probes that still need visits. Basic ones come first, then in the order given."""

    basic: tuple[OpProbe, ...]
    collectives: tuple[CollectiveProbe, ...]
    blocks: tuple[BlockProbe, ...]
    ops: tuple[OpProbe, ...]

    @classmethod
    def of(
        cls,
        ops: Sequence[OpProbe],
        *,
        blocks: Sequence[BlockProbe],
        collectives: Sequence[CollectiveProbe],
        session: Session,
    ) -> Asked:
        """Return those that lack a pass's visits, ops of unlike kinds first."""
        unknown = [probe for probe in ops if session.num_visits(probe) < PASSES]
        return cls(
            basic=tuple(p for p in unknown if p.weight == float("inf")),
            collectives=tuple(p for p in collectives if session.num_visits(p) < PASSES),
            blocks=tuple(p for p in blocks if session.num_visits(p) < PASSES),
            ops=tuple(_spanning_first(p for p in unknown if p.weight < float("inf"))),
        )

    def __len__(self) -> int:
        return len(self.basic) + len(self.collectives) + len(self.blocks) + len(self.ops)


@dataclass
class Rounds:
    """The visits of one measurement. Mutable: it keeps the time and what it has learnt."""

    session: Session
    """The records, which each visit adds to."""
    workers: WorkerGroup
    """The ranks that run probes."""
    began: float
    """When the measurement began, in seconds of the monotonic clock."""
    deadline: float | None
    """When its budget ends, on the same clock; None without a budget."""
    progress: Progress
    """What is told how far it is."""
    libraries: tuple[str, ...] = ()
    """Modules that define ops of the models, by name."""
    planned: int = 0
    """Visits that are planned."""
    visited: int = 0
    """Visits so far."""
    cost_s: float = 0.02
    """What a visit takes beside its samples: inputs to make, ranks to meet."""
    failed: set[AnyProbe] = field(default_factory=set)
    """Probes that gave no number, and are not visited again."""
    rank_seconds: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of the basic product on each rank, by which stragglers are found."""

    def measure(self, asked: Asked) -> bool:
        """Visit what is asked for; return whether everything was reached."""
        self.planned = PASSES * len(asked)
        reached = [*asked.basic, *self._first_collectives(asked), *self._first_ops(asked)]
        postponed = len(asked) - len(reached)
        self._visit_further(reached)
        self.session.settle()
        return postponed == 0

    def report(self, doing: str) -> None:
        """Tell how far the run is, by budget if there is one, else by visits."""
        left = max(self.planned - self.visited, 0)
        fraction = self.visited / max(self.planned, 1)
        if self.deadline is not None:
            fraction = (time.monotonic() - self.began) / (self.deadline - self.began)
        self.progress(min(fraction, 1.0), f"{doing} ({left} visits left)" if left else doing)

    def stragglers(self) -> list[str]:
        """Return a line per rank that is slower than the others."""
        medians = {rank: float(np.median(found)) for rank, found in self.rank_seconds.items()}
        return describe_stragglers(medians, self.session.ranks.hosts) if medians else []

    def _first_collectives(self, asked: Asked) -> list[CollectiveProbe]:
        """Visit the basic probes, then collectives within their share; return those reached."""
        for probe in asked.basic:
            self._visit(probe, MOST_VISIT_S)
        # This is the first of ROUNDS visits, so it has that part of the collectives' share.
        reserve = (1 - COLLECTIVE_SHARE / ROUNDS) * self._left() if self.deadline else 0.0
        for index, message in enumerate(asked.collectives):
            left = self._left() - reserve
            if left <= 0 and message.num_bytes not in LEAST_SIZES:
                return list(asked.collectives[:index])
            self._visit(message, self._share(message, left, len(asked.collectives) - index))
        return list(asked.collectives)

    def _first_ops(self, asked: Asked) -> list[OpProbe | BlockProbe]:
        """Visit blocks and ops but those too heavy for the budget; return those reached.

        Blocks before ops: they are few, and correct whatever the ops add up to.
        """
        every: list[OpProbe | BlockProbe] = [*asked.blocks, *asked.ops]
        firsts = _first_of_each_target(asked.ops)
        reached = []
        for index, probe in enumerate(every):
            heavy = 3 * ROUNDS * _expected_seconds(probe) > 0.3 * self._left()
            if probe not in firsts and (heavy or self._left() <= 0):
                continue
            ahead = ROUNDS * len(every) - index
            self._visit(probe, self._share(probe, self._left(), ahead))
            reached.append(probe)
        return reached

    def _visit_further(self, probes: Sequence[AnyProbe]) -> None:
        """Visit all again and again, then what is still uncertain, while there is time.

        Each round has another order, so that no probe always follows the same other one; a
        round for which there is too little time begins with what weighs most.
        """
        chance = random.Random(0)
        round_s = 0.0
        while left := [probe for probe in probes if self._wants(probe)]:
            chance.shuffle(left)
            if self._left() < round_s:
                left.sort(key=self._weighed, reverse=True)
            began = time.monotonic()
            for probe in left:
                if self._left() <= LEAST_VISIT_S + self.cost_s:
                    return
                self._visit(probe, self._further_s(probe))
            round_s = time.monotonic() - began

    def _wants(self, probe: AnyProbe) -> bool:
        if probe in self.failed:
            return False
        visits = self.session.num_visits(probe)
        if visits < PASSES:
            return True
        return visits < MOST_VISITS and self.session.uncertainty(probe) > GOOD_STANDARD_ERROR

    def _further_s(self, probe: AnyProbe) -> float:
        """Return the sampling time of a visit: about what it costs beside, within bounds."""
        if isinstance(probe, CollectiveProbe):
            return COLLECTIVE_VISIT_S
        if self.deadline is None:
            return VISIT_S
        return min(max(self.cost_s, LEAST_VISIT_S), MOST_VISIT_S)

    def _weighed(self, probe: AnyProbe) -> float:
        """Return the seconds of a training step that are uncertain because of a probe."""
        if isinstance(probe, CollectiveProbe):
            weight = probe.num_bytes / TYPICAL_BYTES_PER_S
        else:
            weight = probe.weight
        return self.session.uncertainty(probe) * weight

    def _visit(self, probe: AnyProbe, seconds: float) -> None:
        if probe in self.failed:
            return
        self.report(str(probe))
        self.visited += 1
        began = time.monotonic()
        try:
            if isinstance(probe, CollectiveProbe):
                self._visit_collective(probe, seconds)
            else:
                self._visit_op(probe, seconds)
        except ProbeFailed as error:
            self.failed.add(probe)
            self.session.skip(probe, error)
        else:
            spent = max(time.monotonic() - began - seconds, 0.0)
            # A running mean: costs change from small probes to large ones.
            self.cost_s += 0.1 * (spent - self.cost_s)

    def _visit_op(self, probe: OpProbe | BlockProbe, seconds: float) -> None:
        compiling = isinstance(probe, BlockProbe) and probe.compiled
        answers = self.workers.call(
            {
                "task": "op",
                "libraries": self.libraries,
                "probe": probe.to_json(),
                "seconds": seconds,
                "warm": self.session.num_visits(probe) < WARM_VISITS,
            },
            timeout_s=(COMPILE_TIMEOUT_S if compiling else VISIT_TIMEOUT_S) + 2 * seconds,
        )
        self.session.add_op(probe, answers)
        # The basic product: the same work on all ranks, by which stragglers are found.
        if probe.weight == float("inf") and probe.forward.flop > probe.forward.num_bytes:
            for rank, answer in enumerate(answers):
                seconds_here = float(np.median(answer["forward"]))
                self.rank_seconds.setdefault(rank, []).append(seconds_here)

    def _visit_collective(self, probe: CollectiveProbe, seconds: float) -> None:
        groups = concrete_groups(probe.group, self.session.ranks.nodes)
        task = {
            "task": "collective",
            "kind": probe.kind,
            "num_bytes": probe.num_bytes,
            "groups": groups,
            "seconds": seconds,
        }
        answers = self.workers.call(task, timeout_s=VISIT_TIMEOUT_S + 2 * seconds)
        samples = [s for answer in answers for s in answer["seconds"]]
        self.session.add_collective(probe, samples, concurrent_groups=len(groups))

    def _left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def _share(self, probe: AnyProbe, seconds: float, count: int) -> float:
        """Return the sampling time of one of `count` visits that have `seconds` in all."""
        usual = self._further_s(probe)
        return min(max(seconds / max(count, 1) - self.cost_s, LEAST_VISIT_S), usual)


def _expected_seconds(probe: OpProbe | BlockProbe) -> float:
    """Guess, before measuring, at a rate that any machine of today has."""
    return sum(q.flop / 2e10 + q.num_bytes / 5e9 for q in probe.queries)


def _first_of_each_target(probes: Sequence[OpProbe]) -> set[OpProbe | BlockProbe]:
    """Return the heaviest probe of every target: measured whatever the budget."""
    return set({probe.op.target: probe for probe in reversed(probes)}.values())


def _spanning_first(probes: Iterable[OpProbe]) -> list[OpProbe]:
    """Return the probes, heaviest first, but a few of each target before all others.

    A short budget then leaves no target without measurements to go by.
    """
    seen: Counter[tuple[str, str]] = Counter()
    order: list[tuple[bool, int, OpProbe]] = []
    for probe in probes:
        kind = probe.forward.target, probe.forward.dtype
        order.append((seen[kind] >= MIN_SAMPLES_PER_TARGET, len(order), probe))
        seen[kind] += 1
    return [probe for _, _, probe in sorted(order, key=lambda entry: entry[:2])]
