"""Convolution by sample, channel and group, and in space only where no halo is needed."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.call import Call
from planner.language.ops.families.products.convolution import _flop, _transposed_flop
from tests.ops.calls import offered, on_shard
from tests.sharding.programs import one_op

ones = torch.ones


def test_whole_windows_are_cut_in_space():
    patches = one_op("aten.conv2d.default", ones(2, 4, 4, 8), ones(6, 4, 2, 2), None, [2, 2])
    assert offered(patches) == {
        "S(0),R->S(0)",
        "R,S(0)->S(1)",
        "S(1),S(1)->P",
        "S(2),R->S(2)",
        "S(3),R->S(3)",
    }


@pytest.mark.parametrize(
    "settings", [([1, 1],), ([2, 2], [1, 1]), ([2, 2], [0, 0], [2, 2])], ids=str
)
def test_windows_that_meet_a_neighbours_border_are_not(settings):
    """Overlap, padding, dilation."""
    image = ones(2, 4, 8, 8)
    found = offered(one_op("aten.conv2d.default", image, ones(6, 4, 2, 2), None, *settings))
    assert not {"S(2),R->S(2)", "S(3),R->S(3)"} & found
    assert "S(0),R->S(0)" in found


def test_groups_go_whole_and_each_rank_has_its_share():
    by_channel = one_op(
        "aten.conv2d.default", ones(2, 4, 4, 8), ones(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4
    )
    assert offered(by_channel) == {"S(0),R->S(0)", "S(1),S(0)->S(1)"}
    ((_, args),) = on_shard(by_channel, "S(1),S(0)->S(1)")
    assert args[-1] == 2


def test_a_transposed_convolution_has_its_channels_the_other_way_round():
    up = one_op("aten.conv_transpose2d.input", ones(2, 4, 3, 3), ones(4, 6, 2, 2))
    assert offered(up) == {"S(0),R->S(0)", "S(1),S(0)->P", "R,S(1)->S(1)"}


def test_flop_count_products_with_a_kernel():
    """Each of 2 * 6 * 3 * 3 results is a product over 4 channels of 2 x 2; the other way, each
    of 2 * 4 * 3 * 3 entries of the image meets 6 channels of 2 x 2.
    """
    down = one_op("aten.conv2d.default", ones(2, 4, 4, 4), ones(6, 4, 2, 2))
    assert _flop(Call(down.op, down.program.tensor, 1)) == 2 * (2 * 6 * 9) * (4 * 4)
    up = one_op("aten.conv_transpose2d.input", ones(2, 4, 3, 3), ones(4, 6, 2, 2))
    assert _transposed_flop(Call(up.op, up.program.tensor, 1)) == 2 * (2 * 4 * 9) * (6 * 4)
