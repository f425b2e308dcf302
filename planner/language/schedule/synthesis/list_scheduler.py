"""Greedy list scheduling of a pipeline: whenever a rank is free, pick its next job by a rule.

Microbatches are alike, so jobs of one kind on one stage run in microbatch order without
loss: give the k-th such job of any table to microbatch k and every input is still there in
time. The state is therefore three counters a stage: how many F, G (B or I) and W have started.

Two things a plain list scheduler lacks:

- lookahead: when a job starts, the time its result arrives is known, so a rank can see what
  it will be asked next and leave a gap, or fill it with a W that fits, rather than begin
  something long that would hold up a more urgent job;
- memory: an F runs only in a *safe* state, one in which the microbatches on the rank can
  still finish one after the other from the oldest on (the banker's algorithm). As all ranks
  use the same order of age, the pipeline can't lock up for lack of memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.language.schedule.timing.job_seconds import JobSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a free rank chooses.

    `backward_first` puts gradients before forwards; else forwards go first as far as memory
    lets them. Of several chunks, `oldest_first` prefers the oldest microbatch, else the chunk
    nearest to its end. A rank waits for a more urgent job known to arrive within `patience`
    times what it could run now. With `split_backward`, W is its own job and fills gaps.
    """

    backward_first: bool
    oldest_first: bool
    patience: float
    split_backward: bool


class ListScheduler:
    """One run of the rule over a pipeline; mutable while it runs.

    `live_bytes[stage]` is what one live microbatch takes (any unit) from F until its last
    job, `limit_bytes[pp_rank]` what a rank may hold; it must cover one microbatch on all of
    the rank's stages.
    """

    def __init__(
        self,
        *,
        stage_to_pp_rank: Sequence[int],
        num_microbatches: int,
        times: JobSeconds,
        live_bytes: Sequence[float],
        limit_bytes: Sequence[float],
        rule: Rule,
    ) -> None:
        self._placed = stage_to_pp_rank
        self._num_stages = len(stage_to_pp_rank)
        self._num_microbatches = num_microbatches
        self._rule = rule
        self._live_bytes = live_bytes
        self._limit_bytes = limit_bytes
        self._into_s, self._back_s = times.between_ranks(stage_to_pp_rank)
        self._forward_s = times.forward_s
        self._gradient_s = times.backward_input_s
        if not rule.split_backward:
            self._gradient_s = times.by_kind()[JobKind.FULL_BACKWARD]
        self._weight_s = times.backward_weight_s
        num_ranks = max(stage_to_pp_rank) + 1
        self._stages_of = [
            [s for s, rank in enumerate(stage_to_pp_rank) if rank == r] for r in range(num_ranks)
        ]
        # Jobs started of each stage, and when the inputs of all known ones arrive.
        self._forwards = [0] * self._num_stages
        self._gradients = [0] * self._num_stages
        self._weights = [0] * self._num_stages
        self._forward_at: list[list[float]] = [[] for _ in range(self._num_stages)]
        self._gradient_at: list[list[float]] = [[] for _ in range(self._num_stages)]
        # Stage 0 has the whole batch from the start.
        self._forward_at[0] = [0.0] * num_microbatches
        self._held_bytes = [0.0] * num_ranks
        self._busy_until = [0.0] * num_ranks
        self._wake_ups: list[tuple[float, int]] = []
        self.rows: list[list[Job]] = [[] for _ in range(num_ranks)]

    def run(self, name: str) -> Schedule:
        """Return the table the rule leads to."""
        self._wake_ups = [(0.0, rank) for rank in range(len(self.rows))]
        while self._wake_ups:
            now, rank = heapq.heappop(self._wake_ups)
            # A rank that has begun something since the wake-up was set is woken again at its end.
            if self._busy_until[rank] <= now:
                chosen = self._choose(rank, now)
                if chosen is not None:
                    self._start(*chosen, rank, now)
        return Schedule(
            name=name,
            stage_to_pp_rank=tuple(self._placed),
            num_microbatches=self._num_microbatches,
            jobs=tuple(map(tuple, self.rows)),
        )

    def _choose(self, rank: int, now: float) -> tuple[str, int] | None:
        """Return the (kind, stage) to start now, or None to wait for the next wake-up."""
        best: tuple[tuple[float, ...], str, int] | None = None
        coming: list[tuple[tuple[float, ...], float]] = []
        for urgency, kind, stage, arrival in self._candidates(rank):
            if arrival > now:
                coming.append((urgency, arrival))
            elif best is None or urgency < best[0]:
                best = (urgency, kind, stage)
        gap_end = inf
        if best is not None:
            # A more urgent job that arrives before `reach` would have to wait for this one to end:
            # idle until then, or fill the gap with a W.
            reach = now + self._rule.patience * self._seconds(best[1], best[2])
            gap_end = min((at for u, at in coming if u < best[0] and at < reach), default=inf)
            if gap_end == inf:
                return best[1:]
        elif coming:
            # Nothing can run yet; the next arrival ends the gap.
            gap_end = min(at for _, at in coming)
        return self._weight_that_fits(rank, now, gap_end)

    def _candidates(self, rank: int) -> list[tuple[tuple[float, ...], str, int, float]]:
        """Return the next F and G of each stage known to come, with urgency and arrival."""
        found = []
        for stage in self._stages_of[rank]:
            microbatch = self._gradients[stage]
            if microbatch < self._forwards[stage]:  # its own F is done, for the rank is free
                arrivals = self._gradient_at[stage]
                if stage == self._num_stages - 1:
                    found.append((self._urgency("G", stage, microbatch), "G", stage, 0.0))
                elif microbatch < len(arrivals):
                    urgency = self._urgency("G", stage, microbatch)
                    found.append((urgency, "G", stage, arrivals[microbatch]))
            microbatch = self._forwards[stage]
            if microbatch < len(self._forward_at[stage]) and self._is_safe(rank, stage):
                urgency = self._urgency("F", stage, microbatch)
                found.append((urgency, "F", stage, self._forward_at[stage][microbatch]))
        return found

    def _urgency(self, kind: str, stage: int, microbatch: int) -> tuple[float, ...]:
        # Compared like numbers: False, the preferred kind, comes first.
        first = (kind == "G") != self._rule.backward_first
        nearest_end = stage if kind == "G" else -stage
        if self._rule.oldest_first:
            return (first, microbatch, nearest_end)
        return (first, nearest_end, microbatch)

    def _seconds(self, kind: str, stage: int) -> float:
        return self._forward_s[stage] if kind == "F" else self._gradient_s[stage]

    def _weight_that_fits(self, rank: int, now: float, gap_end: float) -> tuple[str, int] | None:
        """Return the longest W to run in the gap before `gap_end`, or None.

        It may run over by the part of itself that the rule is not patient for: with patience
        1 it has to end in time, with 0 any W is better than to idle.
        """
        if not self._rule.split_backward:
            return None
        pending = [s for s in self._stages_of[rank] if self._weights[s] < self._gradients[s]]
        patience = self._rule.patience
        fitting = [s for s in pending if now + patience * self._weight_s[s] <= gap_end]
        if not fitting:
            return None
        return "W", max(fitting, key=lambda s: (self._weight_s[s], -self._weights[s]))

    def _is_safe(self, rank: int, stage: int) -> bool:
        """Whether the rank's microbatches could still finish, oldest first, after this F."""
        stages = self._stages_of[rank]
        free = self._limit_bytes[rank] - self._held_bytes[rank] - self._live_bytes[stage]
        # Below 0 by more than sums of bytes may be off.
        if free < -1e-9 * self._limit_bytes[rank]:
            return False
        # (With one stage, no microbatch on the rank waits for memory of the rank.)
        if len(stages) == 1:
            return True
        most = sum(self._live_bytes[s] for s in stages)
        started = {s: self._forwards[s] + (s == stage) for s in stages}
        ended = self._weights if self._rule.split_backward else self._gradients
        for microbatch in range(min(ended[s] for s in stages), max(started.values())):
            # Room for a whole microbatch: this and all younger ones can pass one after the other.
            if free >= most:
                return True
            missing = sum(self._live_bytes[s] for s in stages if started[s] <= microbatch)
            if missing > free + 1e-9 * most:
                return False
            # It gets through to its end, and frees what it holds on all of the rank's stages.
            free += sum(self._live_bytes[s] for s in stages if ended[s] <= microbatch < started[s])
        return True

    def _start(self, kind: str, stage: int, rank: int, now: float) -> None:
        if kind == "F":
            counter, job_kind, seconds = self._forwards, JobKind.FORWARD, self._forward_s[stage]
            self._held_bytes[rank] += self._live_bytes[stage]
        elif kind == "G":
            counter, seconds = self._gradients, self._gradient_s[stage]
            split = self._rule.split_backward
            job_kind = JobKind.BACKWARD_INPUT if split else JobKind.FULL_BACKWARD
        else:
            counter, seconds = self._weights, self._weight_s[stage]
            job_kind = JobKind.BACKWARD_WEIGHT
        # After I a microbatch's activations stay: W multiplies them by the output gradients.
        if kind == "W" or job_kind is JobKind.FULL_BACKWARD:
            self._held_bytes[rank] -= self._live_bytes[stage]
        self.rows[rank].append(
            Job(kind=job_kind, stage_index=stage, microbatch_index=counter[stage])
        )
        counter[stage] += 1
        end = now + seconds
        self._busy_until[rank] = end
        heapq.heappush(self._wake_ups, (end, rank))
        # The arrival is known from the start on: the
        # receiving rank can wait for it, or fill the gap.
        if kind == "F" and stage + 1 < self._num_stages:
            self._announce(self._forward_at, stage + 1, end + self._into_s[stage + 1])
        elif kind == "G" and stage > 0:
            self._announce(self._gradient_at, stage - 1, end + self._back_s[stage - 1])

    def _announce(self, arrivals: list[list[float]], stage: int, arrival: float) -> None:
        arrivals[stage].append(arrival)
        heapq.heappush(self._wake_ups, (arrival, self._placed[stage]))
