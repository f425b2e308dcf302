"""Compiled blocks in CUDA graphs: memory that stays, graphs for each block, what has none."""

from dataclasses import replace

import pytest
import torch

from planner.errors import LayoutError, PlanError
from planner.language.graph import Op, Ref
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import local_program
from planner.language.ops.record import why_no_graph
from planner.language.plan import Plan
from planner.runtime.stage.compiled.block import CompiledBlock
from planner.runtime.stage.compiled.graphs import CudaCapture, GraphedKernels, Standing
from planner.runtime.stage.compiled.halves import cut
from planner.runtime.stage.compiled.kernels import op_by_op
from planner.runtime.stage.compiled.trace import trace
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.stage.weight_grads import WeightQueue
from planner.runtime.step.compiling import capture_of
from search import SearchRequest
from tests.costmodel.programs import program_of
from tests.sharding.models import captured
from tests.sharding.programs import random_values

CPU = torch.device("cpu")


def replaying(run):
    """Stands for a CUDA graph: it runs the function again, on the memory that it was given."""
    run()
    return run


def layer():
    return captured("gpt").classes[1].bind(2)


def tensors_of(program, seed):
    values = random_values(program, seed)
    return [
        values[name].clone().requires_grad_(program.tensor[name].requires_grad)
        for name in (*program.inputs, *program.params)
    ]


def graphed(program, *, num_blocks, capture=replaying, standing=None):
    standing = standing or Standing()
    queue = WeightQueue()
    eager = to_graph_module(program, {}, CPU, weight_queue=queue)
    block = CompiledBlock(cut(trace(program, {}, CPU)), op_by_op, eager=eager, queue=queue)
    first = len(program.inputs)
    params = range(first, first + len(program.params))
    block.run_in_graphs(capture, params=params, num_blocks=num_blocks, standing=standing)
    return eager, block


def test_microbatches_in_flight_of_two_blocks_keep_what_they_are():
    """Two blocks of a class, two microbatches: all forwards, then backwards in another order."""
    program = layer()
    captures = []

    def counting(run):
        captures.append(run)
        return replaying(run)

    eager, block = graphed(program, num_blocks=2, capture=counting)
    number = len(program.inputs)
    found = {}
    for form in (eager, block):
        params = [tensors_of(program, seed)[number:] for seed in (0, 1)]
        inputs = [tensors_of(program, seed)[:number] for seed in (2, 3)]
        made = {(b, m): form(*inputs[m], *params[b]) for b in (0, 1) for m in (0, 1)}
        for b, m in ((1, 0), (0, 1), (0, 0), (1, 1)):
            roots = [x for x in made[b, m] if x.requires_grad]
            torch.autograd.backward(roots, [torch.full_like(x, b + m + 0.5) for x in roots])
        leaves = [x for each in (*params, *inputs) for x in each]
        outputs = [x for key in sorted(made) for x in made[key]]
        found[form] = [*outputs, *(x.grad for x in leaves if x.requires_grad)]
    for mine, expected in zip(found[block], found[eager], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
    assert len(captures) == 4, "two blocks, each a graph of either half"


def test_sizes_of_a_class_share_memory():
    """A smaller one lies in what a larger one has; a larger one that comes later has more."""
    small, large, largest = (captured("gpt").classes[1].bind(size) for size in (1, 2, 3))
    standing = Standing()
    made = [graphed(each, num_blocks=1, standing=standing) for each in (large, small, largest)]
    numbers = []
    for program, (eager, block) in zip((large, small, largest), made, strict=True):
        numbers.append([tensors_of(program, 0), tensors_of(program, 0), eager, block])
    for column in (2, 3):
        outputs = [row[column](*row[column - 2]) for row in numbers]
        for each in outputs:
            roots = [x for x in each if x.requires_grad]
            torch.autograd.backward(roots, [torch.full_like(x, 0.5) for x in roots])
        for row, each in zip(numbers, outputs, strict=True):
            row[column] = [*each, *(x.grad for x in row[column - 2] if x.requires_grad)]
    for *_, expected, found in numbers:
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)

    def lies(block):
        halves = (block.forward, block.backward)
        tensors = [x for half in halves for x in (*half._taken, *half._given)]
        return [x.untyped_storage().data_ptr() for x in tensors]

    (_, of_large), (_, of_small), (_, of_largest) = made
    assert lies(of_large) == lies(of_small)
    assert set(lies(of_largest)) - set(lies(of_large)), "what grows with samples is longer"


def test_a_result_in_memory_of_an_argument_is_the_callers():
    def kernels(arguments):
        x, weight = arguments
        arguments.clear()
        return [x[1:], weight.t(), x + weight]

    half = GraphedKernels(
        kernels, params=[1], num_blocks=1, capture=replaying, standing=Standing(), half="forward"
    )
    x, weight = torch.arange(4.0).view(2, 2), torch.ones(2, 2)
    given = [x, weight]
    row, transposed, total = half(given)
    assert given == [], "what nobody else holds is freed as it is used"
    assert row.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert transposed.untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert torch.equal(row, x[1:])
    assert torch.equal(total, x + 1)
    (again,) = half([x + 1, weight])[2:]
    assert torch.equal(total, x + 1), "of another microbatch, and its own"
    assert torch.equal(again, x + 2)
    with pytest.raises(PlanError, match="a parameter of a block in CUDA graphs has moved"):
        half([x, weight.clone()])


class Recorded:
    """Stands for `torch.cuda`: what is called, in order."""

    def __init__(self, *, fails=False):
        self.calls, self._fails = [], fails
        recorded = self

        class Stream:
            def __init__(self, device=None):
                self.name = "side"

            def wait_stream(self, other):
                recorded.calls.append(f"{self.name} waits for {other.name}")

        class CUDAGraph:
            def capture_begin(self, *, pool, capture_error_mode):
                recorded.calls.append(f"begin {pool} {capture_error_mode}")

            def capture_end(self):
                if recorded._fails:
                    raise RuntimeError("operation not permitted when stream is capturing")
                recorded.calls.append("end")

            def replay(self):
                recorded.calls.append("replay")

        class Entered:
            def __init__(self, stream):
                pass

            def __enter__(self):
                recorded.calls.append("enter")

            def __exit__(self, *_):
                recorded.calls.append("leave")

        self.Stream, self.CUDAGraph, self.stream = Stream, CUDAGraph, Entered
        self._now = Stream()
        self._now.name = "now"

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self, device):
        return self._now


def test_a_capture_runs_once_ahead_and_beside_the_stream(monkeypatch):
    cuda = Recorded()
    monkeypatch.setattr(torch, "cuda", cuda)
    capture = CudaCapture(CPU)
    replay = capture(lambda: cuda.calls.append("run"))
    replay()
    assert cuda.calls == [
        "side waits for now", "enter", "run", "begin pool thread_local", "run", "end", "leave",
        "now waits for side", "replay",
    ]  # fmt: skip
    cuda = Recorded(fails=True)
    monkeypatch.setattr(torch, "cuda", cuda)
    with pytest.raises(PlanError, match=r"CUDA can't capture .* not permitted when stream is"):
        CudaCapture(CPU)(lambda: None)


def test_what_no_graph_holds_is_named():
    graph = captured("gpt")
    plan = default_plan(graph, microbatch_size=2, tp=2)
    cut_layer = local_program(graph, plan, 1, degrees=plan.degrees, microbatch_size=2)
    assert why_no_graph(cut_layer) == "its ranks exchange values inside it"
    assert {why_no_graph(each.bind(2)) for each in graph.classes} == {None}
    norms = {why_no_graph(each.bind(2)) for each in captured("batchnorm-mlp").classes}
    assert "it writes buffers" in norms
    drops = Op(name="d", target="aten.dropout.default", args=(Ref("x"), 0.5, True), outputs=("d",))
    program = program_of({}, inputs=("x",), params=(), outputs=("x",))
    assert why_no_graph(replace(program, ops=(drops,))) == "it draws random numbers"


def test_plans_that_have_none_are_refused():
    graph = captured("gpt")
    plan = default_plan(graph, microbatch_size=2, dp=2, zero_stage=2)
    with pytest.raises(ValueError, match="zero_stage is 2 and kernels are graphs"):
        Plan.model_validate(plan.model_dump(mode="json") | {"kernels": "graphs"})
    with pytest.raises(LayoutError, match="`zero` 1 was given for CUDA graphs"):
        SearchRequest(num_devices=2, global_batch=4, execution="ours-graphs", zero=1)
    assert SearchRequest(num_devices=2, global_batch=4, execution="ours-graphs").zero == 0
    alone = default_plan(graph, microbatch_size=2).model_copy(update={"kernels": "graphs"})

    class Mesh:
        device = CPU

    with pytest.raises(PlanError, match="graphs, which CUDA devices have, and this is cpu"):
        capture_of(alone, Mesh())
    assert capture_of(alone.model_copy(update={"kernels": "compiled"}), Mesh()) is None
