"""Negative log-likelihood and log-softmax, with classes or samples divided."""

from __future__ import annotations

import torch

from planner.language.ops.families.losses import log_likelihood
from tests.ops.calls import kernel_call, offered, on_shard
from tests.sharding.programs import one_op

LOGITS, LABELS = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


def test_a_targets_class_is_on_one_rank():
    loss = one_op("aten.nll_loss.default", LOGITS, LABELS)
    assert offered(loss) == {"S(0),S(0)->P", "S(1),R->P"}
    ((target, args),) = on_shard(loss, "S(1),R->P")
    assert (target, args[2:]) == ("planner.vocab_nll_loss", (1, -100, "tp"))
    assert [t for t, _ in on_shard(loss, "S(0),S(0)->P")] == [
        "aten.nll_loss.default",
        "planner.divide_by_count",
    ]


def test_a_divided_log_softmax_sums_exponentials_over_ranks():
    single = one_op("aten.log_softmax.int", LOGITS, -1)
    assert offered(single) == {"S(0)->S(0)", "S(1)->S(1)"}
    ((target, args),) = on_shard(single, "S(1)->S(1)")
    assert (target, args[1:]) == ("planner.vocab_log_softmax", (1, None, "tp"))
    ((target, _),) = on_shard(single, "S(0)->S(0)")
    assert target == "aten.log_softmax.int"
    kept = log_likelihood._exponentials(kernel_call(one_op("aten.log_softmax.int", LOGITS, 1)))
    assert kept.extra_bytes == 4 * (32 + 4)  # the exponentials, and their sum for each row
