"""One random call of each op that has a rule: name → function of (random, axis size)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.sharding.programs import OneOp, frozen, one_op

Case = Callable[[random.Random, int], OneOp]
CASES: dict[str, Case] = {}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


def sizes(rng: random.Random, n: int, count: int) -> list[int]:
    """Sizes of which most are multiples of the axis size `n` and some are not."""
    found = [
        n * rng.randint(1, 3) if rng.random() < 0.8 else rng.randint(1, 5) for _ in range(count)
    ]
    found[rng.randrange(count)] = n * rng.randint(1, 3)  # at least one dim can be sharded
    return found


# -- matrix products ---------------------------------------------------------------------


@case("linear")
def _(rng, n):
    b, s, i, o = sizes(rng, n, 4)
    return one_op("aten.linear.default", randn(b, s, i), randn(o, i), randn(o))


@case("linear_without_bias")
def _(rng, n):
    b, i, o = sizes(rng, n, 3)
    return one_op("aten.linear.default", randn(b, i), randn(o, i))


@case("mm")
def _(rng, n):
    m, k, p = sizes(rng, n, 3)
    return one_op("aten.mm.default", randn(m, k), randn(k, p))


@case("bmm")
def _(rng, n):
    b, m, k, p = sizes(rng, n, 4)
    return one_op("aten.bmm.default", randn(b, m, k), randn(b, k, p))


@case("matmul_broadcast")
def _(rng, n):
    b, h, m, k, p = sizes(rng, n, 5)
    return one_op("aten.matmul.default", randn(b, 1, m, k), randn(h, k, p))


@case("matmul_vector")
def _(rng, n):
    b, m, k = sizes(rng, n, 3)
    return one_op("aten.matmul.default", randn(b, m, k), randn(k))


@case("matmul_weight")
def _(rng, n):
    b, m, k, p = sizes(rng, n, 4)
    return one_op("aten.matmul.default", randn(b, m, k), randn(k, p))


@case("mv")
def _(rng, n):
    m, k = sizes(rng, n, 2)
    return one_op("aten.mv.default", randn(m, k), randn(k))


@case("dot")
def _(rng, n):
    (k,) = sizes(rng, n, 1)
    return one_op("aten.dot.default", randn(k), randn(k))


@case("addmm")
def _(rng, n):
    m, k, p = sizes(rng, n, 3)
    return one_op("aten.addmm.default", randn(p), randn(m, k), randn(k, p))


@case("addmm_scaled")
def _(rng, n):
    m, k, p = sizes(rng, n, 3)
    return one_op("aten.addmm.default", randn(m, p), randn(m, k), randn(k, p), beta=0.5, alpha=2.0)


@case("baddbmm")
def _(rng, n):
    b, m, k, p = sizes(rng, n, 4)
    return one_op("aten.baddbmm.default", randn(b, 1, p), randn(b, m, k), randn(b, k, p))


@case("einsum")
def _(rng, n):
    b, h, q, k, d = sizes(rng, n, 5)
    return one_op("aten.einsum.default", "bhqd,bhkd->bhqk", [randn(b, h, q, d), randn(b, h, k, d)])


@case("einsum_implicit")
def _(rng, n):
    i, j, k = sizes(rng, n, 3)
    return one_op("aten.einsum.default", "ij, jk", [randn(i, j), randn(j, k)])


# -- pointwise -----------------------------------------------------------------------------


def unary(name: str, target: str, *args, positive: bool = False, **kwargs) -> None:
    @case(name)
    def _(rng, n):
        x = randn(*sizes(rng, n, 3))
        return one_op(target, x.abs() + 0.1 if positive else x, *args, **kwargs)


for _name in [
    "abs",
    "cos",
    "erf",
    "exp",
    "gelu",
    "leaky_relu",
    "mish",
    "neg",
    "relu",
    "round",
    "sigmoid",
    "silu",
    "sin",
    "tanh",
    "elu",
]:
    unary(_name, f"aten.{_name}.default")
for _name in ("sqrt", "rsqrt", "log", "reciprocal"):
    unary(_name, f"aten.{_name}.default", positive=True)
unary("pow", "aten.pow.Tensor_Scalar", 3)
unary("clamp", "aten.clamp.default", -0.5, 0.5)
unary("add_number", "aten.add.Tensor", 1.5)
unary("mul_number", "aten.mul.Tensor", 1.5)
unary("div_number", "aten.div.Tensor", 1.5)
unary("rsub_number", "aten.rsub.Scalar", 1.0)
unary("clone", "aten.clone.default")
unary("contiguous", "aten.contiguous.default")
unary("to", "aten.to.dtype", torch.float64)
unary("compare", "aten.gt.Scalar", 0)
unary("zeros_like", "aten.zeros_like.default")
unary("hardtanh", "aten.hardtanh.default")
unary("softplus", "aten.softplus.default")


def binary(name: str, target: str, **kwargs) -> None:
    @case(name)
    def _(rng, n):
        a, b, c = sizes(rng, n, 3)
        return one_op(target, randn(a, b, c), randn(1, c).abs() + 0.1, **kwargs)


binary("add", "aten.add.Tensor")
binary("add_scaled", "aten.add.Tensor", alpha=2)
binary("sub", "aten.sub.Tensor")
binary("mul", "aten.mul.Tensor")
binary("div", "aten.div.Tensor")
binary("div_floor", "aten.div.Tensor_mode", rounding_mode="floor")
binary("maximum", "aten.maximum.default")
binary("eq", "aten.eq.Tensor")
binary("atan2", "aten.atan2.default")


@case("add_same_shape")
def _(rng, n):
    shape = sizes(rng, n, 3)
    return one_op("aten.add.Tensor", randn(*shape), randn(*shape))


@case("mul_self")
def _(rng, n):
    x = randn(*sizes(rng, n, 2))
    return one_op("aten.mul.Tensor", x, x)


@case("lerp")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.lerp.Tensor", randn(a, b), randn(b), randn(a, 1))


@case("where")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.where.self", randn(a, b) > 0, randn(a, b), randn(b))


@case("masked_fill")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.masked_fill.Scalar", randn(a, b), randn(a, 1) > 0, -1e4)


@case("masked_fill_zero")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.masked_fill.Scalar", randn(a, b), randn(a, b) > 0, 0.0)


@case("logical_and")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.logical_and.default", randn(a, b) > 0, randn(b) > 0)


# -- reductions and ops along dims ---------------------------------------------------------


@case("sum_dim")
def _(rng, n):
    dims = rng.sample(range(3), rng.randint(1, 3))
    return one_op("aten.sum.dim_IntList", randn(*sizes(rng, n, 3)), dims, rng.random() < 0.5)


@case("sum")
def _(rng, n):
    return one_op("aten.sum.default", randn(*sizes(rng, n, 3)))


@case("histc")
def _(rng, n):
    return one_op("aten.histc.default", frozen(randn(*sizes(rng, n, 2))), 5, -2.0, 2.0)


@case("mean_dim")
def _(rng, n):
    dims = [-rng.randint(1, 3)]
    return one_op("aten.mean.dim", randn(*sizes(rng, n, 3)), dims, rng.random() < 0.5)


@case("mean")
def _(rng, n):
    return one_op("aten.mean.default", randn(*sizes(rng, n, 3)))


@case("amax")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.amax.default", randn(n * a, b, c), [-1], True)


@case("max_dim")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.max.dim", randn(n * a, b, c), 1)


@case("argmax")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.argmax.default", randn(n * a, b, c), -1)


@case("var")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.var.correction", randn(n * a, b, c + 1), [2], correction=1, keepdim=True)


@case("norm")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.linalg_vector_norm.default", randn(n * a, b, c), 2, [-1])


@case("logsumexp")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.logsumexp.default", randn(n * a, b, c), [-1])


def along(name: str, target: str, *args, **kwargs) -> None:
    @case(name)
    def _(rng, n):
        a, b, c = sizes(rng, n, 3)
        return one_op(target, randn(n * a, b, 2 * c), *args, **kwargs)


along("softmax", "aten.softmax.int", -1)
along("log_softmax", "aten.log_softmax.int", -1)
along("cumsum", "aten.cumsum.default", 2)
along("flip", "aten.flip.default", [1, 2])
along("roll", "aten.roll.default", [1], [2])
along("glu", "aten.glu.default", -1)
along("sort", "aten.sort.default", -1)
along("sort_stable", "aten.sort.stable", stable=True, dim=1)
along("topk", "aten.topk.default", 2, -1)
along("argsort", "aten.argsort.default", -1)
along("diff", "aten.diff.default", 1, -1)
along("tril", "aten.tril.default")


# -- normalisation ---------------------------------------------------------------------------


@case("layer_norm")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.layer_norm.default", randn(n * a, b, c), [c], randn(c), randn(c), 1e-5)


@case("layer_norm_two_dims")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.layer_norm.default", randn(n * a, b, c), [b, c], randn(b, c))


@case("rms_norm")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.rms_norm.default", randn(n * a, b, c), [c], randn(c))


# -- views -------------------------------------------------------------------------------------


@case("view_merge")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.view.default", randn(n * a, b, c), [-1, c])


@case("view_divide")
def _(rng, n):
    a, h, d = sizes(rng, n, 3)
    return one_op("aten.view.default", randn(a, n * h * d), [a, n * h, d])


@case("reshape_mixed")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.reshape.default", randn(a, n * b, 2, c), [a, 1, n * b * 2, c])


@case("view_leading_one")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.view.default", randn(1, n * a, b), [n * a * b])


@case("flatten")
def _(rng, n):
    return one_op("aten.flatten.using_ints", randn(n, *sizes(rng, n, 2)), 0, 1)


@case("unflatten")
def _(rng, n):
    (a,) = sizes(rng, n, 1)
    return one_op("aten.unflatten.int", randn(a, 4 * n), 1, [2 * n, 2])


@case("squeeze")
def _(rng, n):
    return one_op("aten.squeeze.default", randn(n, 1, *sizes(rng, n, 1)))


@case("squeeze_dim")
def _(rng, n):
    return one_op("aten.squeeze.dim", randn(n, 1, *sizes(rng, n, 1)), 1)


@case("unsqueeze")
def _(rng, n):
    return one_op("aten.unsqueeze.default", randn(*sizes(rng, n, 2)), -1)


@case("transpose")
def _(rng, n):
    return one_op("aten.transpose.int", randn(*sizes(rng, n, 3)), 1, -1)


@case("permute")
def _(rng, n):
    order = rng.sample(range(4), 4)
    return one_op("aten.permute.default", randn(*sizes(rng, n, 4)), order)


@case("t")
def _(rng, n):
    return one_op("aten.t.default", randn(*sizes(rng, n, 2)))


@case("movedim")
def _(rng, n):
    return one_op("aten.movedim.int", randn(*sizes(rng, n, 3)), 0, 2)


@case("expand")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.expand.default", randn(a, 1, b), [2 * n, -1, n, -1])


@case("slice")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.slice.Tensor", randn(n * a, b, c + 2), 2, 1, 9223372036854775807)


@case("slice_all")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.slice.Tensor", randn(n * a, n * b), 1, 0, 9223372036854775807)


@case("select")
def _(rng, n):
    return one_op("aten.select.int", randn(n, *sizes(rng, n, 2)), 1, -1)


@case("split")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.split.Tensor", randn(n * a, 3 * b), b, 1)


@case("split_with_sizes")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.split_with_sizes.default", randn(n * a, 3 * b), [b, 2 * b], -1)


@case("chunk")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.chunk.default", randn(n * a, 2 * b), 2, 1)


@case("unbind")
def _(rng, n):
    return one_op("aten.unbind.int", randn(3, *sizes(rng, n, 2)))


@case("cat")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.cat.default", [randn(n * a, b), randn(n * a, 2)], 1)


@case("stack")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.stack.default", [randn(a, b), randn(a, b)], -1)


@case("pad")
def _(rng, n):
    return one_op("aten.pad.default", randn(n, *sizes(rng, n, 2)), [0, 1], "constant", -1.0)


@case("constant_pad_nd")
def _(rng, n):
    return one_op("aten.constant_pad_nd.default", randn(n, *sizes(rng, n, 2)), [1, 1])


@case("repeat")
def _(rng, n):
    return one_op("aten.repeat.default", randn(n, *sizes(rng, n, 1)), [2, 1, 3])


@case("repeat_interleave")
def _(rng, n):
    return one_op("aten.repeat_interleave.self_int", randn(*sizes(rng, n, 3)), 2, 1)


# -- embedding, attention, losses ------------------------------------------------------------------


@case("embedding")
def _(rng, n):
    b, s, h = sizes(rng, n, 3)
    v = n * rng.randint(1, 5)
    return one_op("aten.embedding.default", randn(v, h), torch.randint(v, (b, s)))


@case("embedding_padding")
def _(rng, n):
    b, h = sizes(rng, n, 2)
    v = n * rng.randint(2, 5)
    indices = torch.randint(v, (b, 4))
    indices[0, 0] = v - 2
    return one_op("aten.embedding.default", randn(v, h), indices, v - 2)


def heads(rng, n):
    return (*sizes(rng, n, 1), n * rng.randint(1, 2), *sizes(rng, n, 2), rng.randint(1, 4))


@case("attention")
def _(rng, n):
    b, h, q, k, d = heads(rng, n)
    return one_op(
        "aten.scaled_dot_product_attention.default",
        randn(b, h, q, d),
        randn(b, h, k, d),
        randn(b, h, k, d + 1),
    )


@case("attention_causal")
def _(rng, n):
    b, h, q, _, d = heads(rng, n)
    return one_op(
        "aten.scaled_dot_product_attention.default",
        *(randn(b, h, q, d) for _ in range(3)),
        is_causal=True,
    )


@case("attention_mask")
def _(rng, n):
    b, h, q, k, d = heads(rng, n)
    return one_op(
        "aten.scaled_dot_product_attention.default",
        randn(b, h, q, d),
        randn(b, h, k, d),
        randn(b, h, k, d),
        randn(b, 1, q, k),
        scale=0.3,
    )


@case("attention_grouped")
def _(rng, n):
    b, h, q, k, d = heads(rng, n)
    return one_op(
        "aten.scaled_dot_product_attention.default",
        randn(b, 2 * h, q, d),
        randn(b, h, k, d),
        randn(b, h, k, d),
        enable_gqa=True,
    )


@case("attention_grouped_wide")
def _(rng, n):
    """Heads of keys that the ranks do not divide: of each rank's own queries, or shared by two."""
    b, _, q, k, d = heads(rng, n)
    keys = rng.choice([count for count in (2, 3, 5) if count % n])
    return one_op(
        "aten.scaled_dot_product_attention.default",
        randn(b, keys * n * rng.randint(1, 2), q, d),
        randn(b, keys, k, d),
        randn(b, keys, k, d),
        randn(b, 1, q, k),
        enable_gqa=True,
    )


def of_a_sequence(rng, n, *, groups=1, wider=0):
    """Queries, keys and values of one sequence, whose length all counts of pieces divide."""
    b, h, d = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 4)
    s = 6 * n * rng.randint(1, 2)
    return randn(b, groups * h, s, d), randn(b, h, s, d), randn(b, h, s, d + wider)


@case("attention_of_a_sequence")
def _(rng, n):
    return one_op("aten.scaled_dot_product_attention.default", *of_a_sequence(rng, n))


@case("attention_of_a_sequence_causal_grouped")
def _(rng, n):
    return one_op(
        "aten.scaled_dot_product_attention.default",
        *of_a_sequence(rng, n, groups=2),
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
    )


def told(low, high, chunk, *tables, groups=1):
    """A case of attention that is told of its mask, with tables of documents or of keys."""

    def make(rng, n):
        query, key, value = of_a_sequence(rng, n, groups=groups, wider=1)
        samples, length = query.shape[0], query.shape[2]
        same = torch.arange(length).div(5, rounding_mode="floor").repeat(samples, 1)
        counts = torch.rand(samples, length) < 0.7
        given = [same if "same" in tables else None, counts if "keys" in tables else None]
        return one_op(
            "planner.masked_attention",
            query,
            key,
            value,
            low,
            high,
            chunk,
            None,
            groups > 1,
            *given,
        )

    return make


CASES |= {
    "attention_in_a_window": told(0, 3, None),
    "attention_in_a_window_both_ways": told(-4, 4, None, groups=2),
    "attention_ahead_of_a_window": told(-9, -5, None),
    "attention_in_runs": told(0, None, 4),
    "attention_of_documents": told(0, None, None, "same", groups=2),
    "attention_of_padded_documents": told(None, None, None, "same", "keys"),
}


def targets(samples, classes, ignored=True):
    found = torch.randint(classes, samples)
    if ignored:
        found.view(-1)[0] = -100
    return found


@case("cross_entropy")
def _(rng, n):
    s = sizes(rng, n, 1)[0] + 1
    c = n * rng.randint(2, 4)
    return one_op("aten.cross_entropy_loss.default", randn(n * s, c), targets((n * s,), c))


@case("cross_entropy_smooth")
def _(rng, n):
    c = n * rng.randint(2, 4)
    shape = (n, c, *sizes(rng, n, 1))
    where = targets((shape[0], shape[2]), c)
    return one_op("aten.cross_entropy_loss.default", randn(*shape), where, None, 2, -100, 0.2)


@case("cross_entropy_each")
def _(rng, n):
    c = n * rng.randint(2, 4)
    return one_op("aten.cross_entropy_loss.default", randn(n, c), targets((n,), c), None, 0)


@case("nll_loss_sum")
def _(rng, n):
    c = n * rng.randint(2, 4)
    return one_op("aten.nll_loss_nd.default", randn(2 * n, c), targets((2 * n,), c), None, 2)


@case("nll_loss_mean")
def _(rng, n):
    c = n * rng.randint(2, 4)
    return one_op("aten.nll_loss_nd.default", randn(2 * n, c), targets((2 * n,), c), None, 1)


@case("nll_loss_each")
def _(rng, n):
    c = n * rng.randint(2, 4)
    return one_op("aten.nll_loss_nd.default", randn(n, c, 3), targets((n, 3), c), None, 0)


@case("log_softmax_by_class")
def _(rng, n):
    return one_op("aten.log_softmax.int", 9 * randn(*sizes(rng, n, 3)), rng.choice([0, 1, -1]))


@case("mse_loss")
def _(rng, n):
    shape = sizes(rng, n, 2)
    return one_op("aten.mse_loss.default", randn(*shape), randn(*shape))


@case("bce_with_logits")
def _(rng, n):
    shape = sizes(rng, n, 2)
    return one_op(
        "aten.binary_cross_entropy_with_logits.default", randn(*shape), randn(*shape).sigmoid()
    )


# -- creation and random --------------------------------------------------------------------------


@case("full")
def _(rng, n):
    return one_op("aten.full.default", sizes(rng, n, 2), 2.5, dtype=torch.float64)


@case("new_zeros")
def _(rng, n):
    return one_op("aten.new_zeros.default", randn(2), sizes(rng, n, 2))


@case("dropout_off")
def _(rng, n):
    return one_op("aten.dropout.default", randn(*sizes(rng, n, 2)), 0.5, False)


@case("native_dropout_off")
def _(rng, n):
    return one_op("aten.native_dropout.default", randn(*sizes(rng, n, 2)), 0.5, False)


# -- convolution, pooling, their norms -----------------------------------------------------


@case("conv2d")
def _(rng, n):
    b, i, o = sizes(rng, n, 3)
    args = (randn(b, i, 6, 6), randn(o, i, 3, 3), randn(o), [1, 1], [1, 1])
    return one_op("aten.conv2d.default", *args)


@case("conv2d_patches")
def _(rng, n):
    b, o = sizes(rng, n, 2)
    args = (randn(b, 3, 2 * n, 4 * n), randn(o, 3, 2, 2), randn(o), [2, 2])
    return one_op("aten.conv2d.default", *args)


@case("conv2d_groups")
def _(rng, n):
    (b,) = sizes(rng, n, 1)
    args = (randn(b, 4 * n, 5, 5), randn(2 * n, 2, 3, 3), randn(2 * n), [1, 1], [0, 0], [1, 1])
    return one_op("aten.conv2d.default", *args, 2 * n)


@case("conv1d_depthwise")
def _(rng, n):
    args = (randn(n, 2 * n, 8), randn(2 * n, 1, 3), None, [1], [2], [1])
    return one_op("aten.conv1d.default", *args, groups=2 * n)


@case("conv_transpose2d")
def _(rng, n):
    b, i, o = sizes(rng, n, 3)
    return one_op(
        "aten.conv_transpose2d.input", randn(b, i, 4, 4), randn(i, o, 2, 2), randn(o), [2, 2]
    )


@case("max_pool2d")
def _(rng, n):
    return one_op("aten.max_pool2d.default", randn(*sizes(rng, n, 2), 4, 4), [2, 2])


@case("avg_pool2d")
def _(rng, n):
    return one_op("aten.avg_pool2d.default", randn(*sizes(rng, n, 2), 4, 4), [2, 2])


@case("adaptive_avg_pool2d")
def _(rng, n):
    return one_op("aten.adaptive_avg_pool2d.default", randn(*sizes(rng, n, 2), 4, 4), [1, 1])


@case("upsample_nearest2d")
def _(rng, n):
    return one_op("aten.upsample_nearest2d.vec", randn(*sizes(rng, n, 2), 4, 4), None, [2.0, 2.0])


@case("batch_norm_evaluation")
def _(rng, n):
    b, c = sizes(rng, n, 2)
    running = (frozen(randn(c)), frozen(randn(c).abs() + 0.1))
    args = (randn(b, c, 3), randn(c), randn(c), *running, False, 0.1, 1e-5, False)
    return one_op("aten.batch_norm.default", *args)


@case("batch_norm_training")
def _(rng, n):
    b, c = sizes(rng, n, 1)[0] + 1, n * rng.randint(1, 3)
    running = (frozen(randn(c)), frozen(randn(c).abs() + 0.1))
    affine = (randn(c), randn(c)) if rng.random() < 0.5 else (None, None)
    return one_op(
        "aten.batch_norm.default", randn(b, c, 3), *affine, *running, True, 0.1, 1e-5, False
    )


@case("batch_norm_without_running")
def _(rng, n):
    b, c = sizes(rng, n, 1)[0] + 1, n * rng.randint(1, 3)
    args = (randn(b, c, 3), randn(c), randn(c), None, None, True, 0.1, 1e-5, False)
    return one_op("aten.batch_norm.default", *args)


@case("group_norm")
def _(rng, n):
    (b,) = sizes(rng, n, 1)
    args = (randn(b, 4 * n, 3, 3), 2 * n, randn(4 * n), randn(4 * n))
    return one_op("aten.group_norm.default", *args)


# -- indexing --------------------------------------------------------------------------------


@case("gather")
def _(rng, n):
    a, b, c = n * rng.randint(1, 3), *sizes(rng, n, 2)
    return one_op("aten.gather.default", randn(a, b, c), 1, torch.randint(b, (a, 2 * n, c)))


@case("scatter_add")
def _(rng, n):
    a, b = n * rng.randint(1, 3), sizes(rng, n, 1)[0]
    return one_op("aten.scatter_add.default", randn(a, b), 1, torch.randint(b, (a, 3)), randn(a, 3))


@case("scatter_value")
def _(rng, n):
    a, b = n * rng.randint(1, 3), sizes(rng, n, 1)[0]
    return one_op("aten.scatter.value", randn(a, b), 1, torch.randint(b, (a, 1)), 1.5)


@case("index_select")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.index_select.default", randn(a, b), 1, torch.randint(b, (n,)))


@case("index_add")
def _(rng, n):
    a, b = n * rng.randint(1, 3), sizes(rng, n, 1)[0]
    return one_op("aten.index_add.default", randn(a, b), 1, torch.randint(b, (3,)), randn(a, 3))


@case("index_one")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    return one_op("aten.index.Tensor", randn(a, b, c), [None, torch.randint(b, (n, 2))])


@case("index_two")
def _(rng, n):
    a, b, c = n * rng.randint(1, 3), *sizes(rng, n, 2)
    picked = [torch.randint(a, (2 * n, 1)), torch.randint(b, (1, n))]
    return one_op("aten.index.Tensor", randn(a, b, c), picked)


@case("index_apart")
def _(rng, n):
    a, b, c = sizes(rng, n, 3)
    picked = [torch.randint(a, (n,)), None, torch.randint(c, (n,))]
    return one_op("aten.index.Tensor", randn(a, b, c), picked)


@case("index_put")
def _(rng, n):
    a, b = sizes(rng, n, 1)[0], n * rng.randint(1, 3)
    where = [torch.randperm(a)[:1]]
    return one_op("aten.index_put.default", randn(a, b), where, randn(1, b))


@case("index_put_add")
def _(rng, n):
    a, b = sizes(rng, n, 1)[0], n * rng.randint(1, 3)
    where = [torch.randint(a, (5,))]
    return one_op("aten.index_put.default", randn(a, b), where, randn(5, b), True)


@case("slice_scatter")
def _(rng, n):
    a, b = n * rng.randint(1, 3), sizes(rng, n, 1)[0]
    return one_op("aten.slice_scatter.default", randn(a, b + 1), randn(a, b), 1, 1, b + 1)


@case("select_scatter")
def _(rng, n):
    a, b = n * rng.randint(1, 3), sizes(rng, n, 1)[0]
    return one_op("aten.select_scatter.default", randn(a, b), randn(a), 1, 0)


@case("one_hot")
def _(rng, n):
    return one_op("aten.one_hot.default", torch.randint(4, (n, 3)), 4)


@case("broadcast_tensors")
def _(rng, n):
    a, b = sizes(rng, n, 2)
    return one_op("aten.broadcast_tensors.default", [randn(a, 1), randn(b)])


@case("attention_one_key_head")
def _(rng, n):
    b, h, q, k, d = heads(rng, n)
    return one_op(
        "aten.scaled_dot_product_attention.default",
        randn(b, h, q, d),
        randn(b, 1, k, d),
        randn(b, 1, k, d),
        enable_gqa=True,
    )


# -- rows of experts ---------------------------------------------------------------------


def routed(rng, n):
    """Rows and how wide they are, the experts of each, and of how many."""
    rows, width = sizes(rng, n, 2)
    number = rng.randint(2, 4)
    return rows, width, number, torch.randint(number, (rows, rng.randint(1, 3)))


@case("sort_rows")
def _(rng, n):
    rows, width, number, experts = routed(rng, n)
    return one_op("planner.sort_rows", randn(rows, width), experts, number)


@case("grouped_mm")
def _(rng, n):
    rows, width, number, _ = routed(rng, n)
    ends = torch.tensor([rows] * number, dtype=torch.int32)
    matrices = randn(number, width, n * rng.randint(1, 3))
    return one_op("planner.grouped_mm", randn(rows, width), matrices, ends)


@case("product_of_runs")
def _(rng, n):
    rows, width, number, _ = routed(rng, n)
    ends = torch.tensor([*sorted(rng.choices(range(rows), k=number - 1)), rows]).int()
    matrices = randn(number, width, n * rng.randint(1, 3))
    return one_op("planner.product_of_runs", randn(rows, width), matrices, ends)


@case("stack_of_runs")
def _(rng, n):
    rows, width, number, _ = routed(rng, n)
    ends = torch.tensor([rows] * number, dtype=torch.int32)
    return one_op("planner.stack_of_runs", ends, [randn(width, n) for _ in range(number)])


@case("bias_of_runs")
def _(rng, n):
    rows, width, number, _ = routed(rng, n)
    ends = torch.tensor([rows] * number, dtype=torch.int32)
    return one_op("planner.bias_of_runs", randn(rows, width), randn(number, width), ends)


@case("unsort_rows")
def _(rng, n):
    rows, width, _, experts = routed(rng, n)
    copies = experts.shape[1]
    order = torch.randperm(experts.numel())
    return one_op(
        "planner.unsort_rows", randn(len(order), width), order, randn(rows, copies), copies
    )


@case("unsort_rows_unweighted")
def _(rng, n):
    _, width, _, experts = routed(rng, n)
    order = torch.randperm(experts.numel())
    return one_op("planner.unsort_rows", randn(len(order), width), order, None, experts.shape[1])
