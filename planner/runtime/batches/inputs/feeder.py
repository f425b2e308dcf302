"""From what the script gives a step (a whole batch, or a replica's own part) to a rank's feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import ModelError
from planner.language.graph import Affine, ModelGraph, TensorMeta
from planner.language.graph.batch import flatten_batch
from planner.language.graph.batch_split import BatchSplit
from planner.language.layout.sequences import longest_sequence
from planner.language.plan import Plan
from planner.runtime.batches.inputs.agreement import (
    Agreed,
    Alike,
    Said,
    agree,
    marks_of,
    refuse_other_cuts,
)
from planner.runtime.batches.inputs.dealing import Dealt, deal
from planner.runtime.batches.inputs.documents import Documents
from planner.runtime.batches.inputs.feed import (
    CutBatch,
    Feed,
    Preamble,
    batch_metas,
    check_structure,
    count_samples,
    filled,
    whole_split,
)
from planner.runtime.batches.inputs.loss_weights import LossWeights, own_runs
from planner.runtime.batches.inputs.moving import can_move, with_samples_of_others
from planner.runtime.batches.inputs.whole_batch import OfWhole
from planner.runtime.batches.sampler import OwnPart
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.state.to_device import to_device


@dataclass(frozen=True)
class Shaped:
    """The model on batches of one shape: its graph, and the preamble of each stage of a rank."""

    graph: ModelGraph
    preambles: Mapping[int, Preamble]


def _values(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Return a batch's tensors by path, apart from what made them, and its structure.

    Raises ModelError in training where that would have a gradient in one process, too.
    """
    leaves, tree = flatten_batch(batch)
    for path, tensor in leaves.items():
        if torch.is_grad_enabled() and tensor.grad_fn is not None:
            raise ModelError(
                f"batch leaf {path!r} is computed from tensors that require a gradient "
                f"({type(tensor.grad_fn).__name__}), and a step gives one to the model's own "
                "parameters alone; compute it in the model's forward, or give tensor.detach()"
            )
    return {path: tensor.detach() for path, tensor in leaves.items()}, tree


class Feeder:
    """Feeds one rank's stages. `reads` are the paths of the batch's tensors that they, or the
    loss weight, take; a rank that reads none is given none.
    """

    def __init__(
        self,
        shapes: Sequence[Shaped],
        plan: Plan,
        mesh: Mesh,
        *,
        side_inputs: Mapping[int, tuple[str, ...]],
        loss_weights: LossWeights,
        pad: Mapping[str, float],
        documents: Documents | None = None,
    ) -> None:
        """The first of `shapes` is the plan's own, its buckets follow, the smallest first.

        `side_inputs` names what each stage takes beside activations; `pad` gives by path what
        tensors are filled up with; by `documents` samples are dealt to parts of a batch, where they
        are packed (None: as they are given). Raises ModelError for a path that is not in the batch.
        """
        self._graph, self._plan, self._mesh = shapes[0].graph, plan, mesh
        self._shapes, self._side_inputs, self._weights = shapes, side_inputs, loss_weights
        self._metas = [batch_metas(shaped.graph) for shaped in shapes]
        unknown = sorted(set(pad) - set(self._metas[0]))
        if unknown:
            raise ModelError(
                f"pad has {', '.join(unknown)}, and the batch has {', '.join(self._metas[0])}; "
                "name tensors of the batch"
            )
        self.pad = pad
        is_dealt = documents is not None and documents.are_dealt and can_move(self._metas[0])
        self._documents = documents if is_dealt else None
        self._filled_up = {path: self._varying(path) for path in pad}
        self._smallest_first = (*range(1, len(shapes)), 0)
        used = {name for preamble in shapes[0].preambles.values() for name in preamble.inputs}
        used -= loss_weights.names(0)
        self._used = sorted(used)
        self.reads = loss_weights.reads(self._metas[0]).union(
            self._graph.tensor[name].fqn for name in used
        )

    def _varying(self, path: str) -> frozenset[int]:
        """The dims of a tensor of which a batch may have less: those in which shapes differ, and
        those along a sequence where there is one shape alone.
        """
        own = self._metas[0][path].shape
        others = [metas[path].shape for metas in self._metas[1:]]
        if not others:
            length = longest_sequence(self._graph)
            return frozenset(dim for dim, size in enumerate(own) if size == length)
        return frozenset(
            dim
            for dim, size in enumerate(own)
            if isinstance(size, int) and any(shape[dim] != size for shape in others)
        )

    def feed(self, batch: Any) -> Feed:
        """Return the feed of a whole batch or an `OwnPart`; every rank calls it.

        Raises ModelError for what the plan can't take, for parts on all ranks alike.
        """
        if isinstance(batch, OwnPart):
            return self._own_feed(batch)
        leaves, tree = _values(batch)
        check_structure(tree, leaves, self._graph, needed=self._metas[0])
        (bucket, *_), num_samples = self._fitting(leaves)
        cut = CutBatch(
            split=whole_split(num_samples, self._plan),
            tree=tree,
            leaves=leaves,
            metas=self._metas[bucket],
            bucket=bucket,
            unit=self._plan.unit,
        )
        runs = own_runs(cut.split, self._mesh)
        whole = self._weights.of_whole(cut)
        dealt = self._dealt(cut)
        order = None if dealt is None else dealt.order
        if order is not None:
            cut = replace(cut, order=order)
            whole = self._weights.in_order(whole, cut.bucket, order)
        # (Begun when nothing can raise any more: every rank takes part.)
        feed = replace(self._feed(cut, runs, runs, whole, None), dealt=dealt)
        if self._plan.world_size == 1 or any(isinstance(t, FakeTensor) for t in leaves.values()):
            return feed  # (in a dry run there are no values to compare)
        return replace(feed, check=Alike(self._mesh, leaves, order).check)

    def _dealt(self, cut: CutBatch) -> Dealt | None:
        """Return how a whole batch is dealt, on every rank alike."""
        told = self._documents
        if told is None or not told.are_told(cut.leaves, cut.bucket):
            return None
        work = told.work(cut, range(cut.split.num_samples))
        return deal(work, cut.split, self._plan.shares)

    def _fitting(self, leaves: Mapping[str, Tensor]) -> tuple[tuple[int, ...], int]:
        """Return the shapes that tensors have or may be filled up to, and their samples.

        Raises ModelError where there is none.
        """
        found: dict[int, int] = {}
        wrong: ModelError | None = None
        # In this order, so the first that fits pads the least.
        for bucket in self._smallest_first:
            try:
                found[bucket] = count_samples(
                    leaves,
                    self._metas[bucket],
                    filled_up=self._filled_up,
                    unit=self._plan.unit,
                )
            except ModelError as error:
                wrong = error
        if not found:
            assert wrong is not None
            if len(self._shapes) == 1:
                raise wrong
            raise ModelError(
                f"{wrong}, or as one of {len(self._shapes) - 1} buckets; planner.apply(..., pad="
                '{"PATH": VALUE}) fills tensors up'
            )
        # Of shapes that count other numbers of samples in these tensors, those that agree with the
        # first are kept.
        samples = next(iter(found.values()))
        return tuple(bucket for bucket, count in found.items() if count == samples), samples

    def _own_feed(self, part: OwnPart) -> Feed:
        agreed = part.agreed if isinstance(part.agreed, Agreed) else self._asked(part)
        leaves, tree = _values(part.batch)
        metas = self._metas[agreed.bucket]
        cut = CutBatch(
            split=agreed.split,
            tree=tree,
            leaves=leaves,
            metas=metas,
            bucket=agreed.bucket,
            unit=self._plan.unit,
        )
        runs = agreed.split.own(self._mesh.size("batch"), self._mesh.rank("batch"))
        whole = self._weights.joined(agreed.bucket, agreed.split.num_samples, agreed.parts)
        places = own_runs(agreed.split, self._mesh)
        dealt = self._dealt_of_parts(agreed)
        if dealt is not None and dealt.order is not None:
            cut = with_samples_of_others(
                cut, dealt.order, self._mesh, reads=self.reads, pad=self.pad
            )
            whole = self._weights.in_order(whole, cut.bucket, dealt.order)
        feed = self._feed(cut, runs, places, whole, agreed.counted)
        return replace(feed, dealt=dealt)

    def _dealt_of_parts(self, agreed: Agreed) -> Dealt | None:
        """Return how a batch of which each replica has its part is dealt, on every rank alike."""
        if not agreed.work:
            return None
        split, count = agreed.split, len(agreed.work)
        parts = [iter(own) for own in agreed.work]
        work = [
            next(parts[replica])
            for m in range(split.num_microbatches)
            for replica in range(count)
            for _ in split.part(m, count, replica)
        ]
        return deal(work, split, self._plan.shares)

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
        leaves, tree = _values(batch)
        if not leaves and not self.reads:
            return Said(parts=count, number=number, whole=whole, **more)
        check_structure(tree, leaves, self._graph, needed=self.reads)
        fits, found = self._fitting(leaves)
        samples = found if self._counts_samples(leaves) else None
        counted = told = work = None
        if samples is not None:
            # Where others have no say in it, the replica's part is all there is.
            split, parts, place = self._split(samples), 1, 0
            if whole is not None:
                split, parts, place = whole_split(whole, self._plan), count, number
            runs = split.own(parts, place)
            if samples != runs[-1].stop:
                unit = self._plan.unit.size
                raise ModelError(
                    f"its loader made {samples * unit} samples of {runs[-1].stop * unit}; a "
                    "collate_fn keeps the number of samples"
                )
            cut = CutBatch(
                split=split,
                tree=tree,
                leaves=leaves,
                metas=self._metas[fits[0]],
                bucket=fits[0],
                unit=self._plan.unit,
            )
            work = self._work_of_part(cut, samples)
            if self._weights.tells:
                told = self._weights.of_part(cut, runs)
                if self._weights.is_counted:
                    counted = sum(self._weights.count(cut, runs))
        if "marks" not in more:
            more["marks"] = marks_of(leaves)
        return Said(
            parts=count,
            number=number,
            samples=samples,
            fits=fits,
            whole=whole,
            counted=counted,
            part=told,
            work=work,
            **more,
        )

    def _work_of_part(self, cut: CutBatch, samples: int) -> tuple[int, ...] | None:
        """Return how much work the samples of the rank's part are, if it is the rank to say it."""
        told = self._documents
        is_first = self._mesh.is_first_of_samples
        if told is None or not is_first or not told.are_told(cut.leaves, cut.bucket):
            return None
        return told.work(cut, range(samples))

    def samples_of(self, batch: Any) -> int:
        """Return the samples of a batch that may hold more than the plan takes."""
        leaves, _ = flatten_batch(batch)
        return self._fitting(leaves)[1] * self._plan.unit.size

    def _split(self, samples: int) -> BatchSplit:
        return BatchSplit.of_parts((samples,), num_microbatches=self._plan.num_microbatches)

    def _counts_samples(self, leaves: Mapping[str, Tensor]) -> bool:
        metas = self._metas[0]
        return any(isinstance(size, Affine) for path in leaves for size in metas[path].shape)

    def _feed(
        self,
        cut: CutBatch,
        runs: Sequence[range],
        places: Sequence[range],
        whole: OfWhole,
        counted: float | None,
    ) -> Feed:
        """`runs` are the rank's samples in the cut batch, `places` theirs in the whole one. The
        user's function counts `counted` in that, where replicas have their own parts.
        """
        parts = self._weights.parts(cut, runs, whole, places)
        weights = self._weights.of(whole, cut, runs, parts, counted)
        shaped = self._shapes[cut.bucket]
        metas = [shaped.graph.tensor[name] for name in self._used]

        def piece(meta: TensorMeta, samples: range) -> Tensor:
            tensor = to_device(
                cut.tensor(meta.fqn, samples), self._mesh.device, getattr(torch, meta.dtype)
            )
            # (On the device: what is filled up on the host would no longer lie in pinned memory.)
            return filled(tensor, meta.shape_at(len(samples)), self.pad.get(meta.fqn, 0))

        microbatches = [
            {meta.name: piece(meta, samples) for meta in metas}
            | {
                name: to_device(value, self._mesh.device)
                for name, value in self._weights.given(whole, cut.bucket, part, place).items()
            }
            for samples, part, place in zip(runs, parts, places, strict=True)
        ]

        def side_inputs(stage_index: int, microbatch_index: int) -> tuple[Tensor, ...]:
            values = shaped.preambles[stage_index](
                microbatches[microbatch_index], len(runs[microbatch_index])
            )
            return tuple(values[name] for name in self._side_inputs[stage_index])

        return Feed(
            split=cut.split,
            num_samples=tuple(map(len, runs)),
            side_inputs=side_inputs,
            loss_weights=weights,
            totals=partial(self._weights.totals, whole, cut, counted),
            bucket=cut.bucket,
        )
