"""N9: decoders of the library hold no mask of pairs, and compute in fp64 what their modules do."""

from __future__ import annotations

import pytest
import torch

from planner.capture import capture_module
from planner.language.ops.families.products.masked_attention import MASKED
from planner.language.ops.record import packet_of
from tests.builders import telling_first
from tests.capture.masks.attending import attention_of, check_equal, pairs_held
from tests.model_matrix import REFUSED, model_matrix

LENGTH = 13
"""Of sequences: no width of a model is as large, so that pairs of positions are told by sizes."""

WRITTEN_OUT = {"hf-gemma2", "hf-bloom", "hf-gpt-oss", "hf-deberta-v2"}
"""Their attention is products, a mask that is added, and softmax: it makes all scores."""

WITHOUT = {"hf-mamba", "hf-mamba2"}
"""They have no attention."""

ADDED = {"hf-t5"}
"""Their masks have learned numbers, which are added to scores."""

IN_SINGLE = {"hf-mixtral", "hf-phimoe", "hf-qwen3-moe", "hf-olmoe", "hf-deepseek-v2"}
IN_SINGLE |= {"hf-deepseek-v3", "hf-gpt-oss"}
"""Their products of experts take no double precision; `verify` compares them in it."""

SCORES_IN_SINGLE = {"hf-gptj"}
"""Casts queries and keys to single precision, so that gradients are rounded to it."""


def is_decoder(name: str) -> bool:
    batch = model_matrix()[name].batch(1)
    return name.startswith("hf-") and {"input_ids", "labels"} <= set(batch)


DECODERS = [name for name in model_matrix() if name not in REFUSED and is_decoder(name)]


def batch_of(name: str, size: int) -> dict[str, torch.Tensor]:
    # Contiguous, as a tokenizer makes them: some models take views of labels.
    tables = model_matrix()[name].batch(size)
    return {
        key: table[:, :LENGTH].contiguous() if table.dim() > 1 else table
        for key, table in tables.items()
    }


@pytest.mark.parametrize("name", telling_first(DECODERS, {"hf-llama", "hf-mistral-packed"}))
def test_a_family_is_told_of_its_masks(name):
    """N9: causal, windowed, by document, or padded."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = model_matrix()[name].build().train()
    module = module if name in IN_SINGLE else module.double()
    graph = capture_module(module, batch_of(name, 2), batch_of(name, 3), name=name)
    attention = [op for op in attention_of(graph) if "attention" in packet_of(op.target)]
    is_told = all(op.target == MASKED or len(op.args) < 4 or op.args[3] is None for op in attention)
    assert is_told == (name not in ADDED)
    assert bool(attention) == (name not in WRITTEN_OUT | WITHOUT)
    if name not in WRITTEN_OUT | ADDED:
        assert not pairs_held(graph, LENGTH)
    if name not in IN_SINGLE:
        rounding = 1e-9 if name in SCORES_IN_SINGLE else 1e-12
        check_equal(module, graph, batch_of(name, 5), rounding=rounding)
