"""Lower bound of a step with interleaved stages between given boundaries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.partition.chain_problem import Floats
from search.space.configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds that bound a step, by stage (`tail_s`: by rank).

    Attributes:
        forward_s: forward of a microbatch.
        backward_s: its backward, with what is recomputed.
        ahead_s: the part of the backward that may run after the gradient is sent.
        transfer_s: transfer of activations into the stage; a single 0: not counted.
        back_transfer_s: transfer of the gradient back from the stage; a single 0: not counted.
        tail_s: gradient exchange and optimizer after the rank's last job.
    """

    forward_s: Floats
    backward_s: Floats
    ahead_s: Floats
    transfer_s: Floats
    back_transfer_s: Floats
    tail_s: Floats


def least_end_s(
    configuration: Configuration,
    homes: NDArray[np.intp],
    seconds: StageSeconds,
    copies_s: Floats | float = 0.0,
) -> float:
    """Return when a step ends at the earliest, whatever job table of the schedule's kind is run.

    end(r) = fill(r) + m * work(r) + copies(r) + drain(r) + tail

        fill    forwards and transfers of the first microbatch through the stages before rank r's
                first one: until then rank r has nothing to run
        work    forwards and backwards of all stages of the rank, for each of m microbatches
        copies  by how much copies of activations to the host and back lengthen the rank's jobs
        drain   backwards and transfers of the last gradient through those stages to rank 0, without
                what each stage may put after it sends its gradient; then rank 0 runs its own rest.
                0 where weight gradients are jobs of their own, which may come last
        tail    gradient exchange and optimizer, of the rank itself or, after a drain, of rank 0
    """
    pp = configuration.pp
    forward_s, backward_s, ahead_s = seconds.forward_s, seconds.backward_s, seconds.ahead_s
    work = np.bincount(homes, weights=forward_s + backward_s)
    # Rank r's first stage is r under loop and fold placements alike.
    fill = forward_s.cumsum()[:pp] - forward_s[:pp] + seconds.transfer_s.cumsum()[:pp]
    own = fill + configuration.num_microbatches * work + copies_s
    ends = own + seconds.tail_s
    if not configuration.splits_backward:
        inputs = backward_s - ahead_s
        drain = inputs.cumsum()[:pp] - inputs[:pp] + seconds.back_transfer_s.cumsum()[:pp]
        drain += ahead_s[0]
        # Whichever of a rank's stages its last backward is of.
        most_ahead = np.zeros(pp)
        np.maximum.at(most_ahead, homes, ahead_s)
        ends = np.maximum(ends, own - most_ahead + drain + seconds.tail_s[0])
    return float(ends.max())
