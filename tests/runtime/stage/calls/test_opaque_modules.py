"""A module called by its key: values, gradients, what is refused, what is compiled around it."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from planner.capture.opaque.calls import tensors_of
from planner.errors import PlanError
from planner.language.graph import from_json, to_json
from planner.language.graph.module_keys import module_key
from planner.runtime.stage.calls.opaque_modules import (
    calling_inside,
    find_module,
    keep_modules,
    noting_reached,
    only_opaque_params,
    opaque_calls,
    opaque_module,
    own_params,
)
from tests.captures import capture_module
from tests.opaque_models import Chain, LoopedExperts, batch

COST = ((0, 0, 0, 1, 100), (0, 0, 0, 1, 100))


@pytest.fixture(name="graph")
def _graph():
    model = Chain(LoopedExperts)
    graph = capture_module(model, batch(2), batch(3))
    keep_modules(graph, model)
    return graph


def call(module, x, dtype=torch.float32, shape=None, own_names=(), key=None):
    results = [(tuple(shape or x.shape), dtype, True)]
    key, own = key or module_key(module), tensors_of(module)
    return opaque_module(key, "model", [True], COST, results, [x], [], own, own_names)


def test_values_and_gradients_are_the_module_s(graph):
    module, x = LoopedExperts(), torch.randn(2, 4, 8, requires_grad=True)
    call(module, x).square().sum().backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    module(x).square().sum().backward()
    for grad, tensor in zip(found, (x, *module.parameters()), strict=True):
        if tensor.grad is None:  # the expert that is never chosen: a sum over ranks takes zeros
            assert grad is not None
            assert not grad.any()
        else:
            torch.testing.assert_close(grad, tensor.grad)


def test_parameters_that_a_gradient_reached_are_noted(graph):
    module, x = LoopedExperts(), torch.randn(2, 4, 8, requires_grad=True)
    names = tuple(name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    found: set[str] = set()
    with noting_reached(found):
        made = call(module, x, own_names=names)
    assert not found, "before the backward"
    made.sum().backward()
    assert found == {n for n, _ in module.named_parameters() if ".3." not in n}


def test_a_shape_or_dtype_that_was_not_planned_is_refused(graph):
    module, x = LoopedExperts(), torch.randn(2, 4, 8)
    with pytest.raises(PlanError, match=r"LoopedExperts, .*depends on values"):
        call(module, x, shape=(3, 4, 8))
    with pytest.raises(PlanError, match="a shape or dtype"):
        call(module, x, dtype=torch.float64)


def test_a_module_that_no_model_has_is_refused(graph):
    with pytest.raises(PlanError, match=r"calls Absent@0 as it is, .* search again"):
        find_module("Absent@0")
    keys = {op.args[0]: "Absent@1" for p in graph.classes for op in opaque_calls(p)}
    other = from_json(json.loads(json.dumps(to_json(graph)).replace(*next(iter(keys.items())))))
    with pytest.raises(PlanError, match="calls Absent@1 as it is"):
        keep_modules(other, Chain(LoopedExperts))


def test_calls_on_tensors_without_values_have_shapes(graph):
    module, x = LoopedExperts().to("meta"), torch.empty(2, 4, 8, device="meta", requires_grad=True)
    made = call(module, x)
    assert made.shape == x.shape
    made.sum().backward()
    assert x.grad is not None


def test_nothing_is_held_until_it_is_collected(graph):
    module, x = LoopedExperts(), torch.randn(2, 4, 8, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        given = x * 1
        seen = weakref.ref(given.untyped_storage())
        made = call(module, given)
        made.sum().backward()
        del given, made
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # a compiler looks at it
def test_a_compiler_compiles_around_it(graph):
    module, x = LoopedExperts(), torch.randn(2, 4, 8)
    key = module_key(module)
    compiled = torch.compile(lambda x: torch.sin(call(module, x + 1, key=key)), backend="eager")
    torch.testing.assert_close(compiled(x), torch.sin(module(x + 1)))


def test_calls_inside_a_context(graph):
    entered = []

    class Context:
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *failure):
            pass

    with calling_inside(Context):
        call(LoopedExperts(), torch.randn(2, 4, 8))
    call(LoopedExperts(), torch.randn(2, 4, 8))
    assert len(entered) == 1


def test_parameters_of_a_program_that_only_it_uses(graph):
    program = next(p for p in graph.classes if opaque_calls(p))
    (op,) = opaque_calls(program)
    names = own_params(program, op)
    assert len(names) == len(op.args[7])
    alone = only_opaque_params(program)
    assert {n for n in names if program.tensor[n].kind == "param"} <= alone
    assert len(program.params) > len(alone), "the block has a norm and a layer beside"
