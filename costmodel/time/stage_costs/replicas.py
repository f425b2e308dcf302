"""What replicas of a stage exchange, and their update, for many stages at once.

Both depend on a stage's parameters only: their bytes, tensors and blocks. A chain of few classes
has few kinds of such stages, so each kind is priced once and the answers are kept in the
`CostCache`, for the search and the estimate alike.
"""

from __future__ import annotations

from dataclasses import fields
from math import ceil
from operator import attrgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from costmodel.cache import CostCache
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_exchange import executed_exchange
from costmodel.time.communication import BUCKET_BYTES, DataParallelSeconds, data_parallel_seconds
from costmodel.time.update import RankUpdate, rank_update
from costmodel.topology import data_group
from planner.layout.axes import Degrees
from planner.plan.replication import Replication
from profiles import Group, Lookup, Profile

Floats = NDArray[np.float64]
_EXCHANGE = tuple(f.name for f in fields(DataParallelSeconds))
_exchange_of = attrgetter(*_EXCHANGE)


class ReplicaPrices:
    """Prices of exchange and update under one replication, of stages whose replicas have ranks on
    this mesh. Mutable: it remembers.
    """

    def __init__(self, costs: CostCache, replication: Replication, replica: Degrees) -> None:
        self._costs, self._replication = costs, replication
        self._group = data_group(costs.profile.cluster, replica, replicas=replication.replicas)
        self._updates: dict[tuple[float, float], RankUpdate] = {}
        self._stages: dict[tuple[float, ...], tuple[float, ...]] = {}

    def update(self, param_bytes: float, num_params: float) -> RankUpdate:
        """Return the update of a rank whose stages have these parameters together."""
        key = float(param_bytes), float(num_params)
        if key not in self._updates:
            self._updates[key] = rank_update(
                self._costs.profile,
                self._replication,
                param_bytes=key[0],
                num_tensors=key[1],
            )
        return self._updates[key]

    def update_s(self, param_bytes: float, num_params: float) -> float:
        """Return the seconds of that update, with what the rank does itself about clipping."""
        update = self.update(param_bytes, num_params)
        return update.seconds(clips_gradients=self._costs.clips_gradients)

    def of_stages(
        self, param_bytes: Floats, num_blocks: Floats, num_params: Floats, *frozen: Floats
    ) -> tuple[DataParallelSeconds, Floats]:
        """Return what stages exchange, nothing hidden, and their update where a rank has no other
        stage, in the arrays' shape. `frozen`, for ZeRO 3: bytes of frozen parameters, and of those
        that a backward gathers again.
        """
        kinds, of_kind = distinct(param_bytes, num_blocks, num_params, *frozen)
        answers = np.array([self._of_stage(*kind) for kind in kinds.tolist()])
        *exchange, update_s = answers.T[:, of_kind]
        return DataParallelSeconds(**dict(zip(_EXCHANGE, exchange, strict=True))), update_s

    def _of_stage(
        self,
        param_bytes: float,
        num_blocks: float,
        num_params: float,
        frozen_bytes: float = 0.0,
        frozen_backward_bytes: float = 0.0,
    ) -> tuple[float, ...]:
        """Return the seconds of `DataParallelSeconds`, in its order, and the update's."""
        key = param_bytes, num_blocks, num_params, frozen_bytes, frozen_backward_bytes
        if key not in self._stages:
            seconds = self._exchange(
                self._costs.profile,
                param_bytes=param_bytes,
                num_blocks=int(num_blocks),
                num_tensors=int(num_params),
                frozen_bytes=frozen_bytes,
                frozen_backward_bytes=frozen_backward_bytes,
            )
            self._stages[key] = (*_exchange_of(seconds), self.update_s(param_bytes, num_params))
        return self._stages[key]

    def _exchange(self, profile: Profile, **sizes: Any) -> DataParallelSeconds:
        """Return what a stage exchanges, nothing hidden, on a profile."""
        if self._costs.execution.prices == "profile":
            return data_parallel_seconds(profile, self._group, self._replication, **sizes)
        return executed_exchange(
            cast(ExecutedProfile, profile), self._group, self._replication, **sizes
        )

    def least_s_per_byte(self, block_bytes: float, num_blocks: int) -> DataParallelSeconds:
        """Return seconds for each byte of parameters that no stage's exchange is below, of a chain
        with so many blocks of at most so many bytes each.

        A message takes at least its bytes times the least that a byte of any as long takes. All
        blocks being as large as the largest, messages are as long as any stage's.
        """
        param_bytes = num_blocks * block_bytes
        if self._replication.zero_stage == 0:  # whole buckets, which are the longest
            param_bytes = ceil(param_bytes / BUCKET_BYTES) * float(BUCKET_BYTES)
        seconds = self._exchange(
            cast(Profile, _LeastMessages(self._costs.profile)),
            param_bytes=param_bytes,
            num_blocks=num_blocks,
            num_tensors=0,
        )
        return DataParallelSeconds(
            **{
                name: value / max(param_bytes, 1.0)
                for name, value in zip(_EXCHANGE, _exchange_of(seconds), strict=True)
            }
        )


class _LeastMessages:
    """A profile on which messages take the least seconds of any byte in messages up to as long,
    and work beside them takes nothing.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the least time of a message."""
        rate = self._profile.least_collective_s_per_byte(kind, group, most_bytes=num_bytes)
        return Lookup(seconds=rate * num_bytes, source="least", relative_error=0.0)

    def step_seconds(self, *_: Any, **__: Any) -> Lookup:
        """Return no time."""
        return Lookup(seconds=0.0, source="least", relative_error=0.0)


def replica_prices(costs: CostCache, replication: Replication, replica: Degrees) -> ReplicaPrices:
    """Return the prices under a replication and a replica's mesh; `costs` keeps them."""
    key = replication, replica
    if key not in costs.replica_prices:
        costs.replica_prices[key] = ReplicaPrices(costs, replication, replica)
    return costs.replica_prices[key]


def distinct(*columns: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Return the distinct rows of columns of whole numbers, and the row of each entry."""
    code = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        # Mixes numbers of up to 64 bits; a collision would take billions of kinds.
        code = (code ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(29)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    rows = np.stack([column.reshape(-1)[first] for column in columns], axis=1)
    return rows, np.reshape(inverse, code.shape)
