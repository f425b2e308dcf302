"""Attention by sample, head and query; causal masks and dropout on shards; what kernels save."""

from __future__ import annotations

import torch

from planner.language.ops.families.products.attention import ATTENTION
from planner.language.ops.record import is_random
from tests.ops.calls import offered, on_shard, saved
from tests.sharding.programs import one_op

SDPA = "aten.scaled_dot_product_attention.default"


ones = torch.ones


def attention(*, heads: int = 4, mask=None, dropout=0.0, causal=False, **options):
    query, key, value = ones(2, 4, 6, 8), ones(2, heads, 6, 8), ones(2, heads, 6, 8)
    options = options | ({"enable_gqa": True} if heads < 4 else {})
    return one_op(SDPA, query, key, value, mask, dropout, causal, **options)


def test_heads_are_cut_with_their_own_keys():
    assert offered(attention(heads=2)) == {
        "S(0),S(0),S(0)->S(0)",
        "S(1),S(1),S(1)->S(1)",
        "S(2),R,R->S(2)",
    }
    assert "S(1),R,R->S(1)" in offered(attention(heads=1))  # one key head is everybody's


def test_a_mask_is_cut_along_the_dims_it_has():
    found = offered(attention(mask=ones(1, 1, 6, 6)))
    assert "S(2),R,R,S(2)->S(2)" in found
    assert "S(0),S(0),S(0),R->S(0)" in found


def test_a_shard_of_queries_of_a_causal_mask_knows_its_positions():
    """A rank's queries are later in the sequence than it counts itself."""
    causal = attention(causal=True)
    assert "S(2),R,R->S(2)" in offered(causal)
    assert "S(2)x2,R,R->S(2)x2" not in offered(causal, segments=())
    ((target, args),) = on_shard(causal, "S(2),R,R->S(2)")
    assert (target, args[-2:]) == ("planner.causal_attention", (1, "tp"))
    ((target, _),) = on_shard(causal, "S(1),S(1),S(1)->S(1)")
    assert target == SDPA


def test_dropout_draws_anew_on_each_shard():
    drops = attention(dropout=0.5)
    ((target, args),) = on_shard(drops, "S(1),S(1),S(1)->S(1)")
    assert (target, args[0]) == ("planner.with_own_random_stream", SDPA)
    assert (is_random(drops.op), is_random(attention().op)) == (True, False)


def test_kernels_save_their_inputs_the_result_and_the_sum_of_each_row():
    found = saved(attention())
    assert found.tensors == ("x0", "x1", "x2", "y0")
    assert found.extra_bytes == 4 * 2 * 4 * 6  # log-sum-exp in fp32
    masked = saved(attention(mask=ones(6, 6).bool()))
    assert masked.extra_bytes == found.extra_bytes + 4 * 36  # the mask made additive
    assert ATTENTION.recomputed is False
