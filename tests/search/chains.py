"""Chains of made-up blocks for the searchers: sums over blocks, nothing of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.language.schedule import find_schedule
from planner.language.schedule.job_order import JobOrder
from search.partition.chain_problem import ChainProblem, LeastNeeds
from search.partition.chain_windows import Window


@dataclass(frozen=True, eq=False)
class SumBand:
    start: np.ndarray
    end: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    tail_s: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    resident: np.ndarray

    def least_bytes(self, in_flight: int, choice: int) -> np.ndarray:
        return self.resident + in_flight * self.kept[choice] + self.working[choice]

    def on_rank(self, rank, part) -> tuple[np.ndarray, np.ndarray]:
        fits = np.stack(
            [
                self.least_bytes(rank.in_flight, choice)[part] <= rank.limit_bytes
                for choice in range(len(self.kept))
            ]
        )
        for known in rank.infeasible:
            fits[known.choice] &= ~known.holds(self.start, self.end)[part]
        return np.stack([own[part] for own in self.backward_s]), fits

    def until(self, rank, choice: int, part) -> np.ndarray:
        """No choice depends on the block."""
        return np.zeros_like(self.start[part])


@dataclass(frozen=True, eq=False)
class SumStages:
    """Arrays by block; those of two axes have the recompute choice first. Kept bytes are of
    one microbatch, working bytes a peak; `tied` bytes count once when the first and the last
    block share a stage."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    resident: np.ndarray
    tail_s: np.ndarray
    tied: float = 0.0

    @property
    def num_blocks(self) -> int:
        return self.forward_s.shape[-1]

    @cached_property
    def _largest_working(self) -> np.ndarray:
        """By (choice, first block, last block)."""
        rows = [np.maximum.accumulate(self.working[:, i:], -1) for i in range(self.num_blocks)]
        return np.stack([np.pad(row, ((0, 0), (i, 0))) for i, row in enumerate(rows)], axis=1)

    def cost_window(self, window: Window) -> SumBand:
        return self.costs_of(*np.broadcast_arrays(window.start, window.end))

    def costs_of(self, start: np.ndarray, end: np.ndarray) -> SumBand:

        def sums(values: np.ndarray) -> np.ndarray:
            total = np.concatenate([0 * values[..., :1], np.cumsum(values, axis=-1)], axis=-1)
            return total[..., end] - total[..., start]

        whole = (start == 0) & (end == self.num_blocks)
        return SumBand(
            start=start,
            end=end,
            forward_s=sums(self.forward_s),
            backward_s=sums(self.backward_s),
            tail_s=sums(self.tail_s),
            kept=sums(self.kept),
            working=self._largest_working[:, start, end - 1],
            resident=sums(self.resident) - self.tied * whole,
        )


SCHEDULES = ("1f1b", "fthenb", "naive", "zb_h1")
"""Schedules of one stage a rank that state their order of jobs."""


def stated(schedule: str, pp: int, num_microbatches: int) -> JobOrder:
    """What a schedule states of its order of jobs."""
    return find_schedule(schedule).job_order(pp=pp, num_microbatches=num_microbatches)


def chain(
    stages: SumStages, *, in_flight, m: int, limit: float, order=None, transfer_s=None, ahead=0.0
):
    """`ahead` is the part of each backward that may come after its gradient is sent on, where
    backward is split half of it; the order of jobs is 1F1B's if none is given.
    """
    order = order or stated("1f1b", len(in_flight), m)
    n = stages.num_blocks

    def sums(values: np.ndarray) -> list[float]:
        return [0.0, *np.cumsum(values).tolist()]

    needs = LeastNeeds(
        backward_s=tuple(map(sums, stages.backward_s)),
        kept_bytes=tuple(map(sums, stages.kept)),
        param_bytes=sums(stages.resident),
        lines=lambda live: ((live, 1.0, limit + stages.tied + 1e-9),),
    )
    transfers = np.zeros(n + 1) if transfer_s is None else transfer_s
    return ChainProblem(
        stages=stages,
        block_forward_s=stages.forward_s.min(axis=0),
        block_backward_s=stages.backward_s.min(axis=0),
        block_weight_s=(0.5 if order.splits_backward else ahead) * stages.backward_s[0],
        transfer_s=transfers,
        back_transfer_s=transfers / 2,
        in_flight=tuple(in_flight),
        num_microbatches=m,
        memory_limit_bytes=limit,
        needs=needs,
        order=order,
        choices=("none", "full")[: stages.forward_s.shape[0]],
    )


def random_chain(
    rng: np.random.Generator, schedule: str = "", *, is_stated: bool | None = None
) -> ChainProblem:
    """A chain under a schedule, or any of them; unless `is_stated`, its order of jobs may be one of
    which nothing is known.
    """
    n = int(rng.integers(1, 9))
    stages = int(rng.integers(1, min(n, 4) + 1))
    m = int(rng.integers(stages, 12))
    forward = rng.uniform(0.1, 3.0, n) if rng.integers(2) else rng.integers(1, 4, n).astype(float)
    backward = 2 * forward * rng.uniform(0.8, 1.2)
    kept, inputs = rng.uniform(1, 9, n), rng.uniform(0.1, 1, n)
    both = [np.stack(pair) for pair in (
        (forward, forward), (backward, backward + forward), (kept, inputs), (0 * kept, kept),
    )]  # fmt: skip
    if rng.integers(2):
        both = [pair[:1] for pair in both]
    schedule = schedule or str(rng.choice(SCHEDULES))
    order = stated(schedule, stages, m)
    if not (is_stated if is_stated is not None else rng.integers(3)):
        order = JobOrder(splits_backward=order.splits_backward)
    transfers = rng.uniform(0, 0.5, n + 1)
    transfers[0] = 0.0
    return chain(
        SumStages(
            *both,
            resident=rng.uniform(3, 30, n),
            tail_s=rng.uniform(0, 4.0, n),
            tied=2.0 * float(rng.integers(2)),
        ),
        in_flight=[m if schedule == "fthenb" else min(m, stages - s) for s in range(stages)],
        m=m,
        limit=float(rng.uniform(30, 160)),
        order=order,
        transfer_s=transfers,
        ahead=float(rng.choice([0.0, 0.5])),
    )


def uniform_chain(
    n: int, stages: int, m: int, *, limit: float = float("inf"), tail_s: float = 0.0
) -> ChainProblem:
    """Blocks of 1 s forward, 2 s backward, 1 B kept per microbatch and 4 B resident."""
    ones = np.ones((1, n))
    return chain(
        SumStages(ones, 2 * ones, ones, 0 * ones, 4 * ones[0], tail_s * ones[0]),
        in_flight=[min(m, stages - s) for s in range(stages)],
        m=m,
        limit=limit,
    )
