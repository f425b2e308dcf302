"""A model's chain of blocks under the degrees and layouts of a stage, priced block by block.

The price of a block class is computed once and laid out along the chain, so a thousand equal
layers cost as much to price as eight. What depends on neighbours is added here: collectives that
bring a block's inputs to the placement it takes them in, parameters that blocks share, and the
messages of a stage that starts at a block. No replicas yet (`stage_costs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodel.cache import CostCache
from costmodel.time.boundary import block_entry_seconds, output_placements
from costmodel.time.program import ProgramCost
from costmodel.time.stage_costs.load import LOAD_FIELDS, StageLoad, block_load
from costmodel.time.stage_costs.messages import Messages
from costmodel.time.stage_costs.runs import Floats, Indices, RunLoads
from costmodel.time.stage_costs.times import TIME_FIELDS, RunTimes, block_times
from costmodel.topology import lowered_groups
from planner.graph import ModelGraph
from planner.layout.axes import Degrees
from planner.plan import ClassLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the blocks of a stage are split over the ranks of one replica."""

    tp: int
    """Tensor-parallel degree."""
    microbatch_size: int
    """Samples of one microbatch in one dp replica."""
    cp: int = 1
    """Context-parallel degree."""
    layouts: tuple[ClassLayout, ...] = ()
    """Layouts on tp; a class without a layout is replicated."""
    cp_layouts: tuple[ClassLayout, ...] = ()
    """Layouts on cp."""
    recomputed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Ops that selective recomputation runs again, by class (no entry: the default choice)."""


@dataclass(kw_only=True, eq=False)
class ChainCosts:
    """Seconds and bytes of each block of a chain, and of any run of blocks. Mutable: it remembers
    what it computed.
    """

    costs: CostCache
    split: Split

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.costs.graph

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return len(self.graph.blocks)

    @cached_property
    def by_class(self) -> Mapping[int, ClassLayout]:
        """Layouts on tp by class index."""
        return {layout.class_index: layout for layout in self.split.layouts}

    @cached_property
    def by_class_on_cp(self) -> Mapping[int, ClassLayout]:
        """Layouts on cp by class index."""
        return {layout.class_index: layout for layout in self.split.cp_layouts}

    @cached_property
    def _prices(self) -> Mapping[int, ProgramCost]:
        """Price of each block class that the chain has."""
        split, recomputed = self.split, dict(self.split.recomputed)
        return {
            index: self.costs.block(
                index,
                split.tp,
                split.microbatch_size,
                self.by_class.get(index),
                cp=split.cp,
                cp_layout=self.by_class_on_cp.get(index),
                recomputed=recomputed.get(index),
            )
            for index in {block.class_index for block in self.graph.blocks}
        }

    @cached_property
    def times(self) -> RunTimes:
        """Seconds of each block (n), with collectives that bring its inputs to their placement."""
        times = {index: block_times(price) for index, price in self._prices.items()}
        classes = [block.class_index for block in self.graph.blocks]
        columns = {
            name: np.array([getattr(times[index], name) for index in classes], dtype=float)
            for name in TIME_FIELDS
        }
        for there, back in self._entries():
            columns["comm_forward_s"] += there
            columns["comm_backward_s"] += back
        return RunTimes(**columns)

    @cached_property
    def blocks(self) -> StageLoad:
        """Bytes of each block (n)."""
        loads = {index: block_load(price) for index, price in self._prices.items()}
        classes = [block.class_index for block in self.graph.blocks]
        columns = {
            name: np.array([getattr(loads[index], name) for index in classes], dtype=float)
            for name in LOAD_FIELDS
        }
        columns["side_bytes"] = self._side_bytes[0]
        return StageLoad(**columns)

    @property
    def once_bytes(self) -> Floats:
        """Side inputs of each block (n) that are resident once, whatever is in flight."""
        return self._side_bytes[1]

    @cached_property
    def _side_bytes(self) -> tuple[Floats, Floats]:
        """Side inputs of each block: resident for each microbatch, and once."""
        of_side = {names: self._bytes_of_side(names) for names in set(self._sides)}
        each, once = zip(*(of_side[names] for names in self._sides), strict=True)
        return np.array(each, dtype=float), np.array(once, dtype=float)

    @cached_property
    def _sides(self) -> tuple[frozenset[str], ...]:
        """Names of each block's side inputs."""
        return tuple(
            frozenset(block.inputs[at] for at in self._prices[block.class_index].side_positions)
            for block in self.graph.blocks
        )

    def _bytes_of_side(self, names: frozenset[str]) -> tuple[int, int]:
        return self.costs.side_bytes(names, self.split.microbatch_size)

    def side_bytes(self, first: int, end: int) -> int:
        """Return the side inputs of a run for each microbatch: of all its blocks, each once."""
        return self._bytes_of_side(frozenset().union(*self._sides[first:end]))[0]

    def _entries(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield, for tp and for cp, the seconds of bringing each block's inputs to their place."""
        split = self.split
        axes = lowered_groups(self.costs.profile.cluster, Degrees(cp=split.cp, tp=split.tp))
        for axis, own, other, other_size in (
            ("tp", self.by_class, self.by_class_on_cp, split.cp),
            ("cp", self.by_class_on_cp, self.by_class, split.tp),
        ):
            # Where all boundaries lie alike nothing has to move.
            placements = {p for layout in own.values() for p in (*layout.inputs, *layout.outputs)}
            replicates_some = any(b.class_index not in own for b in self.graph.blocks)
            if len(placements | ({"R"} if replicates_some else set())) <= 1:
                continue
            seconds = [
                block_entry_seconds(
                    self.graph, index, own, self.costs.profile, group=axes[axis].group,
                    microbatch_size=split.microbatch_size,
                    other_layouts=other, other_size=other_size,
                )
                for index in range(self.num_blocks)
            ]  # fmt: skip
            there, back = np.array(seconds).T
            yield there, back

    @cached_property
    def _tied(self) -> Mapping[tuple[int, int], tuple[float, int]]:
        """Bytes and number of trainable parameters that block j shares with i, their user before
        it, by (i, j).
        """
        last_user: dict[str, int] = {}
        shared: dict[tuple[int, int], tuple[float, int]] = {}
        for block in self.graph.blocks:
            layout = self.by_class.get(block.class_index)
            for position, name in enumerate(block.params):
                meta = self.graph.tensor[name]
                if meta.kind != "param" or not meta.requires_grad:
                    continue
                if name in last_user and last_user[name] != block.index:
                    is_cut = layout is not None and layout.params[position].startswith("S")
                    pair = last_user[name], block.index
                    num_bytes, count = shared.get(pair, (0.0, 0))
                    num_bytes += meta.bytes_at(1) // (self.split.tp if is_cut else 1)
                    shared[pair] = num_bytes, count + 1
                last_user[name] = block.index
        return shared

    @cached_property
    def ties(self) -> tuple[tuple[int, int, float], ...]:
        """(i, j, local bytes): blocks i < j share trainable parameters, j being the next user."""
        return tuple((i, j, num_bytes) for (i, j), (num_bytes, _) in self._tied.items())

    @cached_property
    def loads(self) -> RunLoads:
        """Bytes of any runs of blocks."""
        counts = tuple(count for _, count in self._tied.values())
        return RunLoads(blocks=self.blocks, ties=self.ties, tied_tensors=counts)

    @cached_property
    def _time_sums(self) -> Floats:
        """Running sums (fields, n + 1) of seconds and flop."""
        columns = np.stack([getattr(self.times, name) for name in TIME_FIELDS])
        return np.concatenate([np.zeros((len(columns), 1)), np.cumsum(columns, axis=1)], axis=1)

    def run_times(self, start: Indices, end: Indices) -> RunTimes:
        """Return the seconds of runs start .. end-1."""
        columns = self._time_sums[:, end] - self._time_sums[:, start]
        return RunTimes(**dict(zip(TIME_FIELDS, columns, strict=True)))

    @cached_property
    def messages(self) -> Messages:
        """What a stage receives, wherever it starts."""
        return Messages(
            graph=self.graph,
            profile=self.costs.profile,
            tp=self.split.tp,
            cp=self.split.cp,
            microbatch_size=self.split.microbatch_size,
            on_tp=output_placements(self.graph, self.by_class),
            on_cp=output_placements(self.graph, self.by_class_on_cp),
        )


def chain_costs(costs: CostCache, split: Split) -> ChainCosts:
    """Return the chain of a model under a split; `costs` keeps it."""
    if split not in costs.chains:
        costs.chains[split] = ChainCosts(costs=costs, split=split)
    return costs.chains[split]
