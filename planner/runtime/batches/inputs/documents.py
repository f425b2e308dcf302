"""How much work each sample of packed documents is, and how a batch is dealt by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.language.across.cut.documents import DocumentWork, Pattern, document_work
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.runtime.batches.inputs.feed import CutBatch, filled
from planner.runtime.batches.inputs.whole_batch import HostProgram
from planner.runtime.state.weights import constant


class Documents:
    """Tells attention's work on samples of packed documents, for batches of each shape of a plan.

    Mutable: programs are kept by the number of samples.
    """

    def __init__(
        self, graphs: Sequence[ModelGraph], plan: Plan, *, pad: Mapping[str, float]
    ) -> None:
        """`graphs` are captures on the shapes of the plan; `pad` fills tensors up to them."""
        found: list[DocumentWork] = []
        # (Where nothing waits for another part it does not matter which has how much.)
        if plan.pp * plan.batch_parts > 1:
            found = [work for work in map(document_work, graphs) if work is not None]
        self._works = found if len(found) == len(graphs) else []
        self._graphs, self._pad = graphs, pad
        self._programs: dict[tuple[int, int], HostProgram] = {}

    @property
    def are_dealt(self) -> bool:
        """Whether samples are packed documents, which may change places in a batch."""
        return bool(self._works)

    def are_told(self, leaves: Mapping[str, Tensor], bucket: int) -> bool:
        """Whether these tensors of a batch say how much work samples are."""
        graph, inputs = self._graphs[bucket], self._works[bucket].program.inputs
        given = [leaves.get(graph.tensor[name].fqn) for name in inputs]
        return not any(each is None or isinstance(each, FakeTensor) for each in given)

    def work(self, cut: CutBatch, samples: range) -> tuple[int, ...]:
        """Return the flop of each of some samples, forward and backward."""
        told, graph = self._works[cut.bucket], self._graphs[cut.bucket]
        key = cut.bucket, len(samples)
        if key not in self._programs:
            self._programs[key] = HostProgram(told.program.bind(len(samples)))
        values = {}
        for name in told.program.inputs:
            meta = graph.tensor[name]
            piece = cut.tensor(meta.fqn, samples).to("cpu", getattr(torch, meta.dtype))
            values[name] = filled(piece, meta.shape_at(len(samples)), self._pad.get(meta.fqn, 0))
        held = {name: constant(graph.tensor[name]) for name in told.program.params}
        tables = self._programs[key](values, held)
        total = torch.full((len(samples),), told.other_flop, dtype=torch.int64)
        for pattern, flop in told.pair_flop.items():
            pairs = _pairs(tables, pattern)
            runs = graph.unit.runs_of(pattern.rows)
            by_sample = pairs.view(runs, -1, pattern.rows // runs).sum((0, 2))
            total += flop * by_sample
        return tuple(total.tolist())


def _pairs(tables: Mapping[str, Tensor], pattern: Pattern) -> Tensor:
    """Return how many pairs of places meet in each row of a table.

    A document is a run of places with one number. Places that don't count are counted out of it
    as if they were its last.
    """
    same = tables[pattern.same]
    rows, places = same.shape
    begins = torch.ones_like(same, dtype=torch.bool)
    begins[:, 1:] = same[:, 1:] != same[:, :-1]
    if pattern.chunk is not None:
        begins[:, :: pattern.chunk] = True
    counts = None if pattern.keys is None else tables[pattern.keys].flatten().double()
    lengths = torch.bincount(begins.flatten().cumsum(0) - 1, counts, rows * places)
    # The length of each document stands where it begins.
    made = torch.zeros(rows * places, dtype=torch.int64)
    starts = begins.flatten().nonzero()[:, 0]
    made[starts] = pairs_of(lengths[: len(starts)].long(), pattern.low, pattern.high)
    return made.view(rows, places).sum(1)


def pairs_of(lengths: Tensor, low: int | None, high: int | None) -> Tensor:
    """Return how many pairs of places of each document meet: those with low <= q - k <= high."""
    upper = lengths * lengths if high is None else _at_most(lengths, high)
    return upper if low is None else (upper - _at_most(lengths, low - 1)).clamp(min=0)


def _at_most(lengths: Tensor, ahead: int) -> Tensor:
    """Pairs of places of which the first is at most so far ahead: all but a triangle, or one."""
    if ahead < 0:
        side = (lengths + ahead).clamp(min=0)
        return side * (side + 1) // 2
    side = (lengths - 1 - ahead).clamp(min=0)
    return lengths * lengths - side * (side + 1) // 2
