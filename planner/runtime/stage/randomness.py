"""Random numbers of a step: equal on ranks with the same samples and stage, different elsewhere.

Ranks with the same samples hold replicas of one computation and must draw the same dropout masks
(ops on shards take streams of their own from there); other ranks work on other samples or other
layers. The stream is the engine's own: the script's generator, which it
may use to choose equal batches on every rank, is saved before a step and restored after it.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from planner.runtime.process.device import forked_generators, is_accelerator, of
from planner.runtime.process.groups.mesh import Mesh

_PRIME = 1_000_003

_streams: weakref.WeakSet[RandomStream] = weakref.WeakSet()
"""Those of this process: one for each engine that draws."""


class RandomStream:
    """A rank's stream. Mutable: it advances with each step."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        """`seed` is the same on every rank."""
        # A global rank, since pp ranks may cut the batch differently.
        self.seed, self.place = seed, mesh.first_of_samples()
        self._places = mesh.firsts_of_samples()
        self._device = mesh.device
        self._begin(seed)
        _streams.add(self)

    def _begin(self, seed: int) -> None:
        with forked_generators(self._device):
            # A large stride: with a nearby seed no rank has the stream of another.
            torch.manual_seed((seed + _PRIME * self.place) % 2**63)
            self._state = read_generators(self._device)

    def state(self) -> list[Tensor]:
        """Return where the stream is."""
        return [state.clone() for state in self._state]

    def close(self) -> None:
        """Leave the seed to engines that come."""
        _streams.discard(self)

    def restore(self, seed: int, states: Mapping[int, list[Tensor]], step: int) -> None:
        """Go on where streams were, given by place, after so many steps.

        Other places, or another kind of device, have no such streams: theirs begin anew, from the
        seed and the step, so that no number is drawn twice.
        """
        self.seed = seed
        if set(states) == self._places and len(states[self.place]) == len(self._state):
            self._state = [state.clone() for state in states[self.place]]
        else:
            self._begin(random.Random(f"{seed} {step}").getrandbits(63))

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from the stream inside; the script's generators come back unchanged."""
        with forked_generators(self._device):
            write_generators(self._device, self._state)
            yield
            self._state = read_generators(self._device)


def unused_seed(seed: int) -> int:
    """Return a seed that no engine of this process draws from: `seed`, or what follows from it.

    Two engines of one script, such as students that teach each other, would else drop the same.
    """
    if any(stream.seed == seed for stream in _streams):
        gc.collect()  # an engine that the script has let go may wait for it
    used = {stream.seed for stream in _streams}
    found, number = seed, 1
    while found in used:
        found, number = random.Random(f"{seed} engine {number}").getrandbits(63), number + 1
    return found


def read_generators(device: torch.device) -> list[Tensor]:
    """Return the states of the default generators of the CPU and of an accelerator, if any."""
    return [
        torch.get_rng_state(),
        *(of(each).get_rng_state(each) for each in _accelerators(device)),
    ]


def write_generators(device: torch.device, states: list[Tensor]) -> None:
    """Set the generators to what `read_generators` returned."""
    torch.set_rng_state(states[0])
    for each, state in zip(_accelerators(device), states[1:], strict=True):
        of(each).set_rng_state(state, each)


def _accelerators(device: torch.device) -> list[torch.device]:
    return [device] if is_accelerator(device) else []
