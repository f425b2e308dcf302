"""Products: what may be sharded, what is saved, which weight gradient can be deferred."""

from __future__ import annotations

import torch

from planner.language.graph import Op, Ref
from planner.language.ops.families.products import matmul
from planner.language.ops.kernel import LARGE_BYTES
from tests.ops.calls import offered, saved
from tests.sharding.programs import frozen, one_op

ones = torch.ones


def test_a_linear_layer_is_cut_by_column_by_row_and_by_sample():
    layer = one_op("aten.linear.default", ones(4, 6), ones(2, 6), ones(2))
    assert offered(layer) == {
        "S(0),R,R->S(0)",
        "R,S(0),S(0)->S(1)",
        "S(1),S(1),P->P",  # the bias once, not once a rank
    }


def test_batched_products_broadcast_and_einsum_has_letters():
    product = one_op("aten.matmul.default", ones(2, 1, 4, 6), ones(8, 6, 4))
    assert "R,S(0)->S(1)" in offered(product)  # a batch dim that only the second factor has
    einsum = one_op("aten.einsum.default", "ik,kj->ij", [ones(2, 4), ones(4, 6)])
    assert offered(einsum) == {"S(0),R->S(0)", "R,S(1)->S(1)", "S(1),S(0)->P"}
    assert not offered(one_op("aten.einsum.default", "...k,kj->...j", [ones(2, 4), ones(4, 6)]))


def test_a_factor_is_saved_where_its_partner_needs_a_gradient():
    data, weight = frozen(ones(2, 4)), ones(4, 6)
    assert saved(one_op("aten.mm.default", data, weight)).tensors == ("x0",)
    assert saved(one_op("aten.mm.default", data, frozen(ones(4, 6)))).tensors == ()
    assert saved(one_op("aten.addmm.default", ones(6), data, weight)).tensors == ("x1",)


def test_rows_that_cannot_be_folded_in_place_are_copied():
    """The copy is what is saved; but a product with a large weight saves what it was given."""
    x = ones(3, 2, 4).transpose(0, 1)
    small = saved(one_op("aten.linear.default", x, ones(5, 4)))
    assert (small.tensors, small.extra_bytes) == (("x1",), 4 * x.numel())
    wide = ones(LARGE_BYTES // 16, 4)
    assert saved(one_op("aten.linear.default", x, wide)).tensors == ("x0", "x1")


def test_products_name_their_weight():
    x, weight, bias = Ref("x"), Ref("w"), Ref("b")

    def op(*args, kwargs=()) -> Op:
        return Op(name="y", target="aten.linear.default", args=args, kwargs=kwargs, outputs=("y",))

    assert matmul._linear_product(op(x, weight)) == (x, weight, None, True)
    assert matmul._linear_product(op(x, weight, bias)) == (x, weight, bias, True)
    assert matmul._addmm_product(op(bias, x, weight)) == (x, weight, bias, False)
    assert matmul._addmm_product(op(bias, x, weight, kwargs=(("alpha", 2),))) is None
