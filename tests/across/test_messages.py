"""N1: what a user is told where a plan cuts the batch, and where not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import planner
from planner.across import blocks_across_samples
from planner.capture.module import capture_module
from planner.graph import ModelGraph
from planner.plan.batch_statistics import BatchStatisticsWarning, cut_batch_messages
from planner.plan.defaults import default_plan
from tests.across import constructs
from tests.across.constructs import Body, batch
from tests.referees.batches import used_parts


def graph_of(body: Body) -> ModelGraph:
    return capture_module(used_parts(body), batch(2), batch(3))


def told(body: Body, **settings: bool) -> tuple[str, ...]:
    graph = graph_of(body)
    whole = default_plan(graph, microbatch_size=8, num_microbatches=1)
    assert cut_batch_messages(graph, whole) == ()
    cut = default_plan(graph, microbatch_size=2, dp=2, num_microbatches=2)
    return cut_batch_messages(graph, cut, **settings)


CUT = "the plan cuts a batch of 8 samples into 4 parts (dp=2, num_microbatches=2)"


def test_an_op_its_user_and_the_line():
    (message,) = told(constructs.where_sum)
    assert message.startswith("values are computed across samples (sum in block ")
    assert "across/constructs.py:" in message
    assert "`return _out(m, torch.where(h.sum() > 0, h, -2 * h), b)`, used by gt): " in message
    assert f"{CUT}, and each part has those of its own 2" in message


def test_a_loss_that_is_a_sum_says_the_factor():
    (message,) = told(constructs.sum_loss)
    assert message.startswith("the loss grows with the number of samples (sum in block ")
    assert "one device's gradients are 4 times as large" in message
    assert "divide by their number" in message


def test_a_normaliser_is_told_with_loss_weight():
    (message,) = told(constructs.masked_mean)
    assert message.startswith("the loss is divided by a sum over the batch (sum in block ")
    assert "loss_weight=" in message
    assert told(constructs.masked_mean, weighted_loss=True) == ()


def test_a_normaliser_inside_the_model_is_no_matter_of_weights():
    """The share of each expert is used by a product, not by the loss."""
    (message,) = told(constructs.balance_by_counts, weighted_loss=True)
    assert "histc" in message
    assert "used by mul" in message


def test_buffers():
    (message,) = told(constructs.moving_average)
    assert message.startswith("buffers are written from samples (copy_ in block ")
    graph = graph_of(constructs.drawn_walk)
    by_dp = default_plan(graph, microbatch_size=2, dp=2, num_microbatches=1)
    assert cut_batch_messages(graph, by_dp) == ()
    in_turn = default_plan(graph, microbatch_size=2, num_microbatches=3)
    (message,) = cut_batch_messages(graph, in_turn)
    assert (
        "buffers move by numbers that are drawn each time the model runs (copy_ in block "
        in message
    )
    assert "they move 3 times a step instead of once" in message


class Layers(nn.Module):
    """Equal layers, each with the mean of the batch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Centred() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y - y.mean(0)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_an_op_that_nothing_is_known_of_is_told():
    (message,) = told(lambda m, b: m.fc(Round.apply(b["x"])).pow(2).mean())
    assert message.startswith("whether these ops compute across samples is not known (Round in ")
    assert "planner verify shows it" in message


def test_equal_blocks_are_told_together():
    graph = capture_module(Layers(), (torch.randn(2, 4),), (torch.randn(3, 4),))
    (message,) = cut_batch_messages(graph, default_plan(graph, num_microbatches=4))
    assert "mean in blocks layers.0, layers.1, layers.2 and 2 more at " in message
    assert message.count("`return y - y.mean(0)`") == 1
    assert blocks_across_samples(graph) == set(range(5))


def test_a_sum_and_its_use_in_another_block():
    """The op to blame is the reduction, wherever what it gives is used."""

    class Apart(Layers):
        def forward(self, x: Tensor) -> Tensor:
            total = x
            for layer in self.layers:
                x = torch.relu(layer.fc(x))
                total = x.mean(0) if layer is self.layers[0] else total
            return (x * total).pow(2).mean()

    graph = capture_module(Apart(), (torch.randn(2, 4),), (torch.randn(3, 4),))
    (message,) = cut_batch_messages(graph, default_plan(graph, num_microbatches=4))
    assert "mean in block layers.0 at " in message
    assert "`total = x.mean(0) if layer is self.layers[0] else total`, used by mul" in message
    assert blocks_across_samples(graph) == {0, 4}


def test_apply_warns_of_each_kind_once():
    model = used_parts(constructs.sum_loss)
    graph = capture_module(model, batch(2), batch(3))
    plan = default_plan(graph, microbatch_size=2, num_microbatches=3)
    with pytest.warns(BatchStatisticsWarning, match="the loss grows with the number of samples"):
        planner.apply(plan, model)
    dist.destroy_process_group()
    model = used_parts(constructs.masked_mean)
    plan = default_plan(
        capture_module(model, batch(2), batch(3)), microbatch_size=2, num_microbatches=3
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.apply(plan, model, loss_weight=lambda part: part["mask"].sum().item())
    dist.destroy_process_group()
