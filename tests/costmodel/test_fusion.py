"""Fused kernels: which ops they join, what they move, and that they only take less time."""

import pytest

from costmodel import CostCache, estimate
from costmodel.execution import find_execution
from costmodel.table.fusion import fused_groups, fused_seconds, num_kernels
from costmodel.time.block.compute import op_seconds
from planner.language.layout.axes import Degrees
from profiles import load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.programs import CHAIN, program_of
from tests.costmodel.test_estimate import make_plan
from tests.search.machine import Machine


def test_products_part_the_groups():
    """E: gelu and add fuse, mul and neg fuse; b is used on both sides of the product."""
    program = program_of(CHAIN, outputs=("d",))
    assert [[op.name for op in ops] for ops in fused_groups(program)] == [["a", "b"], ["c", "d"]]
    assert num_kernels(program) == 3


def test_a_kernel_reads_and_writes_what_outside_ops_see():
    """E: of four tensors of traffic each, by hand: x, y in and b out; p, b in and d out."""
    program, profile = program_of(CHAIN, outputs=("d",)), Machine()
    eager = {op.name: op_seconds(op, program.tensor, profile) for op in program.ops}
    fused = fused_seconds(program, profile, eager)
    single_s = 32 * 32 * 4 / profile.bytes_per_s

    def forward(*names):
        return sum(fused[name][0] for name in names)

    assert forward("a", "b") == pytest.approx(3 * single_s)
    assert forward("c", "d") == pytest.approx(3 * single_s)
    assert fused["p"] == eager["p"]
    assert fused["a"][1] + fused["b"][1] == pytest.approx(5 * single_s)  # gradients: b in; x, y out


def test_values_of_a_group_that_others_need_are_written():
    program = program_of(CHAIN, outputs=("d", "c"))
    eager = {op.name: op_seconds(op, program.tensor, Machine()) for op in program.ops}
    fused = fused_seconds(program, Machine(), eager)
    single_s = 32 * 32 * 4 / Machine().bytes_per_s
    assert fused["c"][0] + fused["d"][0] == pytest.approx(4 * single_s)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_fused_plans_take_less_time_and_no_more_memory(name):
    """E: on a shipped GPU profile a fused block is faster, by no more than its light ops."""
    model = tiny_models()[name]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name=name)
    profile, plan = load_profile("h100-sxm5-80gb"), make_plan(graph, dp=2)
    eager = estimate(graph, profile, plan)
    cache = CostCache(graph, profile, execution=find_execution("ours-compiled"))
    fused = estimate(graph, profile, plan, costs=cache)
    assert (
        0.3 * eager.path.parts["compute_s"]
        < fused.path.parts["compute_s"]
        < eager.path.parts["compute_s"]
    )
    assert fused.path.parts["host_s"] <= eager.path.parts["host_s"]
    assert fused.peak_bytes <= 1.01 * eager.peak_bytes


def test_measured_compiled_blocks_say_it_all():
    """E: where a profile measured whole compiled blocks, their ratio to eager ops is taken."""
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    profile = load_profile("h100-sxm5-80gb")
    figure = profile.file.launch_overhead_s.model_copy(update={"value": 0.5})
    halved = type(profile)(
        profile.file.model_copy(
            update={
                "compiled_block_correction": {"forward": figure, "backward": figure},
                "launch_overhead_s": figure.model_copy(update={"value": 0.0}),
            }
        )
    )
    block = CostCache(graph, halved).block(0, 1, Degrees(tp=2))
    costs = CostCache(graph, halved, execution=find_execution("ours-compiled"))
    compiled = costs.block(0, 1, Degrees(tp=2))
    assert compiled.times.forward_s == pytest.approx(0.5 * block.times.forward_s)
    # A loss of logits in chunks runs op by op there, too: its half is not saved.
    head = graph.blocks[-1].class_index
    whole, chunked = (costs.block(head, 1, Degrees(), logit_rows=rows) for rows in (0, 16))
    eager = CostCache(graph, halved).block(head, 1, Degrees(), logit_rows=16)
    assert 0.6 * eager.times.forward_s < chunked.times.forward_s < eager.times.forward_s
    assert whole.times.forward_s < chunked.times.forward_s
