"""What every run of consecutive blocks costs, for one tp degree, microbatch size and layout.

The price of a block class is asked once and laid out along the chain, so a table of a
thousand equal layers takes as many questions as one of eight. What replicas and ZeRO add is in
`rank_stages`; nothing is priced here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.cache import CostCache
from costmodel.memory.bound import kept_bytes
from costmodel.time.boundary import block_entry_seconds, output_placements
from costmodel.time.communication import DataParallelSeconds, boundary_seconds
from costmodel.time.inputs import input_seconds
from costmodel.time.offload import copy_seconds
from costmodel.time.stage import StageLoad, again_seconds, block_load
from costmodel.topology import hop_group, split_axes
from planner.graph import ModelGraph
from planner.layout.placement import Shard
from planner.plan import ClassLayout, Precision, Recompute
from profiles import Group, Profile
from search.on_host import NOTHING, OnHost
from search.partition.chain_windows import Window
from search.stages.rank_stages import RankStages, gradient_factor
from search.stages.run_kinds import Indices, Repetition, RunKinds
from search.stages.runs import Runs, used_fields

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOST_KEPT_RUNS = 100_000
"""Runs of windows and their kinds that a table keeps: a few MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKey:
    """What names a table among those of one model on one machine."""

    tp: int
    cp: int
    microbatch_size: int
    layouts: str
    """Digest of the layouts on tp and on cp."""


@dataclass(kw_only=True, eq=False)
class StageTable:
    """Loads of all runs of blocks; keeps what it computed.

    `layouts` is one ClassLayout per class, in class order, or empty at tp 1; `cp_layouts`
    likewise on cp. `once_bytes` (n),
    known once `blocks` is, are side inputs a rank holds once whatever is in flight.
    `replica_memo` (seconds by degrees, bytes and counts) may be shared by all tables.
    `rank_ends` keeps simulations.
    """

    costs: CostCache
    layouts: tuple[ClassLayout, ...]
    tp: int
    microbatch_size: int
    cp: int = 1
    cp_layouts: tuple[ClassLayout, ...] = ()
    precision: Precision = "model"
    on_host: OnHost = NOTHING
    once_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    replica_memo: dict[tuple, tuple[float, ...]] = field(default_factory=dict)
    replica_seconds: dict[tuple, tuple[DataParallelSeconds, Floats]] = field(default_factory=dict)
    rank_ends: dict[tuple, tuple[float, ...]] = field(default_factory=dict)
    _least_sums: dict[Recompute, tuple[list[float], list[float]]] = field(default_factory=dict)
    _kinds: dict[Window, tuple[RunKinds, StageLoad]] = field(default_factory=dict)
    _hops: dict[tuple[Group, int], tuple[Floats, Floats]] = field(default_factory=dict)
    _least_inputs: dict[tuple[bool, int], float] = field(default_factory=dict)

    @cached_property
    def key(self) -> TableKey:
        """Names the table where answers about it are kept."""
        text = repr((self.layouts, self.cp_layouts))
        return TableKey(
            tp=self.tp,
            cp=self.cp,
            microbatch_size=self.microbatch_size,
            layouts=sha256(text.encode()).hexdigest(),
        )

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

    def inputs_s(self, blocks: Iterable[int], num_microbatches: int) -> float:
        """Return what the rank that has these blocks, the first among them, loads of a batch."""
        return input_seconds(
            self.costs,
            blocks,
            microbatch_size=self.microbatch_size,
            num_microbatches=num_microbatches,
        )

    def least_inputs_s(self, *, pp: int, num_microbatches: int) -> float:
        """Return what is loaded of a batch ahead of everything else, whatever the stages."""
        blocks = range(self.num_blocks if pp == 1 else 1)
        key = pp == 1, num_microbatches
        if key not in self._least_inputs:
            self._least_inputs[key] = self.inputs_s(blocks, num_microbatches)
        return self._least_inputs[key]

    @cached_property
    def by_class(self) -> Mapping[int, ClassLayout]:
        """Layouts by class index."""
        return {layout.class_index: layout for layout in self.layouts}

    @cached_property
    def by_class_on_cp(self) -> Mapping[int, ClassLayout]:
        """Layouts on cp by class index."""
        return {layout.class_index: layout for layout in self.cp_layouts}

    @cached_property
    def blocks(self) -> StageLoad:
        """The load of each block, as arrays along the chain, entry redistributions included."""
        prices = {
            index: self.costs.block(
                index,
                self.tp,
                self.microbatch_size,
                self.by_class.get(index),
                cp=self.cp,
                cp_layout=self.by_class_on_cp.get(index),
            )
            for index in {block.class_index for block in self.graph.blocks}
        }
        loads = {index: block_load(price) for index, price in prices.items()}
        classes = [block.class_index for block in self.graph.blocks]
        columns: dict[str, Any] = {
            f.name: np.array([getattr(loads[index], f.name) for index in classes], dtype=float)
            for f in used_fields()
        }
        sides = [
            frozenset(block.inputs[at] for at in prices[block.class_index].side_positions)
            for block in self.graph.blocks
        ]
        of_side = {
            names: self.costs.side_bytes(names, self.microbatch_size) for names in set(sides)
        }
        columns["side_bytes"] = np.array([of_side[names][0] for names in sides], dtype=float)
        self.once_bytes = np.array([of_side[names][1] for names in sides], dtype=float)
        for there, back in self._entries():
            columns["comm_forward_s"] = columns["comm_forward_s"] + there
            columns["comm_backward_s"] = columns["comm_backward_s"] + back
        return StageLoad(**columns)

    def _entries(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield, for tp and for cp, the seconds of bringing each block's inputs to their place."""
        axes = split_axes(self.profile.cluster, tp=self.tp, cp=self.cp)
        sides = (("tp", self.by_class, self.by_class_on_cp), ("cp", self.by_class_on_cp,
                 self.by_class))  # fmt: skip
        for axis, mine, others in sides:
            # Where all boundaries lie alike nothing has to move.
            if len({p for one in mine.values() for p in (*one.inputs, *one.outputs)}) <= 1:
                continue
            other_size = self.cp if axis == "tp" else self.tp
            seconds = [
                block_entry_seconds(
                    self.graph, index, mine, self.profile, group=axes[axis].group,
                    microbatch_size=self.microbatch_size,
                    other_layouts=others, other_size=other_size,
                )
                for index in range(self.num_blocks)
            ]  # fmt: skip
            there, back = np.array(seconds).T
            yield there, back

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds of each block, collectives included."""
        return self.blocks.forward_s + self.blocks.comm_forward_s

    @cached_property
    def backward_s(self) -> Floats:
        """Backward seconds of each block without recompute."""
        return self.blocks.backward_s + self.blocks.comm_backward_s

    @cached_property
    def weight_s(self) -> Floats:
        """Seconds of each block's backward that are weight gradients, as the cost model splits."""
        return self.blocks.weight_s

    def ahead_s(self, *, zero: int, choices: Sequence[Recompute]) -> Floats:
        """Most seconds of each block's backward that may come after its gradient is sent on."""
        return self.weight_s if zero == 0 and "none" in choices else 0 * self.weight_s

    @cached_property
    def sums(self) -> Mapping[str, Floats]:
        """Running sums along the chain with a leading zero; a run is a difference of two."""
        columns = {
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "weight_s": self.weight_s,
            "remade_s": self.blocks.remade_s,
            "param_bytes": self.blocks.param_bytes,
            "num_params": self.blocks.num_params,
        }
        return {name: np.append(0.0, np.cumsum(values)) for name, values in columns.items()}

    def least_sums(self, choice: Recompute) -> tuple[list[float], list[float]]:
        """Return running sums (n + 1) of what blocks take at least under a recompute choice: their
        backward's seconds, and the bytes they keep of a microbatch.
        """
        if choice not in self._least_sums:
            seconds = self.backward_s + again_seconds(self.blocks, choice)
            self._least_sums[choice] = (
                np.append(0.0, np.cumsum(seconds)).tolist(),
                self.runs.kept_sums(choice).tolist(),
            )
        return self._least_sums[choice]

    @cached_property
    def ties(self) -> tuple[tuple[int, int, float], ...]:
        """(i, j, local bytes): blocks i < j share trainable parameters, j being the next user."""
        last_user: dict[str, int] = {}
        shared: dict[tuple[int, int], float] = {}
        for block in self.graph.blocks:
            layout = self.by_class.get(block.class_index)
            for position, name in enumerate(block.params):
                meta = self.graph.tensor[name]
                if meta.kind != "param" or not meta.requires_grad:
                    continue
                if name in last_user and last_user[name] != block.index:
                    split = layout is not None and layout.params[position].startswith("S")
                    size = meta.bytes_at(1) // (self.tp if split else 1)
                    pair = (last_user[name], block.index)
                    shared[pair] = shared.get(pair, 0.0) + size
                last_user[name] = block.index
        return tuple((i, j, size) for (i, j), size in shared.items())

    @cached_property
    def whole(self) -> StageLoad:
        """The load of all blocks as one stage."""
        total = self.runs.loads(np.array(0), np.array(self.num_blocks))
        return replace(total, frozen_bytes=total.frozen_bytes + self.once_bytes.max(initial=0.0))

    def kinds(self, window: Window) -> tuple[RunKinds, StageLoad]:
        """Return the kinds of a window's runs and their loads; the last ones asked are kept."""
        if window not in self._kinds:
            if sum(kinds.of.size for kinds, _ in self._kinds.values()) > _MOST_KEPT_RUNS:
                self._kinds.clear()
                self.replica_seconds.clear()
            kinds = self._repetition.kinds(window)
            self._kinds[window] = kinds, self.runs.loads(kinds.start, kinds.end)
        return self._kinds[window]

    @cached_property
    def _repetition(self) -> Repetition:
        """Where equal blocks follow each other, with equal values arriving and leaving."""
        n = self.num_blocks
        arriving = self._arrivals.reshape(-1, n + 1)
        columns = [getattr(self.blocks, f.name) for f in used_fields()]
        rows = np.stack([*columns, *arriving[:, :-1], *arriving[:, 1:]], axis=1)
        labels = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        tied = sorted({block for i, j, _ in self.ties for block in (i, j)})
        labels[tied] = -1 - np.arange(len(tied))
        return Repetition(labels)

    @cached_property
    def runs(self) -> Runs:
        """The loads of any runs of blocks."""
        return Runs(blocks=self.blocks, ties=self.ties)

    @cached_property
    def _arrivals(self) -> Floats:
        """Bytes a stage that starts at block i receives, and of the gradients it sends back.

        (2, 2, n + 1): forward and back; all, and of tensors that every tp rank holds whole.
        0 at the ends. What block i itself takes from earlier blocks: all of it in a chain, the
        least of it where skips reach further.
        """
        made = output_placements(self.graph, self.by_class)
        on_cp = output_placements(self.graph, self.by_class_on_cp)
        sizes = np.zeros((2, 2, self.num_blocks + 1))
        for block in self.graph.blocks:
            for name in dict.fromkeys(block.inputs):
                if self.graph.producer.get(name, block.index) < block.index:
                    meta = self.graph.tensor[name]
                    split = isinstance(made[name], Shard)
                    size = meta.bytes_at(self.microbatch_size) // (self.tp if split else 1)
                    size //= self.cp if isinstance(on_cp[name], Shard) else 1
                    amounts = np.array([size, 0 if split else size])
                    sizes[0, :, block.index] += amounts
                    sizes[1, :, block.index] += amounts * meta.requires_grad
        return sizes

    def hop_s(self, *, dp: int, cp: int, pp: int) -> Floats:
        """Seconds of one transfer into a stage that starts at block i (n + 1)."""
        return self._hop_seconds(dp, cp, pp, self.tp)[0]

    def back_hop_s(self, *, dp: int, cp: int, pp: int, to_tp: int | None = None) -> Floats:
        """Seconds of the gradient's transfer back from it (n + 1), no more than `hop_s`; the stage
        before, which gathers what came in pieces, may have a tp of its own.
        """
        return self._hop_seconds(dp, cp, pp, to_tp or self.tp)[1]

    def _hop_seconds(self, dp: int, cp: int, pp: int, to_tp: int) -> tuple[Floats, Floats]:
        cluster = self.profile.cluster
        hop = hop_group(cluster, dp=dp, cp=cp, tp=self.tp, pp=pp)
        key = hop, to_tp
        if key not in self._hops:
            tp = split_axes(cluster, tp=to_tp)["tp"].group
            kinds, inverse = np.unique(
                np.moveaxis(self._arrivals, 1, 2).reshape(-1, 2), axis=0, return_inverse=True
            )
            seconds = np.array(
                [
                    boundary_seconds(self.profile, hop, tp, num_bytes=size, whole_bytes=whole)
                    for size, whole in kinds.tolist()
                ]
            )
            there, back = seconds[inverse].reshape(2, -1)
            self._hops[key] = there, back
        return self._hops[key]

    def copies_s(self, loads: StageLoad, choice: Recompute) -> tuple[Floats, Floats]:
        """Return the seconds in which one microbatch's activations of runs with these loads leave
        a device for its host, and return.
        """
        moved, inverse = np.unique(
            kept_bytes(loads, recompute=choice) - loads.side_bytes, return_inverse=True
        )
        down, up = (
            np.array([copy_seconds(self.profile, size, to_host=way) for size in moved.tolist()])
            for way in (True, False)
        )
        return down[inverse], up[inverse]

    def receive_bytes(self, start: Indices, end: Indices) -> Floats:
        """Bytes of the buffers each run posts for its input and its output's gradient."""
        there, back = self._arrivals[:, 0]
        return there[start] + back[end]

    def most_edge_bytes(self, first: int, end: int, *, in_flight: int) -> float:
        """Return the most that a run needs and longer ones that hold it may not.

        That is, what it receives and sends for each microbatch, in both directions, once as a
        message and once as a value; and sums for weights that blocks outside use too.
        """
        edges = float(self._arrivals[:, 0, first].sum() + self._arrivals[:, 0, end].sum())
        copies = sum(size for _, _, size in self.ties) * gradient_factor(self.precision)
        return 2 * ((in_flight + 2) * edges + copies)

    def with_replicas(
        self,
        *,
        dp: int,
        cp: int,
        zero: int,
        choices: tuple[Recompute, ...],
        num_microbatches: int = 1,
        splits_backward: bool = False,
    ) -> RankStages:
        """Return the stages as ranks hold them under these degrees."""
        return RankStages(
            table=self,
            dp=dp,
            cp=cp,
            zero=zero,
            choices=choices,
            num_microbatches=num_microbatches,
            splits_backward=splits_backward,
        )
