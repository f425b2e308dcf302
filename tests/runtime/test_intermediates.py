"""D10, P22: any value inside a model in training can be looked at whole, on any stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import planner
from planner.errors import PlanError
from planner.plan import Plan
from planner.plan.defaults import default_plan
from planner.runtime.check.intermediates import intermediate_names
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

SAMPLES = 8


def look(name: str, plans: list[Plan]) -> list[dict[str, Any]]:
    """Every value of every block under each plan, on rank 0."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    found = []
    for plan in plans:
        tiny, module = build(name)
        engine = planner.apply(plan, module)
        names = intermediate_names(engine.graph)
        values = engine.intermediates(tiny.batch(SAMPLES), names)
        assert engine.step(tiny.batch(SAMPLES)).isfinite()  # training goes on as before
        found.append({n: v.numpy() for n, v in values.items()})
    torch.set_default_dtype(before)
    return found


def test_every_value_equals_that_of_one_process():
    """D10: heads, columns, positions, replicas and microbatches put together again."""
    graph = capture("small-gpt", torch.float64)
    (dense,) = look("small-gpt", [_plan(graph, microbatch_size=SAMPLES)])
    choices = [
        {"tp": 2, "dp": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "tp": 2, "by_stage": {"tp": (2, 1)}, "microbatch_size": 2, "zero_stage": 3},
    ]
    by_rank = run_ranks(look, 4, "small-gpt", [_plan(graph, **c) for c in choices])
    assert all(found == {} for rank in by_rank[1:] for found in rank)
    for choice, found in zip(choices, by_rank[0], strict=True):
        assert found.keys() == dense.keys()
        loss = next(n for n in reversed(dense) if dense[n].ndim == 1)
        for name in dense.keys() - {loss}:
            value, expected = torch.from_numpy(found[name]), torch.from_numpy(dense[name])
            if expected.shape[0] == 1:  # without samples: once for each part of the batch
                expected = expected.expand_as(value)
            torch.testing.assert_close(
                value,
                expected,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, n=name, c=choice: f"{n} under {c}: {text}",
            )
        # The loss too comes once for each part; these are equally large.
        assert found[loss].mean() == pytest.approx(dense[loss].mean(), rel=1e-10)


def fetch(name: str, plans: list[Plan]) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """Every value of a forward, the same fetched while training on the batch, and its loss."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    found = []
    for plan in plans:
        tiny, module = build(name)
        engine = planner.apply(plan, module)
        names = intermediate_names(engine.graph)
        batch = tiny.batch(SAMPLES)
        looked = engine.intermediates(batch, names)
        loss = engine.step(batch, fetch=names).item()
        fetched = engine.fetched
        engine.step(batch)
        assert engine.fetched == {}
        as_arrays = ({n: v.numpy() for n, v in values.items()} for values in (looked, fetched))
        found.append((*as_arrays, loss))
    torch.set_default_dtype(before)
    return found


def test_values_of_any_stage_are_fetched_in_a_training_step():
    """P22: of stage 0 and of the last with its loss, whether activations are kept or made again."""
    graph = capture("small-gpt", torch.float64)
    choices = [
        {"pp": 2, "dp": 2, "recompute": "selective"},
        {"pp": 2, "tp": 2, "recompute": "full"},
        {"pp": 2, "dp": 2, "zero_stage": 3},
        {"pp": 2, "dp": 2, "schedule": "zb_h1"},
    ]
    by_rank = run_ranks(fetch, 4, "small-gpt", [_plan(graph, **choice) for choice in choices])
    assert all(fetched == {} for rank in by_rank[1:] for _, fetched, _ in rank)
    for choice, (looked, fetched, loss) in zip(choices, by_rank[0], strict=True):
        assert fetched.keys() == looked.keys()
        for name, value in fetched.items():
            np.testing.assert_allclose(
                value, looked[name], rtol=1e-12, atol=1e-14, err_msg=f"{name} {choice}"
            )
        last = next(n for n in reversed(fetched) if fetched[n].ndim == 1)
        assert fetched[last].mean() == pytest.approx(loss, rel=1e-10)


def _plan(graph: Any, **choices: Any) -> Plan:
    size = choices.pop("microbatch_size", 1)
    replicas = choices.get("dp", 1)
    return default_plan(
        graph, microbatch_size=size, num_microbatches=SAMPLES // (size * replicas), **choices
    )


def test_an_unknown_name_is_answered_with_a_known_one():
    """D10."""
    tiny, module = build("small-gpt")
    engine = planner.apply(default_plan(capture("small-gpt")), module)
    with pytest.raises(
        PlanError, match=r"no op or module makes 'layers.0/linaer'; .* layers\.0/linear"
    ):
        engine.intermediates(tiny.batch(2), ["layers.0/linaer"])
