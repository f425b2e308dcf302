"""A model's chain of blocks under the degrees and layouts of a stage, priced block by block.

The price of a block class is computed once and laid out along the chain, so a thousand equal
layers cost as much to price as eight. What depends on neighbours is added here: collectives that
bring a block's inputs to the placement it takes them in, parameters that blocks share, and the
messages of a stage that starts at a block. No replicas yet (`stage_costs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from costmodel.cache import BlockPrice, CostCache
from costmodel.memory.block.block_bytes import backward_bytes, late_bytes, rest_bytes
from costmodel.memory.block.placed_block import BlockBytes
from costmodel.time.block.boundary import block_entry
from costmodel.time.block.moved import BlockMoved, shown_s
from costmodel.time.stage_costs.load import LOAD_FIELDS, StageLoad
from costmodel.time.stage_costs.messages import Messages
from costmodel.time.stage_costs.runs import (
    Floats,
    Indices,
    RunLoads,
    Tie,
    largest_in,
    sparse_table,
)
from costmodel.time.stage_costs.times import TIME_FIELDS, RunTimes
from costmodel.topology import lowered_groups
from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.plan import ClassLayout, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the blocks of a stage are split over the ranks of one replica."""

    degrees: Degrees = field(default_factory=Degrees)
    """Sizes on the axes that blocks are lowered on (`replica_mesh`)."""
    microbatch_size: int
    """Samples of one microbatch in one dp replica."""
    layouts: tuple[ClassLayout, ...] = ()
    """Layouts on these axes; on an axis where a class has none it is replicated."""
    recomputed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Ops that selective recomputation runs again, by class (no entry: the default choice)."""
    beside: bool = False
    """Weight gradients are made beside collectives of the backward (`Plan.overlap`)."""
    pieces: int = 1
    """In how many pieces gathers and scatters of a forward go beside products
    (`Plan.gather_pieces`)."""
    logit_rows: int = 0
    """Of how many tokens a rank makes logits at a time (`Plan.logit_rows`)."""
    polls: bool = False
    """Hosts poll for messages that cross nodes, and reach collectives late (`CostCache.polls`)."""


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
    def layouts(self) -> Mapping[str, Mapping[int, ClassLayout]]:
        """Layouts by axis and class."""
        found: dict[str, dict[int, ClassLayout]] = {axis.name: {} for axis in lowered_axes()}
        for layout in self.split.layouts:
            if layout.axis in found:  # (On ep nothing lies otherwise at the ends of blocks.)
                found[layout.axis][layout.class_index] = layout
        return found

    @cached_property
    def _prices(self) -> Mapping[int, BlockPrice]:
        """Price of each block class that the chain has."""
        split, recomputed = self.split, dict(self.split.recomputed)
        return {
            index: self.costs.block(
                index,
                split.microbatch_size,
                split.degrees,
                self._layouts_of(index),
                recomputed=recomputed.get(index),
                polls=split.polls,
                beside=split.beside,
                pieces=split.pieces,
                logit_rows=split.logit_rows,
            )
            for index in {block.class_index for block in self.graph.blocks}
        }

    def _layouts_of(self, class_index: int) -> tuple[ClassLayout, ...]:
        return tuple(of for of in self.split.layouts if of.class_index == class_index)

    def _along(self, of_class: Mapping[int, Any], names: Sequence[str]) -> dict[str, Floats]:
        """Lay fields of what is known of classes out along the chain."""
        row = {index: number for number, index in enumerate(of_class)}
        rows = np.array(
            [[getattr(known, name) for name in names] for known in of_class.values()], dtype=float
        )
        columns = rows.T[:, [row[block.class_index] for block in self.graph.blocks]]
        return dict(zip(names, columns, strict=True))

    @cached_property
    def times(self) -> RunTimes:
        """Seconds of each block (n), with collectives that bring its inputs to their placement."""
        of_class = {index: price.times for index, price in self._prices.items()}
        columns = self._along(of_class, TIME_FIELDS)
        has_backward = self._along(self._prices, ("has_backward",))["has_backward"]
        for of_axis in self._entries:
            shown = {
                entry: (shown_s(moved.forward), shown_s(moved.backward))
                for entry, moved in of_axis.items()
            }
            there, back = np.array([shown[entry] for entry in self.costs.links.entries]).T
            # A second run begins as the first did: its inputs are brought to their placement again.
            columns["comm_forward_s"] += there
            columns["rerun_s"] += there * has_backward
            columns["rerun_comm_s"] += there * has_backward
            columns["comm_backward_s"] += back
        return RunTimes(**columns)

    @cached_property
    def blocks(self) -> StageLoad:
        """Bytes of each block (n)."""
        of_class = {index: price.load for index, price in self._prices.items()}
        columns = self._along(of_class, LOAD_FIELDS)
        # The price of a class counts its side inputs one by one. Here those in one storage count
        # once, and those made once for all microbatches are apart (`once_bytes`).
        columns["side_bytes"] = self._side_bytes[0]
        # What several blocks read (an encoder's output, a stream beside its norms) is one storage,
        # which a run holds once, like a side input.
        if self._read_again:
            kept, every = np.zeros((2, self.num_blocks))
            for at, inputs in self._read_again.items():
                kept[at] = sum(size for size, is_kept in inputs.values() if is_kept)
                every[at] = sum(size for size, _ in inputs.values())
            columns["saved_bytes"] -= kept
            columns["side_bytes"] = columns["side_bytes"] + kept
            # A recomputed block keeps all its inputs.
            columns["input_bytes"] -= every
            columns["selective_bytes"] -= every
        return StageLoad(**columns)

    @cached_property
    def late_bytes(self) -> Floats:
        """Bytes that each block (n) holds at least for each microbatch whose weight gradients are
        still to be made, where they have jobs of their own (`block_bytes.late_bytes`).
        """
        return self._bytes_along(late_bytes)

    @cached_property
    def backward_bytes(self) -> Floats:
        """Bytes that the backward of each block (n) takes at least beside what the block saves
        (`block_bytes.backward_bytes`).
        """
        return self._bytes_along(backward_bytes)

    def _bytes_along(self, bytes_of: Callable[[BlockBytes], int]) -> Floats:
        """Return what is found of each block (n), nothing recomputed."""
        split = self.split
        of_class = {
            index: bytes_of(
                self.costs.block_bytes(
                    index,
                    split.microbatch_size,
                    split.degrees,
                    self._layouts_of(index),
                    beside=split.beside,
                    logit_rows=split.logit_rows,
                )
            )
            for index in {block.class_index for block in self.graph.blocks}
        }
        return np.array([of_class[block.class_index] for block in self.graph.blocks], dtype=float)

    @cached_property
    def _read_again(self) -> Mapping[int, Mapping[str, tuple[int, bool]]]:
        """Activations that a block reads and another block, too: bytes, and whether it keeps them
        without recomputation; by block and name.
        """
        blocks = self.graph.blocks
        readers = Counter(name for block in blocks for name in dict.fromkeys(block.inputs))
        found: dict[int, dict[str, tuple[int, bool]]] = {}
        for at, block in enumerate(blocks):
            for position, size, is_kept in self._prices[block.class_index].activations:
                if readers[block.inputs[position]] > 1:
                    found.setdefault(at, {})[block.inputs[position]] = size, is_kept
        return found

    def kept(self, start: Indices, end: Indices, by_block: Sequence[Recompute]) -> Floats:
        """Return what a microbatch keeps of runs (of few) if the blocks of the chain recompute
        this, side inputs apart.
        """
        kept = self.loads.kept(start, end, by_block)
        if not self._read_again:
            return kept
        once = []
        for first, behind in zip(start.tolist(), end.tolist(), strict=True):
            held: dict[str, int] = {}
            for at in range(first, behind):
                for name, (size, is_kept) in self._read_again.get(at, {}).items():
                    if is_kept or by_block[at] != "none":
                        held[name] = size
            once.append(float(sum(held.values())))
        return kept + np.array(once)

    @property
    def once_bytes(self) -> Floats:
        """Side inputs of each block (n) that are resident once, whatever is in flight."""
        return self._side_bytes[1]

    def largest_once_bytes(self, start: Indices, end: Indices) -> Floats:
        """Return what runs start .. end-1 hold at least of side inputs that are resident once."""
        return largest_in(self._once_table, start, end)

    @cached_property
    def _once_table(self) -> Floats:
        return sparse_table(self.once_bytes)

    @cached_property
    def _side_bytes(self) -> tuple[Floats, Floats]:
        """Side inputs of each block: resident for each microbatch, and once."""
        values = self.costs.side_values(self.split.microbatch_size)
        of_side = {
            names: [values.num_bytes(names, fixed=fixed) for fixed in (False, True)]
            for names in set(self._sides)
        }
        each, once = zip(*(of_side[names] for names in self._sides), strict=True)
        return np.array(each, dtype=float), np.array(once, dtype=float)

    @cached_property
    def _sides(self) -> tuple[frozenset[str], ...]:
        """Names of each block's side inputs."""
        return tuple(
            frozenset(block.inputs[at] for at in self._prices[block.class_index].side_positions)
            for block in self.graph.blocks
        )

    def side_bytes(self, first: int, end: int) -> int:
        """Return the side inputs of a run for each microbatch: of all its blocks, each once."""
        values = self.costs.side_values(self.split.microbatch_size)
        return values.num_bytes(frozenset().union(*self._sides[first:end]), fixed=False)

    @cached_property
    def _entries(self) -> tuple[Mapping[int, BlockMoved], ...]:
        """For each axis the collectives that bring inputs to where a block takes them, by entry.

        Blocks of one entry take the same placements from blocks of the same classes.
        """
        degrees, entries = self.split.degrees, self.costs.links.entries
        groups = lowered_groups(self.costs.profile.cluster, degrees)
        every = []
        for axis, own in self.layouts.items():
            others = [
                (other, degrees[name]) for name, other in self.layouts.items() if name != axis
            ]
            found: dict[int, BlockMoved] = {}
            for index, entry in enumerate(entries):
                if entry not in found:
                    found[entry] = block_entry(
                        self.graph, index, own, self.costs.profile,
                        axis=axis, group=groups[axis].group,
                        microbatch_size=self.split.microbatch_size, others=others,
                    )  # fmt: skip
            every.append(found)
        return tuple(every)

    def moved(self, index: int) -> BlockMoved:
        """Return the collectives of a block, with those that bring its inputs to their place."""
        entry = self.costs.links.entries[index]
        parts = [of_axis[entry] for of_axis in self._entries]
        parts.append(self._prices[self.graph.blocks[index].class_index].moved)
        forward, backward, again = zip(*parts, strict=True)
        return BlockMoved(sum(forward, ()), sum(backward, ()), sum(again, ()))

    def has_backward(self, index: int) -> bool:
        """Whether a gradient arrives at a block."""
        return self._prices[self.graph.blocks[index].class_index].has_backward

    @cached_property
    def _ties(self) -> tuple[Tie, ...]:
        """What blocks of the chain share."""
        has_backward = [self._prices[block.class_index].has_backward for block in self.graph.blocks]
        shared: dict[tuple[int, int], Counter[str]] = {}
        for i, j, meta, size, is_spread in self._shared_tensors():
            is_param = meta.kind == "param" and not meta.table
            if is_param and meta.requires_grad:
                held = {"param_bytes": size, "num_params": 1}
                held |= {"spread_bytes": size * is_spread, "num_spread": int(is_spread)}
            else:
                # Gathered for a backward if any of both has one: blocks with one come last.
                again = size * (is_param and has_backward[i] and has_backward[j])
                held = {"frozen_bytes": size, "frozen_param_bytes": size * is_param}
                held["frozen_backward_bytes"] = again
            shared.setdefault((i, j), Counter()).update(held)
        return tuple((i, j, held) for (i, j), held in shared.items())

    def _shared_tensors(self) -> Iterator[tuple[int, int, TensorMeta, int, bool]]:
        """Yield (i, j, tensor, local bytes, whether it lies on the experts' mesh): blocks i < j
        share it, j being the next user.
        """
        graph, degrees = self.graph, self.split.degrees
        for name, users in graph.shared_params.items():
            meta = graph.tensor[name]
            # Pairs of neighbouring users: a run with k users counts it k times, less k - 1 pairs.
            for i, j in pairwise(users):
                block = graph.blocks[j]
                at = block.params.index(name)
                price = self._prices[block.class_index]
                size, is_spread = rest_bytes(meta), at in price.spread
                if is_spread:
                    size //= degrees["ep"]
                for axis, layouts in self.layouts.items():
                    layout = layouts.get(block.class_index)
                    # Sharded on this axis (`Shard` is spelled S(dim)): a rank has its part only.
                    if layout and layout.params[at].startswith("S"):
                        size //= degrees[axis]
                yield i, j, meta, size, is_spread

    @cached_property
    def ties(self) -> tuple[tuple[int, int, float], ...]:
        """(i, j, local bytes): blocks i < j share trainable parameters, j being the next user."""
        tied = ((i, j, float(held["param_bytes"])) for i, j, held in self._ties)
        return tuple(tie for tie in tied if tie[2])

    @cached_property
    def loads(self) -> RunLoads:
        """Bytes of any runs of blocks."""
        return RunLoads(blocks=self.blocks, ties=self._ties)

    @cached_property
    def _time_sums(self) -> Floats:
        """Running sums (fields, n + 1) of seconds and flop."""
        # A leading column of zeros makes sums[end] - sums[start] hold for start 0, too.
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
            links=self.costs.links,
            profile=self.costs.profile,
            degrees=self.split.degrees,
            microbatch_size=self.split.microbatch_size,
            layouts=self.layouts,
        )


def chain_costs(costs: CostCache, split: Split) -> ChainCosts:
    """Return the chain of a model under a split; `costs` keeps it."""
    return costs.once(split, lambda: ChainCosts(costs=costs, split=split))
