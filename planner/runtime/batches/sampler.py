"""What a script hands to `Engine.step`, and in which order samples are read. Free of torch.

A step takes the same global batch on every rank, or on each the part of its replica:

    sampler = planner.ShardedSampler(len(dataset), batch_size=plan.global_batch)
    loader = DataLoader(dataset, batch_size=plan.global_batch, sampler=sampler)
    engine.step(batch)

    for part in engine.loader(dataset): engine.step(part)
    engine.step(planner.OwnPart(batch))    # of a loader of your own
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from planner.errors import ModelError


class ShardedSampler:
    """Indices of one shard of a dataset, in an order drawn anew each epoch. Mutable: the epoch.

    Sample i of an epoch's order goes to shard i % num_shards. Neighbours that belong `together`
    stay so (give ``plan.unit.size`` where ``plan.unit.runs`` is 1). Where the data run short of
    whole batches on every shard, the order begins again (as often as it takes), so that all
    shards and all batches are equally long and no sample is left out.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        together: int = 1,
    ) -> None:
        """`batch_size` is what the loader draws from this shard at a time. Raises ModelError for
        an empty dataset, or a shard that there is not, or numbers that `together` does not divide.
        """
        if num_samples < 1 or batch_size < 1:
            raise ModelError(
                f"num_samples={num_samples} and batch_size={batch_size} must both be at least 1"
            )
        if not 0 <= shard_id < num_shards:
            raise ModelError(
                f"shard_id={shard_id} is not one of the {num_shards} shards; use 0 to "
                f"{num_shards - 1}"
            )
        if together < 1 or num_samples % together or batch_size % together:
            raise ModelError(
                f"together={together} must divide num_samples={num_samples} and "
                f"batch_size={batch_size}"
            )
        self._together = together
        self._num_samples, self._batch_size = num_samples, batch_size
        self._num_shards, self._shard_id = num_shards, shard_id
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        self._first = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; without it every pass has the same."""
        self._epoch, self._first = epoch, 0

    def start_at(self, samples: int) -> int:
        """Begin the next pass where so many samples were trained on (`Engine.samples`, counted
        over all shards and passes); return its epoch.

        It holds for any number of shards, if batches over all shards are of one size.
        """
        self._epoch, done = divmod(samples, len(self) * self._num_shards)
        self._first = done // self._num_shards
        return self._epoch

    def __len__(self) -> int:
        """Samples of one pass over this shard."""
        together = self._num_shards * self._batch_size
        return -(-self._num_samples // together) * self._batch_size

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of one pass."""
        each = self._together
        order = list(range(self._num_samples // each))
        if self._shuffle:
            random.Random(f"{self._seed} {self._epoch}").shuffle(order)
        first, self._first = self._first, 0
        for turn in range(first, len(self)):
            group, place = divmod(turn, each)
            yield order[(group * self._num_shards + self._shard_id) % len(order)] * each + place


@dataclass(frozen=True)
class OwnPart:
    """A batch that holds the samples of one replica alone, for `Engine.step` and `evaluate`.

    Attributes:
        batch: those samples in the structure that the plan was made with, or None on a rank whose
            stages read nothing of it; tensors that its stages do not read may be None, too.
        agreed: what all ranks know of all parts already; None for a part that `Engine.loader` has
            not made, of which the step asks.
    """

    batch: Any = None
    agreed: Any = field(default=None, repr=False)
