"""What each batch's gradient counts for in that of several batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.errors import PlanError
from planner.language.graph.batch_split import BatchSplit
from planner.runtime.batches.inputs.feed import Feed
from planner.runtime.step.update.accumulation import Accumulation


def feed(total: float | None, weights: tuple[float, ...] = (0.25, 0.75), **more: float) -> Feed:
    return Feed(
        split=BatchSplit.even(4, num_microbatches=2),
        num_samples=(2, 2),
        side_inputs={},
        loss_weights=[torch.tensor(weight) for weight in weights],
        totals=lambda: {} if total is None else {"samples": total, **more},
    )


def trained(totals: list[float | None], gradients: list[float]) -> float:
    """The gradient of an update after batches of some gradients, each of its mean loss."""
    param, held = nn.Parameter(torch.zeros(())), Accumulation()
    param.grad = torch.zeros(())
    for number, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
        taken = held.add(feed(total), is_last=number + 1 == len(totals))
        for weight in taken.loss_weights:
            param.grad += weight * gradient
    held.finish([param, nn.Parameter(torch.zeros(()))])  # without a gradient
    assert not held.is_open
    return param.grad.item()


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([4.0], 1.0),
        ([4.0, 4.0], 1.5),
        ([2.0, 4.0, 1.0], (2 * 1 + 4 * 2 + 1 * 3) / 7),
        ([2.0, 0.0, 2.0], 2.0),  # a batch in which nothing counts
        ([None, None], 3.0),  # losses that are sums
    ],
)
def test_the_gradient_is_that_of_the_batches_in_a_row(totals, expected):
    gradients = [1.0, 2.0, 3.0][: len(totals)]
    assert trained(totals, gradients) == pytest.approx(expected)


def test_a_batch_alone_is_taken_as_it_is():
    held, given = Accumulation(), feed(3.0)
    assert held.add(given, is_last=True) is given
    held.finish([])
    assert held.is_last
    assert not held.is_open


def test_terms_that_count_batches_differently_are_refused():
    held = Accumulation()
    held.add(feed(4.0, labels=6.0), is_last=False)
    held.add(feed(2.0, labels=3.0), is_last=False)  # in proportion
    with pytest.raises(PlanError, match=r"differently \(\[4.0, 5.0\] in this one, \[4.0, 6.0\] in"):
        held.add(feed(4.0, labels=5.0), is_last=True)
    held.forget()
    # A sum over samples, and a term that is none.
    with pytest.raises(PlanError, match="terms of the loss count the batches of an update"):
        held.add(feed(4.0, added=1.0), is_last=False)


def test_batches_that_were_let_go_leave_no_weight():
    held = Accumulation()
    held.add(feed(8.0), is_last=False)
    assert held.is_open
    with pytest.raises(PlanError, match=r"engine\.save .* gradients of 1 batches"):
        held.refuse_open("engine.save")
    held.forget()
    held.refuse_open("engine.save")
    given = feed(2.0)
    assert held.add(given, is_last=False).loss_weights == given.loss_weights
