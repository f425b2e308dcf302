"""How many labels a loss counts in a part of a batch, as its graph makes them of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.across.counted import CountedLoss, counted_loss
from planner.graph import Affine, ModelGraph, Program
from planner.plan.batch_statistics import BatchStatisticsWarning
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.step.inputs.feed import CutBatch, filled

_CPU = torch.device("cpu")


class LabelCounts:
    """Counts the labels of a model's loss on batches of one shape.

    Mutable: programs are kept by the number of samples, and a warning comes once.
    """

    def __init__(self, graph: ModelGraph, counted: CountedLoss, pad: Mapping[str, float]) -> None:
        """`pad` fills tensors of a smaller shape up."""
        self._graph, self._counted, self._pad = graph, counted, pad
        self._programs: dict[tuple[int, int], tuple[_Made, _Made]] = {}
        self._has_warned = False
        self._names = tuple(
            dict.fromkeys(
                name
                for labels in counted.means
                for name in (*labels.preamble.inputs, *labels.inputs)
                if name in graph.batch_inputs
            )
        )

    @classmethod
    def of(cls, graph: ModelGraph, pad: Mapping[str, float]) -> LabelCounts | None:
        """Return what counts the labels of a model; None where its loss is no mean over some."""
        counted = counted_loss(graph)
        return None if counted is None else cls(graph, counted, pad)

    @property
    def reads(self) -> frozenset[str]:
        """The paths of the batch's tensors that labels are made of."""
        return frozenset(self._graph.tensor[name].fqn for name in self._names)

    def count(self, cut: CutBatch, runs: Sequence[range], *, warns: bool = False) -> list[float]:
        """Return how many labels count in each of some runs of samples, in the first of the means.

        Where the loss has other terms that count otherwise, no weight makes the mean over all parts
        that of the whole batch; with `warns` this is told, once.
        """

        def counts(number: int) -> list[int]:
            return self._counts(number, cut, runs)

        first = counts(0)
        if not (warns and not self._has_warned):
            return [float(n) for n in first]
        others = [counts(number) for number in range(1, len(self._counted.means))]
        if not self._counted.is_all:
            others.append([len(samples) for samples in runs])
        uneven = next((other for other in others if not _in_proportion(first, other)), None)
        if uneven is not None:
            self._has_warned = True
            warnings.warn(
                "the loss has a mean over labels that are not ignored and other terms, which count "
                f"parts of the batch differently (labels {first}, others {uneven}); parts are "
                "weighed by the labels, so the other terms differ from one device's; "
                "planner.apply(..., loss_weight=) weighs by something else",
                BatchStatisticsWarning,
                stacklevel=2,
            )
        return [float(n) for n in first]

    def _counts(self, number: int, cut: CutBatch, runs: Sequence[range]) -> list[int]:
        """Return how many labels count in each run; where they lie sample by sample they are made
        once for all runs, of which a batch has as many as replicas times microbatches.
        """
        labels = self._counted.means[number]
        rows = labels.made.tensor[labels.made.outputs[0]].shape[:1]
        if not (rows and isinstance(rows[0], Affine) and not rows[0].fixed):
            return [sum(self._of_samples(number, cut, samples)) for samples in runs]
        first = min((samples.start for samples in runs if samples), default=0)
        last = max((samples.stop for samples in runs if samples), default=0)
        before = list(accumulate(self._of_samples(number, cut, range(first, last)), initial=0))
        return [
            before[samples.stop - first] - before[samples.start - first] if samples else 0
            for samples in runs
        ]

    @torch.no_grad()
    def _of_samples(self, number: int, cut: CutBatch, samples: range) -> list[int]:
        """Return how many labels count in each of some samples; in no order where labels do not
        lie sample by sample.
        """
        labels, size = self._counted.means[number], len(samples)
        if not size:
            return []
        if (number, size) not in self._programs:
            self._programs[number, size] = (
                _Made(labels.preamble.bind(size)),
                _Made(labels.made.bind(size)),
            )
        preamble, made = self._programs[number, size]
        values: dict[str, Tensor] = {}
        for name in self._names:
            meta = self._graph.tensor[name]
            piece = cut.tensor(meta.fqn, samples).to(_CPU, getattr(torch, meta.dtype))
            values[name] = filled(piece, meta.shape_at(size), self._pad.get(meta.fqn, 0))
        values |= preamble({name: values[name] for name in labels.preamble.inputs})
        found = made(dict(zip(made.inputs, (values[n] for n in labels.inputs), strict=True)))
        (target,) = found.values()
        if isinstance(target, FakeTensor):  # in a dry run, which has no values
            return [target.numel() // size] * size
        counting = target != labels.ignore_index
        if counting.numel() % size:
            return [int(counting.sum())]
        return list(map(int, counting.reshape(size, -1).sum(1).tolist()))


class _Made:
    """A program without weights, on the host."""

    def __init__(self, program: Program) -> None:
        self.inputs, self._outputs = program.inputs, program.outputs
        self._run = to_graph_module(program, {}, _CPU)

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = self._run(*(values[name] for name in self.inputs))
        return dict(zip(self._outputs, made, strict=True))


def _in_proportion(first: Sequence[int], second: Sequence[int]) -> bool:
    return all(a * sum(second) == b * sum(first) for a, b in zip(first, second, strict=True))
