"""Weight gradients are made while collectives of input gradients are under way (N11, D18)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import planner
from costmodel.time.communication import beside_seconds
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.language.plan import ClassLayout, Plan
from planner.runtime.process import collectives
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.stage.beside_collectives import BesideCollectives, RedistributeBeside
from planner.runtime.stage.compiled.kernels import op_by_op
from planner.runtime.stage.compiled.pieces import _WAIT, RunPieces, in_pieces
from planner.runtime.stage.weight_grads import Pending, WeightProduct
from planner.runtime.step.engine import Engine
from planner.timeline import BESIDE, COLLECTIVE, bubbles, load_timeline
from search import SearchRequest
from search.candidates import Candidates
from tests.builders import HIDDEN, VOCABULARY, gpt_batch
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, sgd, train_beside
from tests.runtime.scenarios import build, capture, check_plans
from tests.search.machine import Machine
from tests.spawn import run_ranks


def beside(plan: Plan) -> Plan:
    """The plan with weight gradients beside collectives."""
    return plan.model_copy(update={"overlap": "input-gradients"})


def calls_of_a_step(plan: Plan, folder: str, owner: type, product: str) -> list[str]:
    """Train a step and return, in order, starts of collectives, waits, and products: the calls of
    the method of that name.
    """
    told: list[str] = []
    run, multiply = collectives.run, getattr(owner, product)

    class Funcol:
        def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
            called = getattr(torch.ops._c10d_functional, name)

            def calling(*given: Any) -> torch.Tensor:
                told.append("wait" if name == "wait_tensor" else "start")
                return called(*given)

            return calling

    def multiplying(self: Any, *given: Any) -> Any:
        told.append("product")
        return multiply(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER_TIMELINE", folder)
        patch.setattr(collectives, "_funcol", Funcol())
        patch.setattr(owner, product, multiplying)
        tiny, module = build("small-gpt")
        engine = planner.apply(plan, module)
        engine.step(tiny.batch(plan.global_batch))
        engine.close()
    assert run is collectives.run
    return told


def test_products_are_made_between_the_start_of_a_collective_and_the_wait_for_it(tmp_path):
    """One block's backward of a GPT's layer on tp: the MLP's two products beside the sum of its
    input's gradient, the attention's beside the next; and so the timeline tells it.
    """
    plan = beside(default_plan(capture("small-gpt"), tp=2, num_microbatches=1))
    told, _ = run_ranks(calls_of_a_step, 2, plan, str(tmp_path), Pending, "accumulate")
    # A group is what happens from the start of a collective to the wait for it.
    groups = " ".join(told).split("start")[1:]
    assert all(group.split()[-1] == "wait" for group in groups)
    made = [group.count("product") for group in groups]
    assert sum(made) == told.count("product") >= 8
    assert sum(count > 1 for count in made) == 4  # of two layers, each with two sums
    for line in load_timeline(tmp_path):
        found = [span for span in line.spans if span.kind == BESIDE]
        sums = [span for span in line.spans if span.kind == COLLECTIVE]
        assert len(found) >= 4
        for span in found:
            assert sum(s.start_s <= span.start_s and span.end_s <= s.end_s for s in sums) == 1
    idle = bubbles(load_timeline(tmp_path))
    assert all(0 < rank.collective_s < rank.step_s and rank.compute_s > 0 for rank in idle)


def test_without_the_choice_a_collective_is_waited_for_at_once(tmp_path):
    plan = default_plan(capture("small-gpt"), tp=2, num_microbatches=1)
    told, _ = run_ranks(calls_of_a_step, 2, plan, str(tmp_path), Pending, "accumulate")
    assert "product" not in told
    # (Ops of ours that communicate inside start theirs elsewhere, and wait here.)
    assert {told[at + 1] for at, call in enumerate(told) if call == "start"} == {"wait"}


def test_trains_as_one_process_on_two_ranks():
    """With tp alone, recomputed, and where the model ties weights; and parts of sequences."""
    cases = [
        ("small-gpt", {"tp": 2, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "recompute": "full"}),
        ("small-gpt", {"tp": 2, "recompute": "selective"}),
        ("small-tied-gpt", {"tp": 2, "num_microbatches": 2}),
        ("small-gpt", {"cp": 2}),
    ]
    plans = [
        (name, beside(default_plan(capture(name, torch.float64), **choices)))
        for name, choices in cases
    ]
    # Between layers whole tensors, or tensors split along the sequence.
    split = split_layouts(capture("small-gpt", torch.float64))
    plans += [("small-gpt", plans[0][1].model_copy(update={"layouts": split}))]
    check_plans(2, plans)


def split_layouts(graph: ModelGraph) -> tuple[ClassLayout, ...]:
    """Layouts on tp 2 that hand on tensors split along the sequence."""
    solver = Candidates.of(graph, Machine(), SearchRequest(num_devices=2, global_batch=2)).layouts
    solved = [point.layouts().by_class for point in solver.solver.at(2, 1)._solve()]
    return next(
        layouts for layouts in solved if any("S(1)" in layout.outputs for layout in layouts)
    )


class ComparingLayer(nn.Module):
    """Compares what its product takes: from there comes no gradient."""

    def __init__(self):
        super().__init__()
        self.product = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        y = torch.tanh(x)
        is_open = (y > 0).to(y.dtype)
        return x + self.product(y) * is_open


class Comparing(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(ComparingLayer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def comparing_plan(zero_stage: int) -> Plan:
    """On parts of sequences, which are exchanged for parts of features where they are compared."""
    graph = capture_module(Comparing().double(), gpt_batch(2), gpt_batch(3))
    plan = beside(default_plan(graph, cp=2, num_microbatches=1, zero_stage=zero_stage))
    layouts = []
    for layout in plan.layouts:
        program = graph.classes[layout.class_index]
        compared = [op.name for op in program.ops if op.target == "aten.gt.Scalar"]
        ops = dict(layout.ops) | dict.fromkeys(compared, "S(2)->S(2)")
        layouts.append(layout.model_copy(update={"ops": tuple(ops.items())}))
    return plan.model_copy(update={"layouts": tuple(layouts)})


def comparing_gap(plans: Sequence[Plan]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    found = []
    for plan in plans:
        torch.manual_seed(0)
        module = Comparing()
        alone = OneProcess(module, sgd)
        engine = planner.apply(plan, module, optimizer=sgd(module))
        batches = [gpt_batch(plan.global_batch * n) for n in (1, 2)]
        batches = [{k: v[: plan.global_batch] for k, v in batch.items()} for batch in batches]
        found.append(train_beside(engine, alone, batches).largest)
        engine.close()
    return found


def test_no_product_waits_for_a_collective_that_no_gradient_comes_to():
    """ZeRO has reduced a block's gradients when its backward ends: those made later were lost."""
    plans = [comparing_plan(zero_stage) for zero_stage in (2, 3)]
    assert max(run_ranks(comparing_gap, 2, plans)[0]) < 1e-10


@pytest.mark.slow
def test_trains_as_one_process_on_four_ranks():
    """With replicas, ZeRO, stages, and a schedule whose W jobs make what no collective hides."""
    cases = [
        ("small-gpt", {"tp": 2, "dp": 2, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "dp": 2, "zero_stage": 1, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "dp": 2, "zero_stage": 2, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "dp": 2, "zero_stage": 3, "recompute": "full"}),
        ("small-gpt", {"tp": 2, "pp": 2, "num_microbatches": 3}),
        ("small-gpt", {"tp": 2, "pp": 2, "schedule": "zb_h1", "num_microbatches": 2}),
        ("routed-gpt", {"tp": 2, "dp": 2, "ep": 2}),
    ]
    check_plans(
        4,
        [
            (name, beside(default_plan(capture(name, torch.float64), **choices)))
            for name, choices in cases
        ],
    )


def trained_compiled(graph: Any, plans: list[Plan]) -> list[tuple[list[torch.Tensor], list[int]]]:
    """Two steps of each plan on graphs that run op by op: parameters, and how many weight gradients
    were made beside each collective.
    """
    found = []
    for plan in plans:
        tiny, module = build("small-gpt")
        with pytest.MonkeyPatch.context() as patch:
            made = made_beside(patch)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            mesh = build_mesh(plan, torch.device("cpu"))
            engine = Engine(
                plan, from_json(graph), module, mesh, optimizer=optimizer, compiler=op_by_op
            )
            for _ in range(2):
                engine.step(tiny.batch(plan.global_batch))
            state = engine.full_state_dict()
            engine.close()
        found.append(([state[name] for name in sorted(state)], [n for n in made if n]))
    return found


def made_beside(patch: pytest.MonkeyPatch) -> list[int]:
    """Return what counts, from now on, weight gradients made inside each collective."""
    made: list[int] = []
    run, accumulate = collectives.run, Pending.accumulate
    inside: list[str] = []

    def running(kind: str, start: Any, **how: Any) -> torch.Tensor:
        made.append(0)
        inside.append(kind)
        given = run(kind, start, **how)
        inside.pop()
        return given

    def product(self: Pending) -> None:
        if inside:
            made[-1] += 1
        accumulate(self)

    patch.setattr(collectives, "run", running)
    patch.setattr(Pending, "accumulate", product)
    return made


def test_compiled_blocks_make_them_beside_the_same_collectives():
    """To the last bit what they are at the end of a block's backward, under each recomputation."""
    graph = capture("small-gpt")
    plans = [
        default_plan(graph, tp=2, num_microbatches=2, recompute=recompute)
        for recompute in ("none", "full", "selective")
    ]
    compiled = [
        plan.model_copy(update={"kernels": "compiled", "overlap": overlap})
        for plan in plans
        for overlap in ("none", "input-gradients")
    ]
    told, _ = run_ranks(trained_compiled, 2, to_json(graph), compiled)
    for (expected, at_end), (found, made) in zip(told[::2], told[1::2], strict=True):
        assert not at_end
        # Of two layers, of two microbatches, in two steps: the sums behind MLP and attention.
        assert len(made) >= 16
        assert sum(made) >= 8 * 4
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_blocks_train_as_one_process():
    cases: list[dict[str, Any]] = [
        {"tp": 2, "recompute": "selective"},
        {"tp": 2, "num_microbatches": 2},
        {"cp": 2},
    ]
    plans = [
        (
            "small-gpt",
            beside(default_plan(capture("small-gpt", torch.float64), **how)).model_copy(
                update={"kernels": "compiled"}
            ),
        )
        for how in cases
    ]
    check_plans(2, plans)


def a_backward() -> tuple[fx.GraphModule, list[tuple[int, int]], set[int]]:
    """dx3 = g w3; its sum; a sum of g; dx2 = the first sum times w2; its sum; and the factors."""
    graph = fx.Graph()
    g, w3, w2 = (graph.placeholder(name) for name in ("g", "w3", "w2"))
    start, wait = torch.ops._c10d_functional.all_reduce.default, _WAIT

    def summed(x: fx.Node) -> fx.Node:
        return graph.call_function(wait, (graph.call_function(start, (x, "sum", "tp")),))

    dx3 = graph.call_function(torch.ops.aten.mm.default, (g, w3))
    first = summed(dx3)
    aside = summed(g)
    dx2 = graph.call_function(torch.ops.aten.mm.default, (first, w2))
    graph.output((summed(dx2), aside, w3, g, w2, first))
    # Of the product by w3 both factors are there at once, of that by w2 behind the first sum.
    return fx.GraphModule(torch.nn.Module(), graph), [(2, 3), (4, 5)], {0, 1}


def test_a_backward_ends_a_piece_where_weight_gradients_can_be_made():
    """Beside the first two sums; the third, for which nothing is left, stays in the last piece."""
    pieces = in_pieces(*a_backward())
    assert pieces is not None
    calls = [
        [
            node.target.name().partition("::")[2]
            for node in part.module.graph.nodes
            if node.op == "call_function" and node.target is not _WAIT
        ]
        for part in pieces.parts
    ]
    assert [part.products for part in pieces.parts] == [(0,), (1,), ()]
    assert calls == [["mm"], ["mm"], ["all_reduce"]]
    module, factors, gradients = a_backward()
    assert in_pieces(module, [], gradients) is None
    assert factors


@pytest.mark.parametrize(("transfer_s", "product_s"), [(0.0, 1.0), (0.5, 1.0), (2.0, 1.0)])
def test_what_shows_of_a_delayed_collective_of_compiled_blocks(transfer_s, product_s, monkeypatch):
    """D18: with a delay injected, on a clock that products and waits alone move."""
    clock_s = 0.0

    def until(then_s: float) -> None:
        nonlocal clock_s
        clock_s = max(clock_s, then_s)

    sums = LateSums(transfer_s, lambda: clock_s, until)
    monkeypatch.setattr(collectives, "_funcol", sums)
    module, factors, gradients = a_backward()
    pieces = in_pieces(module, factors, gradients)
    assert pieces is not None
    parts = tuple(
        replace(part, started=part.started and replace(part.started, call=sums.all_reduce))
        for part in pieces.parts
    )
    # (The third one runs in its piece, without a clock.)
    for part in parts:
        for node in list(part.module.graph.nodes):
            if "all_reduce" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                part.module.graph.erase_node(node)
    run = RunPieces(replace(pieces, parts=parts), op_by_op)
    made = []

    def make(products, results):
        for at in products:
            assert all(results[place] is not None for place in factors[at])
            made.append(at)
            until(clock_s + product_s)

    run([torch.ones(2, 2) for _ in range(3)], make)
    assert made == [0, 1]
    predicted_s = float(beside_seconds(Machine(), transfer_s, product_s))
    assert sums.waited_s == pytest.approx([predicted_s] * 2, rel=0.1)


def test_plans_without_the_field_are_read_and_written_as_before():
    plan = default_plan(capture("small-gpt"), tp=2)
    assert "overlap" not in plan.model_dump(mode="json")
    again = Plan.model_validate(beside(plan).model_dump(mode="json"))
    assert again.overlap == "input-gradients"


class LateSums:
    """Collectives whose results are there `transfer_s` after their start, by a clock of `now` and
    `until`. `waited_s` is how long was waited for each.
    """

    def __init__(
        self, transfer_s: float, now: Callable[[], float], until: Callable[[float], None]
    ) -> None:
        self._transfer_s, self._now, self._until = transfer_s, now, until
        self._there_s: dict[int, float] = {}
        self.waited_s: list[float] = []

    def all_reduce(self, x: torch.Tensor, how: str, group: str) -> torch.Tensor:
        found = x.clone()
        self._there_s[id(found)] = self._now() + self._transfer_s
        return found

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        began_s = self._now()
        self._until(self._there_s.pop(id(x)))
        self.waited_s.append(self._now() - began_s)
        return x


def backward_of_two_products(sums: LateSums) -> None:
    """x -> redistribute -> two products in turn, and back."""
    beside = BesideCollectives()
    product = WeightProduct(None, transposed=True, waiting=beside.waiting)
    x = torch.randn(4, 8, requires_grad=True)
    first, second = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_funcol", sums)
        y = RedistributeBeside(beside)(x, "tp", "R", "R", True)
        product(product(y, first), second).sum().backward()
    assert x.grad is not None
    assert first.grad is not None
    assert second.grad is not None
    assert not beside.waiting


@pytest.mark.parametrize("transfer_s", [0.0, 0.5, 2.0, 2.5, 8.0])
@pytest.mark.parametrize("product_s", [0.0, 1.0])
def test_what_shows_of_a_delayed_collective_is_what_is_predicted(
    transfer_s, product_s, monkeypatch
):
    """D18: with a delay injected, on a clock that products and waits alone move."""
    clock_s = 0.0

    def until(then_s: float) -> None:
        nonlocal clock_s
        clock_s = max(clock_s, then_s)

    accumulate = Pending.accumulate

    def product(self: Pending) -> None:
        until(clock_s + product_s)
        accumulate(self)

    monkeypatch.setattr(Pending, "accumulate", product)
    sums = LateSums(transfer_s, lambda: clock_s, until)
    backward_of_two_products(sums)
    predicted_s = beside_seconds(Machine(), transfer_s, 2 * product_s)
    assert sums.waited_s == [pytest.approx(float(predicted_s), rel=0.1)]


@pytest.mark.slow
@pytest.mark.parametrize(("transfer_s", "product_s"), [(0.4, 0.1), (0.1, 0.2), (0.4, 0.0)])
def test_it_is_so_by_the_clock(transfer_s, product_s, monkeypatch):
    """D18: the same in seconds, within 10% and what else the machine does."""

    def until(then_s: float) -> None:
        time.sleep(max(0.0, then_s - time.perf_counter()))

    accumulate = Pending.accumulate

    def product(self: Pending) -> None:
        time.sleep(product_s)
        accumulate(self)

    monkeypatch.setattr(Pending, "accumulate", product)
    sums = LateSums(transfer_s, time.perf_counter, until)
    backward_of_two_products(sums)
    predicted_s = float(beside_seconds(Machine(), transfer_s, 2 * product_s))
    assert sums.waited_s == [pytest.approx(predicted_s, rel=0.1, abs=0.02)]
