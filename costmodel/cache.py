"""CostCache: whatever is expensive to price about a graph on a machine is priced once.

A block's price depends on its class, the microbatch size, tp, cp and the class's layouts,
never on where in the model it stands.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from costmodel.links import Links, find_links
from costmodel.memory.block.block_bytes import BlockBytes, block_bytes
from costmodel.memory.exact.stage.jobs import StageJobs
from costmodel.side_values import SideValues, find_side_values
from costmodel.table.fusion import Kernels
from costmodel.time.program import ProgramCost, price_program
from costmodel.topology import lowered_groups
from planner.graph import ModelGraph, Program
from planner.layout.axes import Degrees
from planner.layout.lowering import lower
from planner.ops.recompute_choice import ops_made_again
from planner.plan import ClassLayout, Recompute
from planner.plan.replication import Replication
from profiles import Profile

if TYPE_CHECKING:
    from costmodel.time.stage_costs.chain import ChainCosts, Split
    from costmodel.time.stage_costs.replicas import ReplicaPrices


class CostCache:
    """Prices of a graph's block classes on one profile. Mutable: it remembers answers.

    Says also what kind of step is priced: its `kernels`, and whether it `clips_gradients`.
    """

    def __init__(
        self,
        graph: ModelGraph,
        profile: Profile,
        *,
        kernels: Kernels = "eager",
        clips_gradients: bool = False,
    ) -> None:
        self.graph, self.profile, self.kernels = graph, profile, kernels
        self.clips_gradients = clips_gradients
        self._batch_inputs: dict[frozenset[str], frozenset[str]] = {}
        self._bound: dict[tuple[int, int], Program] = {}
        self._local: dict[tuple, Program] = {}
        self._blocks: dict[tuple, ProgramCost] = {}
        self._bytes: dict[tuple, BlockBytes] = {}
        self._side_values: dict[int, SideValues] = {}
        self.stage_jobs: dict[tuple, dict[tuple, StageJobs]] = {}
        self.chains: dict[Split, ChainCosts] = {}
        self.replica_prices: dict[tuple[Replication, int], ReplicaPrices] = {}

    @cached_property
    def links(self) -> Links:
        """How the graph's blocks hang together."""
        return find_links(self.graph)

    def bound(self, class_index: int, microbatch_size: int) -> Program:
        """Return a class's program at a microbatch size."""
        key = class_index, microbatch_size
        if key not in self._bound:
            self._bound[key] = self.graph.classes[class_index].bind(microbatch_size)
        return self._bound[key]

    def local(
        self,
        class_index: int,
        tp: int,
        microbatch_size: int,
        layout: ClassLayout | None,
        *,
        cp: int = 1,
        cp_layout: ClassLayout | None = None,
    ) -> Program:
        """Return a class's program as one rank runs it, lowered as `local_program` does."""
        key = class_index, tp, microbatch_size, layout, cp, cp_layout
        if key not in self._local:
            whole = self.bound(class_index, microbatch_size)
            on_tp = lower(whole, layout, axis="tp", axis_size=tp)
            self._local[key] = lower(on_tp, cp_layout, axis="cp", axis_size=cp, sum_later=True)
        return self._local[key]

    def block(
        self,
        class_index: int,
        tp: int,
        microbatch_size: int,
        layout: ClassLayout | None = None,
        *,
        cp: int = 1,
        cp_layout: ClassLayout | None = None,
        recomputed: tuple[str, ...] | None = None,
    ) -> ProgramCost:
        """Return the price of one block of a class.

        `recomputed` names the ops that selective recomputation runs again (None: the
        default choice).
        """
        layout, cp_layout = None if tp == 1 else layout, None if cp == 1 else cp_layout
        key = class_index, tp, microbatch_size, layout, cp, cp_layout, recomputed
        if key not in self._blocks:
            local = self.local(class_index, tp, microbatch_size, layout, cp=cp, cp_layout=cp_layout)
            whole = self.bound(class_index, microbatch_size)
            self._blocks[key] = price_program(
                local,
                self.profile,
                axes=lowered_groups(self.profile.cluster, Degrees(cp=cp, tp=tp)),
                remade=ops_made_again(whole, local, recomputed),
                kernels=self.kernels,
            )
        return self._blocks[key]

    def block_bytes(
        self,
        class_index: int,
        tp: int,
        microbatch_size: int,
        layout: ClassLayout | None = None,
        *,
        cp: int = 1,
        cp_layout: ClassLayout | None = None,
        recompute: Recompute = "none",
        recomputed: tuple[str, ...] | None = None,
    ) -> BlockBytes:
        """Return what one block of a class holds while it runs, storage by storage."""
        layout, cp_layout = None if tp == 1 else layout, None if cp == 1 else cp_layout
        key = class_index, tp, microbatch_size, layout, cp, cp_layout, recompute, recomputed
        if key not in self._bytes:
            local = self.local(class_index, tp, microbatch_size, layout, cp=cp, cp_layout=cp_layout)
            whole = self.bound(class_index, microbatch_size)
            self._bytes[key] = block_bytes(
                local,
                device_type=self.profile.cluster.device_type,
                recompute=recompute,
                recomputed=ops_made_again(whole, local, recomputed),
            )
        return self._bytes[key]

    def batch_inputs(self, block_index: int) -> frozenset[str]:
        """Return the batch's tensors that a block takes, itself or through preamble values."""
        graph = self.graph
        taken = frozenset(
            name for name in graph.blocks[block_index].inputs if name not in graph.producer
        )
        if taken not in self._batch_inputs:
            made = taken & set(graph.preamble.outputs)
            through = graph.preamble.only(tuple(sorted(made))).inputs if made else ()
            self._batch_inputs[taken] = (taken - made) | frozenset(through)
        return self._batch_inputs[taken]

    def side_bytes(self, names: frozenset[str], microbatch_size: int) -> tuple[int, int]:
        """Return bytes of preamble values: per microbatch, and of those that are always the same.

        A value that depends on no batch input (positions, a causal mask) is computed once.
        """
        values = self.side_values(microbatch_size)
        return values.num_bytes(names, fixed=False), values.num_bytes(names, fixed=True)

    def side_values(self, microbatch_size: int) -> SideValues:
        """Return the preamble's values for microbatches of a size."""
        if microbatch_size not in self._side_values:
            self._side_values[microbatch_size] = find_side_values(self.graph, microbatch_size)
        return self._side_values[microbatch_size]
