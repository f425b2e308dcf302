"""Over which labels a loss is a mean, read off the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.across.counted import CountedLoss, counted_loss
from planner.capture import capture_module

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


def found(loss: Loss) -> CountedLoss | None:
    return counted_loss(capture_module(Classes(loss), batch(2), batch(3)))


def mean(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "means"),
    [
        (lambda m, logits, labels: mean(logits, labels), 1),
        (lambda m, logits, labels: 2 * -mean(logits, labels) / 3 + 1, 1),
        (lambda m, logits, labels: mean(logits[:, :-1], labels[:, 1:]), 1),
        (lambda m, logits, labels: mean(logits, F.pad(labels, (0, 1), value=-100)[:, 1:]), 1),
        (lambda m, logits, labels: F.nll_loss(logits.log_softmax(-1).mT, labels), 1),
        (lambda m, logits, labels: mean(logits, labels) + mean(-logits, labels.flip(1)), 2),
        # Weights are no part of the batch: their term is the same in every part.
        (lambda m, logits, labels: mean(logits, labels) + m.head.weight.square().sum(), 1),
    ],
)
def test_a_loss_that_is_means_over_labels_alone(loss, means):
    counted = found(loss)
    assert counted is not None
    assert counted.is_all
    assert len(counted.means) == means
    assert {labels.ignore_index for labels in counted.means} == {-100}


def test_another_label_may_be_the_ignored_one():
    counted = found(lambda m, logits, labels: mean(logits, labels, ignore_index=0))
    assert counted is not None
    assert counted.means[0].ignore_index == 0


def test_classes_may_have_weights_of_a_buffer():
    counted = found(lambda m, logits, labels: mean(logits, labels, weight=m.weights / 2))
    assert counted is not None
    (labels,) = counted.means
    assert len(labels.made.outputs) == 2
    assert len(labels.buffers) == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, logits, labels: mean(logits, labels) + logits.square().mean(),
        lambda m, logits, labels: mean(logits, labels) + 0.1 * logits.logsumexp(-1).mean(),
    ],
)
def test_other_terms_of_the_batch_are_seen(loss):
    counted = found(loss)
    assert counted is not None
    assert not counted.is_all


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, logits, labels: logits.square().mean() + 0 * labels.sum(),
        lambda m, logits, labels: mean(logits, labels, reduction="sum"),
        # Weights that train, or that a block writes, are not those of all parts of a step.
        lambda m, logits, labels: mean(logits, labels, weight=m.head.bias.detach()),
        lambda m, logits, labels: mean(logits, labels, weight=m.weights.mul_(0.9)),
        lambda m, logits, labels: mean(logits, labels).exp(),
        lambda m, logits, labels: F.cross_entropy(logits.mT, F.one_hot(labels, CLASSES).mT.float()),
        # Labels that the model makes itself.
        lambda m, logits, labels: mean(logits, (logits.argmax(-1) + labels) % CLASSES),
    ],
)
def test_what_is_no_such_mean(loss):
    assert found(loss) is None
