"""M14, D8: placements that the user fixes are in the plan that a search finds; the rest follows."""

import pytest

from planner.errors import LayoutError
from planner.language.layout.pins import class_pins, parse_pin
from search import SearchRequest, find_plan
from tests.captures import capture_tiny
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4)


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


def search(graph, *texts, **choices):
    """Return the plan on four devices with these pins."""
    by_class = class_pins(graph, [parse_pin(text) for text in texts])
    pins = tuple((i, name, str(p)) for i, here in by_class.items() for name, p in here.items())
    plan = find_plan(
        graph, MACHINE, SearchRequest(num_devices=4, global_batch=8, pins=pins, **choices)
    ).plan
    assert plan is not None
    return plan


def placements(graph, plan):
    """Return the placements of a plan's parameters by qualified name."""
    return {
        graph.tensor[name].fqn: place
        for block in graph.blocks
        for name, place in zip(block.params, plan.layouts[block.class_index].params, strict=True)
    }


def test_none_one_and_two_annotations(gpt):
    """D8: each is kept where tp is more than one, and none makes the plan faster."""
    up, down = "layers.*.up: S(1)@tp", "layers.*.down: S(0)@tp"
    free, single, two = (search(gpt, *texts, tp=2) for texts in ((), (up,), (up, down)))
    assert placements(gpt, free)["layers.1.up.weight"] != "S(1)"
    for plan in (single, two):
        for layer in range(4):
            assert placements(gpt, plan)[f"layers.{layer}.up.weight"] == "S(1)"
    assert placements(gpt, two)["layers.2.down.weight"] == "S(0)"
    steps = [plan.estimate["step_s"] for plan in (free, single, two)]
    assert steps == sorted(steps)


def test_a_tied_weight_is_pinned_for_all_its_blocks():
    """M14, G8: by the one name it has in the model."""
    pytest.importorskip("transformers")
    graph = capture_tiny("hf-gpt2")
    plan = search(graph, "transformer.wte.weight: S(0)@tp", tp=2)
    assert placements(graph, plan)["transformer.wte.weight"] == "S(0)"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["layers.*.norm1: S(0)@tp"], r"op layer_norm \(.*fits the pinned norm1.weight=S\(0\) on"),
        (
            ["layers.*.up.weight: S(0)@tp", "layers.*.up.bias: R@tp"],
            r"fits the pinned up.weight=S\(0\), up.bias=R on tp=2; drop a pin or choose",
        ),
    ],
)
def test_pins_that_no_rule_keeps_are_named_as_the_user_did(gpt, texts, message):
    """M14: an infeasible pin gives the conflicting constraints."""
    with pytest.raises(LayoutError, match=message):
        search(gpt, *texts, tp=2)
