"""What parts of a batch take of the whole one, made of the batch before a step, on the host.

The graph says what that is (`planner.language.across.whole`): values that blocks take, and counts
by which parts count in the loss. Where every rank is given the whole batch, each makes them itself.
Where replicas have their own parts, a program runs in two halves: of each part, up to sums over its
samples and rows that meet those of other parts; and, once ranks told each other these, of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.language.across.halves import Halves, halves
from planner.language.across.whole import LossShares, loss_shares
from planner.language.graph import Affine, ModelGraph, Program, Ref, TensorMeta, map_refs
from planner.language.ops.samples.state import ADDED, SAMPLES, SCALED
from planner.runtime.batches.inputs.feed import CutBatch, filled, piece_of, rows_of
from planner.runtime.stage.program_fx import to_graph_module

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPart:
    """What a rank tells the others of its replica's samples.

    Attributes:
        samples: of each microbatch.
        sums: over its samples, each in the mean or the sum over the batch.
        rows: of each microbatch, of tensors whose samples meet those of other parts.
        same: numbers of the batch, which all replicas have.
    """

    samples: tuple[int, ...]
    sums: Mapping[str, Tensor]
    rows: Mapping[str, tuple[Tensor, ...]]
    same: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfWhole:
    """Values and counts of a whole batch of some samples, by the names of the program's outputs."""

    samples: int
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def count(self, name: str) -> float:
        """Return what counts in the batch."""
        return float(self.samples) if name == SAMPLES else float(self.values[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What counts in a part of a batch: its samples, and what the program's outputs are on it."""

    samples: int
    counts: Mapping[str, Tensor]


class WholeBatchValues:
    """Makes what parts take of batches of one shape. Mutable: programs are kept by the number of
    samples, and `tensors`, the buffers that they read by names in the graph, get values.
    """

    def __init__(
        self,
        graph: ModelGraph,
        run: ModelGraph,
        pad: Mapping[str, float],
        tensor_of: Callable[[TensorMeta], Tensor],
    ) -> None:
        """`run` is the graph as a plan runs it; `pad` fills tensors of a smaller shape up, and
        `tensor_of` gives what a buffer is on the host.
        """
        self._graph, self._pad = graph, pad
        self.shares: LossShares = loss_shares(run)
        program = self.shares.program
        self._halves: Halves = halves(program, graph.unit)
        self.tensors = {name: tensor_of(graph.tensor[name]) for name in program.params}
        self._programs: dict[tuple[str, int], HostProgram] = {}
        whole = graph.whole
        self._values = () if whole is None else whole.values
        self._shares = () if whole is None else whole.shares
        counts = [*self.shares.counts.values(), *(c for _, c in self._shares if c != SAMPLES)]
        self._counts = tuple(dict.fromkeys(counts))
        # Divisors count whole batches alone.
        self._counts_parts = self.shares.share in self.shares.counts or any(
            count != SAMPLES for _, count in self._shares
        )

    def take_values(self, values: Mapping[str, Tensor]) -> None:
        """Take other values for its tensors, by their names in the graph."""
        for name, tensor in self.tensors.items():
            if name in values:
                tensor.copy_(values[name])

    @property
    def names(self) -> frozenset[str]:
        """Names in the graph of what blocks take of the whole batch."""
        return frozenset() if self._graph.whole is None else frozenset(self._graph.whole.names)

    @property
    def reads(self) -> frozenset[str]:
        """The paths of the batch's tensors that it is made of."""
        return frozenset(self._graph.tensor[name].fqn for name in self.shares.program.inputs)

    @property
    def is_needed(self) -> bool:
        """Whether anything is made of the batch's tensors."""
        return bool(self.shares.program.outputs)

    def of_whole(self, cut: CutBatch) -> OfWhole:
        """Return what is made of a whole batch."""
        samples = cut.split.num_samples
        return OfWhole(samples=samples, values=self._run("whole", cut, range(samples)))

    def of_part(self, cut: CutBatch, runs: Sequence[range]) -> OfPart:
        """Return what others need of a replica's microbatches, of a batch that is its own part."""
        found = [self._run("first", cut, samples) for samples in runs]
        samples = tuple(map(len, runs))
        sums = {}
        for name, share in self._halves.sums.items():
            parts = [
                each[name] if share == ADDED else each[name] * len(run)
                for each, run in zip(found, runs, strict=True)
                if len(run)
            ]
            sums[name] = torch.stack(parts).sum(0)
        rows = {name: tuple(each[name] for each in found) for name in self._halves.rows}
        same = {name: found[0][name] for name in self._halves.same}
        return OfPart(samples=samples, sums=sums, rows=rows, same=same)

    def joined(self, parts: Sequence[OfPart]) -> OfWhole:
        """Return what is made of a batch whose replicas' parts are given in their order."""
        samples = sum(sum(part.samples) for part in parts)
        given: dict[str, Tensor] = dict(parts[0].same)
        for name, share in self._halves.sums.items():
            total = torch.stack([part.sums[name] for part in parts]).sum(0)
            given[name] = total if share == ADDED else total / samples
        for name, dim in self._halves.rows.items():
            each = range(len(parts[0].samples))
            rows = [part.rows[name][m] for m in each for part in parts]
            given[name] = self._in_a_row(name, rows, dim)
        return OfWhole(
            samples=samples, values=self._program("second", samples)(given, self.tensors)
        )

    def _in_a_row(self, name: str, rows: Sequence[Tensor], dim: int) -> Tensor:
        """Return rows of parts as those of the batch, run by run where samples lie in several."""
        size = self._halves.first.tensor[name].shape[dim]
        assert isinstance(size, Affine)
        in_runs = (self._graph.unit.runs_of(size.per_sample), -1)
        each = [rows_of.unflatten(dim, in_runs) for rows_of in rows]
        return torch.cat(each, dim + 1).flatten(dim, dim + 1)

    def parts(
        self, cut: CutBatch, runs: Sequence[range], whole: OfWhole, places: Sequence[range]
    ) -> list[Counted]:
        """Return what counts in each of some runs of samples, as far as shares need it. The samples
        have `places` in the whole batch.
        """
        return [
            Counted(
                samples=len(run),
                counts=self._counts_in(cut, run, whole, place) if self._counts_parts else {},
            )
            for run, place in zip(runs, places, strict=True)
        ]

    def _counts_in(
        self, cut: CutBatch, run: range, whole: OfWhole, place: range
    ) -> dict[str, Tensor]:
        return self._run("counts", cut, run, whole, place) if len(run) and self._counts else {}

    def weights(self, whole: OfWhole, parts: Sequence[Counted]) -> list[Tensor]:
        """Return what each of some parts counts for in the loss of the batch."""
        share = self.shares.share
        if share in (ADDED, SCALED):
            return [torch.tensor(float(part.samples > 0), dtype=torch.float64) for part in parts]
        return [_share(self.shares.counts.get(share, share), whole, part) for part in parts]

    def given(self, whole: OfWhole, part: Counted, place: range) -> dict[str, Tensor]:
        """Return what blocks take with a microbatch, whose samples have a `place` in the whole
        batch, by names in the graph.
        """
        made = {}
        for name, output in self._values:
            meta = self._graph.tensor[name]
            made[name] = piece_of(whole.values[output], meta, place, self._graph.unit)
        for name, count in self._shares:
            dtype = getattr(torch, self._graph.tensor[name].dtype)
            made[name] = _share(count, whole, part).to(dtype)
        return made

    def in_order(self, whole: OfWhole, order: Sequence[int]) -> OfWhole:
        """Return the same of a batch whose samples change places: values that each sample has do,
        too. They were made of the batch as it was given, on whose order they may depend.
        """
        moved = dict(whole.values)
        for name, output in self._values:
            if output in moved:
                meta = self._graph.tensor[name]
                moved[output] = rows_of(whole.values[output], meta, order, self._graph.unit)
        return replace(whole, values=moved)

    def totals(self, whole: OfWhole) -> dict[str, float]:
        """Return what counts in a batch, for each term of its loss; of sums over samples 1.

        The first is what a batch counts for among others.
        """
        share = self.shares.share
        terms = self.shares.terms if share == SCALED else (share,)
        return {
            term: 1.0 if term == ADDED else whole.count(self.shares.counts.get(term, term))
            for term in terms
        }

    @property
    def counts_take_values(self) -> bool:
        """Whether what counts in a part follows from values of the whole batch."""
        return not {name for name, _ in self._values}.isdisjoint(self._counting().inputs)

    def counts_of(self, cut: CutBatch, runs: Sequence[range]) -> list[dict[str, float]]:
        """Return all that counts in each of some runs of a batch, samples among it; the batch is
        whole where `counts_take_values`.
        """
        found = []
        samples = cut.split.num_samples
        whole = self.of_whole(cut) if self.counts_take_values else OfWhole(samples=samples)
        for run in runs:
            made = self._counts_in(cut, run, whole, run)
            found.append(
                {SAMPLES: float(len(run))}
                | {name: float(made[name]) if name in made else 0.0 for name in self._counts}
            )
        return found

    def _run(
        self,
        what: str,
        cut: CutBatch,
        samples: range,
        whole: OfWhole | None = None,
        place: range = range(0),
    ) -> dict[str, Tensor]:
        program = self._program(what, len(samples))
        of_whole = dict(self._values)
        values: dict[str, Tensor] = {}
        for name in program.inputs:
            meta = self._graph.tensor[name]
            if whole is not None and name in of_whole:
                value = whole.values[of_whole[name]]
                values[name] = piece_of(value, meta, place, self._graph.unit)
                continue
            piece = cut.tensor(meta.fqn, samples).to(_CPU, getattr(torch, meta.dtype))
            values[name] = filled(piece, meta.shape_at(len(samples)), self._pad.get(meta.fqn, 0))
        return program(values, self.tensors)

    def _program(self, what: str, samples: int) -> HostProgram:
        if (what, samples) not in self._programs:
            program = {
                "whole": self.shares.program,
                "first": self._halves.first,
                "second": self._halves.second,
            }.get(what) or self._counting()
            self._programs[what, samples] = HostProgram(program.bind(samples))
        return self._programs[what, samples]

    def _counting(self) -> Program:
        """Return what counts in a part, which takes values of the whole batch as blocks do: labels
        and weights of classes may be made of these.
        """
        program = self.shares.program
        given = {value: self._graph.tensor[name] for name, value in self._values}

        def taken(ref: Ref) -> Ref:
            return Ref(given[ref.name].name) if ref.name in given else ref

        ops = tuple(
            replace(op, args=map_refs(op.args, taken), kwargs=map_refs(op.kwargs, taken))
            for op in program.ops
        )
        metas = tuple(given.values())
        inputs = (*program.inputs, *(meta.name for meta in metas))
        tensors = (*program.tensors, *metas)
        return replace(program, inputs=inputs, tensors=tensors, ops=ops).only(self._counts)


class HostProgram:
    """A program without parameters, on the host."""

    def __init__(self, program: Program) -> None:
        self.inputs, self._outputs, self._buffers = program.inputs, program.outputs, program.params
        self._run = to_graph_module(program, {}, _CPU)

    @torch.no_grad()
    def __call__(
        self, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what it makes of a batch's tensors and its buffers, by names in the program."""
        given = (*(values[name] for name in self.inputs), *(tensors[n] for n in self._buffers))
        return dict(zip(self._outputs, self._run(*given), strict=True))


def is_known(whole: OfWhole) -> bool:
    """Whether values are numbers; a dry run has none."""
    return not any(isinstance(value, FakeTensor) for value in whole.values.values())


def _share(name: str, whole: OfWhole, part: Counted) -> Tensor:
    """Return what a part counts by what the batch counts; zero without samples."""
    if not part.samples:
        return torch.zeros((), dtype=torch.float64)
    if name == SAMPLES:
        return torch.tensor(part.samples / whole.samples, dtype=torch.float64)
    return part.counts[name].double() / whole.values[name].double()
