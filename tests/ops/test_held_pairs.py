"""N9: attention that holds pairs of positions is named, with what it costs."""

from __future__ import annotations

import torch

from planner.capture import capture_module
from planner.language.ops.held_pairs import held_pairs, held_pairs_messages
from tests.capture.masks.attending import LENGTH, batch_of, captured


def earlier_or_first(tables):
    at = torch.arange(LENGTH)
    return (at <= at[:, None]) | (at == 3)


def causal(tables):
    at = torch.arange(LENGTH)
    return at <= at[:, None]


class WrittenOut(torch.nn.Module):
    """Attention as products and a softmax, and a softmax that is no attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = torch.nn.Embedding(16, 8), torch.nn.Linear(8, LENGTH)

    def forward(self, ids):
        x = self.embed(ids)
        scores = x @ x.mT / 8
        hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
        weights = scores.masked_fill(hidden, -1e9).softmax(-1)
        return (weights @ x).mean() + self.mix(x).softmax(-1).square().mean()


def test_a_mask_that_is_not_recognised_is_named():
    """N9: 12 x 12 truths of a byte, and the line that attends."""
    _, graph = captured(earlier_or_first)
    (held,) = held_pairs(graph)
    assert (held.kind, held.num_tensors, held.num_bytes) == ("mask", 1, 144)
    (message,) = held_pairs_messages(graph)
    assert "takes a mask that is not recognised: 144 B a sample" in message
    assert "12 x 12 pairs" in message
    assert "attending.py" in message
    assert held_pairs_messages(captured(causal)[1]) == ()


def test_attention_that_is_written_out_is_named():
    """N9: scores, scaled, masked, and their softmax, and three tensors on the way to the mask."""
    graph = capture_module(WrittenOut(), batch_of(2), batch_of(3))
    (held,) = held_pairs(graph)
    assert (held.kind, held.num_tensors, held.num_bytes) == ("scores", 7, 3600)
    (message,) = held_pairs_messages(graph)
    assert "is written out: 7 tensors of pairs take 3.52 KiB a sample" in message
