"""Sums, products and choices: what is linear takes a term of a sum over ranks."""

from __future__ import annotations

import torch

from planner.language.ops.families.entries import arithmetic
from tests.ops.calls import kernel_call, offered, saved
from tests.sharding.programs import frozen, one_op

ROW, MATRIX = torch.ones(4), torch.ones(2, 4)


def partials(target: str, *args) -> set[str]:
    return {s for s in offered(one_op(target, *args)) if "P" in s}


def test_a_sum_takes_two_terms_or_none():
    """A number would be added once on each rank."""
    assert partials("aten.add.Tensor", MATRIX, ROW) == {"P,P->P"}
    assert partials("aten.add.Tensor", MATRIX, 1.0) == set()


def test_a_product_takes_one_term_and_a_quotient_takes_it_above():
    assert partials("aten.mul.Tensor", MATRIX, ROW) == {"P,R->P", "R,P->P"}
    assert partials("aten.div.Tensor", MATRIX, ROW) == {"P,R->P"}
    assert partials("aten.mul.Tensor", MATRIX.long(), ROW.long()) == set()
    floor = one_op("aten.div.Tensor_mode", MATRIX, ROW, rounding_mode="floor")
    assert not {s for s in offered(floor) if "P" in s}


def test_a_choice_is_linear_in_the_pair_and_a_fill_only_with_zero():
    assert partials("aten.where.self", MATRIX > 0, MATRIX, MATRIX + 1) == {"R,P,P->P"}
    assert partials("aten.masked_fill.Scalar", MATRIX, MATRIX > 0, 0) == {"P,R->P"}
    assert partials("aten.masked_fill.Scalar", MATRIX, MATRIX > 0, 1.0) == set()


def test_factors_are_saved_for_the_gradient_of_the_other():
    trained, data = torch.ones(4), frozen(torch.ones(2, 4))
    assert saved(one_op("aten.mul.Tensor", data, trained)).tensors == ("x0",)
    assert saved(one_op("aten.div.Tensor", trained, data)).tensors == ("x1",)
    assert saved(one_op("aten.div.Tensor", data, trained)).tensors == ("x0", "x1")
    assert arithmetic._factors(kernel_call(one_op("aten.mul.Tensor", trained, 2.0))).tensors == ()
