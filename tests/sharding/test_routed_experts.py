"""Blocks with experts are named: whose ranks may sort rows of their own, and whose may not."""

from __future__ import annotations

import pytest
import torch

from planner.language.lowering.routed_experts import routing_messages
from tests.capture.routing.dealing import Dealt, captured
from tests.captures import capture_tiny

pytest.importorskip("transformers")


def test_told_routing_is_named_with_its_experts():
    torch.manual_seed(0)
    assert routing_messages(captured(Dealt())) == (
        "layers.0, layers.1: 4 experts, 2 a token; each rank may route rows of its own",
    )
    assert routing_messages(capture_tiny("gpt")) == ()


def test_an_order_that_is_not_recognised_is_named_with_its_line():
    graph = captured(Dealt(taken=lambda x, order: x[order[order] // 2]))
    first, *_ = routing_messages(graph)
    assert first.startswith("layers.0")
    assert "dealing.py:" in first
    assert "every rank of tp and cp sorts and holds all rows" in first
