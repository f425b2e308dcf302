"""Modules that run as they are are named, with what they cost."""

from __future__ import annotations

import re

from planner.language.graph.called_modules import called_modules_messages, called_whole
from planner.language.ops.flops import backward_work, op_kernels, op_work
from tests.captures import capture_module, capture_tiny
from tests.opaque_models import PARTS, Chain, LoopedExperts, PickedRows, batch


def test_one_line_for_each_class_and_line():
    graph = capture_module(Chain(LoopedExperts), batch(2), batch(3))
    (message,) = called_modules_messages(graph)
    assert message.startswith("LoopedExperts of layers.0, layers.1, layers.2 and 1 more at ")
    assert "opaque_models.py:" in message
    assert "runs as it is" in message
    assert called_modules_messages(capture_tiny("gpt")) == ()


def test_a_model_that_is_too_short_for_its_stages_is_told_what_is_called_whole():
    graph = capture_module(Chain(PickedRows, num=1), batch(2), batch(3))
    assert re.fullmatch(r" \(PickedRows at .*`.*` depends on values.*whole\)", called_whole(graph))
    assert called_whole(capture_tiny("gpt")) == ""


def test_work_is_what_the_trial_counted():
    """Two experts of 2 x 8 x 16 multiply-adds a row, and the router's 8 x 4."""
    graph = capture_module(Chain(LoopedExperts), batch(2), batch(3))
    program = next(p for p in graph.classes if any("opaque" in op.target for op in p.ops))
    bound = program.bind(2)
    op = next(op for op in bound.ops if "opaque" in op.target)
    rows, products = 2 * 4, 2 * (2 * 2 * 8 * 16 + 8 * 4)
    forward = op_work(op, bound.tensor)
    assert rows * products < forward.flop < 1.5 * rows * products
    backward = backward_work(op, bound.tensor, forward)
    assert 2.5 * forward.flop < backward.flop < 4 * forward.flop  # its forward, and both products
    kernels = op_kernels(op, bound.tensor)
    assert 20 < kernels[0] < kernels[1]
    assert op_kernels(bound.ops[0], bound.tensor) == (1, 1)


def test_every_part_is_named():
    for what, part in PARTS.items():
        graph = capture_module(Chain(part), batch(2), batch(3))
        (message,) = called_modules_messages(graph)
        assert message.startswith(part.__name__), what
