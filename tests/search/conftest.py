"""A transformer of real widths, captured once for all tests of what is found in its layers."""

from __future__ import annotations

import pytest

from planner.graph import ModelGraph
from tests.captures import capture_wide_llama


@pytest.fixture(scope="session")
def llama() -> ModelGraph:
    """Two layers of Llama-3-8B's width, each head with keys of its own; only shapes exist."""
    return capture_wide_llama(
        2048,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=32,
    )
