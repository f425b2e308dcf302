"""Attention of several parts of the keys put together; a term of a loss times its share."""

from __future__ import annotations

import pytest
import torch

from planner.runtime.stage.calls.part_of import part_of
from planner.runtime.stage.calls.ring_attention import _merge


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_the_keys_together_are_attention_to_all(seed):
    """A softmax over all keys, of which a query may see none in a part, or none at all."""
    torch.manual_seed(seed)
    scores, values = torch.randn(4, 12).double() * 30, torch.randn(12, 5).double()
    scores.masked_fill_(torch.rand(4, 12) < 0.5, -torch.inf)
    scores[0], scores[1, :4] = -torch.inf, -torch.inf
    out, lse = torch.zeros(4, 5).double(), torch.full((4,), -torch.inf).double()
    for part, of_part in zip(scores.split(4, 1), values.split(4), strict=True):
        part_lse = part.logsumexp(1)
        lse = _merge(out, lse, part.softmax(1).nan_to_num() @ of_part, part_lse)
    expected = scores.softmax(1).nan_to_num() @ values
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_term_counts_by_its_share_and_without_one_for_nothing(dtype):
    term = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    share = torch.tensor(0.25, dtype=torch.float64)
    assert part_of(term, share.to(dtype)).item() == 0.75
    (gradient,) = torch.autograd.grad(part_of(term, share.to(dtype)), term)
    assert gradient == 0.25
    nothing = torch.tensor(float("nan"), dtype=dtype, requires_grad=True)
    none = torch.zeros((), dtype=dtype)
    assert part_of(nothing, none).item() == 0
    (gradient,) = torch.autograd.grad(part_of(nothing, none), nothing)
    assert gradient == 0
    assert part_of(term, share.to(dtype)).dtype == dtype
