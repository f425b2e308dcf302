"""Linear algebra and recurrent layers are never sharded; their rules tell samples apart."""

from __future__ import annotations

import torch

from planner.language.ops.call import Call
from planner.language.ops.families.products import linear_algebra
from planner.language.ops.record import family_of, is_random
from tests.ops.calls import offered
from tests.sharding.programs import one_op

ones = torch.ones


def alone(single) -> set[str]:
    """Dims along which the op computes each entry alone, by the rule for samples."""
    rule = family_of(single.op.target).across.rule
    return {str(s) for s in rule(Call(single.op, single.program.tensor, 2))}


def test_matrices_of_a_batch_are_alone():
    inverse = one_op("aten.linalg_inv.default", torch.eye(2).expand(4, 2, 2).clone())
    assert alone(inverse) == {"S(0)->S(0)"}
    assert not offered(inverse)


def test_a_transform_mixes_the_dim_it_goes_along():
    assert alone(one_op("aten.fft_fft.default", ones(2, 4))) == {"S(0)->S(0)"}
    assert alone(one_op("aten.fft_fft.default", ones(2, 4), None, 0)) == {"S(1)->S(1)"}
    assert alone(one_op("aten.fft_fft2.default", ones(2, 4))) == set()


def test_distances_are_of_all_pairs():
    pairs = one_op("aten.cdist.default", ones(2, 3, 4), ones(2, 5, 4))
    assert alone(pairs) == {"S(0),S(0)->S(0)", "S(1),R->S(1)", "R,S(1)->S(2)"}


def test_a_recurrent_layer_takes_sequences_alone():
    weights = [ones(4, 2), ones(4, 4), ones(4), ones(4)]
    for batch_first, dim in ((False, 1), (True, 0)):
        state = ones(1, 3 if not batch_first else 2, 4)
        layer = one_op(
            "aten.rnn_tanh.input",
            *(ones(2, 3, 2), state, weights, True, 1, 0.0, False, False, batch_first),
        )
        assert alone(layer) == {f"S({dim}),S(1),R,R,R,R->S({dim}),S(1)"}
        assert not is_random(layer.op)
    assert linear_algebra._drops(layer.op) is False
