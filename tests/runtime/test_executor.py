"""What the executor does with a job table: order, memory, and where the work is done.

P6, P7 (live activations as the table says), P14 and P12 (a user's table is run), P19
(activations die with their last job), P20, P21 (one program per class), G10 (backward order
is the table's), G16 (evaluation holds nothing).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import planner
from planner.language.graph import iter_refs
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import (
    Job,
    JobKind,
    backward_input,
    backward_weight,
    forward,
    full_backward,
    register_schedule,
)
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.in_flight import in_flight
from planner.runtime.step.engine import Engine
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks


@contextmanager
def registered(name: str, build_rows: Any) -> Iterator[str]:
    register_schedule(name)(build_rows)
    try:
        yield name
    finally:
        del SCHEDULES[name]


def newest_first(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """A table of a user's own: all forwards, then backwards from the newest."""
    order = range(num_microbatches)
    return [
        [forward(rank, m) for m in order] + [full_backward(rank, m) for m in reversed(order)]
        for rank in range(pp)
    ]


def split(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """All forwards, all input gradients, all weight gradients."""
    order = range(num_microbatches)
    return [
        [make(rank, m) for make in (forward, backward_input, backward_weight) for m in order]
        for rank in range(pp)
    ]


def _engine(plan: Plan) -> tuple[Engine, Any]:
    tiny, module = build("gpt")
    return planner.apply(plan, module), tiny.batch(plan.global_batch)


def _watch(engine: Engine, after: Any) -> None:
    """Call `after(job)` after each job of the engine."""
    executor = engine._executor
    inner = executor._do

    def watched(job: Job, *args: Any) -> None:
        inner(job, *args)
        after(job)

    executor._do = watched


def most_live(plans: list[Plan]) -> list[int]:
    """The most microbatch-stages this rank held at once, under each plan."""
    result = []
    for plan in plans:
        engine, batch = _engine(plan)
        counts: list[int] = []
        _watch(engine, lambda job, e=engine, c=counts: c.append(len(e._executor.live)))
        engine.step(batch)
        assert not engine._executor.live
        result.append(max(counts))
    return result


def test_live_activations_are_those_of_the_table():
    """P6: FThenB holds m; P7: 1F1B holds min(m, p - s)."""
    plans = [
        default_plan(capture("gpt"), pp=2, num_microbatches=4, schedule=name)
        for name in ("fthenb", "1f1b", "naive")
    ]
    measured = list(zip(*run_ranks(most_live, 2, plans), strict=True))
    assert measured == [(4, 4), (2, 1), (1, 1)]
    for plan, counts in zip(plans, measured, strict=True):
        schedule = schedule_of(plan)
        assert counts == tuple(in_flight(schedule))


def test_activations_die_with_their_backward():
    """P19: what microbatch 0 saved is gone right after its backward, before any other job."""
    engine, batch = _engine(default_plan(capture("gpt"), num_microbatches=2, schedule="1f1b"))
    saved: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    current: list[int] = []
    stage = engine.stages[0]
    inner = stage.forward

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 1 and not isinstance(tensor, torch.nn.Parameter):
            saved.setdefault(len(current), []).append(weakref.ref(tensor))
        return tensor

    def watched(*inputs: torch.Tensor, **options: Any) -> Any:
        current.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return inner(*inputs, **options)

    stage.forward = watched
    dead: dict[str, int] = {}
    alive: dict[str, int] = {}

    def count(job: Job) -> None:
        refs = saved[len(current)]
        live = [r() for r in refs if r() is not None and r() not in batch_tensors]
        (alive if job.kind is JobKind.FORWARD else dead)[str(job)] = len(live)

    batch_tensors: list[torch.Tensor] = []
    _watch(engine, count)
    gc.disable()  # they must die by themselves, not by the collector
    try:
        engine.step(batch)
    finally:
        gc.enable()
    assert all(n > 10 for n in alive.values())
    params = len(list(stage.parameters()))
    assert all(n <= params for n in dead.values()), (alive, dead)


def test_a_users_table_runs_in_its_order():
    """P14, G10: jobs run as the table lists them, the same loss as any other order."""
    with registered("newest_first", newest_first) as name:
        plan = default_plan(capture("gpt"), num_microbatches=3, schedule=name)
        engine, batch = _engine(plan)
        done: list[str] = []
        _watch(engine, lambda job: done.append(str(job)))
        loss = engine.step(batch)
    assert done == ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]
    other, _ = _engine(default_plan(capture("gpt"), num_microbatches=3))
    torch.testing.assert_close(loss, other.step(batch))


def test_blocks_of_a_class_share_one_program():
    """P21: one traced program per class, whatever the number of layers and microbatches."""
    engine, batch = _engine(default_plan(capture("gpt"), num_microbatches=4))
    engine.step(batch)
    programs = {block.programs[0](1) for block in engine.stages[0].blocks}
    assert len(programs) == len(engine.graph.classes) < len(engine.stages[0].blocks)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_input_gradient_jobs_make_no_weight_products(recompute):
    """I does the products of input gradients, W those of weight gradients, counted in flop."""
    graph = capture("gpt")
    with registered("split", split) as name:
        plan = default_plan(graph, num_microbatches=2, schedule=name, recompute=recompute)
        engine, batch = _engine(plan)
        flop = dict.fromkeys(JobKind, 0)
        executor = engine._executor
        inner = executor._do
        # The counter does not know the in-place form, with which W adds up.
        products = {torch.ops.aten.addmm_: lambda c, a, b, **_: 2 * a[0] * a[1] * b[1]}

        def counted(job: Job, *args: Any) -> None:
            with FlopCounterMode(display=False, custom_mapping=products) as counter:
                inner(job, *args)
            flop[job.kind] += counter.get_total_flops()

        executor._do = counted
        loss = engine.step(batch)
    # Each linear does 2 * samples * in * out flop per microbatch in each of F, I and W.
    linears = 0
    for block in graph.blocks:
        program = graph.classes[block.class_index].bind(1)
        for op in program.ops:
            if op.target == "aten.linear.default":
                weight = program.tensor[[r.name for r in iter_refs(op.args)][1]]
                samples = program.tensor[op.outputs[0]].numel_at(1) // weight.shape[0]
                linears += 2 * samples * weight.numel_at(1)
    assert flop[JobKind.BACKWARD_WEIGHT] == 2 * linears
    attention = flop[JobKind.FORWARD] - 2 * linears
    again = flop[JobKind.FORWARD] if recompute == "full" else 0
    # Attention's backward is five products to the forward's two.
    assert flop[JobKind.BACKWARD_INPUT] == 2 * linears + attention * 5 // 2 + again
    plain, _ = _engine(default_plan(graph, num_microbatches=2))
    torch.testing.assert_close(loss, plain.step(batch))
    for name, grad in plain.full_gradients().items():
        torch.testing.assert_close(engine.full_gradients()[name], grad)


def test_evaluation_keeps_nothing_and_trains_nothing():
    """G16."""
    engine, batch = _engine(default_plan(capture("gpt"), num_microbatches=2))
    before = engine.full_state_dict()
    kept: list[int] = []
    _watch(engine, lambda job: kept.append(len(engine._executor.live)))
    first = engine.evaluate(batch)
    assert kept == [0, 0]
    assert all(torch.equal(t, before[n]) for n, t in engine.full_state_dict().items())
    torch.testing.assert_close(engine.step(batch), first)
