"""The recipe of docs/contributing.md, performed: a family of ops from one record.

The op is of a library that the planner has never seen. With its record it is sharded, lowered,
priced, counted in memory, recomputed, and known to compute each sample alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from costmodel.memory.saved import saved_tensors, scratch_bytes
from planner.capture import capture_module
from planner.language.across import across_samples
from planner.language.graph import ModelGraph
from planner.language.layout.placement import OpSharding, Replicate
from planner.language.lowering.propagate import propagate_graph
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.kernel import gradients_of_result_size, in_order_of_inputs, saves_inputs
from planner.language.ops.letters import pointwise
from planner.language.ops.recompute_choice import default_ops
from planner.language.ops.record import (
    FOREIGN,
    OpFamily,
    ShardRule,
    family_of,
    register,
    unregister,
)
from planner.language.ops.registry import has_rule, strategies
from planner.language.ops.samples.step import Across
from tests.costmodel.test_saved import really_saved_bytes
from tests.sharding.models import in_double
from tests.sharding.programs import check_lowered

# ---- the file that a family needs

SQUASH = OpFamily(
    name="squash",
    targets=("toy.squash",),
    shard=(ShardRule(pointwise),),
    flop_per_element=3,
    result=in_order_of_inputs,
    saved=saves_inputs(0),
    scratch=gradients_of_result_size(1),
)
"""x / (1 + x**2), entry by entry; its gradient reads x."""

# ---- its test


@torch.library.custom_op("toy::squash", mutates_args=())
def squash(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x * x)


@squash.register_fake
def _(x):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * (1 - x * x) / (1 + x * x) ** 2


squash.register_autograd(_backward, setup_context=_setup)


class Squashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, target):
        for layer in self.layers:
            x = squash(layer(x))
        return F.mse_loss(x, target)


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 4, 8), "target": torch.randn(size, 4, 8)}


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    torch.manual_seed(0)
    return capture_module(Squashing(), batch(2), batch(3))


@pytest.fixture
def family():
    register(SQUASH)
    yield SQUASH
    unregister(SQUASH)


def one_block(graph: ModelGraph):
    program = graph.classes[0].bind(2)
    return program, next(op for op in program.ops if op.target.startswith("toy."))


def test_without_a_record_little_is_taken_for_granted(graph):
    program, op = one_block(graph)
    assert family_of(op.target) is FOREIGN
    assert not has_rule(op.target)
    assert strategies(op, program.tensor, 2) == (
        OpSharding(inputs=(Replicate(),), outputs=(Replicate(),)),
    )
    assert op.name not in default_ops(program)
    assert {finding.kind for finding in across_samples(graph)} == {"unknown"}


def test_it_is_sharded(graph, family):
    program, op = one_block(graph)
    offered = {str(sharding) for sharding in strategies(op, program.tensor, 2)}
    assert offered == {"R->R", "S(0)->S(0)", "S(1)->S(1)", "S(2)->S(2)"}


def test_it_is_lowered_to_what_one_process_computes(graph, family):
    double = replace(graph, classes=tuple(in_double(program) for program in graph.classes))
    layouts = propagate_graph(double, microbatch_size=2, axis_size=2)
    for layout in layouts:
        check_lowered(double.classes[layout.class_index].bind(2), layout, 2)
    sharded = [
        sharding
        for layout in layouts
        for name, sharding in layout.ops
        if "squash" in name and str(sharding) != "R->R"
    ]
    assert sharded


def test_it_is_priced(graph, family):
    """64 entries in fp32: 3 flop each, 256 bytes in and out; backward twice the flop."""
    program, op = one_block(graph)
    forward = op_work(op, program.tensor)
    assert (forward.flop, forward.read_bytes, forward.write_bytes) == (192, 256, 256)
    assert backward_work(op, program.tensor).flop == 384
    assert op.name in default_ops(program)


def test_its_saved_bytes_are_autograds(graph, family):
    program, op = one_block(graph)
    saved = saved_tensors(program, device_type="cpu")
    assert saved.saved[op.name].tensors == op.inputs
    assert saved.num_bytes == really_saved_bytes(program)
    assert scratch_bytes(op, saved.storages, forward=False) == 256
    assert scratch_bytes(op, saved.storages, forward=True) == 0


def test_it_computes_samples_alone(graph, family):
    assert across_samples(graph) == ()


@pytest.fixture
def handled():
    """The family without a sharding rule: a handler in its record says what it does to samples."""
    family = replace(SQUASH, shard=(), across=Across(handlers=(lambda step: (step.states[0],),)))
    register(family)
    yield family
    unregister(family)


def test_what_no_rule_says_of_samples_is_a_handler_of_the_record(graph, handled):
    assert not has_rule("toy.squash.default")
    assert across_samples(graph) == ()


def test_an_op_is_in_one_family(family):
    with pytest.raises(ValueError, match=r"toy\.squash is in two op families: squash, squash"):
        register(SQUASH)
