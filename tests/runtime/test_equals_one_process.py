"""Every way of cutting a model computes what one process computes (fp64, rtol 1e-10).

P1 (dp), P2 (tp), P3 (params only at their owner), P4 (microbatches), P5 (2x2x2), P6 and P7
(fthenb and 1f1b run), P24 (loss on every rank), P26 (one stage), M20 (forward only written),
D3 (params gathered back from their shards).
"""

from __future__ import annotations

import pytest
import torch

from planner.errors import LayoutError
from planner.language.lowering.defaults import default_plan
from tests.runtime.scenarios import RTOL, capture, check, clip_many
from tests.spawn import run_ranks

BY_BLOCK = ("full", "full", "selective", "selective", "full", "none")
"""Recomputation of the GPT's blocks: no stage of two or three recomputes all alike."""


def test_one_rank_takes_the_same_path():
    """P26, P4: one stage, with 1, 2, 4 and 8 microbatches of one global batch, any model."""
    cases = [
        ("small-gpt", {"num_microbatches": m, "microbatch_size": 8 // m, "recompute": r})
        for m, r in [(1, "none"), (2, "full"), (4, "none"), (8, "none")]
    ]
    cases += [("unet", {"recompute": "full"}), ("encoder-decoder", {}), ("resnet", {})]
    outcomes = check(1, cases)
    assert len({round(o[0].gaps.losses[0], 12) for o in outcomes[:4]}) == 1


def test_data_parallel():
    """P1: two replicas on halves of the batch, and the same with ZeRO 1, 2 and 3."""
    check(
        2,
        [
            ("small-gpt", {"dp": 2}),
            ("unet", {"dp": 2, "microbatch_size": 2}),
            ("small-gpt", {"dp": 2, "zero_stage": 1}),
            ("small-gpt", {"dp": 2, "zero_stage": 2, "recompute": "full"}),
            ("small-gpt", {"dp": 2, "zero_stage": 3, "recompute": "full"}),
        ],
    )


def test_tensor_parallel():
    """P2: one layer's weights on two ranks, attention and MLP."""
    for outcomes in check(
        2, [("small-gpt", {"tp": 2}), ("small-gpt", {"tp": 2, "recompute": "full"})]
    ):
        # Both ranks hold a piece of every parameter.
        assert outcomes[0].params_held == outcomes[1].params_held


def test_pipeline():
    """P3, P6, P7: each rank holds its own layers' params only."""
    cases = [
        ("small-gpt", {"pp": 2, "schedule": "1f1b"}),
        ("small-gpt", {"pp": 2, "schedule": "fthenb", "recompute": "full"}),
        ("small-gpt", {"pp": 2, "schedule": "naive"}),
        ("gpt", {"pp": 2, "recompute": BY_BLOCK}),
        ("gpt", {"pp": 2, "schedule": "zb_h1", "recompute": BY_BLOCK[::-1]}),
        ("gpt", {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "recompute": BY_BLOCK}),
    ]
    for outcomes in check(2, cases):
        assert not outcomes[0].params_held & outcomes[1].params_held


def test_stages_of_given_numbers_of_blocks():
    """G1: the first stage has the token embedding alone, or half of the blocks."""
    by_rank = check(
        2, [("gpt", {"pp": 2, "balance": (1, 5)}), ("gpt", {"pp": 2, "balance": (3, 3)})]
    )
    assert "token.weight" in by_rank[0][0].params_held
    assert not any("layers" in name for name in by_rank[0][0].params_held)


@pytest.mark.parametrize(
    ("balance", "says"),
    [
        ((1, 3), "balance=1,3 deals 4 blocks and the model has 6"),
        ((6, 0), "the numbers must be 1 or more and add up to 6"),
        ((2, 2, 2), "balance=2,2,2 is for 3 stages and pp*vpp=2"),
    ],
)
def test_a_balance_must_deal_every_block(balance, says):
    """G1, G2: a wrong sum or count is an error, not a different plan."""
    with pytest.raises(LayoutError) as refused:
        default_plan(capture("gpt", torch.float64), pp=2, balance=balance)
    assert says in str(refused.value)


def test_skips_go_straight_to_their_consumers():
    """G8: a U-Net on three stages, and an encoder output every decoder layer reads."""
    check(
        3,
        [
            ("unet", {"pp": 3, "num_microbatches": 3}),
            ("encoder-decoder", {"pp": 3, "num_microbatches": 3}),
        ],
    )


def test_pairs_of_axes_on_four_ranks():
    """P5: dp, tp and pp two at a time, with ZeRO, and four stages."""
    check(
        4,
        [
            ("small-gpt", {"tp": 2, "pp": 2}),
            ("small-gpt", {"dp": 2, "pp": 2, "zero_stage": 3}),
            ("small-gpt", {"dp": 2, "tp": 2, "zero_stage": 1}),
            # A split backward, which ZeRO makes as one: the last of them reduces.
            ("small-gpt", {"dp": 2, "pp": 2, "zero_stage": 1, "schedule": "zb_h1"}),
            ("deep-gpt", {"dp": 2, "pp": 2, "vpp": 2, "zero_stage": 3, "schedule": "zb_v"}),
            ("small-gpt", {"pp": 4}),
        ],
    )


def test_all_three_axes_on_eight_ranks():
    """P5: 2 x 2 x 2."""
    check(8, [("small-gpt", {"dp": 2, "tp": 2, "pp": 2})])


def test_virtual_stages_and_split_backwards():
    """V2, V6, V10: whatever table there is, the executor runs it (two ranks: `test_delays`)."""
    two = {"pp": 4, "vpp": 2, "num_microbatches": 8}
    cases = [("deep-gpt", {**two, "schedule": name}) for name in ("interleaved_1f1b", "dualpipe_v")]
    cases.append(("deep-gpt", {"pp": 4, "schedule": "zb_h1"}))
    check(4, cases)


def test_gradients_are_clipped_by_the_norm_over_all_ranks():
    """Shards, replicas, ZeRO shards and tied copies: every element counts once."""
    cases = [("small-gpt", c) for c in ({"dp": 2}, {"tp": 2}, {"dp": 2, "zero_stage": 3})]
    cases += [
        ("small-tied-gpt", {"pp": 2}),
        ("small-tied-gpt", {"pp": 2, "vpp": 2, "schedule": "zb_v"}),
    ]
    plans = [(name, default_plan(capture(name, torch.float64), **c)) for name, c in cases]
    for by_rank in zip(*run_ranks(clip_many, 2, plans, 0.1), strict=True):
        assert by_rank[0][0] == by_rank[1][0]
        assert by_rank[0][0] == pytest.approx(by_rank[0][1], rel=1e-10)
        assert by_rank[0][0] > 0.1
        assert by_rank[0][2] < RTOL
