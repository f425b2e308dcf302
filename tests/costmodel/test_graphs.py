"""CUDA graphs of compiled blocks, priced: launches of the host against copies and memory."""

import pytest

from costmodel import CostCache, estimate
from costmodel.execution import find_execution
from costmodel.memory.block.graph_bytes import graph_bytes
from planner.language.lowering.defaults import default_plan
from profiles import load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.programs import program_of

SIZE = 32 * 32 * 4
LAYER = {
    "a": ("aten.mm.default", ("x", "w")),
    "b": ("aten.gelu.default", ("a",)),
    "c": ("aten.mm.default", ("b", "v")),
}


def test_what_halves_take_and_give_is_counted_by_hand():
    """x in, c out with a and b, which are saved. Back: x, a, b and c's gradient in; gradients of x
    and a out, as b and c's own gradient lie in memory that was taken.
    """
    program = program_of(LAYER, inputs=("x",), params=("w", "v"), outputs=("c",))
    found = graph_bytes(program)
    assert found == (SIZE, 3 * SIZE, 4 * SIZE, 2 * SIZE)
    assert found.total == 10 * SIZE


def prices(graph, **layout):
    profile = load_profile("h100-sxm5-80gb")
    found = {}
    for name in ("ours-compiled", "ours-graphs"):
        plan = default_plan(graph, **layout)
        costs = CostCache(graph, profile, execution=find_execution(name))
        found[name] = estimate(graph, profile, plan, costs=costs)
    return found["ours-compiled"], found["ours-graphs"]


@pytest.fixture(scope="module")
def small():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


def test_small_blocks_gain_what_the_host_took(small):
    """Of kernels of microseconds the device waits for launches: with graphs there are fewer."""
    compiled, graphs = prices(small, microbatch_size=2, num_microbatches=4)
    assert graphs.path.parts["host_s"] < 0.8 * compiled.path.parts["host_s"]
    assert graphs.step_s < compiled.step_s
    assert graphs.peak_bytes > compiled.peak_bytes, "memory that stays"


def test_blocks_that_no_graph_holds_are_priced_as_without(small):
    """On tp ranks exchange values inside of layers and head; the embedding's rows as well."""
    compiled, graphs = prices(small, microbatch_size=2, num_microbatches=4, tp=2)
    assert graphs.step_s == compiled.step_s
    assert graphs.peak_bytes == compiled.peak_bytes


def test_large_blocks_pay_for_copies(small):
    """A device that is busy hides all launches, and copies take it longer."""
    compiled, graphs = prices(small, microbatch_size=2**16, num_microbatches=2)
    assert compiled.path.parts["host_s"] == pytest.approx(0, abs=1e-3 * compiled.step_s)
    assert graphs.step_s > compiled.step_s
