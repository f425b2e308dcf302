"""D10, P22: any value inside a model in training can be looked at whole, on any stage."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.step.intermediates import intermediate_names
from tests.captures import capture_module
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


class Attention(nn.Module):
    """Returns a tuple, of which others use one part or both."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        y = self.up(x).tanh()
        return y, {"norm": y.square().mean(-1), "unused": y.exp()}


class Layer(nn.Module):
    """Its own last op is not what it returns."""

    def __init__(self, *, uses_both: bool) -> None:
        super().__init__()
        self.attention, self.down, self.uses_both = Attention(), nn.Linear(4, 4), uses_both
        self.rest = nn.Identity()

    def forward(self, x):
        y, more = self.attention(x)
        if self.uses_both:
            y = y * more["norm"].unsqueeze(-1)
        return self.down(self.rest(y) + x)


class Containers(nn.Module):
    """Lists and sequences of layers, one of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(uses_both=False), Layer(uses_both=True)])
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5))
        self.head, self.loss = nn.Linear(4, 2), nn.MSELoss()

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        x = self.tail(x)
        return self.loss(self.head(x), x[:, :2])


CONTAINED = ("layers.0", "layers.1", "layers.0.attention", "layers.0.attention.up", "tail", "head")


def containers(size: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, 4, generator=generator, dtype=torch.float64),)


def fetch_modules(plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What modules returned in an evaluation and a step, and why others are refused."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    engine = planner.apply(plan, Containers())
    batch = containers(SAMPLES)
    engine.evaluate(batch, fetch=CONTAINED)
    found = dict(engine.fetched)
    engine.step(batch, fetch=("layers.1", "loss"))
    found |= {f"{name} in training": value for name, value in engine.fetched.items()}
    refused = {}
    for name in ("layers", "layers.1.attention", "layers.1.rest", "layers.2", "tial"):
        with pytest.raises(PlanError) as caught:
            engine.step(batch, fetch=[name])
        refused[name] = str(caught.value)
    return found, refused


def test_what_a_module_with_parts_returned_is_fetched_or_refused_by_name():
    torch.set_default_dtype(torch.float64)
    graph = capture_module(Containers(), containers(2), containers(3), name="containers")
    torch.manual_seed(0)
    alone, expected = Containers().eval(), {}
    for name, part in alone.named_modules():
        part.register_forward_hook(
            lambda _, __, out, name=name: expected.__setitem__(name, out)  # the last call's
        )
    alone(*containers(SAMPLES))
    plans = [_plan(graph, dp=2, microbatch_size=2), _plan(graph, pp=2, microbatch_size=2)]
    for plan in plans:
        found, refused = run_ranks(fetch_modules, 2, plan)[0]
        for name in CONTAINED:
            value = expected[name][0] if name.endswith("attention") else expected[name]
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found["layers.1 in training"], expected["layers.1"])
        assert found["loss in training"].shape == (plan.num_microbatches * plan.degrees["dp"],)
        assert (
            "layers is a ModuleList, which is not called and returns nothing" in refused["layers"]
        )
        assert refused["layers"].endswith("such as layers.1")
        told = refused["layers.1.attention"]
        assert re.search(r"\(a Attention\) makes 2 tensors that others use.*: \S+, \S+$", told)
        assert "layers.1.rest (a Identity) makes nothing on the way" in refused["layers.1.rest"]
        for name in ("layers.2", "tial"):
            assert f"no op or module makes {name!r}" in refused[name]


def test_an_unknown_name_is_answered_with_a_known_one():
    """D10."""
    tiny, module = build("small-gpt")
    engine = planner.apply(default_plan(capture("small-gpt")), module)
    with pytest.raises(
        PlanError, match=r"no op or module makes 'layers.0/linaer'; .* layers\.0/linear"
    ):
        engine.intermediates(tiny.batch(2), ["layers.0/linaer"])
