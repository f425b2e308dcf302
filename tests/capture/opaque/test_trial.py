"""What a trial refuses is in `tests.constructs`; here what it finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.opaque.calls import SEED
from planner.capture.opaque.trial import NotHeld, Place, Trial
from planner.errors import CaptureError


def tried(module: nn.Module, *args, num_samples=2, precision="model"):
    given = [arg for arg in args if isinstance(arg, Tensor)]
    numbers = iter(range(len(given)))
    places = tuple(Place(next(numbers)) if isinstance(arg, Tensor) else arg for arg in args)
    return Trial(
        module=module,
        precision=precision,
        who="it",
        key="it",
        places=(places, ()),
        given=given,
        num_samples=num_samples,
        first=None,
    ).run()


class Counting(nn.Module):
    def forward(self, x, lengths, factor):
        kept = [sample[:n] for sample, n in zip(x, lengths.tolist(), strict=True)]
        return {"sums": torch.stack([s.sum(0) for s in kept]) * factor, "factor": factor}


def meta(*shape, dtype=torch.float32, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def test_shapes_structure_and_samples():
    call = tried(Counting(), meta(4, 3, 5, grad=True), meta(4, dtype=torch.int64), 2.0)
    (result,) = call.results
    assert (result.shape, result.dtype, result.is_differentiable) == ((4, 5), torch.float32, True)
    leaves, spec = call.structure
    assert leaves == [Tensor, 2.0]
    assert torch.utils._pytree.tree_unflatten(leaves, spec) == {"sums": Tensor, "factor": 2.0}
    assert call.args == (Place(0), Place(1), 2.0)
    assert call.holds_samples == (True, True)


def test_devices_are_not_seeded(monkeypatch):
    """Their random numbers, and those of this process, go on where the script left them."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("devices seeded"))
    before = torch.random.get_rng_state()
    tried(Counting(), meta(4, 3, 5, grad=True), meta(4, dtype=torch.int64), 2.0)
    assert torch.equal(torch.random.get_rng_state(), before)


class Rows(nn.Module):
    def forward(self, x, by):
        return x[by > 0]


def test_shapes_that_follow_values_are_not_held():
    with pytest.raises(NotHeld, match="shape, or a number, depends on values"):
        tried(Rows(), meta(8, 3), meta(8, dtype=torch.int64))


class Cut(nn.Module):
    def forward(self, x, lengths):
        return x[:, : int(lengths.max())]


class Counts(nn.Module):
    def forward(self, x, steps):
        made = torch.zeros_like(x)
        for _ in range(int(steps.max())):
            made = torch.tanh(made + x)
        return made


def test_lengths_are_tried_that_are_not_alike():
    """Lengths of 1 alone, which any forward takes, would show one shape."""
    given = meta(2, 5, grad=True), meta(2, dtype=torch.int64)
    with pytest.raises(NotHeld, match="shape, or a number, depends on values"):
        tried(Cut(), *given)


def test_a_result_that_some_values_leave_without_a_gradient():
    call = tried(Counts(), meta(2, 5, grad=True), meta(2, dtype=torch.int64))
    assert call.results[0].is_differentiable
    assert call.holds_samples == (True, False), "all samples take as many rounds"
    forward, backward = call.cost.forward, call.cost.backward
    assert forward[0].per_sample >= 10, "of the dearest course that was tried"
    assert backward[0].per_sample > 0


class Drifts(nn.Module):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x * type(self).calls


def test_a_forward_that_differs_the_second_time():
    with pytest.raises(CaptureError, match="gives something else the second time"):
        tried(Drifts(), meta(4, 3))


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = [nn.Linear(3, 3)]

    def forward(self, x):
        return self.held[0](x)


def test_weights_that_no_part_holds():
    with pytest.raises(CaptureError, match="keeps a module in held, which is not registered"):
        tried(Unregistered(), meta(4, 3))


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


@pytest.mark.parametrize(
    ("draw", "holds_samples"),
    [
        (lambda x: F.dropout(x, 0.1), (True, False)),
        (lambda x: x + torch.randn_like(x), (True, False)),
        (lambda x: x if torch.rand(()) < 0.1 else 2 * x, (True, False)),
        (lambda x: x * (torch.rand(len(x), 1) + 0.9).floor(), (True, False)),
        (lambda x: x[torch.rand(len(x)).argsort()], ()),
        (lambda x: x[torch.randn(len(x)).topk(len(x)).indices.flip(0)], ()),
        (lambda x: x[torch.randperm(len(x))], ()),
        (lambda x: x[torch.randint(len(x), (len(x),))], ()),
    ],
)
def test_a_module_that_draws_is_given_a_seed(draw, holds_samples):
    """Its samples are apart unless a draw makes them change places."""
    call = tried(Drawing(draw), meta(4, 3))
    assert call.num_given == 2
    assert call.kwargs == ((SEED, Place(1)),)
    assert call.holds_samples == holds_samples


class Cached(nn.Module):
    def forward(self, x):
        return x, object()


def test_what_no_graph_can_hold_is_refused_where_it_is_used():
    leaves, _ = tried(Cached(), meta(4, 3)).structure
    unread = leaves[1]
    uses = (bool, len, iter, hash, lambda it: it.keys, lambda it: it[0], lambda it: it == 1)
    for use in (*uses, lambda it: isinstance(it, dict)):
        with pytest.raises(NotHeld, match="it, returns a object; return tensors and numbers"):
            use(unread)
