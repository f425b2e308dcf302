"""A transformer of real widths, captured once for all tests of what is found in its layers."""

from __future__ import annotations

import pytest

from planner.language.graph import ModelGraph
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


@pytest.fixture(autouse=True)
def _no_communicators(monkeypatch):
    """NCCL's buffers are larger than all that models of a few layers take, of which bounds and
    limits are tested here; `tests/costmodel/memory/test_communicators.py` has them.
    """
    monkeypatch.setattr(
        "costmodel.memory.exact.plan_memory.communicator_bytes", lambda rank, edges: 0
    )
