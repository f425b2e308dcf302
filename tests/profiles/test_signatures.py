"""X7: what a search can ask for is measured once per signature, however deep the model."""

from dataclasses import replace

import pytest

from planner.language.ops.flops import op_work
from planner.language.ops.registry import strategies
from profiles.measure.grid import standard_grid
from profiles.measure.signatures import blocks, signatures
from tests.builders import tiny_models
from tests.captures import capture_module


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


def test_depth_does_not_matter(graph):
    """X7: a model with every block repeated needs the same probes."""
    deeper = replace(graph, blocks=graph.blocks * 8)
    shallow = {probe.key for probe in signatures([graph], num_devices=4)}
    deep = [probe.key for probe in signatures([deeper], num_devices=4)]
    assert set(deep) == shallow
    assert len(deep) == len(shallow)


def test_every_signature_once_over_models(graph):
    keys = [probe.key for probe in signatures([graph, graph], num_devices=4)]
    assert len(keys) == len(set(keys)) == len(signatures([graph], num_devices=4))


def test_covers_every_op_with_work_of_the_unsharded_program(graph):
    keys = {
        (probe.op.target, shapes)
        for probe in signatures([graph], num_devices=1, microbatch_sizes=(2,))
        for shapes in [probe.forward.flop]
    }
    for program in graph.classes:
        bound = program.bind(2)
        for op in bound.ops:
            work = op_work(op, bound.tensor)
            if work.num_bytes and not op.target.startswith("planner."):
                assert (op.target, work.flop) in keys


def test_sharded_signatures_are_smaller(graph):
    """A column-parallel linear layer over 2 ranks does half the work."""
    alone = signatures([graph], num_devices=1, microbatch_sizes=(2,))
    largest = max(
        (p for p in alone if p.op.target == "aten.linear.default"), key=lambda p: p.forward.flop
    )
    both = signatures([graph], num_devices=2, microbatch_sizes=(2,))
    assert any(p.forward.flop == largest.forward.flop / 2 for p in both)


def test_the_heaviest_come_first(graph):
    weights = [probe.weight for probe in signatures([graph], num_devices=2)]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_standard_grid_spans_families_and_repeats_nothing(device):
    grid = standard_grid(device)
    keys = [probe.key for probe in grid]
    assert len(keys) == len(set(keys))
    packets = {probe.op.target.split(".")[1] for probe in grid}
    assert {"linear", "scaled_dot_product_attention", "layer_norm", "embedding"} <= packets
    assert all(probe.backward is not None for probe in grid)


def test_strategies_of_a_linear_layer_are_more_than_one(graph):
    """Guards the tests above against a registry without rules."""
    bound = graph.classes[1].bind(2)
    linear = next(op for op in bound.ops if op.target == "aten.linear.default")
    assert len(strategies(linear, bound.tensor, 2)) > 1


def test_the_block_that_most_of_a_step_hangs_on_comes_first(graph):
    """A layer that is used eight times; its compiled form, which takes long to make, behind it."""
    (layer,) = (i for i, each in enumerate(graph.classes) if each.name.endswith("*"))
    deeper = replace(graph, blocks=graph.blocks + 7 * graph.blocks[1:2])
    first, second, *_ = blocks([deeper], compiled=True)
    assert {first.program.name, second.program.name} == {graph.classes[layer].name}
    assert (first.compiled, second.compiled) == (False, True)


def test_a_block_is_the_sum_of_its_ops(graph):
    """One probe per class and size; its parts are the queries of its ops with work."""
    probes = blocks([graph, graph])
    assert len(probes) == 2 * len(graph.classes)
    for probe in probes:
        works = [op_work(op, probe.program.tensor) for op in probe.program.ops]
        assert probe.forward.flop == sum(work.flop for work in works)
        forward = [part for part in probe.parts if part.direction == "forward"]
        assert len(forward) == sum(work.num_bytes > 0 for work in works)
