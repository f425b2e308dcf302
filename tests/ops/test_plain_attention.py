"""Attention by plain products: what a CPU saves where a mask needs a gradient."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.plain_attention import (
    backward_scratch,
    forward_scratch,
    is_plain,
    saved_bytes,
)
from tests.ops.calls import kernel_call
from tests.sharding.programs import frozen, one_op

QUERY = torch.ones(1, 2, 4, 8)


def call(mask: torch.Tensor | None, device_type: str = "cpu", dtype=torch.float32):
    q, k, v = (torch.full_like(QUERY, float(i), dtype=dtype) for i in range(3))
    return kernel_call(
        one_op("aten.scaled_dot_product_attention.default", q, k, v, mask), device_type
    )


def test_only_a_mask_that_trains_on_a_cpu():
    assert is_plain(call(torch.ones(4, 4)))
    assert not is_plain(call(frozen(torch.ones(4, 4))))
    assert not is_plain(call(torch.ones(4, 4), "cuda"))
    assert not is_plain(call(None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_and_probabilities_are_saved_in_fp32(dtype):
    """64 entries each of query, key and value, and 2 heads of 4 x 4 scores, of 4 bytes."""
    assert saved_bytes(call(torch.ones(4, 4, dtype=dtype), dtype=dtype)) == 4 * (3 * 64 + 2 * 16)


def test_short_inputs_take_casts_beside():
    short = call(torch.ones(4, 4, dtype=torch.bfloat16), dtype=torch.bfloat16)
    long = call(torch.ones(4, 4))
    assert forward_scratch(short) > forward_scratch(long) >= 0
    whole = call(torch.ones(1, 2, 4, 4))
    # A mask of all scores is their gradient itself; a smaller one is summed to its shape.
    assert backward_scratch(whole) <= backward_scratch(long)
