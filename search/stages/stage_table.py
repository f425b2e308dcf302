"""The stages that a search may cut a model into, for one mesh of a replica, microbatch size and
layout.

What runs of blocks cost is the cost model's (`costmodel.time.stage_costs`); here is what a search
adds: the runs of a window, of which equal ones are priced once (`Repetition`), and caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

import numpy as np

from costmodel.cache import CostCache
from costmodel.memory.bound import NOTHING, OnHost
from costmodel.time.inputs import input_seconds
from costmodel.time.offload import copy_seconds
from costmodel.time.stage_costs.chain import ChainCosts, Split, chain_costs
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.runs import Floats, RunLoads
from costmodel.time.stage_costs.stage_costs import BlockRuns, StageCosts
from costmodel.topology import pipeline_group
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees
from planner.language.plan import ClassLayout, Precision, Recompute
from planner.language.plan.replication import Replication, gradient_factor
from profiles import Group, Profile
from search.partition.chain_windows import Repetition, RunKinds, Window
from search.space.configuration import Configuration, Shape
from search.stages.partial_recompute import PartialRecompute, partial_recomputes

_MOST_KEPT_RUNS = 100_000
"""Runs of windows and their kinds that a table keeps: a few MB."""


TableKey = str
"""What names a table among those of one model on one machine: its mesh, size and layouts."""


@dataclass(kw_only=True, eq=False)
class StageTable:
    """Costs of all runs of blocks under one layout. Mutable: it remembers what it computed, and a
    copy with other costs or samples (`dataclasses.replace`) begins without that.
    """

    costs: CostCache
    """Prices of block classes, and what of them is kept for all tables."""
    layouts: tuple[ClassLayout, ...]
    """A layout for each class on each axis with several ranks, axis by axis in class order."""
    degrees: Degrees
    """Sizes on the axes that blocks are lowered on."""
    microbatch_size: int
    """Samples of a microbatch in one dp replica."""
    precision: Precision = "model"
    """Dtype of parameters and gradient sums."""
    on_host: OnHost = NOTHING
    """What all plans of the search put on the host."""
    beside: bool = False
    """Weight gradients are made beside collectives of the backward (`Split`)."""
    pieces: int = 1
    """In how many pieces gathers and scatters of a forward go beside products (`Split`)."""
    logit_rows: int = 0
    """Of how many tokens a rank makes logits at a time; 0: of all (`Plan.logit_rows`)."""
    rank_ends: dict[tuple, tuple[float, ...]] = field(default_factory=dict, init=False)
    """When ranks end their last jobs, in seconds, of the cuts that were simulated."""
    _least_sums: dict[Recompute, tuple[list[float], list[float]]] = field(
        default_factory=dict, init=False
    )
    """Running sums along the chain of backward seconds and kept bytes, by recompute choice."""
    _partial: dict[tuple, tuple[PartialRecompute, ...]] = field(default_factory=dict, init=False)
    """Pairs of recompute choices, by the choices and whether hosts poll."""
    _chains: dict[bool, ChainCosts] = field(default_factory=dict, init=False)
    """Costs of each block, by whether hosts poll."""
    _kinds: dict[tuple[Window, bool], tuple[RunKinds, BlockRuns]] = field(
        default_factory=dict, init=False
    )
    """Kinds of runs of the last windows, and a run of each."""
    _stage_costs: dict[tuple[Replication, Window, bool], StageCosts] = field(
        default_factory=dict, init=False
    )
    """Costs of these runs, by how replicas share weights."""
    _least_inputs: dict[tuple[bool, int], float] = field(default_factory=dict, init=False)
    """Seconds of loading a batch, by whether there is a pipeline and the number of microbatches."""

    @cached_property
    def key(self) -> TableKey:
        """Names the table where answers about it are kept."""
        layouts = sha256(repr(self.layouts).encode()).hexdigest()
        beside = " beside" * self.beside + f" pieces={self.pieces}" * (self.pieces > 1)
        rows = f" logit_rows={self.logit_rows}" if self.logit_rows else ""
        return f"{self.degrees} microbatch_size={self.microbatch_size} {layouts}{beside}{rows}"

    @property
    def members(self) -> tuple[StageTable, ...]:
        """The tables that its bounds hold for: itself (`either_table`: two)."""
        return (self,)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.degrees["tp"]

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.costs.graph

    @property
    def profile(self) -> Profile:
        """The machine."""
        return self.costs.profile

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return len(self.graph.blocks)

    @property
    def chain(self) -> ChainCosts:
        """Costs of each block, where hosts do not poll for messages: the least of them."""
        return self.chain_where(polls=False)

    def chain_where(self, *, polls: bool) -> ChainCosts:
        """Return the costs of each block where hosts poll for messages between stages, or not; the
        estimate of a plan of this table reads the same.
        """
        if polls not in self._chains:
            split = Split(
                degrees=self.degrees,
                microbatch_size=self.microbatch_size,
                layouts=self.layouts,
                beside=self.beside,
                pieces=self.pieces,
                logit_rows=self.logit_rows,
                polls=polls,
            )
            self._chains[polls] = chain_costs(self.costs, split)
        return self._chains[polls]

    @property
    def blocks(self) -> StageLoad:
        """Bytes of each block, as arrays along the chain."""
        return self.chain.blocks

    @property
    def runs(self) -> RunLoads:
        """Bytes of any runs of blocks."""
        return self.chain.loads

    @property
    def once_bytes(self) -> Floats:
        """Side inputs of each block (n) that a rank holds once, whatever is in flight."""
        return self.chain.once_bytes

    @property
    def ties(self) -> tuple[tuple[int, int, float], ...]:
        """(i, j, local bytes): blocks i < j share trainable parameters, j being the next user."""
        return self.chain.ties

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds of each block, collectives included."""
        return self.chain.times.whole_forward_s

    @cached_property
    def backward_s(self) -> Floats:
        """Backward seconds of each block without recompute, collectives included."""
        return self.chain.times.whole_backward_s

    @property
    def weight_s(self) -> Floats:
        """Seconds of each block's backward that are weight gradients."""
        return self.chain.times.weight_s

    def recompute_s(self, choice: Recompute) -> Floats:
        """Return what a recompute choice adds to each block's backward."""
        return self.chain.times.recompute_s(choice)

    def least_recompute_s(self, choices: Sequence[Recompute]) -> Floats:
        """Return the least that any of the choices adds to each block's backward."""
        least: Floats = np.min([self.recompute_s(choice) for choice in choices], axis=0)
        return least

    def partial(
        self, choices: tuple[Recompute, ...], *, polls: bool = False
    ) -> tuple[PartialRecompute, ...]:
        """Return the pairs of recompute choices of which a stage's first blocks take the second."""
        key = choices, polls
        if key not in self._partial:
            self._partial[key] = partial_recomputes(self.chain_where(polls=polls), choices)
        return self._partial[key]

    def ahead_s(self, *, is_sharded: bool, choices: Sequence[Recompute]) -> Floats:
        """Return the most of each block's backward that may come after its gradient is sent on."""
        # ZeRO reduces a block's gradients as its backward ends, and a stage that recomputes makes
        # them at once: neither leaves a weight gradient to come after its input's gradient.
        may_defer = not is_sharded and "none" in choices and self.costs.execution.sends_ahead
        return self.weight_s * may_defer

    def least_sums(self, choice: Recompute) -> tuple[list[float], list[float]]:
        """Return running sums (n + 1) of what blocks take at least under a recompute choice: their
        backward's seconds, and the bytes they keep of a microbatch.
        """
        if choice not in self._least_sums:
            seconds = self.backward_s + self.recompute_s(choice)
            self._least_sums[choice] = (
                np.append(0.0, np.cumsum(seconds)).tolist(),
                self.runs.kept_sums(choice).tolist(),
            )
        return self._least_sums[choice]

    @cached_property
    def late_sums(self) -> Floats:
        """Running sums (n + 1) of what blocks hold for each microbatch whose weight gradients are
        still to be made.
        """
        return np.append(0.0, np.cumsum(self.chain.late_bytes))

    @cached_property
    def whole(self) -> StageLoad:
        """Bytes of all blocks as one stage."""
        total = self.runs.loads(np.array(0), np.array(self.num_blocks))
        return replace(total, frozen_bytes=total.frozen_bytes + self.once_bytes.max(initial=0.0))

    def inputs_s(self, blocks: Iterable[int], num_microbatches: int) -> float:
        """Return what the rank that has these blocks, the first among them, loads of a batch."""
        return input_seconds(
            self.costs,
            blocks,
            microbatch_size=self.microbatch_size,
            num_microbatches=num_microbatches,
        )

    def least_inputs_s(self, mine: Configuration | Shape) -> float:
        """Return what is loaded of a batch ahead of everything else, whatever the stages."""
        # In a pipeline only block 0 is sure to be on the first rank.
        blocks = range(self.num_blocks if mine.pp == 1 else 1)
        key = mine.pp == 1, mine.num_microbatches
        if key not in self._least_inputs:
            self._least_inputs[key] = self.inputs_s(blocks, mine.num_microbatches)
        return self._least_inputs[key]

    def window(
        self, window: Window, replication: Replication, *, polls: bool = False
    ) -> tuple[RunKinds, StageCosts]:
        """Return the kinds of a window's runs and what a run of each costs."""
        # Which runs are alike depends on the layout alone; what they cost, on the replicas too.
        kinds, runs = self._runs_of(window, polls)
        key = replication, window, polls
        if key not in self._stage_costs:
            self._stage_costs[key] = StageCosts(runs=runs, replication=replication)
        return kinds, self._stage_costs[key]

    def _runs_of(self, window: Window, polls: bool) -> tuple[RunKinds, BlockRuns]:
        """Return the kinds of a window's runs and a run of each; the last windows are kept."""
        key = window, polls
        if key not in self._kinds:
            if sum(kinds.of.size for kinds, _ in self._kinds.values()) > _MOST_KEPT_RUNS:
                self._kinds.clear()
                self._stage_costs.clear()
            kinds = self.repetition.kinds(window)
            chain = self.chain_where(polls=polls)
            self._kinds[key] = kinds, BlockRuns(chain=chain, start=kinds.start, end=kinds.end)
        return self._kinds[key]

    @cached_property
    def repetition(self) -> Repetition:
        """Where blocks of equal costs follow each other, with equal values arriving and leaving.

        What a block costs follows from its class and from what brings its inputs.
        """
        n = self.num_blocks
        arriving = self.chain.messages.arrivals.reshape(-1, n + 1)
        # A row for each property (n). Of messages: what a stage that starts at the block receives,
        # and what a stage that ends with it sends on.
        rows = [
            np.array([float(block.class_index) for block in self.graph.blocks]),
            self.blocks.side_bytes,
            self.blocks.input_bytes,
            self.once_bytes,
            self.chain.times.comm_forward_s,
            self.chain.times.comm_backward_s,
            *arriving[:, :-1],
            *arriving[:, 1:],
        ]
        # (block, property) Blocks with equal rows have equal labels.
        labels = np.unique(np.stack(rows, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        tied = sorted({block for i, j, _ in self.ties for block in (i, j)})
        # A run of both blocks of a tie holds their weight once, so none is like another block.
        labels[tied] = -1 - np.arange(len(tied))
        return Repetition(labels)

    def transfers_s(self, configuration: Configuration) -> tuple[Floats, Floats]:
        """Seconds of one transfer into a stage that starts at block i (n + 1), and of the
        gradient's way back from it, which takes no more.
        """
        return self.chain.messages.transfer_s(self._pp_group(configuration))

    def waited_transfer(self, configuration: Configuration) -> Group | None:
        """Return the ranks of a transfer between stages that the runtime does not overlap; None
        where it does, or there is none.
        """
        if configuration.pp == 1 or "stages" in self.costs.execution.overlaps:
            return None
        return self._pp_group(configuration)

    def _pp_group(self, configuration: Configuration) -> Group:
        return pipeline_group(self.costs.cluster, configuration.degrees, pp=configuration.pp)

    def copies_s(self, saved_bytes: Floats) -> tuple[Floats, Floats]:
        """Return the seconds in which one microbatch's activations, so many bytes of each run, side
        inputs apart, leave a device for its host, and return.
        """
        # Few different sizes: each is looked up in the profile once.
        moved, inverse = np.unique(saved_bytes, return_inverse=True)
        down, up = (
            np.array([copy_seconds(self.profile, size, to_host=way) for size in moved.tolist()])
            for way in (True, False)
        )
        return down[inverse], up[inverse]

    def most_edge_bytes(self, first: int, end: int, *, in_flight: int, receive_ahead: int) -> float:
        """Return the most that a run needs and longer ones that hold it may not.

        That is, what it receives and sends for each microbatch, in both directions, once as a
        message and once as a value; and sums for weights that blocks outside use too. Receives are
        posted `receive_ahead` jobs ahead, each with a buffer.
        """
        # What reaches the run from before it, and what reaches past its end: all of that may be
        # the run's.
        arriving = self.chain.messages.arriving(
            np.array([first, end]), np.array([end, self.num_blocks])
        )
        edges = float(arriving[:, 0].sum())
        copies = sum(size for _, _, size in self.ties) * gradient_factor(self.precision)
        # Beside what is in flight: buffers of posted receives, or a message that leaves each way.
        return 2 * ((in_flight + max(2, receive_ahead)) * edges + copies)
