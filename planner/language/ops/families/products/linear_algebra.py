"""Linear algebra, transforms, distances and recurrent layers, most of them without sharding rule.

No plan shards such an op; the rules here tell which samples it computes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Op
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, R, normal_dim, normal_dims
from planner.language.ops.families.images import by_sample
from planner.language.ops.letters import Letters, broadcast, by_letters, same_dims
from planner.language.ops.record import OpFamily, aten, register
from planner.language.ops.samples.step import Across


def of_matrices(call: Call) -> Iterator[OpSharding]:
    """Matrices in the last two dims (vectors, for `diag_embed`), each alone."""
    given = (call.arg(2, "dim1", 0), call.arg(3, "dim2", 1)) if "diagonal" in call.packet else ()
    rank = len(call.inputs[0])
    fixed = normal_dims(given or (-2, -1), rank) if "diag_embed" not in call.packet else (rank - 1,)
    batch = [d for d in range(rank) if d not in fixed]
    inputs: list[Letters] = [
        [None if d in fixed else d for d in range(len(s))] for s in call.inputs
    ]
    yield from by_letters(inputs, [[*batch, *[None] * (len(s) - len(batch))] for s in call.outputs])


def _distances(call: Call) -> Iterator[OpSharding]:
    """Points [..., p, m] and [..., r, m] to [..., p, r]."""
    batch = range(len(call.outputs[0]) - 2)
    sides = [[*broadcast(s[:-2], call.outputs[0][:-2])] for s in call.inputs[:2]]
    yield from by_letters([[*sides[0], "p", None], [*sides[1], "r", None]], [[*batch, "p", "r"]])


def _outer(call: Call) -> Iterator[OpSharding]:
    """Vectors [a] and [b] to [a, b]."""
    yield from by_letters([["a"], ["b"]], [["a", "b"]])


def _bilinear(call: Call) -> Iterator[OpSharding]:
    """Tensors [..., i] and [..., j], weight [o, i, j], bias [o]."""
    batch: Letters = range(len(call.inputs[0]) - 1)
    weights: list[Letters] = [[None] * len(s) for s in call.inputs[2:]]
    yield from by_letters([[*batch, None], [*batch, None], *weights], [[*batch, None]])


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


def _transform(call: Call) -> Iterator[OpSharding]:
    """Along one dim."""
    yield from same_dims(call, fixed=normal_dims(call.arg(2, "dim", -1), len(call.inputs[0])))


def _transform_plane(call: Call) -> Iterator[OpSharding]:
    """Along two dims."""
    yield from same_dims(call, fixed=normal_dims(call.arg(2, "dim", (-2, -1)), len(call.inputs[0])))


def _transform_dims(call: Call) -> Iterator[OpSharding]:
    """Along the dims given, or all."""
    place = 1 if "shift" in call.packet else 2
    yield from same_dims(call, fixed=normal_dims(call.arg(place, "dim"), len(call.inputs[0])))


def _drops(op: Op) -> bool:
    """A recurrent layer draws for its dropout."""
    return op.target.endswith(".input") and bool(op.args[5])


# ---------------------------------------------------------------------------------------- records

_MATRICES = OpFamily(
    name="matrix functions",
    targets=aten("matrix_exp matrix_power inverse det logdet slogdet cholesky diag_embed"),
    across=Across(rule=of_matrices),
)
register(_MATRICES)
register(
    replace(
        _MATRICES,
        name="linear algebra",
        targets=aten(
            "linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex linalg_det linalg_slogdet"
            " linalg_eigh linalg_svd linalg_qr linalg_solve linalg_matrix_exp linalg_pinv"
            " linalg_solve_triangular"
        ),
        recomputed=False,
    )
)
register(
    OpFamily(
        name="other linear algebra and transforms",
        targets=("aten.linalg_*", "aten.fft_*"),
        recomputed=False,
    )
)
for _names, _rule in (
    ("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", _transform),
    ("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", _transform_plane),
    ("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift", _transform_dims),
):
    register(
        OpFamily(
            name=f"transforms: {_names}",
            targets=aten(_names),
            recomputed=False,
            across=Across(rule=_rule),
        )
    )
register(
    OpFamily(
        name="short-time transforms", targets=aten("stft istft"), across=Across(rule=by_sample)
    )
)
register(
    OpFamily(
        name="distances",
        targets=aten("cdist _cdist_forward"),
        recomputed=False,
        across=Across(rule=_distances),
    )
)
register(
    OpFamily(
        name="outer product",
        targets=aten("outer ger"),
        across=Across(rule=_outer, algebra="product"),
    )
)
register(
    OpFamily(
        name="bilinear layer",
        targets=aten("bilinear"),
        recomputed=False,
        across=Across(rule=_bilinear),
    )
)
register(
    OpFamily(
        name="similarities",
        targets=aten("cosine_similarity pairwise_distance"),
        across=Across(rule=_of_pairs),
    )
)
register(
    OpFamily(
        name="recurrent layers",
        targets=aten("lstm gru rnn_tanh rnn_relu"),
        recomputed=False,
        random=_drops,
        across=Across(rule=_recurrent),
    )
)
