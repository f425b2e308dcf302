"""Embedding: by token, by hidden dim, or with the vocabulary divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, P, R
from planner.ops.letters import by_letters
from planner.ops.registry import LocalForm, Placed, local_form, rule


@rule("aten.embedding", contiguous=True, together=True)
def embedding_by_vocabulary(call: Call) -> Iterator[OpSharding]:
    """Each rank has a range of rows and yields a term of the sum."""
    if not _depends_on_the_batch(call):
        yield OpSharding(inputs=(Shard(0), R), outputs=(P,))


@rule("aten.embedding")
def embedding(call: Call) -> Iterator[OpSharding]:
    """Weight [vocabulary, hidden], indices […], output […, hidden]."""
    if not _depends_on_the_batch(call):
        indices = list(range(len(call.inputs[1])))
        yield from by_letters([[None, "h"], indices], [[*indices, "h"]])


def _depends_on_the_batch(call: Call) -> bool:
    """Whether gradients are scaled by how often a row is used, or sparse."""
    return bool(call.arg(3, "scale_grad_by_freq", False) or call.arg(4, "sparse", False))


@local_form("aten.embedding")
def embedding_on_shard(placed: Placed) -> LocalForm:
    """With the vocabulary divided, a rank looks up its own rows and yields zero elsewhere."""
    if placed.sharding.inputs[0] != Shard(0):
        return LocalForm((placed.op,))
    padding = placed.call.arg(2, "padding_idx", -1)
    return placed.with_args(
        *placed.op.args[:2], padding, placed.axis, target="planner.vocab_embedding"
    )
