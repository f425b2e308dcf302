"""From what the script gives a step (a whole batch, or a replica's own part) to a rank's feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.data import OwnPart
from planner.errors import ModelError
from planner.graph import Affine, ModelGraph
from planner.graph.batch import flatten_batch
from planner.graph.batch_split import BatchSplit
from planner.plan import Plan
from planner.runtime.start.mesh import Mesh
from planner.runtime.step.agreement import Agreed, Said, agree, marks_of, refuse_other_cuts
from planner.runtime.step.feed import (
    CutBatch,
    Feed,
    Preamble,
    batch_metas,
    check_structure,
    count_samples,
    cut_batch,
    even_split,
)
from planner.runtime.step.loss_weights import LossWeights


class Feeder:
    """Feeds one rank's stages. `reads` are the paths of the batch's tensors that they, or the
    loss weight, take; a rank that reads none is given none.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        mesh: Mesh,
        *,
        preambles: Mapping[int, Preamble],
        side_inputs: Mapping[int, tuple[str, ...]],
        loss_weights: LossWeights,
    ) -> None:
        """`side_inputs` names what each stage takes beside activations."""
        self._graph, self._plan, self._mesh = graph, plan, mesh
        self._preambles, self._side_inputs, self._weights = preambles, side_inputs, loss_weights
        self._metas = batch_metas(graph)
        used = {name for preamble in preambles.values() for name in preamble.inputs}
        self._used = [graph.tensor[name] for name in sorted(used)]
        self.reads = frozenset(
            self._metas if loss_weights.reads_batch else (meta.fqn for meta in self._used)
        )

    def feed(self, batch: Any) -> Feed:
        """Return the feed of a whole batch or an `OwnPart`; every rank calls it.

        Raises ModelError for what the plan can't take, for parts on all ranks alike.
        """
        if isinstance(batch, OwnPart):
            return self._own_feed(batch)
        cut = cut_batch(batch, self._graph, self._plan)
        count, number = self._mesh.size("batch"), self._mesh.rank("batch")
        runs = [cut.split.part(m, count, number) for m in range(cut.split.num_microbatches)]
        return self._feed(cut, runs, self._weights.of(cut))

    def _own_feed(self, part: OwnPart) -> Feed:
        agreed = part.agreed if isinstance(part.agreed, Agreed) else self._asked(part)
        leaves, tree = flatten_batch(part.batch)
        cut = CutBatch(split=agreed.split, tree=tree, leaves=leaves, metas=self._metas)
        runs = self._runs(agreed)
        if agreed.counted is None:
            weights = self._weights.by_samples(agreed.split)
        elif self._weights.reads_batch:
            weights = self._weights.by_counts(self._weights.count(cut, runs), agreed.counted)
        else:
            weights = ()
        return self._feed(cut, runs, weights)

    def _asked(self, part: OwnPart) -> Agreed:
        refuse_other_cuts(self._plan)
        agreed = agree(self._mesh, self._plan, lambda: self.say(part.batch))
        assert agreed is not None, "no rank said that its data have ended"
        return agreed

    def say(self, batch: Any, *, whole: int | None = None, **more: Any) -> Said:
        """Return what this rank says of its own part; see `Said`.

        Raises ModelError for a part that lacks what the rank reads, or has another structure.
        """
        count, number = self._mesh.size("batch"), self._mesh.rank("batch")
        leaves, tree = flatten_batch(batch)
        if not leaves and not self.reads:
            return Said(parts=count, number=number, whole=whole, **more)
        check_structure(tree, leaves, self._graph, needed=self.reads)
        samples = count_samples(leaves, self._metas) if self._counts_samples(leaves) else None
        counted = None
        if samples is not None:
            # Where others have no say in it, the replica's part is all there is.
            split, parts, place = self._split(samples), 1, 0
            if whole is not None:
                split, parts, place = even_split(whole, self._plan), count, number
            runs = split.own(parts, place)
            if samples != runs[-1].stop:
                raise ModelError(
                    f"its loader made {samples} samples of {runs[-1].stop}; a collate_fn keeps "
                    "the number of samples"
                )
            if self._weights.reads_batch and self._mesh.is_first_of_samples:
                cut = CutBatch(split=split, tree=tree, leaves=leaves, metas=self._metas)
                counted = sum(self._weights.count(cut, runs))
        if "marks" not in more:
            more["marks"] = marks_of(leaves)
        return Said(
            parts=count, number=number, samples=samples, whole=whole, counted=counted, **more
        )

    def _split(self, samples: int) -> BatchSplit:
        return BatchSplit.of_parts((samples,), num_microbatches=self._plan.num_microbatches)

    def _counts_samples(self, leaves: Mapping[str, Tensor]) -> bool:
        return any(isinstance(size, Affine) for path in leaves for size in self._metas[path].shape)

    def _runs(self, agreed: Agreed) -> tuple[range, ...]:
        return agreed.split.own(self._mesh.size("batch"), self._mesh.rank("batch"))

    def _feed(self, cut: CutBatch, runs: Sequence[range], weights: tuple[Tensor, ...]) -> Feed:
        microbatches = [
            {
                meta.name: cut.tensor(meta.fqn, samples).to(
                    self._mesh.device, getattr(torch, meta.dtype), non_blocking=True
                )
                for meta in self._used
            }
            for samples in runs
        ]

        def side_inputs(stage_index: int, microbatch_index: int) -> tuple[Tensor, ...]:
            values = self._preambles[stage_index](
                microbatches[microbatch_index], len(runs[microbatch_index])
            )
            return tuple(values[name] for name in self._side_inputs[stage_index])

        return Feed(
            split=cut.split,
            num_samples=tuple(map(len, runs)),
            side_inputs=side_inputs,
            loss_weights=weights,
        )
