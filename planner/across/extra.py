"""How ops without a sharding rule treat the dims of their tensors.

In the form of sharding rules, so that both are read alike, but only to tell samples apart: no
plan shards such an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from planner.graph import Ref
from planner.layout.placement import OpSharding, Placement, Shard
from planner.ops.call import Call, P, R, normal_dim, normal_dims
from planner.ops.letters import Letters, broadcast, by_letters, pointwise, same_dims

Rule = Callable[[Call], Iterator[OpSharding]]

EXTRA: dict[str, Rule] = {}
"""A rule for each op packet that `planner.ops` has none for."""

NONE = 0
"""ATen's number for a loss of each element."""

LOSSES = {
    "aten.kl_div": 2,
    "aten.soft_margin_loss": 2,
    "aten.hinge_embedding_loss": 3,
    "aten.margin_ranking_loss": 4,
    "aten.poisson_nll_loss": 5,
    "aten.cosine_embedding_loss": 4,
    "aten.triplet_margin_loss": 7,
    "aten.multi_margin_loss": 5,
    "aten.multilabel_margin_loss": 2,
}
"""Losses by sample, and the place of their `reduction`."""

ELEMENTWISE = {
    "aten.mse_loss": 2,
    "aten.l1_loss": 2,
    "aten.smooth_l1_loss": 2,
    "aten.huber_loss": 2,
    "aten.binary_cross_entropy": 3,
    "aten.binary_cross_entropy_with_logits": 4,
}
"""Losses of each element, and the place of their `reduction`."""


def _extra(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        EXTRA.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return register


_POINTWISE = """
rand_like randn_like randint_like bernoulli exponential uniform normal log_normal cauchy geometric
random poisson rrelu rrelu_with_noise float_power type_as polar complex real imag angle conj
signbit nextafter hypot heaviside logaddexp2 special_expit special_xlogy special_erfcx special_i0e
special_entr i0 rad2deg deg2rad fill zero view_as_real_copy gcd lcm bitwise_left_shift
bitwise_right_shift isneginf isposinf isreal resolve_conj resolve_neg polygamma igamma igammac
fake_quantize_per_tensor_affine isin
""".split()  # noqa: SIM905 - names read better as text


@_extra(*_POINTWISE)
def _element_by_element(call: Call) -> Iterator[OpSharding]:
    """Each entry from the entries at its place."""
    yield from pointwise(call)
    if call.packet in ("aten.type_as", "aten.real", "aten.imag", "aten.conj"):
        yield OpSharding(inputs=(P, R)[: len(call.inputs)], outputs=(P,))


@_extra("bucketize")
def _by_boundaries(call: Call) -> Iterator[OpSharding]:
    """Numbers of any shape, boundaries [k]."""
    letters: Letters = range(len(call.inputs[0]))
    yield from by_letters([letters, *[[None]] * (len(call.inputs) - 1)], [letters])


@_extra("view_as_complex", "view_as_real")
def _complex_view(call: Call) -> Iterator[OpSharding]:
    """Pairs of numbers in the last dim, or complex ones without it."""
    letters: Letters = range(min(len(call.inputs[0]), len(call.outputs[0])))
    sides = [
        letters if len(shape) == len(letters) else [*letters, None]
        for shape in (call.inputs[0], call.outputs[0])
    ]
    yield from by_letters(sides[:1], sides[1:])
    yield OpSharding(inputs=(P,), outputs=(P,))


@_extra("einsum")
def _einsum_with_ellipsis(call: Call) -> Iterator[OpSharding]:
    """The dims of an ellipsis, aligned from the last; plain equations have a sharding rule."""
    left, _, out = str(call.op.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." not in left or "..." not in out:
        return
    extra = max(len(s) - len(t.replace("...", "")) for t, s in zip(terms, call.inputs, strict=True))

    def spelled(term: str, rank: int) -> list[int | str | None]:
        before, dots, after = term.partition("...")
        count = rank - len(before) - len(after) if dots else 0
        return [*before, *range(extra - count, extra), *after]

    letters = [spelled(t, len(s)) for t, s in zip(terms, call.inputs, strict=True)]
    result = spelled(out, len(call.outputs[0]))
    summed = {c for term in letters for c in term if c is not None} - set(result)
    yield from by_letters(letters, [result], summed=summed)


@_extra("cdist", "_cdist_forward")
def _distances(call: Call) -> Iterator[OpSharding]:
    """Points [..., p, m] and [..., r, m] to [..., p, r]."""
    batch = range(len(call.outputs[0]) - 2)
    sides = [[*broadcast(s[:-2], call.outputs[0][:-2])] for s in call.inputs[:2]]
    yield from by_letters([[*sides[0], "p", None], [*sides[1], "r", None]], [[*batch, "p", "r"]])


@_extra("outer", "ger")
def _outer(call: Call) -> Iterator[OpSharding]:
    yield from by_letters([["a"], ["b"]], [["a", "b"]])


@_extra("bilinear")
def _bilinear(call: Call) -> Iterator[OpSharding]:
    """Tensors [..., i] and [..., j], weight [o, i, j], bias [o]."""
    batch: Letters = range(len(call.inputs[0]) - 1)
    weights: list[Letters] = [[None] * len(s) for s in call.inputs[2:]]
    yield from by_letters([[*batch, None], [*batch, None], *weights], [[*batch, None]])


@_extra("cosine_similarity", "pairwise_distance")
def _of_pairs(call: Call) -> Iterator[OpSharding]:
    """Two tensors, reduced along one dim together."""
    whole = max(call.inputs, key=len)
    dim = normal_dim(
        call.arg(2, "dim", 1) if "cosine" in call.packet else len(whole) - 1, len(whole)
    )
    letters: Letters = [None if d == dim else d for d in range(len(whole))]
    inputs = [[None if i is None else letters[i] for i in broadcast(s, whole)] for s in call.inputs]
    kept = len(call.outputs[0]) == len(whole)
    yield from by_letters(inputs, [[d for d in letters if kept or d is not None]])


@_extra("prelu")
def _prelu(call: Call) -> Iterator[OpSharding]:
    """Tensor [n, c, ...], weight [c] or [1]."""
    for d in range(len(call.inputs[0])):
        if d != 1:
            yield OpSharding(inputs=(Shard(d), R), outputs=(Shard(d),))


@_extra("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: Call) -> Iterator[OpSharding]:
    """Input [t, n, i] (or [n, t, i]), states [layers, n, h], weights: by sequence."""
    batch_first = bool(call.op.args[8])
    place = Shard(0 if batch_first else 1)
    states = 2 if call.packet == "aten.lstm" else 1
    weights = len(call.inputs) - 1 - states
    yield OpSharding(
        inputs=(place, *(Shard(1),) * states, *(R,) * weights),
        outputs=(place, *(Shard(1),) * states),
    )


@_extra(
    "im2col",
    "col2im",
    "pixel_unshuffle",
    "channel_shuffle",
    "grid_sampler",
    "max_unpool2d",
    "affine_grid_generator",
    "stft",
    "istft",
    "multinomial",
    "native_group_norm",
)
def _by_sample(call: Call) -> Iterator[OpSharding]:
    """Each entry of the first dim alone; other tensors that have the dim go with it."""
    count = call.inputs[0][0] if call.inputs[0] else 0
    places = [
        Shard(0) if shape and shape[0] == count else R for shape in (*call.inputs, *call.outputs)
    ]
    cut = len(call.inputs)
    yield OpSharding(inputs=tuple(places[:cut]), outputs=tuple(places[cut:]))


@_extra(
    "linalg_inv",
    "linalg_inv_ex",
    "linalg_cholesky",
    "linalg_cholesky_ex",
    "linalg_det",
    "linalg_slogdet",
    "linalg_eigh",
    "linalg_svd",
    "linalg_qr",
    "linalg_solve",
    "linalg_matrix_exp",
    "linalg_pinv",
    "linalg_solve_triangular",
    "matrix_exp",
    "matrix_power",
    "inverse",
    "det",
    "logdet",
    "slogdet",
    "cholesky",
    "diag_embed",
    "diagonal",
)
def _of_matrices(call: Call) -> Iterator[OpSharding]:
    """Matrices in the last two dims (vectors, for `diag_embed`), each alone."""
    given = (call.arg(2, "dim1", 0), call.arg(3, "dim2", 1)) if "diagonal" in call.packet else ()
    rank = len(call.inputs[0])
    fixed = normal_dims(given or (-2, -1), rank) if "diag_embed" not in call.packet else (rank - 1,)
    batch = [d for d in range(rank) if d not in fixed]
    inputs: list[Letters] = [
        [None if d in fixed else d for d in range(len(s))] for s in call.inputs
    ]
    yield from by_letters(inputs, [[*batch, *[None] * (len(s) - len(batch))] for s in call.outputs])


@_extra(*(f"fft_{kind}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")))
def _transform(call: Call) -> Iterator[OpSharding]:
    """Along one dim."""
    yield from same_dims(call, fixed=normal_dims(call.arg(2, "dim", -1), len(call.inputs[0])))


@_extra(*(f"fft_{kind}" for kind in ("fft2", "ifft2", "rfft2", "irfft2")))
def _transform_plane(call: Call) -> Iterator[OpSharding]:
    """Along two dims."""
    yield from same_dims(call, fixed=normal_dims(call.arg(2, "dim", (-2, -1)), len(call.inputs[0])))


@_extra("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_fftshift", "fft_ifftshift")
def _transform_dims(call: Call) -> Iterator[OpSharding]:
    """Along the dims given, or all."""
    place = 1 if "shift" in call.packet else 2
    yield from same_dims(call, fixed=normal_dims(call.arg(place, "dim"), len(call.inputs[0])))


@_extra("aminmax", "mode", "nanmedian", "count_nonzero", "quantile", "nanquantile")
def _reduction(call: Call) -> Iterator[OpSharding]:
    """Along one dim, or all."""
    rank = len(call.inputs[0])
    place = 2 if "quantile" in call.packet else 1
    default = -1 if call.packet == "aten.mode" else None
    dims = normal_dims(call.arg(place, "dim", default), rank)
    kept = len(call.outputs[0]) == rank and rank > 0
    letters: Letters = [None if d in dims else d for d in range(rank)]
    out = letters if kept else [d for d in letters if d is not None]
    rest: list[Letters] = [[None] * len(s) for s in call.inputs[1:]]
    yield from by_letters([letters, *rest], [out] * len(call.outputs))


@_extra(*(name.removeprefix("aten.") for name in LOSSES))
def _loss(call: Call) -> Iterator[OpSharding]:
    """A loss of each sample in the first dim; summed or averaged, those of a part are a term."""
    is_each = call.arg(LOSSES[call.packet], "reduction", 1) == NONE
    for dim in range(len(call.inputs[0]) if call.packet == "aten.kl_div" else 1):
        place = Shard(dim)
        given = isinstance(call.arg(3, "weight"), Ref) and call.packet == "aten.multi_margin_loss"
        inputs: list[Placement] = [place for _ in call.inputs]
        if given:
            inputs[-1] = R
        yield OpSharding(inputs=tuple(inputs), outputs=(place if is_each else P,))


@_extra(*(name.removeprefix("aten.") for name in ELEMENTWISE))
def _elementwise_loss(call: Call) -> Iterator[OpSharding]:
    """With broadcasting (weights of classes), of which the sharding rule says nothing."""
    whole = max(call.inputs, key=lambda shape: (len(shape), prod(shape)))
    is_each = call.arg(ELEMENTWISE[call.packet], "reduction", 1) == NONE
    letters = range(len(whole))
    inputs = [broadcast(shape, whole) for shape in call.inputs]
    yield from by_letters(inputs, [letters if is_each else []], summed=() if is_each else letters)
