"""How many labels a loss counts in a part of a batch, as its graph makes them of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import isclose

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.across.counted import CountedLoss, counted_loss
from planner.graph import Affine, ModelGraph, Program, TensorMeta
from planner.plan.batch_statistics import BatchStatisticsWarning
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.step.inputs.feed import CutBatch, filled

_CPU = torch.device("cpu")


class LabelCounts:
    """Counts the labels of a model's loss on batches of one shape, by the weights of their classes.

    `tensors` are the buffers that it reads, by names in the graph, on the host. Mutable: these get
    values, programs are kept by the number of samples, and a warning comes once.
    """

    def __init__(
        self,
        graph: ModelGraph,
        counted: CountedLoss,
        pad: Mapping[str, float],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """`pad` fills tensors of a smaller shape up."""
        self._graph, self._counted, self._pad, self.tensors = graph, counted, pad, tensors
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
    def of(
        cls, graph: ModelGraph, pad: Mapping[str, float], tensor_of: Callable[[TensorMeta], Tensor]
    ) -> LabelCounts | None:
        """Return what counts the labels of a model; None where its loss is no mean over some.

        `tensor_of` gives what a buffer of the graph is on the host.
        """
        counted = counted_loss(graph)
        if counted is None:
            return None
        names = dict.fromkeys(name for labels in counted.means for name in labels.buffers)
        return cls(graph, counted, pad, {name: tensor_of(graph.tensor[name]) for name in names})

    @property
    def reads(self) -> frozenset[str]:
        """The paths of the batch's tensors that labels are made of."""
        return frozenset(self._graph.tensor[name].fqn for name in self._names)

    def count(self, cut: CutBatch, runs: Sequence[range], *, warns: bool = False) -> list[float]:
        """Return how many labels count in each of some runs of samples, in the first of the means.

        Where the loss has other terms that count otherwise, no weight makes the mean over all parts
        that of the whole batch; with `warns` this is told, once.
        """
        first = self._counts(0, cut, runs)
        if not (warns and not self._has_warned):
            return first
        others = self._terms(cut, runs)[1:]
        uneven = next((other for other in others if not _in_proportion(first, other)), None)
        if uneven is not None:
            self._warn(
                "the loss has a mean over labels that are not ignored and other terms, which count "
                f"parts of the batch differently (labels {_told(first)}, others {_told(uneven)}); "
                "parts are weighed by the labels, so the other terms differ from one device's; "
                "planner.apply(..., loss_weight=) weighs by something else"
            )
        return first

    def compare(self, given: Sequence[float], cut: CutBatch, runs: Sequence[range]) -> None:
        """Warn, once, where the user's counts of some runs are those of no term of the loss."""
        if self._has_warned or not sum(given) > 0:
            return
        terms = self._terms(cut, runs)
        if not any(_in_proportion(given, term) for term in terms):
            self._warn(
                f"loss_weight counts {_told(given)} in parts of the batch, and the loss is divided "
                f"by {_told(terms[0])} there (its labels that are not ignored, by the weights of "
                "their classes), so training differs from one device; without loss_weight= parts "
                "count by that"
            )

    def _warn(self, message: str) -> None:
        self._has_warned = True
        warnings.warn(message, BatchStatisticsWarning, stacklevel=3)

    def _terms(self, cut: CutBatch, runs: Sequence[range]) -> list[list[float]]:
        """Return what each term of the loss counts in each run, the first mean first."""
        terms = [self._counts(number, cut, runs) for number in range(len(self._counted.means))]
        if not self._counted.is_all:
            terms.append([float(len(samples)) for samples in runs])
        return terms

    def _counts(self, number: int, cut: CutBatch, runs: Sequence[range]) -> list[float]:
        """Return how many labels count in each run; where they lie sample by sample they are made
        once for all runs, of which a batch has as many as replicas times microbatches.
        """
        labels = self._counted.means[number]
        rows = labels.made.tensor[labels.made.outputs[0]].shape[:1]
        # (Labels of samples that lie apart do not follow each other sample by sample.)
        in_order = cut.unit.runs == 1
        if not (in_order and rows and isinstance(rows[0], Affine) and not rows[0].fixed):
            return [sum(self._of_samples(number, cut, samples)) for samples in runs]
        first = min((samples.start for samples in runs if samples), default=0)
        last = max((samples.stop for samples in runs if samples), default=0)
        # Once for the span of all runs, then summed by run.
        each = self._of_samples(number, cut, range(first, last))
        return [
            sum(each[samples.start - first : samples.stop - first], start=0.0) for samples in runs
        ]

    @torch.no_grad()
    def _of_samples(self, number: int, cut: CutBatch, samples: range) -> list[float]:
        """Return how many labels count in each of some samples; in no order where labels do not
        lie sample by sample.
        """
        labels, size = self._counted.means[number], len(samples)
        if not size:
            return []
        if (number, size) not in self._programs:
            self._programs[number, size] = (
                _Made(labels.preamble.bind(size), labels.preamble.params),
                _Made(labels.made.bind(size), labels.params),
            )
        preamble, made = self._programs[number, size]
        values: dict[str, Tensor] = {}
        for name in self._names:
            meta = self._graph.tensor[name]
            piece = cut.tensor(meta.fqn, samples).to(_CPU, getattr(torch, meta.dtype))
            values[name] = filled(piece, meta.shape_at(size), self._pad.get(meta.fqn, 0))
        given = {name: values[name] for name in labels.preamble.inputs}
        values |= preamble(given, self.tensors)
        given = dict(zip(made.inputs, (values[n] for n in labels.inputs), strict=True))
        target, *weights = made(given, self.tensors).values()
        if isinstance(target, FakeTensor):  # in a dry run, which has no values
            return [target.numel() / size] * size
        counting = target != labels.ignore_index
        counts = counting.double()
        for weight in weights:  # of classes; an ignored label may be none of them
            counts = weight.double()[target.where(counting, 0)] * counting
        if counts.numel() % size:
            return [float(counts.sum())]
        # [samples, labels of each].
        found: list[float] = counts.reshape(size, -1).sum(1).tolist()
        return found


class _Made:
    """A program without parameters, on the host; `buffers` names in the graph what it reads."""

    def __init__(self, program: Program, buffers: Sequence[str]) -> None:
        self.inputs, self._outputs, self._buffers = program.inputs, program.outputs, buffers
        self._run = to_graph_module(program, {}, _CPU)

    def __call__(
        self, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        given = (*(values[name] for name in self.inputs), *(tensors[n] for n in self._buffers))
        return dict(zip(self._outputs, self._run(*given), strict=True))


def _in_proportion(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two counts are the same shares of their sums, but for rounding."""
    all_first, all_second = sum(first), sum(second)
    return all(
        isclose(a * all_second, b * all_first, rel_tol=1e-9, abs_tol=1e-12)
        for a, b in zip(first, second, strict=True)
    )


def _told(counts: Sequence[float]) -> list[float]:
    return [float(f"{count:.6g}") for count in counts]
