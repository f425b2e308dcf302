"""The order of nodes: ranks follow each other node by node, as the plan was priced.

torchelastic's dynamic rendezvous sorts the nodes of a round by their host's names. Where stages lie
on unlike devices, or the network has tiers, that would start ranks on nodes that the plan does not
mean; so nodes that were told their numbers tell them to each other, and are sorted by these.
"""

from __future__ import annotations

import json
import socket

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from planner.nodes.meeting import in_order

_ROOM = "planner/order"


class InOrder(RendezvousHandler):
    """A rendezvous whose nodes are numbered as they were told. Mutable: as what it wraps."""

    def __init__(self, inner: RendezvousHandler, number: int | None) -> None:
        """`number` is this node's; None where it was told none, as all others then are."""
        self._inner, self._number = inner, number

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the nodes of the next round; raise PlannerError where they are in no order."""
        met = self._inner.next_rendezvous()
        store = PrefixStore(_ROOM, met.store)  # of this round alone
        store.set(str(met.rank), json.dumps([self._number, socket.gethostname()]))
        told = [json.loads(store.get(str(rank))) for rank in range(met.world_size)]
        order = in_order([number for number, _ in told], [name for _, name in told])
        rank = order.index(met.rank)
        first = met.bootstrap_store_info
        assert first is not None
        if not self._inner.use_agent_store:
            # The ranks' own store is one that rank 0 makes, so it is where the first node is.
            first = RendezvousStoreInfo.build(rank, store, local_addr=None)
        return RendezvousInfo(met.store, rank, met.world_size, first)

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks meet in the store of the node that has the rendezvous."""
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        """Return the name of what nodes meet by."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """Whether no further round can begin."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Let no further round begin."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that came too late for this round."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """End what the rendezvous needs; whether that worked."""
        return self._inner.shutdown()
