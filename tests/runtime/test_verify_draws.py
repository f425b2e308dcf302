"""Both sides of `verify` are given the same draws, whatever draws and for whichever samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture.modes.fixed_draws import FixedDraws
from planner.errors import PlanError
from planner.language.graph import Op, from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.language.ops.record import is_random
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from tests.builders import telling_first
from tests.runtime.test_verify_faults import WIDTH, graph_of, source_of, verify_here
from tests.spawn import run_ranks


class Noisy(nn.Module):
    """A network whose middle is changed by what a function draws."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noise = noise

    def forward(self, x, z, target):
        return F.mse_loss(self.outer(self.noise(self.inner(x))), target)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda y: y * torch.rand_like(y),
    "rand": lambda y: y * (torch.rand(y.shape[0], 1) < 0.9),
    "randn": lambda y: y + 0.1 * torch.randn(y.shape),
    "randn_like": lambda y: y * (1 + 0.1 * torch.randn_like(y)),
    "randint": lambda y: y + torch.randint(0, 1000, (y.shape[0],))[:, None] / 1000,
    "randperm": lambda y: y[:, torch.randperm(WIDTH)],
    "bernoulli": lambda y: y * torch.bernoulli(y.sigmoid()),
    "multinomial": lambda y: y * F.one_hot(torch.multinomial(y.softmax(-1), 2), WIDTH).sum(1),
    "stochastic depth": lambda y: y * y.new_empty(y.shape[0], 1).bernoulli_(0.8).div_(0.8),
    "normal_": lambda y: y + 0.1 * torch.empty_like(y).normal_(),
    "uniform_": lambda y: y + torch.zeros_like(y).uniform_(-1, 1),
    "gumbel_softmax": lambda y: F.gumbel_softmax(y, tau=0.5),
    "hard gumbel_softmax": lambda y: F.gumbel_softmax(y, hard=True),
    "rrelu": lambda y: F.rrelu(y, training=True),
    "poisson": lambda y: y + torch.poisson(y.abs().detach()),
    "normal": lambda y: y + torch.normal(y.detach(), 0.5),
    "dropout beside": lambda y: F.dropout(y, 0.5) + torch.rand_like(y),
}


@pytest.mark.parametrize(
    "name", telling_first(DRAWS, {"stochastic depth", "poisson", "dropout beside"})
)
def test_a_forward_that_draws_is_compared_with_fixed_draws(name):
    """N3: two microbatches draw what the whole batch does, and the report names the op."""
    report = verify_here(lambda: Noisy(DRAWS[name]), steps=2)
    assert report.passed, report
    assert any("draws random numbers" in note for note in report.notes)


def test_a_fault_beside_draws_is_found():
    """N3: a branch that noise scales keeps its gradients."""

    class Lost(Noisy):
        def forward(self, x, z, target):
            return super().forward(x, z, target) + 1e-9 * self.inner.weight.sum()

    noise = DRAWS["rand_like"]
    report = verify_here(lambda: Lost(noise), graph=graph_of(lambda: Noisy(noise)))
    assert not report.passed
    assert report.gradient.name == "inner.weight"


def many_draws(y: torch.Tensor) -> torch.Tensor:
    y = DRAWS["gumbel_softmax"](DRAWS["rand"](DRAWS["bernoulli"](y))) + y
    return DRAWS["rrelu"](DRAWS["multinomial"](y))


def build_many() -> nn.Module:
    return Noisy(many_draws)


def verify_both(captured: object) -> list[VerifyReport | None]:
    graph = from_json(captured)
    plans = [default_plan(graph, microbatch_size=2, **layout) for layout in ({"dp": 2}, {"tp": 2})]
    return [compare_with_one_process(p, source_of(build_many), graph=graph) for p in plans]


def test_ranks_draw_what_one_process_draws():
    """N3: over dp and over tp."""
    for report in run_ranks(verify_both, 2, to_json(graph_of(build_many)))[0]:
        assert report.passed, report
        assert sum("bernoulli in" in note for note in report.notes) == 1


class Recurrent(nn.Module):
    def __init__(self, layer: nn.LSTM):
        super().__init__()
        self.layer = layer

    def forward(self, x, z, target):
        return F.mse_loss(self.layer(x[:, None])[0][:, 0], target)


def random_overloads():
    """Every ATen op that torch says draws from a seeded generator."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and packet in dir(torch.ops.aten):
            found = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in found.tags:
                yield found


# Recurrent layers and attention draw for their dropout alone, which is switched off.
FOR_DROPOUT = ("attention", "lstm", "gru", "rnn", "sdp", "dropout", "_nested_tensor_softmax")


def test_what_draws_is_known_to_draw():
    """N3: planner's list of random ops (which has no torch) has all that torch has."""
    unknown = [
        str(op)
        for op in random_overloads()
        if not any(part in str(op) for part in FOR_DROPOUT)
        and not is_random(Op(name="x", target=str(op), args=(), outputs=("x",)))
    ]
    assert not unknown


def test_recurrent_layers_draw_for_their_dropout():
    """N1: else a recomputed block would drop others, and ranks of a tp group would."""
    for dropout in (0.0, 0.5):
        layer = nn.LSTM(WIDTH, WIDTH, 2, dropout=dropout, batch_first=True)
        graph = graph_of(lambda layer=layer: Recurrent(layer))
        assert any(is_random(op) for c in graph.classes for op in c.ops) == bool(dropout)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.clone().normal_(2.0, 3.0),
        lambda x: x.clone().log_normal_(),
        lambda x: x.clone().cauchy_(),
        lambda x: x.clone().exponential_(2.0),
        lambda x: x.clone().geometric_(0.3),
        lambda x: x.clone().random_(3, 9),
        lambda x: x.clone().random_(),
        lambda x: x.clone().bernoulli_(0.3),
        lambda x: x.clone().bernoulli_(x),
        lambda x: torch.normal(1.0, 2.0, (3, 4)),
        lambda x: torch.normal(x, x),
        lambda x: torch.normal(0.5, x),
        lambda x: torch.randint_like(x, 5),
        lambda x: torch.randint(2, 7, (3,)),
        lambda x: torch.binomial(torch.full_like(x, 9.0), x),
        lambda x: torch.poisson(x),
        lambda x: torch._standard_gamma(x),
        lambda x: torch.distributions.Dirichlet(x).sample(),
        lambda x: torch.distributions.Categorical(probs=x).sample(),
        lambda x: torch.multinomial(x, 3, replacement=True),
        lambda x: torch.rand(3, out=torch.empty(3)),
        lambda x: torch.randperm(7, device="cpu"),
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_draws_are_fixed_finite_and_shaped_as_they_were(draw):
    """N3: of the same shape and dtype as a true draw, and the same each time."""
    x = torch.linspace(0.1, 0.8, 12).view(3, 4)
    true = draw(x)
    with FixedDraws():
        first = draw(x)
        assert torch.equal(first, draw(x))
    assert (first.shape, first.dtype) == (true.shape, true.dtype)
    assert first.isfinite().all()


def test_most_likely_is_drawn_first_of_equals():
    """N3: no rounding decides between equal probabilities."""
    weights = torch.tensor([[0.1, 0.3, 0.3 + 1e-16, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.double)
    with FixedDraws():
        drawn = torch.multinomial(weights, 2)
    assert drawn.tolist() == [[1, 2], [3, 2]]


def test_an_op_without_fixed_numbers_is_named():
    with (
        FixedDraws(),
        pytest.raises(PlanError, match=r"aten\._fill_mem_eff_dropout_mask_\.default draws random"),
    ):
        torch.ops.aten._fill_mem_eff_dropout_mask_(torch.ones(3), 0.5, 0, 0)


def test_dropout_keeps_what_is_likelier_kept_than_not():
    x = torch.ones(3)
    with FixedDraws():
        assert torch.equal(torch.native_dropout(x, 0.5, True)[0], 2 * x)
        made, kept = torch.native_dropout(x, 1.0, True)
        assert torch.equal(made, 0 * x)
        assert not kept.any()
        assert torch.equal(torch.native_dropout(torch.ones(3), 0.0, True)[0], torch.ones(3))
