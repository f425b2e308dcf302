"""Pooling and resizing: samples and channels alone, space whole."""

from __future__ import annotations

import torch

from planner.language.ops.families import images
from tests.ops.calls import kernel_call, offered, saved
from tests.sharding.programs import one_op

IMAGE = torch.ones(2, 4, 4, 4)


def test_space_stays_whole_and_a_maximum_takes_no_term_of_a_sum():
    mean, most = (one_op(f"aten.{n}_pool2d.default", IMAGE, [2, 2]) for n in ("avg", "max"))
    assert offered(mean) == {"S(0)->S(0)", "S(1)->S(1)", "P->P"}
    assert offered(most) == {"S(0)->S(0)", "S(1)->S(1)"}
    shuffled = one_op("aten.pixel_shuffle.default", IMAGE, 2)  # mixes channels into space
    assert offered(shuffled) == {"S(0)->S(0)", "P->P"}


def test_a_maximum_saves_where_it_was_and_a_mean_of_all_saves_nothing():
    most = one_op("aten.max_pool2d.default", IMAGE, [2, 2])
    assert saved(most).extra_bytes == 8 * 2 * 4 * 2 * 2
    whole = one_op("aten.adaptive_avg_pool2d.default", IMAGE, [1, 1])
    assert images._unless_a_mean(kernel_call(whole)).tensors == ()
    halves = one_op("aten.adaptive_avg_pool2d.default", IMAGE, [2, 2])
    assert images._unless_a_mean(kernel_call(halves)).tensors == ("x0",)
