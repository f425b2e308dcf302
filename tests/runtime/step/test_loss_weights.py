"""What the loss of each part counts for: they sum to one over all parts of all replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.errors import ModelError
from planner.language.lowering.defaults import default_plan
from planner.language.ops.samples.state import ADDED
from planner.runtime.batches.inputs.feed import cut_batch
from planner.runtime.batches.inputs.loss_weights import LossWeights, own_runs
from planner.runtime.batches.inputs.whole_batch import WholeBatchValues
from tests.builders import gpt_batch
from tests.captures import capture_tiny
from tests.runtime.alone import Parts


def weights_of(number: int, *, count=None, has_loss: bool = True, samples: int = 7, share=None):
    graph = capture_tiny("gpt")
    plan = default_plan(graph, dp=2, microbatch_size=2, num_microbatches=2)
    cut = cut_batch(gpt_batch(samples), graph, plan)
    mesh = Parts({"batch": 2}, {"batch": number})
    whole = WholeBatchValues(graph, graph, {}, lambda meta: torch.zeros(()))
    if share is not None:
        whole.shares = replace(whole.shares, share=share)
    weights = LossWeights(
        mesh,
        dtype=torch.float64,
        has_loss=has_loss,
        takes=False,
        count=count,
        wholes=[whole],
        is_exact=count is None,
    )
    runs = own_runs(cut.split, mesh)
    whole = weights.of_whole(cut)
    made = weights.of(whole, cut, runs, weights.parts(cut, runs, whole, runs))
    return [w.item() for w in made]


def test_samples_count_alike_however_unevenly_they_are_cut():
    both = [weights_of(number) for number in range(2)]
    assert sorted(w for own in both for w in own) == pytest.approx([1 / 7, 2 / 7, 2 / 7, 2 / 7])
    assert weights_of(0, has_loss=False) == []
    assert weights_of(0, share=ADDED) == [1.0, 1.0]


def test_what_the_user_counts():
    ids = iter(range(100))

    def count(part) -> float:
        return float(next(ids) % 4)  # 0, 1, 2, 3 for the parts of both replicas, in order

    assert weights_of(1, count=count) == pytest.approx([2 / 6, 3 / 6])
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ModelError, match="must not be negative, nor all zero"):
            weights_of(0, count=lambda part, bad=bad: bad)
