"""Rows of the rank whose experts are picked most, over the mean of all ranks of an exchange.

Rows that ranks receive in training are spread log-normally (DeepEP's pull request 393, of tokens
that ranks receive). Of n ranks, each with X = exp(s Z - s^2/2) times the mean, Z normal and s the
imbalance, the fullest has

    expected    E[max X] = n E[Phi(Z + s)^(n - 1)]
    quantile q  exp(s Phi^-1(q^(1/n)) - s^2/2)

times the mean of t k / E rows an expert (t: tokens, k: experts a token, E: experts of a rank's
place), never more than all ranks' rows on one. All ranks wait for it, layer by layer, so the
expectation sets time; memory is held by the quantile with which a plan must fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp
from statistics import NormalDist

from costmodel.execution.execution import Execution
from planner.errors import PlannerError
from planner.language.graph import Program
from planner.language.lowering.experts import grouped_products
from planner.language.ops.record import packet_of
from profiles import Profile

_NORMAL = NormalDist()
_FARTHEST, _STEPS = 8.0, 1600
"""Standard deviations up to which the expectation is summed, and points of the sum."""

GIVEN = "given"

LARGEST = 3.0
"""Imbalances above this put all rows on one rank of any number that is used."""


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How uneven a router deals rows to ranks."""

    sigma: float
    """Standard deviation of the logarithm of a rank's rows; 0: all ranks receive as many."""
    odds: float = 0.5
    """With which the fullest rank has no more rows than its memory is counted for."""
    source: str = "the runtime's record"
    """What it is from."""

    def of_time(self, ranks: int, *, most: float) -> float:
        """Return the rows that the fullest of so many ranks is expected to have, over the mean; at
        most `most`.
        """
        return min(most, expected_fullest(self.sigma, ranks))

    def of_memory(self, ranks: int, *, most: float) -> float:
        """Return the rows that the fullest of so many ranks stays within with the odds, over the
        mean; at most `most`.
        """
        return min(most, max(1.0, fullest_within(self.sigma, ranks, self.odds)))


def check_imbalance(sigma: float | None) -> None:
    """Raise PlannerError for an imbalance that is none; None is not given."""
    if sigma is not None and not 0 <= sigma <= LARGEST:
        raise PlannerError(
            f"`expert_imbalance` {sigma:g} was given; it is the standard deviation of the "
            f"logarithm of rows a rank, 0 (forced to be even) to {LARGEST:g}: "
            "`expert_imbalance` 0.66 is natural routing in fine-tuning"
        )


def imbalance_of_step(
    execution: Execution, profile: Profile, *, given: float | None = None, odds: float = 0.5
) -> Imbalance:
    """Return how uneven the routers of a runtime's steps are: as `given`, as recorded runs of the
    profile told, or as the runtime's record says.
    """
    if given is not None:
        return Imbalance(given, odds, GIVEN)
    if profile.expert_imbalance is not None:
        return Imbalance(profile.expert_imbalance, odds, "recorded runs")
    return Imbalance(execution.expert_imbalance, odds)


@lru_cache(maxsize=4096)
def expected_fullest(sigma: float, ranks: int) -> float:
    """Return the expected largest of so many draws of a log-normal with mean 1."""
    if sigma == 0 or ranks == 1:
        return 1.0
    step = 2 * _FARTHEST / _STEPS
    points = (-_FARTHEST + step * (at + 0.5) for at in range(_STEPS))
    density = sum(_NORMAL.pdf(z) * _NORMAL.cdf(z + sigma) ** (ranks - 1) for z in points)
    return max(1.0, ranks * density * step)


@lru_cache(maxsize=4096)
def fullest_within(sigma: float, ranks: int, odds: float) -> float:
    """Return what the largest of so many draws of it is below with these odds."""
    if sigma == 0 or ranks == 1:
        return 1.0
    return exp(sigma * _NORMAL.inv_cdf(odds ** (1 / ranks)) - sigma**2 / 2)


def imbalance_of(fullest: float, ranks: int) -> float:
    """Return the imbalance under which the fullest of so many ranks has so many times the mean."""
    low, high = 0.0, LARGEST
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_fullest(middle, ranks) < fullest else (low, middle)
    return low if fullest > 1 else 0.0


def most_rows(program: Program, ranks: int) -> float:
    """Return the rows that a rank of so many may receive at most, over the mean: a token goes to
    different experts, of which a rank has a part. `program` is a block's, bound and unlowered.
    """
    products = grouped_products(program)
    if not products or ranks == 1:
        return 1.0
    number = program.tensor[products[0].inputs[1]].shape_at(1)[0]
    picked = experts_per_token(program)
    return min(picked, max(1, number // ranks)) * ranks / picked


def experts_per_token(program: Program) -> int:
    """Return how many experts a block's router picks for each token; 1 where it has none."""
    picks = [op for op in program.ops if packet_of(op.target) == "topk"]
    return int(program.tensor[picks[-1].outputs[0]].shape_at(1)[-1]) if picks else 1
