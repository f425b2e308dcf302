"""How ranks spent the steps of a timeline: jobs, what collectives in them expose, and no job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.timeline.spans import (
    BESIDE,
    COLLECTIVE,
    DEAL,
    JOB_KINDS,
    OPTIMIZER,
    REMAKE,
    RankTimeline,
    Span,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBubble:
    """How one rank spent one step, from the first job anywhere to the last one's end.

    Jobs are those of the table: the optimizer's, which may run beside other ranks' backwards, is
    apart.
    """

    rank: int
    """The rank."""
    pp_rank: int
    """Its pipeline rank."""
    step: int
    """Number of the step, from 0."""
    step_s: float
    """Seconds from the first job of any rank to the last one's end."""
    compute_s: float
    """Seconds in jobs, without what collectives inside them expose."""
    collective_s: float
    """Seconds that those collectives expose: beside which no weight gradients are made."""
    optimizer_s: float
    """Seconds of the optimizer's job, after the rank's last job of the table."""

    @property
    def bubble_s(self) -> float:
        """Time in no job."""
        return self.step_s - self.compute_s - self.collective_s

    @property
    def bubble_fraction(self) -> float:
        """Part of the step in no job."""
        return self.bubble_s / self.step_s


def dealt_by_work(timeline: Sequence[RankTimeline]) -> list[str]:
    """Return how documents of the last recorded batch were dealt, in words; nothing where none
    were.
    """
    # (All ranks have one order.)
    return [span.name for span in timeline[0].spans if span.kind == DEAL][-1:] if timeline else []


def bubbles(timeline: Iterable[RankTimeline]) -> tuple[RankBubble, ...]:
    """Return how every rank spent every step, by step, then rank."""
    timeline = tuple(timeline)
    jobs: dict[tuple[int, int], list[Span]] = defaultdict(list)
    collective_s: dict[tuple[int, int], float] = defaultdict(float)
    optimizer_s: dict[tuple[int, int], float] = defaultdict(float)
    for line in timeline:
        for span in line.spans:
            if span.kind in JOB_KINDS or span.kind == REMAKE:
                jobs[span.step, line.rank].append(span)
            elif span.kind == COLLECTIVE and span.microbatch >= 0:
                collective_s[span.step, line.rank] += span.end_s - span.start_s - span.hidden_s
            elif span.kind == BESIDE:
                collective_s[span.step, line.rank] -= span.end_s - span.start_s
            elif span.kind == OPTIMIZER:
                optimizer_s[span.step, line.rank] += span.end_s - span.start_s
    result = []
    for step in sorted({step for step, _ in jobs}):
        bounds = [
            (span.start_s + line.clock_offset_s, span.end_s + line.clock_offset_s)
            for line in timeline
            for span in jobs.get((step, line.rank), [])
        ]
        if not bounds:
            continue
        step_s = max(end for _, end in bounds) - min(start for start, _ in bounds)
        for line in timeline:
            spans = jobs.get((step, line.rank), [])
            inside_s = collective_s.get((step, line.rank), 0.0)
            result.append(
                RankBubble(
                    rank=line.rank,
                    pp_rank=line.pp_rank,
                    step=step,
                    step_s=step_s,
                    compute_s=sum(s.end_s - s.start_s for s in spans) - inside_s,
                    collective_s=inside_s,
                    optimizer_s=optimizer_s.get((step, line.rank), 0.0),
                )
            )
    return tuple(result)
