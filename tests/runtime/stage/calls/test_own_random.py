"""Random ops on shards: a stream for each rank, equal numbers in a recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from planner.runtime.stage.calls import own_random

X = torch.ones(4, 6, 8, 8)


def drawn(target: str, stream: int, *args, monkeypatch) -> torch.Tensor:
    monkeypatch.setattr(own_random, "stream_of", lambda *groups: stream)
    torch.manual_seed(0)
    result = own_random.with_own_random_stream(target, "tp", X, *args)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", ["dropout", "native_dropout", "feature_dropout", "alpha_dropout"])
def test_ranks_differ_and_a_recomputation_does_not(name, monkeypatch):
    target, args = f"aten.{name}.default", (0.5, True)
    here, again = (drawn(target, 0, *args, monkeypatch=monkeypatch) for _ in range(2))
    there = drawn(target, 1, *args, monkeypatch=monkeypatch)
    assert torch.equal(here, again)
    assert not torch.equal(here, there)
    assert torch.equal(drawn(target, 0, 0.5, False, monkeypatch=monkeypatch), X)


def test_a_mode_that_is_not_said_is_training(monkeypatch):
    """`torch.native_dropout(x, p, None)` drops."""
    said, unsaid = (
        drawn("aten.native_dropout.default", 0, 0.5, train, monkeypatch=monkeypatch)
        for train in (True, None)
    )
    assert torch.equal(said, unsaid)
    assert not torch.equal(unsaid, X)


def test_what_is_kept_is_scaled_up(monkeypatch):
    y = drawn("aten.dropout.default", 0, 0.25, True, monkeypatch=monkeypatch)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert y.mean().item() == pytest.approx(1.0, abs=0.1)
    none = drawn("aten.dropout.default", 0, 1.0, True, monkeypatch=monkeypatch)
    assert torch.equal(none, torch.zeros_like(X))


def test_channels_are_dropped_whole(monkeypatch):
    y = drawn("aten.feature_dropout.default", 0, 0.5, True, monkeypatch=monkeypatch)
    assert all(channel.unique().numel() == 1 for channel in y.flatten(0, 1))


def test_alpha_dropout_keeps_mean_and_variance():
    torch.manual_seed(0)
    y = own_random._alpha_dropout(0, torch.randn(100, 1000), 0.3, True)
    assert (y.mean().item(), y.std().item()) == pytest.approx((0.0, 1.0), abs=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_the_plain_formula_is_attention(causal, mask):
    """Compiled attention with dropout is this one: without dropout it is PyTorch's."""
    if causal and mask:
        return  # PyTorch takes one of them
    torch.manual_seed(0)
    query = torch.randn(2, 4, 6, 8)
    key, value = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    given = {None: None, "bool": torch.ones(6, 6).tril().bool(), "float": torch.randn(6, 6)}[mask]
    expected = F.scaled_dot_product_attention(
        query, key, value, given, is_causal=causal, enable_gqa=True
    )
    found = own_random._plain_attention(
        0, query, key, value, given, 0.0, causal, scale=None, enable_gqa=True
    )
    torch.testing.assert_close(found, expected)


def test_attention_leaves_the_other_ops_numbers_alone():
    torch.manual_seed(0)
    torch.randint(2**62, ())  # what a draw takes of the generator that ranks advance in step
    expected = torch.rand(3)
    torch.manual_seed(0)
    q = torch.ones(1, 1, 4, 8)
    own_random.own_attention(1, q, q, q, dropout_p=0.5)
    assert torch.equal(torch.rand(3), expected)
