"""Modules as trainers write them, by hand: fused products, scores, adapters, experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.language.graph import Affine
from planner.language.templates import build_transformer
from planner.language.templates.modules import block_names, embed, head, layer
from planner.language.templates.transformer import Adapters
from tests.templates.written import (
    EXPERTS,
    GPT,
    HEADS,
    LATENT,
    LLAMA,
    SEQ,
    WIDE,
    H,
    count,
    num_params,
    written,
)


def test_modules_have_one_product_where_libraries_have_three():
    program = written(layer, LLAMA, dense=True)
    kv = 2 * (H // HEADS)
    assert num_params(program) == H * (H + 2 * kv) + H**2 + 3 * H * WIDE + 2 * H
    assert count(program, "linear") == 4
    (attention,) = [op for op in program.ops if "attention" in op.target]
    assert attention.args[4:6] == (0.0, True)
    assert dict(attention.kwargs) == {"enable_gqa": True}


def test_attention_without_a_kernel_of_its_own_writes_its_scores():
    program = written(layer, replace(GPT, fused_attention=False), dense=True)
    assert [count(program, name) for name in ("matmul", "softmax", "linear")] == [2, 1, 4]
    # Of the weights of attention and of each half.
    assert count(program, "dropout") == 3
    (softmax,) = [op for op in program.ops if op.target.startswith("aten.softmax")]
    assert program.tensor[softmax.outputs[0]].shape == (Affine(1), HEADS, SEQ, SEQ)
    assert num_params(program) == 4 * H**2 + 2 * H * WIDE + 3 * H + WIDE + 2 * 2 * H


def test_adapters_add_their_rank_times_the_widths_they_join():
    model = replace(LLAMA, adapters=Adapters(rank=3))
    plain = num_params(written(layer, LLAMA, dense=True))
    kv = 2 * (H // HEADS)
    more = 3 * (H + H + 2 * kv) + 3 * (H + H)
    assert num_params(written(layer, model, dense=True)) == plain + more


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_of_modules(shared):
    """6 experts of three 32 by 24 matrices, a router; shared ones as a feed-forward of 2 * 24."""
    experts = replace(EXPERTS, shared=shared)
    dense = num_params(written(layer, LLAMA, dense=True)) - 3 * H * WIDE
    model = replace(LLAMA, experts=experts)
    expected = dense + 6 * 3 * H * 24 + 6 * H + 3 * H * shared * 24
    assert num_params(written(layer, model, dense=False)) == expected
    assert num_params(written(layer, model, dense=True)) == dense + 3 * H * WIDE


def test_experts_with_biases_add_one_to_the_rows_of_each():
    """6 experts, of 2 * 24 columns and 32."""
    plain = replace(LLAMA, experts=EXPERTS)
    model = replace(LLAMA, experts=replace(EXPERTS, bias=True))
    without, biased = (written(layer, each, dense=False) for each in (plain, model))
    assert num_params(biased) - num_params(without) == 6 * (2 * 24 + H)
    assert count(biased, "bias_of_runs") == 2


def test_latent_attention_multiplies_narrow_vectors():
    """Queries 32 -> 12 -> 4 heads of 8 + 4; keys and values 32 -> 10 + 4 -> 4 heads of 2 * 8."""
    model = replace(LLAMA, kv_heads=HEADS, latent=LATENT)
    products = H * 12 + 12 * HEADS * 12 + H * (10 + 4) + 10 * HEADS * 16 + H * H
    program = written(layer, model, dense=True)
    assert num_params(program) == products + 12 + 10 + 2 * H + 3 * H * WIDE
    whole = written(layer, replace(model, latent=replace(LATENT, query_rank=0)), dense=True)
    narrow = H * 12 + 12 * HEADS * 12 + 12
    assert num_params(whole) == num_params(program) - narrow + H * HEADS * 12


def test_ends_have_a_table_of_tokens_and_of_positions_where_they_are_learned():
    assert num_params(written(embed, LLAMA)) == 100 * H
    assert num_params(written(embed, replace(GPT, max_positions=20))) == (100 + 20) * H
    assert num_params(written(head, LLAMA)) == H + 100 * H
    assert num_params(written(head, GPT)) == 2 * H + 100 * H


def test_the_loss_is_of_all_tokens_in_fp32():
    program = written(head, LLAMA)
    (loss,) = [op for op in program.ops if "cross_entropy" in op.target]
    logits, labels = (program.tensor[name] for name in loss.inputs)
    assert (logits.shape, labels.shape) == ((Affine(SEQ), 100), (Affine(SEQ),))
    assert program.tensor[loss.outputs[0]].dtype == "float32"
    # Labels come shifted: nothing is padded.
    assert count(program, "pad") == 0


def test_blocks_are_called_the_same_in_all_models():
    assert block_names(GPT) == block_names(LLAMA)
    assert block_names(GPT)[1].format(3) != block_names(GPT)[1].format(4)


def test_a_token_ahead_takes_a_layer_and_the_head_again():
    """A product that joins stream and token, the head's matrix twice, three norms more."""
    next_only, ahead = (written(head, replace(LLAMA, ahead=n)) for n in (0, 1))
    assert num_params(ahead) - num_params(next_only) == 2 * H * H + 3 * H
    assert len([op for op in ahead.ops if "cross_entropy" in op.target]) == 2
    products = [op for op in ahead.ops if "linear" in op.target]
    assert products[1].inputs[1] == products[2].inputs[1] != products[0].inputs[1]
    layers = [len(build_transformer(replace(LLAMA, ahead=n)).blocks) for n in (0, 1)]
    assert layers[1] == layers[0] + 1


def made_by(program, name):
    """Return the op that makes a value."""
    return next(op for op in program.ops if name in op.outputs)


def test_positions_turn_the_halves_of_heads_against_each_other():
    """x cos + (-x2, x1) sin."""
    program = written(layer, LLAMA, dense=True)
    half = H // HEADS // 2
    turned = [op for op in program.ops if op.target.startswith("aten.neg")]
    assert len(turned) == 2  # of queries and of keys
    for neg in turned:
        second = made_by(program, neg.inputs[0])
        assert second.args[1:3] == (3, half)
        (joined,) = [op for op in program.ops if neg.outputs[0] in op.inputs]
        first = made_by(program, joined.inputs[1])
        assert joined.inputs[0] == neg.outputs[0]
        assert first.args[1:4] == (3, 0, half)
        assert first.inputs == second.inputs


def test_written_scores_are_scaled_by_the_width_of_a_head():
    program = written(layer, replace(GPT, fused_attention=False), dense=True)
    (softmax,) = [op for op in program.ops if op.target.startswith("aten.softmax")]
    scaled = made_by(program, softmax.inputs[0])
    assert scaled.target == "aten.mul.Tensor"
    assert scaled.args[1] == (H // HEADS) ** -0.5
    assert softmax.args[1] == -1  # over keys


def test_what_an_adapter_adds_is_scaled_by_alpha_over_rank():
    program = written(layer, replace(LLAMA, adapters=Adapters(rank=4, alpha=32)), dense=True)
    scales = [op.args[1] for op in program.ops if op.target == "aten.mul.Tensor"]
    assert [scale for scale in scales if isinstance(scale, float)] == [8.0, 8.0]


def test_a_gated_feed_forward_multiplies_by_the_activated_first_half():
    program = written(layer, LLAMA, dense=True)
    (chunk,) = [op for op in program.ops if op.target.startswith("aten.chunk")]
    (silu,) = [op for op in program.ops if op.target.startswith("aten.silu")]
    assert silu.inputs == (chunk.outputs[0],)
    (product,) = [op for op in program.ops if silu.outputs[0] in op.inputs]
    assert product.inputs == (silu.outputs[0], chunk.outputs[1])
