"""Grouped queries on more ranks than heads of keys: a rank reads the keys of its own queries."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.families.products.grouped_heads import OWN_KEYS
from planner.language.ops.families.products.masked_attention import MASKED
from planner.runtime.stage.calls.local_ops import own_key_heads
from tests.ops.calls import offered, on_shard, view
from tests.sharding.programs import one_op

SDPA = "aten.scaled_dot_product_attention.default"
BY_HEAD = "S(1),R,R->S(1)"


def grouped(queries: int, keys: int):
    query, key = torch.ones(2, queries, 6, 8), torch.ones(2, keys, 6, 8)
    return one_op(SDPA, query, key, key.clone(), enable_gqa=True)


@pytest.mark.parametrize(("ranks", "is_offered"), [(2, False), (4, True), (8, True), (3, False)])
def test_keys_are_whole_where_the_ranks_do_not_divide_their_heads(ranks, is_offered):
    assert (BY_HEAD in offered(grouped(8, 2), ranks)) is is_offered


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "made"),
    [(8, 2, 4, 1), (8, 2, 8, 1), (12, 6, 4, 3), (12, 3, 2, 6), (24, 6, 4, 6)],
)
def test_a_rank_reads_the_heads_of_its_queries(queries, keys, ranks, made):
    *picks, (target, args) = on_shard(grouped(queries, keys), BY_HEAD, ranks)
    assert [target for target, _ in picks] == [OWN_KEYS, OWN_KEYS]
    assert picks[0][1][1:] == (queries // ranks, queries // keys, made, "tp")
    assert target == SDPA
    assert [ref.name for ref in args[1:3]] == ["x1_of_op", "x2_of_op"]


def test_attention_told_of_its_mask_does_so_too():
    query, key = torch.ones(2, 8, 6, 8), torch.ones(2, 2, 6, 8)
    single = one_op(MASKED, query, key, key.clone(), 0, None, None, None, True, None, None)
    assert BY_HEAD in offered(single, 4)
    assert [target for target, _ in on_shard(single, BY_HEAD, 4)] == [OWN_KEYS, OWN_KEYS, MASKED]


def test_a_run_of_heads_is_a_view_and_shared_heads_are_copied():
    keys = torch.arange(3.0).view(3, 1, 1).expand(2, 3, 5, 4).contiguous()
    single = one_op(OWN_KEYS, keys, 2, 2, 1, "")
    assert offered(single) == {"S(0)->S(0)", "S(3)->S(3)", "P->P"}  # on another axis, not by head
    assert view(single).strides == keys.stride()
    assert own_key_heads(keys, 2, 2, 1, "").data_ptr() == keys.data_ptr()
    assert view(one_op(OWN_KEYS, keys, 1, 2, 1, "")).strides == keys.stride()  # one of each
    assert own_key_heads(keys, 1, 2, 1, "").data_ptr() == keys.data_ptr()
    copied = one_op(OWN_KEYS, keys, 3, 2, 3, "")
    assert view(copied) is None
    assert own_key_heads(keys, 3, 2, 3, "")[0, :, 0, 0].tolist() == [0, 0, 1]
