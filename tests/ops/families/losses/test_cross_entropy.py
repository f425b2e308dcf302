"""Cross entropy: by class ranks exchange sums, by sample they count their targets."""

from __future__ import annotations

import torch

from planner.language.ops.families.losses import cross_entropy
from tests.ops.calls import kernel_call, offered, on_shard, saved
from tests.sharding.programs import one_op

LOGITS, LABELS = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


def loss(*args, logits=LOGITS):
    return one_op("aten.cross_entropy_loss.default", logits, LABELS, *args)


def test_by_class_and_by_sample():
    assert offered(loss()) == {"S(1),R->R", "S(0),S(0)->P"}
    assert offered(loss(None, 0)) == {"S(1),R->R", "S(0),S(0)->S(0)"}
    assert offered(loss(torch.ones(8))) == set()  # a mean of weights is of all samples
    one_sample = one_op("aten.cross_entropy_loss.default", torch.ones(8), LABELS[0])
    assert offered(one_sample) == {"S(0),R->R"}


def test_a_mean_of_samples_becomes_a_sum_and_a_count():
    ((target, args), (count, _)) = on_shard(loss(), "S(0),S(0)->P")
    assert (target, args[3]) == ("aten.cross_entropy_loss.default", 2)
    assert count == "planner.divide_by_count"
    ((target, args),) = on_shard(loss(None, 1, 7, 0.1), "S(1),R->R")
    assert (target, args[2:]) == ("planner.vocab_cross_entropy", (1, 7, 0.1, "tp"))


def test_log_probabilities_are_saved_and_made_again_by_their_gradient():
    single = loss(logits=torch.ones(4, 8))
    assert saved(single).extra_bytes == 4 * 32 + 4  # log-softmax, and how many targets count
    call = kernel_call(single)
    assert cross_entropy._log_probabilities_gradient(call, forward=False) == 4 * 32
    assert cross_entropy._log_probabilities_gradient(call, forward=True) == 0
