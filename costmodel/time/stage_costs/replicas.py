"""What replicas of a stage exchange, and their update, for many stages at once.

Both depend on a stage's parameters only: their bytes, tensors and blocks. A chain of few classes
has few kinds of such stages, so each kind is priced once and the answers are kept in the
`CostCache`, for the search and the estimate alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from math import ceil, inf
from operator import attrgetter
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from costmodel.cache import CostCache
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_exchange import executed_exchange
from costmodel.time.communication import BUCKET_BYTES, DataParallelSeconds, data_parallel_seconds
from costmodel.time.update import RankUpdate, rank_update
from costmodel.topology import axis_group, copies_group, data_group
from planner.language.layout.axes import Degrees
from planner.language.plan.parts import gathers_narrow
from planner.language.plan.replication import Replication
from profiles import Group, Lookup, Profile

Floats = NDArray[np.float64]
Counted = Literal["bytes", "messages"]
"""What is counted of an exchange in place of its seconds."""
_EXCHANGE = tuple(f.name for f in fields(DataParallelSeconds))
_exchange_of = attrgetter(*_EXCHANGE)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Who holds the same parameters, or the same experts."""

    replication: Replication
    group: Group
    """The ranks that share them: under ZeRO those with the other shards, else all replicas."""
    copies: Group
    """The ranks with the same shards."""


class ReplicaPrices:
    """Prices of exchange and update under one replication, of stages whose replicas have ranks on
    this mesh. Mutable: it remembers.
    """

    def __init__(self, costs: CostCache, replication: Replication, replica: Degrees) -> None:
        self._costs, self._replication = costs, replication
        cluster = costs.cluster
        of_experts = replication.of_experts
        # ZeRO exchanges among the ranks that share a state; copies of it sum their shards on top.
        sharing = replication.shards if replication.is_sharded else replication.replicas
        spread = of_experts.shards if of_experts.is_sharded else of_experts.replicas
        self._dense = _Sharing(
            replication,
            group=data_group(cluster, replica, replicas=sharing),
            copies=copies_group(
                cluster, replica, shards=sharing, copies=replication.replicas // sharing
            ),
        )
        # The experts' mesh deals neighbouring ranks to etp and ep, so ranks with the same experts
        # are etp * ep = `expert_parts` apart.
        self._experts = _Sharing(
            of_experts,
            group=axis_group(cluster, size=spread, stride=replica.expert_parts),
            copies=axis_group(
                cluster,
                size=of_experts.replicas // spread,
                stride=replica.expert_parts * spread,
            ),
        )
        self.gathers_narrow = (
            replication.is_sharded
            and gathers_narrow(
                replication.precision,
                nodes=self._dense.group.num_nodes,
                ranks_of_node=self._dense.group.ranks_per_node,
                devices_of_node=cluster.devices_per_node,
            )
            # FSDP2 gathers as usual where experts of a block are gathered among other ranks.
            and replication.expert_replicas is None
            and costs.execution.prices == "profile"
        )
        self._exchange_profile = costs.profile
        self._updates: dict[tuple[float, ...], RankUpdate] = {}
        self._stages: dict[tuple[float, ...], tuple[float, ...]] = {}

    def counted(self, what: Counted) -> ReplicaPrices:
        """Return the same exchange, of which bytes or messages are counted in place of seconds."""
        counted = copy(self)
        counted._exchange_profile = cast(Profile, _CountedMessages(self._costs.profile, what))
        counted._stages = {}
        return counted

    def update(
        self,
        param_bytes: float,
        num_params: float,
        spread_bytes: float = 0.0,
        num_spread: float = 0.0,
    ) -> RankUpdate:
        """Return the update of a rank whose stages have these parameters together, the last two
        of them on the experts' mesh.
        """
        key = float(param_bytes), float(num_params), float(spread_bytes), float(num_spread)
        if key not in self._updates:
            parts = [(self._dense, key[0] - key[2], key[1] - key[3])]
            if spread_bytes:
                parts.append((self._experts, key[2], key[3]))
            updates = [
                rank_update(
                    self._costs.profile, of.replication, param_bytes=num_bytes, num_tensors=tensors
                )
                for of, num_bytes, tensors in parts
            ]
            self._updates[key] = sum(updates[1:], start=updates[0])
        return self._updates[key]

    def update_s(self, *params: float) -> float:
        """Return the seconds of that update, with what the rank does itself about clipping."""
        return self.update(*params).seconds(clips_gradients=self._costs.clips_gradients)

    def of_stages(
        self,
        param_bytes: Floats,
        num_blocks: Floats,
        num_params: Floats,
        *,
        frozen: Sequence[Floats] = (),
        spread: Sequence[Floats] = (),
        narrow: Floats | None = None,
    ) -> tuple[DataParallelSeconds, Floats]:
        """Return what stages exchange, nothing hidden, and their update where a rank has no other
        stage, in the arrays' shape. `frozen`, for ZeRO 3: bytes of frozen parameters, and of those
        that a backward gathers again. `spread`: bytes and number of the trained parameters that lie
        on the experts' mesh. `narrow`: bytes of those that are gathered in 8 bits.
        """
        nothing = (0 * param_bytes, 0 * param_bytes)
        if narrow is not None:
            spread = (*(spread or nothing), narrow)
        if spread and not frozen:
            frozen = nothing
        # (kinds, columns): a chain of few classes has few kinds among its many runs.
        kinds, of_kind = distinct(param_bytes, num_blocks, num_params, *frozen, *spread)
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
        spread_bytes: float = 0.0,
        num_spread: float = 0.0,
        narrow_bytes: float = 0.0,
    ) -> tuple[float, ...]:
        """Return the seconds of `DataParallelSeconds`, in its order, and the update's."""
        frozen = frozen_bytes, frozen_backward_bytes
        key = param_bytes, num_blocks, num_params, *frozen, spread_bytes, num_spread, narrow_bytes
        if key not in self._stages:
            profile = self._exchange_profile
            seconds = _exchange_of(
                self._exchange(
                    profile,
                    self._dense,
                    param_bytes=param_bytes - spread_bytes,
                    num_blocks=int(num_blocks),
                    num_tensors=int(num_params - num_spread),
                    frozen_bytes=frozen_bytes,
                    frozen_backward_bytes=frozen_backward_bytes,
                    **({"narrow_bytes": narrow_bytes} if narrow_bytes else {}),
                )
            )
            if spread_bytes:
                of_experts = self._exchange(
                    profile,
                    self._experts,
                    param_bytes=spread_bytes,
                    num_blocks=int(num_blocks),
                    num_tensors=int(num_spread),
                )
                pairs = zip(seconds, _exchange_of(of_experts), strict=True)
                # Experts and the rest have groups of their own, and their messages follow each
                # other.
                seconds = tuple(whole + spread for whole, spread in pairs)
            update_s = self.update_s(param_bytes, num_params, spread_bytes, num_spread)
            self._stages[key] = (*seconds, update_s)
        return self._stages[key]

    def _exchange(self, profile: Profile, sharing: _Sharing, **sizes: Any) -> DataParallelSeconds:
        """Return what a stage exchanges, nothing hidden, on a profile."""
        group, replication = sharing.group, sharing.replication
        sizes["copies"] = sharing.copies
        if self._costs.execution.prices == "profile":
            return data_parallel_seconds(profile, group, replication, **sizes)
        rated, execution = cast(ExecutedProfile, profile), self._costs.execution
        if isinstance(profile, _CountedMessages):
            execution = replace(execution, unpack_s=0.0)  # (seconds of no message)
        return executed_exchange(rated, execution, group, replication, **sizes)

    def least_s_per_byte(self, block_bytes: float, num_blocks: int) -> DataParallelSeconds:
        """Return seconds for each byte of parameters that no stage's exchange is below, of a chain
        with so many blocks of at most so many bytes each.

        A message takes at least its bytes times the least that a byte of any as long takes. All
        blocks being as large as the largest, messages are as long as any stage's. Experts on ranks
        of their own have fewer replicas, so a byte of them may take less than others.
        """
        # The longer a message, the less a byte of it takes: the longest there may be bounds all.
        param_bytes = num_blocks * block_bytes
        if not self._replication.is_sharded:  # whole buckets, which are the longest
            param_bytes = ceil(param_bytes / BUCKET_BYTES) * float(BUCKET_BYTES)
        # A byte takes least where all of them are gathered in 8 bits, or none is.
        in_8_bits = (0.0, param_bytes) if self.gathers_narrow else (0.0,)
        seconds = [
            _exchange_of(
                self._exchange(
                    cast(Profile, _LeastMessages(self._costs.profile)),
                    sharing,
                    param_bytes=param_bytes,
                    num_blocks=num_blocks,
                    num_tensors=0,
                    **({"narrow_bytes": narrow_bytes} if narrow_bytes else {}),
                )
            )
            for sharing in {self._dense, self._experts}
            for narrow_bytes in in_8_bits
        ]
        least = (min(values) / max(param_bytes, 1.0) for values in zip(*seconds, strict=True))
        return DataParallelSeconds(**dict(zip(_EXCHANGE, least, strict=True)))


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


class _CountedMessages:
    """A profile on which a message takes as many seconds as it has bytes, or one, and work beside
    messages none: formulas of seconds then count.
    """

    def __init__(self, profile: Profile, what: Counted) -> None:
        self._profile, self._what = profile, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)

    @property
    def cluster(self) -> Any:
        """The machine, whose memory is infinitely fast."""
        return replace(self._profile.cluster, memory_bytes_per_s=inf)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the count of a message."""
        count = num_bytes if self._what == "bytes" else 1.0
        return Lookup(seconds=count, source="counted", relative_error=0.0)

    def step_seconds(self, *_: Any, **__: Any) -> Lookup:
        """Return no time."""
        return Lookup(seconds=0.0, source="counted", relative_error=0.0)


def replica_prices(costs: CostCache, replication: Replication, replica: Degrees) -> ReplicaPrices:
    """Return the prices under a replication and a replica's mesh; `costs` keeps them."""
    return costs.once((replication, replica), lambda: ReplicaPrices(costs, replication, replica))


def distinct(*columns: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Return the distinct rows of columns of whole numbers, and the row of each entry."""
    code = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        # Mixes numbers of up to 64 bits (2^64 over the golden ratio); a collision would take
        # billions of kinds. One column of codes sorts faster than rows do.
        code = (code ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(29)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    rows = np.stack([column.reshape(-1)[first] for column in columns], axis=1)
    return rows, np.reshape(inverse, code.shape)
