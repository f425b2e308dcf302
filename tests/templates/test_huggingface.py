"""Blocks as the transformers library writes them, by hand: their matrices, heads and loss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.language.graph import Affine
from planner.language.templates import huggingface
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


def test_a_layer_of_llama_has_three_matrices_and_shares_heads():
    program = written(huggingface.layer, LLAMA, dense=True)
    kv = 2 * (H // HEADS)
    assert num_params(program) == H * (H + 2 * kv) + H**2 + 3 * H * WIDE + 2 * H
    # The kernel reads keys and values of 2 heads for 4 heads of queries: none is repeated.
    whole = written(huggingface.layer, replace(LLAMA, kv_heads=HEADS), dense=True)
    for each, grouped in ((program, True), (whole, False)):
        (attention,) = [op for op in each.ops if "attention" in op.target]
        assert dict(attention.kwargs).get("enable_gqa", False) is grouped
        assert count(each, "expand") == 0


def test_latent_attention_multiplies_narrow_vectors():
    """Queries 32 -> 12 -> 4 heads of 8 + 4; keys and values 32 -> 10 + 4 -> 4 heads of 2 * 8."""
    model = replace(LLAMA, kv_heads=HEADS, latent=LATENT)
    expected = H * 12 + 12 * HEADS * 12 + H * (10 + 4) + 10 * HEADS * 16 + H * H
    norms = 12 + 10 + 2 * H
    program = written(huggingface.layer, model, dense=True)
    assert num_params(program) == expected + norms + 3 * H * WIDE
    whole = replace(model, latent=replace(LATENT, query_rank=0))
    of_whole = expected - H * 12 - 12 * HEADS * 12 + H * HEADS * 12
    program = written(huggingface.layer, whole, dense=True)
    assert num_params(program) == of_whole + norms - 12 + 3 * H * WIDE


def test_labels_are_shifted_and_the_loss_is_in_fp32():
    program = written(huggingface.head, LLAMA)
    (loss,) = [op for op in program.ops if "cross_entropy" in op.target]
    logits, labels = (program.tensor[name] for name in loss.inputs)
    assert (logits.shape, logits.dtype) == ((Affine(SEQ), 100), "float32")
    assert (labels.shape, labels.dtype) == ((Affine(SEQ),), "int64")
    (padded,) = [op for op in program.ops if op.target == "aten.pad.default"]
    assert padded.args[1:] == ((0, 1), "constant", -100.0)
    assert num_params(program) == H + 100 * H


def test_embeddings_add_a_table_of_positions_where_they_are_learned():
    assert num_params(written(huggingface.embed, LLAMA)) == 100 * H
    assert num_params(written(huggingface.embed, GPT)) == (100 + SEQ) * H
    longer = replace(GPT, max_positions=20)
    assert num_params(written(huggingface.embed, longer)) == (100 + 20) * H


def test_blocks_are_called_as_the_library_does():
    assert huggingface.block_names(GPT)[1] == "transformer.h.{}"
    assert huggingface.block_names(LLAMA)[1] == "model.layers.{}"


def test_queries_and_keys_are_normed_head_by_head():
    """Qwen3's: a weight of a head's width each, before the heads are turned."""
    plain = written(huggingface.layer, LLAMA, dense=True)
    normed = written(huggingface.layer, replace(LLAMA, query_key_norm=True), dense=True)
    assert num_params(normed) == num_params(plain) + 2 * (H // HEADS)


@pytest.mark.parametrize("dense", [True, False])
def test_experts_take_the_place_of_the_feed_forward_but_in_dense_layers(dense):
    model = replace(LLAMA, experts=EXPERTS)
    plain = num_params(written(huggingface.layer, LLAMA, dense=True)) - 3 * H * WIDE
    more = 3 * H * WIDE if dense else 6 * 3 * H * 24 + 6 * H
    program = written(huggingface.layer, model, dense=dense)
    assert num_params(program) == plain + more
    assert (count(program, "topk") == 0) == dense


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt2"])
def test_layers_leave_what_the_next_takes(model):
    """A stream of hidden vectors, with a gradient whatever came in."""
    stream = (Affine(1), SEQ, H)
    embedded = written(huggingface.embed, model)
    assert embedded.tensor[embedded.outputs[0]].shape == stream
    for differentiable in (True, False):
        program = written(huggingface.layer, model, dense=True, differentiable=differentiable)
        first, out = program.tensor[program.inputs[0]], program.tensor[program.outputs[0]]
        assert first.shape == out.shape == stream
        assert (first.requires_grad, out.requires_grad) == (differentiable, True)
    head = written(huggingface.head, model)
    assert head.tensor[head.inputs[0]].shape == stream
    assert head.tensor[head.outputs[0]].shape == ()
