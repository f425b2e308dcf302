"""Embedding by token, hidden dim and vocabulary."""

from __future__ import annotations

import torch

from planner.language.graph import Op, TensorMeta
from planner.language.layout.redistribute import (
    EXCHANGED_EMBEDDING,
    inner_collectives,
)
from planner.language.ops.families.products import embedding
from tests.ops.calls import offered, on_shard, saved
from tests.sharding.programs import one_op

TABLE, INDICES = torch.ones(8, 4), torch.zeros(2, 6, dtype=torch.long)


def test_a_rank_looks_up_its_own_rows():
    lookup = one_op("aten.embedding.default", TABLE, INDICES)
    by_rows = {"S(0),R->P", "S(0),S(0)->S(0)", "S(0),S(1)->S(1)"}
    assert offered(lookup) == by_rows | {"R,S(0)->S(0)", "R,S(1)->S(1)", "S(1),R->S(2)"}
    ((target, args),) = on_shard(lookup, "S(0),R->P")
    assert (target, args[-2:]) == ("planner.vocab_embedding", (-1, "tp"))
    ((target, _),) = on_shard(lookup, "S(1),R->S(2)")
    assert target == "aten.embedding.default"


def test_ranks_with_samples_of_their_own_exchange_rows():
    lookup = one_op("aten.embedding.default", TABLE, INDICES)
    ((target, args),) = on_shard(lookup, "S(0),S(1)->S(1)")
    assert (target, args[2:]) == (EXCHANGED_EMBEDDING, (-1, "tp", 2))
    op = Op(name="rows", target=target, args=(*args,), outputs=("y",))
    metas = [
        TensorMeta(name=name, shape=shape, dtype=dtype, kind="activation")
        for name, shape, dtype in (
            (op.inputs[0], (4, 4), "float32"),
            (op.inputs[1], (2, 3), "int64"),
            ("y", (2, 3, 4), "float32"),
        )
    ]
    # Each as large as what a rank has: its numbers there, its rows back.
    found = inner_collectives(op, {meta.name: meta for meta in metas})
    assert found == (("all_to_all", 6 * 8), ("all_to_all", 24 * 4))


def test_gradients_that_depend_on_how_often_a_row_is_used_are_not_cut():
    assert not offered(one_op("aten.embedding.default", TABLE, INDICES, -1, True))


def test_indices_are_saved_and_rows_are_all_that_is_read():
    lookup = one_op("aten.embedding.default", TABLE, INDICES)
    assert saved(lookup).tensors == ("x1",)
    call = embedding.Call(lookup.op, lookup.program.tensor, 1)
    assert embedding._gathered_bytes(call) == 4 * 12 * 4 + 8 * 12  # fp32 rows, int64 indices
