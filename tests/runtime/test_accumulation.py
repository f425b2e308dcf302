"""Gradients of several batches, and one update: as one process on all of them (fp64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny
from tests.runtime.beside import OneProcess, adamw, gap_by_tensor
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks


def train(cases: list[tuple[str, Plan, bool]]) -> list[tuple[float, float, float]]:
    """Return for each case the gaps of gradient norm, gradients and parameters."""
    torch.set_default_dtype(torch.float64)
    found = []
    for model, plan, weighted in cases:
        tiny, module = build(model)
        clipped: list[float] = []

        def clip(each: torch.nn.Module, norms: list[float] = clipped) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05).item())

        alone = OneProcess(module, adamw, loss=tiny.loss, clip=clip)
        # By the first number of a sample, between 1 and 3: parts count unequally.
        count: Any = (
            (lambda part: float(len(part["ids"]) + part["ids"][:, 0].sum() % 7 + 1))
            if (weighted)
            else None
        )
        engine = planner.apply(
            plan,
            module,
            optimizer=adamw(module),
            max_grad_norm=0.05,
            loss_weight=count,
            accept=["local-samples"] if weighted else [],
        )
        # What no update follows leaves nothing behind.
        engine.step(tiny.batch(plan.global_batch), update=False)
        engine._accumulation.forget()
        engine.state.samples = 0
        norm_gap = gradient_gap = 0.0
        for _ in range(2):
            whole = tiny.batch(3 * plan.global_batch)
            sizes = [plan.global_batch, plan.global_batch, plan.global_batch - 1]
            parts = [
                {k: v.split([*sizes, 1])[at] for k, v in whole.items()} for at in range(len(sizes))
            ]
            for at, part in enumerate(parts):
                engine.step(part, update=at == len(parts) - 1)
                if at == 0:
                    engine.evaluate(part)  # changes nothing of what waits
            if weighted:
                # The mean over what counts, microbatch by microbatch of each replica.
                pieces = [piece for part in parts for piece in _pieces(part, plan)]
                weights = list(map(count, pieces))
                alone.update(pieces, [weight / sum(weights) for weight in weights])
            else:
                alone.step({k: torch.cat([part[k] for part in parts]) for k in whole})
            norm_gap = max(norm_gap, abs(engine.grad_norm.item() / clipped[-1] - 1))
            gap = gap_by_tensor(engine.full_gradients(), alone.gradients())
            gradient_gap = max(gradient_gap, gap)
        assert engine.steps == 2
        assert engine.samples == 2 * sum(sizes)
        state = engine.full_state_dict()
        engine.close()
        found.append((norm_gap, gradient_gap, gap_by_tensor(state, alone.parameters())))
    return found


def _pieces(batch: dict[str, torch.Tensor], plan: Plan) -> list[dict[str, torch.Tensor]]:
    from planner.language.graph.batch_split import BatchSplit

    size = len(next(iter(batch.values())))
    split = BatchSplit.even(size, num_microbatches=plan.num_microbatches, parts=plan.dp)
    return [
        {k: v[run.start : run.stop] for k, v in batch.items()}
        for m in range(plan.num_microbatches)
        for run in (split.part(m, plan.dp, number) for number in range(plan.dp))
    ]


def test_several_batches_make_one_update():
    graph = capture("gpt", torch.float64)
    cases = [
        ("gpt", default_plan(graph, microbatch_size=2, **choices), weighted)
        for choices, weighted in [
            ({"dp": 2}, False),
            ({"dp": 2, "zero_stage": 1}, True),
            ({"dp": 2, "zero_stage": 2}, False),
            ({"dp": 2, "zero_stage": 3}, True),
            ({"pp": 2}, True),
        ]
    ]
    for (_, plan, weighted), gaps in zip(cases, run_ranks(train, 2, cases)[0], strict=True):
        assert max(gaps) < 1e-9, (plan.degrees, plan.zero_stage, weighted, gaps)


def test_gradients_that_wait_are_not_lost_in_silence(tmp_path):
    plan = default_plan(capture_tiny("mlp"), num_microbatches=1, microbatch_size=4)
    engine = planner.apply(plan, MlpWithTarget())
    engine.step(mlp_batch(4), update=False)
    with pytest.raises(PlanError, match="would lose the gradients of 1 batches"):
        engine.save(tmp_path)
    with pytest.raises(PlanError, match=r"engine.full_gradients after engine.step\(..., update"):
        engine.full_gradients()
    engine.step(mlp_batch(4))
    engine.full_gradients()
