"""What a step takes at least where backwards are split: the dual of a linear program.

For schedules that wait for the first and the last round trip and state how many weight gradients
come last (ZB-H1), however blocks are cut into stages. Legend: f, i, w the seconds of a stage's F, I
and W job; m microbatches; S stages; k_s = min(m, warmup of stage s) - 1 the forwards that fit into
its first round trip; l_s its late weight gradients. Each stage s has two paths
(`search.partition.chain_paths`), to its own end and back to stage 0:

    sum over j < s of f_j  +  m (f + i + w)_s - k_s f_s  +  sum over j > s of (f + i)_j
    the same  +  sum over j < s of i_j  -  l_s w_s  +  w_0

The first backward returns when the microbatch has passed the later stages and back, meanwhile k_s
more forwards are done; l_s weight gradients come after the last gradient is sent on. A step is no
shorter than any mean of paths, of weights y >= 0: than sum over j of (A f + B i + C w)_j, A, B,
C >= 0 being y's means of the coefficients above. Wherever a block lies, it adds the least of
(A f + B i + C w) over j at least; the first block lies on stage 0 and the last on stage S - 1. The
y taken makes all stages alike for blocks of the chain's mean f : i : w.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from planner.schedule import JobOrder
from search.partition.chain_problem import Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class ZeroBubbleBound:
    """The bound for blocks whose jobs take `seconds` (n, 3): forward, backward's input gradients
    and weight gradients.
    """

    seconds: Floats

    def least_step_s(self, order: JobOrder, num_microbatches: int, more_s: float = 0.0) -> float:
        """Return a step time that no boundaries can beat under an order of jobs; `more_s` is what
        all stages' forwards and backwards of a microbatch take beside their blocks.
        """
        return max(
            self._mean_of(coefficients, more_s)
            for coefficients in _means(order, num_microbatches, self._mean_block)
        )

    def _mean_of(self, coefficients: Floats, more_s: float) -> float:
        first, last = self.seconds[0] @ coefficients[:, 0], self.seconds[-1] @ coefficients[:, -1]
        kinds, counts = self._inner_kinds
        inner = counts @ (kinds @ coefficients).min(axis=1)
        return float(first + inner + last + more_s * coefficients[:2].min())

    @cached_property
    def _mean_block(self) -> tuple[float, ...]:
        """The parts of f, i and w in the chain's seconds, roughly."""
        total = self.seconds.sum(axis=0)
        return tuple(np.round(total / total.sum(), 3).tolist())

    @cached_property
    def _inner_kinds(self) -> tuple[Floats, Floats]:
        kinds, counts = np.unique(self.seconds[1:-1], axis=0, return_counts=True)
        return kinds.reshape(-1, 3), counts.astype(float)


@lru_cache(maxsize=4096)
def _means(order: JobOrder, m: int, mean_block: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return (A, B, C) of the header, by stage, for either kind of paths."""
    pp = len(order.warmup)
    stage, other = np.arange(pp)[:, None], np.arange(pp)[None, :]
    before, own, after = (1.0 * (other < stage), 1.0 * (other == stage), 1.0 * (other > stage))
    fitting = np.minimum(m, order.warmup)[:, None] - 1
    ends = np.stack([before + after + (m - fitting) * own, after + m * own, m * own])
    returns = ends.copy()
    returns[1] += before
    returns[2] -= np.array(order.late_weights)[:, None] * own
    returns[2, :, 0] += 1.0
    means = []
    for paths in (ends, returns):
        matrix = np.tensordot(np.array(mean_block), paths, axes=1)
        # The dual: weights of the paths with which every stage's mean seconds are equal.
        weights = np.maximum(0.0, np.linalg.solve(matrix.T, np.ones(pp)))
        means.append(np.tensordot(weights / weights.sum(), paths, axes=(0, 1)).reshape(3, pp))
    return means[0], means[1]
