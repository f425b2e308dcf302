"""P11: what a step of the runtime does, job by job, is what `work_of_jobs` says."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch

import planner
from planner.language.lowering.captured_ops import PREAMBLE, work_of_jobs
from planner.language.lowering.defaults import default_plan
from planner.language.plan.schedule_of import schedule_of
from planner.runtime.stage import programs
from planner.runtime.stage.weight_grads import Pending
from tests.runtime.scenarios import build, capture

MICROBATCHES = 2


def test_a_step_does_each_captured_op_in_its_kind_of_job(monkeypatch):
    """Ops of the programs that forwards run, weight gradients that W jobs make, parameters that
    O steps on; counted in a step, where each job of a kind runs once a microbatch.
    """
    graph = capture("gpt")
    plan = default_plan(graph, schedule="zb_h1", num_microbatches=MICROBATCHES)
    done: Counter[tuple[str, str]] = Counter()
    kind = [""]  # of the job in work
    to_graph_module, accumulate = programs.to_graph_module, Pending.accumulate

    def counted_module(*args: Any, **settings: Any) -> torch.nn.Module:
        module = to_graph_module(*args, **settings)
        nodes = (node for node in module.graph.nodes if node.op.startswith("call_"))
        num_ops, forward = (
            sum(node.target is not operator.getitem for node in nodes),
            module.forward,
        )

        def run(*inputs: Any) -> Any:
            done[kind[0], "forward"] += num_ops
            return forward(*inputs)

        module.forward = run
        return module

    def counted_gradient(pending: Pending) -> None:
        done[kind[0], "weight gradient"] += 1
        accumulate(pending)

    monkeypatch.setattr(programs, "to_graph_module", counted_module)
    monkeypatch.setattr(Pending, "accumulate", counted_gradient)
    tiny, module = build("gpt")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine = planner.apply(plan, module, optimizer=optimizer)
    run_job = engine._executor._do

    def do(job: Any, *rest: Any) -> None:
        kind[0] = str(job.kind)
        run_job(job, *rest)
        kind[0] = ""

    monkeypatch.setattr(engine._executor, "_do", do)
    assert not optimizer.state
    engine.step(tiny.batch(plan.global_batch))

    expected: Counter[tuple[str, str]] = Counter()
    for (of, _), pieces in work_of_jobs(graph, plan, schedule_of(plan)).items():
        expected.update((str(of), each.part) for each in pieces if each.block != PREAMBLE)
    # AdamW makes moments of each parameter that it steps on.
    assert len(optimizer.state) == expected["O", "update"] > 0
    assert done == {
        key: MICROBATCHES * expected[key] for key in (("F", "forward"), ("W", "weight gradient"))
    }
    assert sum(done.values()) > 0
