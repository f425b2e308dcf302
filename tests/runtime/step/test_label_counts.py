"""Parts of a batch count by the labels in them, each by the weight of its class."""

from __future__ import annotations

import pytest
import torch

from planner.plan.batch_statistics import BatchStatisticsWarning
from planner.plan.defaults import default_plan
from planner.runtime.step.inputs.feed import cut_batch
from planner.runtime.step.inputs.label_counts import LabelCounts
from tests.across.test_counted import CLASSES, Classes, batch, mean
from tests.captures import capture_module

WEIGHTS = torch.arange(1.0, CLASSES + 1)
LABELS = torch.tensor([[0, 1, -100, 2], [-100] * 4, [4, 4, 4, 4]])


def test_an_ignored_label_counts_nothing_and_the_user_is_told_of_another_count():
    model = Classes(lambda m, logits, labels: mean(logits, labels, weight=m.weights))
    graph = capture_module(model, batch(2), batch(3))
    counts = LabelCounts.of(graph, {}, lambda meta: WEIGHTS.clone())
    plan = default_plan(graph, num_microbatches=3, microbatch_size=1)
    cut = cut_batch((torch.randn(3, 4, 3), LABELS), graph, plan)
    runs = [range(n, n + 1) for n in range(3)]
    assert counts is not None
    assert counts.count(cut, runs, warns=True) == [6.0, 0.0, 20.0]
    counts.compare([3.0, 0.0, 10.0], cut, runs)  # the same shares
    with pytest.warns(
        BatchStatisticsWarning, match=r"counts \[3.0, 0.0, 4.0\].* \[6.0, 0.0, 20.0\]"
    ):
        counts.compare([3.0, 0.0, 4.0], cut, runs)
