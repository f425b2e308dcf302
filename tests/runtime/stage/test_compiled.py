"""Compiled blocks: what they save, make again, defer and hand on is what eager blocks do."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._inductor import config
from torch.autograd.graph import saved_tensors_hooks

from planner.language.graph.batch_split import BatchSplit
from planner.language.lowering.defaults import default_plan
from planner.language.ops.recompute_choice import ops_made_again
from planner.runtime.stage.compiled.block import CompiledBlock
from planner.runtime.stage.compiled.halves import cut
from planner.runtime.stage.compiled.kernels import CompilerFailed, compiled, op_by_op
from planner.runtime.stage.compiled.sizes import Size, places_of
from planner.runtime.stage.compiled.trace import NotCompilable, trace
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.stage.programs import Programs
from planner.runtime.stage.recompute import Keeper
from planner.runtime.stage.weight_grads import WeightQueue
from tests.runtime.alone import mesh_of
from tests.sharding.models import captured
from tests.sharding.op_cases import CASES
from tests.sharding.programs import one_op, random_values

CPU = torch.device("cpu")
MODELS = {"gpt": 1, "resnet": 2, "hf-mixtral": 1}
"""A class of each: a layer; one with BatchNorm, which writes buffers; one with experts."""
QUICK = ("gpt", "resnet")
BY_VALUES = {"bias_of_runs", "product_of_runs", "stack_of_runs"}


def both(program, compiler=op_by_op, made_again=()):
    """The eager and the compiled form of a program, and the queue of their weight gradients."""
    queue = WeightQueue()
    eager = to_graph_module(program, {}, CPU, weight_queue=queue)
    halves = cut(trace(program, {}, CPU), made_again=made_again)
    return eager, CompiledBlock(halves, compiler, eager=eager, queue=queue), queue


def run(block, program, queue, *, deferred=False):
    """Outputs, gradients and buffers of one forward and backward, and the bytes it saved."""
    values = random_values(program, 0)
    tensors = [
        values[name].clone().requires_grad_(program.tensor[name].requires_grad)
        for name in (*program.inputs, *program.params)
    ]
    own = {x.untyped_storage()._cdata for x in tensors}
    saved = {}

    def pack(x):
        if x.untyped_storage()._cdata not in own:
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    collecting = queue.collecting((0, 0)) if deferred else nullcontext()
    with collecting, saved_tensors_hooks(pack, lambda x: x):
        outputs = block(*tensors)
    roots = [x for x in outputs if x.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(x) / 3 for x in roots])
    if deferred:
        matrices = [x for x in tensors[len(program.inputs) :] if x.dim() == 2 and x.requires_grad]
        assert all(x.grad is None for x in matrices), "made where a W job makes them"
        queue.flush((0, 0))
    return [*outputs, *(x.grad for x in tensors), *tensors], sum(saved.values())


def assert_equal(found, expected, atol=0.0):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in QUICK)]
)
def test_a_block_computes_and_saves_what_its_ops_do(name):
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    program = captured(name).classes[MODELS[name]].bind(2)
    eager, block, queue = both(program)
    expected, eager_bytes = run(eager, program, queue)
    found, saved_bytes = run(block, program, queue)
    assert_equal(found, expected)
    assert saved_bytes == pytest.approx(eager_bytes, rel=1e-3)  # but for a few numbers
    again = ops_made_again(program, program, None)
    _, recomputing, queue = both(program, made_again=again)
    found, kept_bytes = run(recomputing, program, queue)
    assert_equal(found, expected)
    assert kept_bytes < 0.8 * saved_bytes


@pytest.mark.parametrize("name", sorted(set(CASES) - BY_VALUES))
def test_a_graph_of_each_op_computes_and_saves_what_it_does(name):
    torch.manual_seed(0)
    single = CASES[name](random.Random(name), 2)
    eager, block, _ = both(single.program)

    def run_once(form):
        torch.manual_seed(1)  # of what they draw
        tensors = [
            x.clone().detach().requires_grad_(single.program.tensor[n].requires_grad)
            for n, x in zip(single.program.inputs, single.inputs, strict=True)
        ]
        saved = {}
        with saved_tensors_hooks(
            lambda x: (saved.update({x.untyped_storage()._cdata: x}), x)[1], lambda x: x
        ):
            outputs = form(*tensors)
        roots = [x for x in outputs if x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) / 3 for x in roots])
        found = [*outputs, *(x.grad for x in tensors), *tensors]
        return found, sum(x.untyped_storage().nbytes() for x in saved.values()), len(roots)

    expected, eager_bytes, num_roots = run_once(eager)
    found, saved_bytes, num_found = run_once(block)
    assert num_found == num_roots
    assert saved_bytes <= eager_bytes
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:  # a gradient of zeros may be left out
            assert not any(x is not None and x.any() for x in (a, b))
        else:
            torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True)


def test_weight_gradients_wait_for_their_job():
    program = captured("gpt").classes[1].bind(2)
    eager, block, queue = both(program)
    expected, _ = run(eager, program, queue, deferred=True)
    found, _ = run(block, program, queue, deferred=True)
    assert_equal(found, expected)


def test_a_gradient_that_autograd_may_take_over_is_no_other_tensor():
    """The gradient of y = x + p by p is that of y: added to in place, it would change both."""
    whole = one_op("aten.add.Tensor", torch.ones(2, 3), torch.ones(2, 3)).program
    program = replace(whole, inputs=("x0",), params=("x1",))
    _, block, _ = both(program)
    x, param = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    (y,) = block(x, param)
    given = torch.ones(2, 3)
    y.backward(given)
    assert param.grad.untyped_storage()._cdata != given.untyped_storage()._cdata


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_written_buffer_is_saved_as_it_was(recomputes):
    """A microbatch moves running statistics between another's forward and backward."""
    program = captured("batchnorm-mlp").classes[1].bind(2)
    moved = ops_made_again(program, program, None) if recomputes else ()
    found = {}
    for name, block in zip(("eager", "block"), both(program, made_again=moved)[:2], strict=True):
        values = random_values(program, 0)
        shared = [
            values[n].clone().requires_grad_(program.tensor[n].requires_grad)
            for n in program.params
        ]
        inputs = [
            [(values[n].detach() * scale).requires_grad_() for n in program.inputs]
            for scale in (1, 2)
        ]
        outputs = [block(*given, *shared) for given in inputs]
        for made in outputs:
            made[-1].backward(torch.ones_like(made[-1]) / 3)
        made = [x for each in outputs for x in each]
        found[name] = [*made, *(x.grad for given in inputs for x in given), *shared]
        found[name] += [x.grad for x in shared]
    assert_equal(found["block"], found["eager"])


def test_what_saves_nothing_runs_op_by_op():
    program = captured("mlp").classes[0].bind(2)
    eager, block, _ = both(program)
    block.forward = None  # not called
    values = random_values(program, 0)
    tensors = [values[name] for name in (*program.inputs, *program.params)]
    with torch.no_grad():
        assert_equal(block(*tensors), eager(*tensors))
    # Traced as one without a gradient, which the graph would not make.
    tensors[0].requires_grad_()
    assert_equal(block(*tensors), eager(*tensors))


def test_sizes_of_microbatches_by_the_parts_that_have_them():
    """Of 7 samples in 2 microbatches of 4 parts: 0 1 1 1, 1 1 1 1; in 2 parts 1 2, 2 2."""
    split = BatchSplit.even(7, num_microbatches=2, parts=4)
    assert split.sizes == ((0, 1, 1, 1), (1, 1, 1, 1))
    found = places_of(split, 3, 2)
    assert found == {(0, Size(3, 1)), (0, Size(3, 2)), (1, Size(3, 2))}
    assert places_of(split, 0, 1) == {(0, Size(0, 3)), (0, Size(0, 4))}
    assert {size.parts for _, size in places_of(split, 0, 2, in_whole=True)} == {(1, 2)}
    for number, size in found:
        assert any(len(split.part(m, 2, number)) == size.num_samples for m in (0, 1))


def test_sizes_that_are_not_compiled_run_op_by_op():
    graph = captured("mlp")
    plan = default_plan(graph, microbatch_size=4)
    programs = Programs([graph], plan, mesh_of(plan), keeper=Keeper(), weight_queue=None)
    for size in (4, 3):
        programs.compile(0, Size(0, size), op_by_op, recomputes=False)
    programs.compile(0, Size(0, 4), op_by_op, recomputes=True)

    def compiled_sizes(of):
        return [size for size in (2, 3, 4) if isinstance(of(size), CompiledBlock)]

    assert compiled_sizes(programs.of_class(0)) == [3, 4]
    assert compiled_sizes(programs.recomputing(0)) == [4]
    assert compiled_sizes(programs.of_class(1)) == []
    programs.run_eagerly(0, {Size(0, 3)})
    assert compiled_sizes(programs.of_class(0)) == [4]
    programs.run_eagerly(0)
    assert compiled_sizes(programs.of_class(0)) == []


def test_a_compiler_makes_the_same():
    program = captured("mlp").classes[0].bind(2)
    eager, block, queue = both(program, compiled)
    expected, _ = run(eager, program, queue)
    found, _ = run(block, program, queue)
    assert_equal(found, expected, atol=1e-14)
    assert block.forward.__code__.co_argcount == 1, "arguments in a list, which it empties"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compiler_makes_the_same_of_layers(name):
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    program = captured(name).classes[MODELS[name]].bind(2)
    for again in ((), ops_made_again(program, program, None)):
        eager, block, queue = both(program, compiled, again)
        for deferred in (False, True):
            expected, eager_bytes = run(eager, program, queue, deferred=deferred)
            found, saved_bytes = run(block, program, queue, deferred=deferred)
            assert_equal(found, expected, atol=1e-10)
            assert again or saved_bytes == pytest.approx(eager_bytes, rel=1e-3)


def test_a_failing_compiler_says_so_in_a_line():
    program = captured("mlp").classes[0].bind(2)
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        pytest.raises(CompilerFailed) as raised,
    ):
        both(program, compiled)
    assert "\n" not in str(raised.value)
    assert "compiler" in str(raised.value)


def test_what_no_graph_holds_is_refused_by_its_reason():
    program = captured("mlp").classes[0].bind(2)
    ops = (replace(program.ops[0], target="planner.deal_runs"), *program.ops[1:])
    with pytest.raises(NotCompilable, match="follows from their values"):
        trace(replace(program, ops=ops), {}, CPU)
    ops = (replace(program.ops[0], target="aten.nonzero.default", args=program.ops[0].args[:1]),)
    outputs = program.ops[0].outputs
    with pytest.raises(NotCompilable, match="no graph holds it: Dynamic"):
        trace(replace(program, ops=ops, outputs=outputs), {}, CPU)
