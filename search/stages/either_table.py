"""Tables that differ in their logits alone, whole in one and made in chunks in the other, as one.

Chunks take longer, and hold less where the loss is made; all other blocks are alike. So a search
looks at both at once, by a table that no plan of either is faster than, nor smaller:

    seconds    of whole logits; nothing for what blocks that differ recompute
    bytes      of each block the least of both; of blocks that differ under any recomputation

A bound of this table holds for both: paths and shares of work never fall with a block's seconds,
nor bytes of a rank with a block's. (Seconds of weight gradients, which may come late, count for no
more than others of a backward: there the most of both is the least.) Only what it does not rule out
is looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from costmodel.time.stage_costs.chain import ChainCosts
from costmodel.time.stage_costs.load import LOAD_FIELDS, SAVED, StageLoad
from costmodel.time.stage_costs.runs import Flags, Floats
from costmodel.time.stage_costs.times import TIME_FIELDS, RunTimes
from search.stages.stage_table import StageTable

_RECOMPUTED = ("recomputed_s", "rerun_s", "rerun_host_s", "rerun_comm_s")
_NO_FASTER = ("forward_s", "backward_s", "comm_forward_s", "comm_backward_s")


@dataclass(kw_only=True, eq=False)
class EitherChain(ChainCosts):
    """What blocks take at least with whole logits or in chunks."""

    whole: ChainCosts
    chunked: ChainCosts

    @cached_property
    def differs(self) -> Flags:
        """Which blocks (n) are not alike."""
        pairs = [
            *((getattr(self.whole.times, n), getattr(self.chunked.times, n)) for n in TIME_FIELDS),
            *(
                (getattr(self.whole.blocks, n), getattr(self.chunked.blocks, n))
                for n in LOAD_FIELDS
            ),
            (self.whole.late_bytes, self.chunked.late_bytes),
            (self.whole.backward_bytes, self.chunked.backward_bytes),
        ]
        flags: Flags = np.any([whole != chunked for whole, chunked in pairs], axis=0)
        return flags

    @cached_property
    def times(self) -> RunTimes:
        """Seconds of each block (n)."""
        whole, chunked = self.whole.times, self.chunked.times
        free = {name: np.where(self.differs, 0.0, getattr(whole, name)) for name in _RECOMPUTED}
        return replace(whole, weight_s=np.maximum(whole.weight_s, chunked.weight_s), **free)

    @cached_property
    def blocks(self) -> StageLoad:
        """Bytes of each block (n)."""
        columns: dict[str, Floats] = {}
        for name in LOAD_FIELDS:
            # What the next block shares of a block's outputs is counted there: the most is least.
            least = np.maximum if name == "tail_bytes" else np.minimum
            columns[name] = least(
                getattr(self.whole.blocks, name), getattr(self.chunked.blocks, name)
            )
        of_any = np.min([columns[name] for name in SAVED.values()], axis=0)
        for name in SAVED.values():
            columns[name] = np.where(self.differs, of_any, columns[name])
        return StageLoad(**columns)

    @cached_property
    def late_bytes(self) -> Floats:
        """As of a chain, the least of both."""
        least: Floats = np.minimum(self.whole.late_bytes, self.chunked.late_bytes)
        return least

    @cached_property
    def backward_bytes(self) -> Floats:
        """As of a chain: with what blocks save here, the least of both with their own."""
        whole, chunked = (
            chain.blocks.saved_bytes + chain.backward_bytes for chain in (self.whole, self.chunked)
        )
        least: Floats = np.minimum(whole, chunked) - self.blocks.saved_bytes
        return least


@dataclass(kw_only=True, eq=False)
class EitherTable(StageTable):
    """Two tables of equal layouts, the first with whole logits: no plan of either is below it."""

    either: tuple[StageTable, StageTable]

    @property
    def members(self) -> tuple[StageTable, ...]:
        """Both."""
        return self.either

    @cached_property
    def key(self) -> str:
        """Names the two among tables."""
        return " or ".join(table.key for table in self.either)

    def chain_where(self, *, polls: bool) -> ChainCosts:
        """Return the least costs of each block, where hosts poll for messages or not."""
        if polls not in self._chains:
            whole, chunked = (table.chain_where(polls=polls) for table in self.either)
            self._chains[polls] = EitherChain(
                costs=chunked.costs, split=chunked.split, whole=whole, chunked=chunked
            )
        return self._chains[polls]


def with_both(tables: Iterable[StageTable]) -> Iterator[StageTable]:
    """Yield tables, of which those that differ in logits alone are one (`EitherTable`)."""
    by_layouts: dict[tuple, list[StageTable]] = {}
    for table in tables:
        by_layouts.setdefault((table.layouts, table.beside), []).append(table)
    for alike in by_layouts.values():
        both = sorted(alike, key=lambda table: table.logit_rows)
        if len(both) == 2 and _is_no_faster(both[1], both[0]):
            yield _either(both[0], both[1])
        else:
            yield from alike


def _either(whole: StageTable, chunked: StageTable) -> EitherTable:
    given = {f.name: getattr(chunked, f.name) for f in fields(StageTable) if f.init}
    return EitherTable(**given, either=(whole, chunked))


def _is_no_faster(chunked: StageTable, whole: StageTable) -> bool:
    """Whether no job of any block takes less in chunks, without what its device waits for, too."""
    slow, fast = chunked.chain.times, whole.chain.times
    waits = ("forward_s", "host_forward_s"), ("backward_s", "host_backward_s")
    return all(
        bool(np.all(getattr(slow, name) >= getattr(fast, name))) for name in _NO_FASTER
    ) and all(
        bool(
            np.all(
                getattr(slow, name) - getattr(slow, host)
                >= getattr(fast, name) - getattr(fast, host)
            )
        )
        for name, host in waits
    )
