"""What a part of a batch counts for in a loss, read off the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.language.across import across_samples, follows_from_parts, loss_shares
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.language.ops.samples.state import ADDED, SAMPLES, SCALED
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.step.engine import Engine

CLASSES = 5
Loss = Callable[["Classes", Tensor, Tensor], Tensor]


class Classes(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("weights", torch.ones(CLASSES))
        self._loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self._loss(self, self.head(x), labels)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4, 3), torch.randint(CLASSES, (size, 4))


def graph_of(loss: Loss) -> ModelGraph:
    return capture_module(Classes(loss), batch(2), batch(3))


def mean(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, logits, labels: mean(logits, labels),
        lambda m, logits, labels: 2 * -mean(logits, labels) / 3 + 1,
        lambda m, logits, labels: mean(logits[:, :-1], labels[:, 1:]),
        lambda m, logits, labels: mean(logits, F.pad(labels, (0, 1), value=-100)[:, 1:]),
        lambda m, logits, labels: F.nll_loss(logits.log_softmax(-1).mT, labels),
        lambda m, logits, labels: mean(logits, labels) + mean(-logits, labels.flip(1)),
        # Weights are no part of the batch: their term is the same in every part.
        lambda m, logits, labels: mean(logits, labels) + m.head.weight.square().sum(),
        lambda m, logits, labels: mean(logits, labels).mean(),
        lambda m, logits, labels: mean(logits, labels)[None][0],
        lambda m, logits, labels: torch.stack([mean(logits, labels), mean(-logits, labels)]).mean(),
        lambda m, logits, labels: mean(logits, labels, weight=m.weights / 2),
        lambda m, logits, labels: mean(logits, labels, ignore_index=0),
    ],
)
def test_a_mean_over_labels_counts_by_those_that_are_not_ignored(loss):
    graph = graph_of(loss)
    shares = loss_shares(graph)
    assert list(shares.counts) == [shares.share]
    assert graph.whole is None
    assert across_samples(graph) == ()


def test_a_mean_over_labels_has_its_share_before_a_parameter_multiplies_it():
    """In a part without labels that count it is 0/0, and the parameter's gradient would be."""
    graph = graph_of(lambda m, logits, labels: mean(logits, labels) * m.log_scale.exp())
    assert loss_shares(graph).share == SCALED
    assert graph.whole is not None
    assert [len(values) for values in (graph.whole.values, graph.whole.shares)] == [0, 1]
    x, labels = batch(4)
    labels[2:] = -100
    torch.manual_seed(0)
    module = Classes(lambda m, logits, labels: mean(logits, labels) * m.log_scale.exp())
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2)
    engine = Engine(plan, graph, copy.deepcopy(module), build_mesh(plan, torch.device("cpu")))
    expected = module(x, labels)
    expected.backward()
    assert engine.step((x, labels)).item() == pytest.approx(expected.item())
    found = engine.full_gradients()["log_scale"]
    assert found.item() == pytest.approx(module.log_scale.grad.item())


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        (lambda m, logits, labels: logits.square().mean() + 0 * m.weights.sum(), SAMPLES),
        (lambda m, logits, labels: logits.square().sum() / len(logits), SAMPLES),
        (lambda m, logits, labels: mean(logits, labels, reduction="sum"), ADDED),
        (lambda m, logits, labels: logits.square().mean() * len(logits), ADDED),
        (lambda m, logits, labels: logits.square().sum() / 7, ADDED),
        # Places of classes are never the ignored label.
        (lambda m, logits, labels: mean(logits, logits.argmax(-1)), SAMPLES),
        (
            lambda m, logits, labels: F.cross_entropy(
                logits.mT, F.one_hot(labels, CLASSES).mT.float()
            ),
            SAMPLES,
        ),
    ],
)
def test_means_over_samples_and_sums(loss, share):
    graph = graph_of(loss)
    assert loss_shares(graph).share == share
    assert across_samples(graph) == ()


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, logits, labels: mean(logits, labels) + logits.square().mean(),
        lambda m, logits, labels: mean(logits, labels) + mean(logits, labels, ignore_index=1),
        lambda m, logits, labels: logits.square().sum() + m.log_scale.square(),
        lambda m, logits, labels: logits.square().sum() + 1,
        lambda m, logits, labels: (logits.logsumexp(-1) * (labels > 1)).sum() / (labels > 1).sum(),
    ],
)
def test_terms_that_count_differently_have_their_shares_in_the_graph(loss):
    graph = graph_of(loss)
    assert loss_shares(graph).share == SCALED
    assert graph.whole is not None
    assert across_samples(graph) == ()
    assert from_json(to_json(graph)).fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        # Weights that train, or that a block writes, are not those of all parts of a step.
        (lambda m, logits, labels: mean(logits, labels, weight=m.head.bias.detach()), "normaliser"),
        (lambda m, logits, labels: mean(logits, labels, weight=m.weights.mul_(0.9)), "normaliser"),
        (lambda m, logits, labels: mean(logits, labels).exp(), "mixed"),
        (lambda m, logits, labels: mean(logits, labels).clamp(max=3), "mixed"),
        # Labels that the model makes itself, of which some may be ignored.
        (
            lambda m, logits, labels: mean(logits, (logits.argmax(-1) + labels) % CLASSES),
            "normaliser",
        ),
        (
            lambda m, logits, labels: mean(
                logits, torch.where(logits.amax(-1) > 0, logits.argmax(-1), -100)
            ),
            "normaliser",
        ),
        (
            lambda m, logits, labels: mean(logits, torch.max(logits.argmax(-1), labels)),
            "normaliser",
        ),
        (
            lambda m, logits, labels: mean(logits, torch.arange(-100, 5 - 100)[logits.argmax(-1)]),
            "normaliser",
        ),
        (
            lambda m, logits, labels: mean(
                logits, labels.masked_fill(torch.rand_like(logits[..., 0]) > 0.5, -100)
            ),
            "normaliser",
        ),
    ],
)
def test_what_does_not_follow_from_parts_is_a_finding(loss, kind):
    graph = graph_of(loss)
    assert kind in {finding.kind for finding in across_samples(graph)}
    assert not follows_from_parts(graph)


class Rounded(torch.autograd.Function):
    """An op that nothing is known of."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def test_terms_behind_an_unknown_op_have_their_shares():
    """What a user accepts of the op says nothing of the terms of the loss."""
    graph = graph_of(
        lambda m, logits, labels: mean(Rounded.apply(logits), labels) + logits.square().mean()
    )
    assert {finding.kind for finding in across_samples(graph)} == {"unknown"}
    shares = loss_shares(graph)
    assert (shares.share, SAMPLES in shares.terms, len(shares.terms)) == (SCALED, True, 2)
