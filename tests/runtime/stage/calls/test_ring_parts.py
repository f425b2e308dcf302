"""D19: parts of attention by flash kernels, held against tiles with the kernel of the CPU."""

from __future__ import annotations

import pytest
import torch

from planner.runtime.stage.calls.attention_tiles import Sight
from planner.runtime.stage.calls.ring_parts import FlashParts, TileParts

RANKS, SCALE = 3, 0.3


class OnCpu(FlashParts):
    """The same pieces, by the kernel of the CPU, which computes in fp64."""

    dtype = torch.float64
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    @staticmethod
    def backward(gradient, query, key, value, out, lse, *rest, scale):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dropout, causal = rest[4:6]
        return backward(gradient, query, key, value, out, lse, dropout, causal, scale=scale)


@pytest.mark.parametrize("low", [0, None], ids=["causal", "whole"])
@pytest.mark.parametrize(("segments", "mirrored"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("of_rank", range(RANKS))
def test_pieces_by_flash_are_those_by_tiles(low, segments, mirrored, of_rank):
    """Results and sums of exponentials, and gradients given those of all parts; heads of 5 numbers
    are filled up to 8.
    """
    torch.manual_seed(0)
    # (In the middle all is as in stripes.)
    sight = Sight(low, None, None, segments, RANKS, rank=0 if mirrored else 1, mirrored=mirrored)
    query, key, value, gradient, out = torch.randn(5, 2, 2, 4 * segments, 5, dtype=torch.float64)
    lse = torch.rand(2, 2, 4 * segments, dtype=torch.float64) + 3
    flash, tiles = OnCpu(SCALE, sight), TileParts(query, key, None, None, SCALE, sight)
    assert flash.meets(of_rank) == tiles.meets(of_rank)
    for found, expected in zip(
        flash.attend(query, key, value, of_rank), tiles.attend(query, key, value, of_rank),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = []
    for kernel in (flash, tiles):
        of_query, *of_keys = (torch.ones_like(x) for x in (query, key, value))
        given = (query, key, value, out, lse, gradient)
        kernel.add_gradients(given, of_query, of_keys, of_rank)
        grads.append((of_query, *of_keys))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("low", [0, None], ids=["causal", "whole"])
@pytest.mark.parametrize("of_rank", range(RANKS))
def test_flash_kernels_are_tiles_up_to_their_rounding(low, of_rank):
    """Two heads of keys for four of queries, of 20 numbers; bf16 against the same in fp32."""
    torch.manual_seed(0)
    sight = Sight(low, None, None, 2, RANKS, rank=1)
    wide = {"dtype": torch.bfloat16, "device": "cuda"}
    query, gradient, out = torch.randn(3, 2, 4, 256, 20, **wide)
    key, value = torch.randn(2, 2, 2, 256, 20, **wide)
    lse = torch.rand(2, 4, 256, device="cuda") + 6
    flash = FlashParts(SCALE, sight)
    tiles = TileParts(query, key, None, None, SCALE, sight)
    assert flash.meets(of_rank) == tiles.meets(of_rank)
    attended, grads = [], []
    for kernel in (flash, tiles):
        attended.append(kernel.attend(query, key, value, of_rank))
        of_query, *of_keys = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
        given = (query, key, value, out, lse, gradient)
        kernel.add_gradients(given, of_query, of_keys, of_rank)
        grads.append((of_query, *of_keys))
    for found, expected in zip((*attended[0], *grads[0]), (*attended[1], *grads[1]), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
