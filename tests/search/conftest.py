"""A transformer of real widths, captured once for all tests of what is found in its layers."""

from __future__ import annotations

import pytest
import torch

from planner.graph import ModelGraph
from tests.builders import build_hf
from tests.captures import capture_module

LENGTH = 2048


@pytest.fixture(scope="session")
def llama() -> ModelGraph:
    """Two layers of Llama-3-8B's width; only their shapes exist."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = build_hf(
            "LlamaForCausalLM",
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=LENGTH,
        )

        def batch(size):
            ids = torch.zeros(size, LENGTH, dtype=torch.long)
            return {"input_ids": ids, "labels": ids}

        return capture_module(model.to(torch.bfloat16), batch(2), batch(3), name="llama")
