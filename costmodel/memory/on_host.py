"""What a plan offloads to the host's memory: optimizer state, saved activations, both, nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class OnHost:
    """What all plans of one search put on the host."""

    optimizer: bool = False
    activations: bool = False

    def live(self, in_flight: Any) -> Any:
        """Return how many microbatches' activations a device holds at least at its worst sample.

        With offload these are the microbatch in work and the one that is copied out or in. This
        is a bound: the exact walk also counts microbatches that wait too briefly to be offloaded.
        """
        if not self.activations:
            return in_flight
        return np.minimum(in_flight, 2)


NOTHING = OnHost()
