"""Blocks with experts are named: whose ranks may sort rows of their own, and whose may not."""

from __future__ import annotations

import random

import pytest
import torch

from planner.language.lowering.routed_experts import routing_messages
from planner.language.ops.families.entries.routing import SORT_ROWS
from tests.capture.routing.dealing import Dealt, batch_of, captured
from tests.captures import capture_tiny
from tests.sharding.programs import check_lowered
from tests.sharding.random_layouts import random_layout

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


@pytest.mark.parametrize("biased", [False, True])
def test_random_layouts_equal_dense(biased):
    """Sorted rows of each rank's own may be redistributed in any way and back: ends and orders,
    which have no whole, are taken with rows that lie as those they were made of.
    """
    torch.manual_seed(0)
    graph = captured(Dealt(biased=biased).double(), lambda size: batch_of(size, torch.float64))
    program = next(p for p in graph.classes if any(op.target == SORT_ROWS for op in p.ops)).bind(2)
    by_rows = 0
    for seed in range(12):
        layout = random_layout(program, random.Random(seed), 2)
        by_rows += any("O(0)" in text for _, text in layout.ops)
        check_lowered(program, layout, 2, seed)
    assert by_rows >= 3
