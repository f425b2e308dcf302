"""What is left of a long training's time on nodes that fail, or are slow for a while.

    M = D / n                                       the job's mean time between failures
    E(t) = M e^(R/M) (e^((t + d)/M) - 1)            expected seconds until t of work are saved
    best t:  1 - t/M = e^(-(t + d)/M)               least E(t) / t; about sqrt(2 d M) where d << M
    busy = 1 - e^(-n L / S)                         part of the time in which some node is slow
    speed = 1 - busy (1 - 1/f)
    goodput = speed t / E(t)                        useful work in a second

    n  nodes of the job, which waits for each of them
    D  mean seconds between failures of a node, which come at random (a Poisson process)
    d  seconds by which a checkpoint stalls the training
    R  seconds from a failure until the training is where the last checkpoint was: found, nodes
       replaced, processes started, checkpoint read; a failure meanwhile begins it again. A
       checkpoint that is written beside the training is of use when it is written: add that, too
    t  seconds of work between checkpoints
    S  mean seconds between slow spells of a node, L their mean seconds, f a step with a slow node
       over one without

Sources: Young, A first order approximation to the optimum checkpoint interval, 1974 (the square
root); Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006
(E and its optimum); the part of the time in which some node is slow is that in which a queue with
as many servers as come (M/G/infinity) is not empty: spells of any distribution.

Not said: failures that come together (a switch, a room), and restarts with fewer nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1

from planner.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How nodes fail and what a checkpoint and a restart take."""

    node_mtbf_s: float
    """Mean seconds between failures of one node (D)."""
    checkpoint_s: float
    """Seconds by which a checkpoint stalls the training (d)."""
    restart_s: float
    """Seconds from a failure to the work going on (R)."""
    slow_mtbf_s: float = float("inf")
    """Mean seconds between slow spells of one node (S)."""
    slow_s: float = 0.0
    """Mean seconds of a slow spell, until the node is better or replaced (L)."""
    slow_factor: float = 1.0
    """A step with a slow node over one without (f)."""

    def __post_init__(self) -> None:
        """Raise PlanError for times that cannot be."""
        for name in ("node_mtbf_s", "checkpoint_s", "slow_mtbf_s"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name):g}; it must be above 0 seconds")
        if not (self.restart_s >= 0 and self.slow_s >= 0 and self.slow_factor >= 1):
            raise PlanError(
                f"restart_s {self.restart_s:g}, slow_s {self.slow_s:g} and slow_factor "
                f"{self.slow_factor:g} were given; seconds are 0 or more, the factor 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What a job makes of its time, in parts of it that add up to 1 with `useful`."""

    mtbf_s: float
    """Mean seconds between failures of the job (M)."""
    interval_s: float
    """Seconds of work between checkpoints (t)."""
    useful: float
    """Work that lasts, at the speed without slow nodes."""
    checkpoints: float
    """Stalled by checkpoints that lasted."""
    lost: float
    """Work, and checkpoints, between the last checkpoint and a failure."""
    restarting: float
    """Nobody trains."""
    slow: float
    """Work takes longer than without slow nodes."""


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Return the seconds of work between checkpoints with the most goodput.

    1 - x - e^(-x - d/M) falls from above 0 to below over x = t/M in 0 .. 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        # Bisection on t/M; 60 halvings leave less than a float resolves.
        if 1 - middle > exp(-middle - checkpoint_s / mtbf_s):
            low = middle
        else:
            high = middle
    return mtbf_s * (low + high) / 2


def goodput(failures: Failures, num_nodes: int, *, interval_s: float | None = None) -> Goodput:
    """Return what a job on so many nodes makes of its time; with the best interval if not given.

    All is 0 but `lost` and `restarting` where checkpoints hardly ever get done.
    """
    mtbf_s = failures.node_mtbf_s / num_nodes
    interval_s = interval_s or best_interval_s(mtbf_s, failures.checkpoint_s)
    # A failure's restart lasts R, or until the next failure: M (1 - e^(-R/M)) on average.
    restarting = -expm1(-failures.restart_s / mtbf_s)
    # Work and checkpoint are lost together when a failure comes before the checkpoint is written.
    segment = (interval_s + failures.checkpoint_s) / mtbf_s
    working = 0.0
    if segment < MOST_SEGMENT:
        # t / E(t), as e^(-R/M) is 1 - `restarting`.
        working = interval_s / mtbf_s * (1 - restarting) / expm1(segment)
    # Each saved interval of t has stalled d.
    checkpoints = working * failures.checkpoint_s / interval_s
    # M/G/infinity: the probability that at least one of the nodes is in a slow spell.
    busy = -expm1(-num_nodes * failures.slow_s / failures.slow_mtbf_s)
    slow = working * busy * (1 - 1 / failures.slow_factor)
    return Goodput(
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        useful=working - slow,
        checkpoints=checkpoints,
        lost=1 - restarting - working - checkpoints,
        restarting=restarting,
        slow=slow,
    )


MOST_SEGMENT = 700.0
"""Mean times between failures of an interval whose exponential is still a float."""
