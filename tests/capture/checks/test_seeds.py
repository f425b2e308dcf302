"""What a forward does to random generators is noted; what a backward or a library does is not."""

from __future__ import annotations

import pytest
import torch

from planner.capture.checks.draws.seeds import Seeds


def forks() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda: torch.manual_seed(torch.initial_seed()), "manual_seed at "),
        (lambda: torch.random.set_rng_state(torch.get_rng_state()), "set_rng_state at "),
        (forks, "set_rng_state at "),
        (lambda: torch.default_generator.manual_seed(torch.initial_seed() + 1), "another seed"),
    ],
)
def test_who_sets_a_generator_is_named(forward, says):
    seeds, setter = Seeds(), torch.manual_seed
    with torch.random.fork_rng(devices=[]), seeds.noted():
        forward()
    assert seeds.set_by is not None
    assert seeds.set_by.startswith(says)
    assert torch.manual_seed is setter


def test_draws_set_nothing():
    seeds = Seeds()
    with seeds.noted():
        torch.rand(2)
        torch.nn.functional.dropout(torch.ones(4), 0.5)
    assert seeds.set_by is None
