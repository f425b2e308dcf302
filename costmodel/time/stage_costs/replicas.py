"""What replicas of a stage exchange, and their update, for many stages at once.

Both depend on a stage's parameters only: their bytes, tensors and blocks. A chain of few classes
has few kinds of such stages, so each kind is priced once and the answers are kept in the
`CostCache`, for the search and the estimate alike.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from costmodel.cache import CostCache
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_exchange import executed_exchange
from costmodel.time.communication import DataParallelSeconds, data_parallel_seconds
from costmodel.time.update import RankUpdate, rank_update
from costmodel.topology import data_group
from planner.layout.axes import Degrees
from planner.plan.replication import Replication

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
            profile = self._costs.profile
            frozen = {
                "frozen_bytes": frozen_bytes,
                "frozen_backward_bytes": frozen_backward_bytes,
            }
            if isinstance(profile, ExecutedProfile):
                seconds = executed_exchange(
                    profile,
                    self._group,
                    self._replication,
                    param_bytes=param_bytes,
                    num_blocks=int(num_blocks),
                    num_tensors=int(num_params),
                    **frozen,
                )
            else:
                seconds = data_parallel_seconds(
                    profile,
                    self._group,
                    self._replication,
                    param_bytes=param_bytes,
                    num_blocks=int(num_blocks),
                    num_tensors=int(num_params),
                    **frozen,
                )
            self._stages[key] = (*_exchange_of(seconds), self.update_s(param_bytes, num_params))
        return self._stages[key]


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
