"""Gradients in flat buckets, and copies of one parameter with one gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from planner.runtime.state.gradients import reduce
from planner.runtime.state.gradients.reduce import GradBuckets, TiedCopies


def test_gradients_accumulate_in_buckets_of_one_dtype(monkeypatch):
    monkeypatch.setattr(reduce, "BUCKET_BYTES", 24)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    params = [
        nn.Parameter(torch.ones(4)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(2, dtype=torch.float64)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ]
    buckets = GradBuckets(params, dist.group.WORLD)
    # Last parameters first: their gradients are ready first. 3 + 2 floats fit, 4 more do not.
    assert [(flat.numel(), flat.dtype) for flat in buckets._flats] == [
        (2, torch.float64),
        (5, torch.float32),
        (4, torch.float32),
    ]
    (params[0].sum() + 2 * params[2].sum()).backward()
    assert torch.equal(buckets._flats[1], torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0]))
    buckets.start()
    buckets.finish()
    assert torch.equal(params[0].grad, torch.ones(4))
    buckets.zero()
    assert not params[0].grad.any()
    assert params[4].grad is None


def test_every_copy_gets_the_sum_over_all_ranks():
    here, there = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    here.grad = torch.tensor([1.0, 2.0])
    tied = TiedCopies([[here, there]], lambda totals: [10 + total for total in totals])
    tied.sum()
    assert torch.equal(here.grad, torch.tensor([11.0, 12.0]))
    assert torch.equal(there.grad, here.grad)  # it had none of its own


def test_the_gradient_of_a_copy_is_summed_where_it_lies():
    """A tied table is a large part of a model: no copy of it is made for the exchange."""
    only, first, second = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    bucket = torch.arange(6.0)
    only.grad, first.grad = torch.ones(2, 3), bucket.view(2, 3)
    second.grad = torch.ones(3, 2).T  # as an op may leave it
    given: list[int] = []

    def exchange(totals: list[torch.Tensor]) -> list[torch.Tensor]:
        given.extend(total.data_ptr() for total in totals)
        for total in totals:
            total.mul_(2)
        return totals

    TiedCopies([[only], [first, second]], exchange).sum()
    assert given == [only.grad.data_ptr(), bucket.data_ptr()]
    assert torch.equal(only.grad, torch.full((2, 3), 2.0))
    assert bucket.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert torch.equal(second.grad, first.grad)
