"""`verify` passes for right plans and fails for each deliberate fault.

Item 7 of the walking skeleton: HF GPT-2 (tied embeddings) and HF Llama, unmodified, fp64
in spite of the casts written into them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.graph import ModelGraph
from planner.model_file import ModelSource
from planner.plan import Plan
from planner.plan_defaults import default_plan
from planner.runtime import verify
from planner.runtime.engine import Engine
from planner.runtime.promote import ReferenceMode, has_dropout, promote_graph
from planner.runtime.verify import VerifyReport, compare_with_one_process
from tests.runtime.scenarios import capture, models
from tests.spawn import run_ranks


def _source(name: str) -> ModelSource:
    tiny = models()[name]
    return ModelSource(
        path=Path(name), build=tiny.build, batch=tiny.batch, loss=tiny.loss, dependencies=()
    )


class SkippedReduce(Engine):
    """The dp ranks do not add their gradients up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for buckets in self._trained._buckets.values():
            buckets.start = lambda: None


def with_a_layer_dropped(plan: Plan, graph: ModelGraph, *args: Any, **kwargs: Any) -> Engine:
    """The second layer reads what the first one read, so the first has no effect."""
    first, second = graph.blocks[1], graph.blocks[2]
    blocks = list(graph.blocks)
    blocks[2] = replace(second, inputs=first.inputs)
    return Engine(plan, replace(graph, blocks=tuple(blocks)), *args, **kwargs)


class SwappedLabels(Engine):
    """Microbatches 0 and 1 get each other's labels."""

    def _feed(self, batch: Any) -> Any:
        labels = batch["labels"].clone()
        size = self.plan.microbatch_size
        labels[:size], labels[size : 2 * size] = (
            batch["labels"][size : 2 * size],
            batch["labels"][:size],
        )
        return super()._feed({**batch, "labels": labels})


def compare_many(cases: list[tuple[str, Plan, Any]]) -> list[VerifyReport | None]:
    return [
        compare_with_one_process(plan, _source(name), steps=2, make_engine=make)
        for name, plan, make in cases
    ]


def _reports(world_size: int, cases: list[tuple[str, dict[str, Any], Any]]) -> list[VerifyReport]:
    plans = [(name, default_plan(capture(name), **c), make) for name, c, make in cases]
    return run_ranks(compare_many, world_size, plans)[0]


def test_deliberate_faults_are_found():
    """X13: each fault alone makes verify fail, and the plan without it passes."""
    cases: list[tuple[str, dict[str, Any], Any]] = [
        ("gpt", {"dp": 2}, Engine),
        ("gpt", {"dp": 2}, SkippedReduce),
        ("gpt", {"pp": 2}, with_a_layer_dropped),
        ("gpt", {"pp": 2}, SwappedLabels),
    ]
    right, skipped, dropped, swapped = _reports(2, cases)
    assert right.passed
    assert not skipped.passed
    assert skipped.gradient.relative > 1e-3
    assert not dropped.passed
    assert dropped.loss.relative > 1e-6
    assert not swapped.passed
    assert swapped.loss.relative > 1e-6


@pytest.mark.slow  # the quick tests have these models in test_verify_matrix
def test_hugging_face_models_on_two_ranks():
    """Tied embeddings on both ends of a pipeline, grouped-query heads over tp."""
    pytest.importorskip("transformers")
    choices = [{"dp": 2}, {"tp": 2}, {"pp": 2}]
    cases = [(name, c, Engine) for name in ("hf-gpt2", "hf-llama") for c in choices]
    for (name, chosen, _), report in zip(cases, _reports(2, cases), strict=True):
        assert report.passed, f"{name} {chosen}: {report}"


@pytest.mark.slow  # the quick tests have these models in test_verify_matrix
def test_hugging_face_models_on_four_ranks():
    pytest.importorskip("transformers")
    choices = [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}]
    cases = [(name, c, Engine) for name in ("hf-gpt2", "hf-llama") for c in choices]
    for (name, chosen, _), report in zip(cases, _reports(4, cases), strict=True):
        assert report.passed, f"{name} {chosen}: {report}"


def test_a_nan_fails():
    gap = verify._difference({"a": float("nan")}, {"a": 1.0}, 0)
    assert gap.name == "a"
    assert not gap.relative <= 1e-9


def test_a_missing_tensor_fails():
    assert verify._difference({}, {"a": 1.0}, 0).relative == float("inf")


def test_a_layer_with_tiny_gradients_is_compared_like_any_other():
    """X13: what counts as rounding is judged within a layer, not against the largest of all."""
    sizes = {"head.weight": 1.0, "layers.0.weight": 1e-8, "layers.0.bias": 1e-8}
    wrong = sizes | {"layers.0.bias": 1e-8 * (1 + 1e-7)}
    found = verify._difference(wrong, sizes, 0)
    assert (found.name, found.relative) == ("layers.0.bias", pytest.approx(1e-7))


def test_terms_that_cancel_are_not_a_difference():
    """X13: a sum that is zero but for rounding passes; one rounding is 2.2e-16 of its terms."""
    expected = {"a.weight": 3.0, "a.bias": 2e-15, "b.weight": 1.0, "b.bias": 1.0}
    assert verify._difference(expected | {"a.bias": -2e-15}, expected, 0).relative < 1e-10
    assert verify._difference(expected | {"a.bias": 2e-12}, expected, 0).relative > 1e-9


def test_a_module_of_nothing_but_rounding_is_no_measure():
    """X13: keys of one position have no gradient; what is left of it is rounding of its terms."""
    expected = {"layer.k.weight": 4e-17, "layer.k.bias": 2e-17, "layer.v.weight": 0.9}
    assert verify._difference(expected | {"layer.k.bias": -2e-17}, expected, 0).relative < 1e-10
    assert verify._difference(expected | {"layer.k.bias": 1e-12}, expected, 0).relative > 1e-9


class Casting(nn.Module):
    """What real models do: upcast inside, and drop out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x.to(torch.bfloat16), -1, dtype=torch.float32)
        y = y + torch.arange(4, dtype=torch.float32) + x.float() + x.half()
        return nn.functional.dropout(y, 0.5, training=True)


def test_the_reference_neither_rounds_nor_drops():
    x = torch.randn(3, 4, dtype=torch.float64)
    with ReferenceMode():
        y = Casting()(x)
    assert y.dtype == torch.float64
    expected = torch.softmax(x, -1) + torch.arange(4) + x + x
    torch.testing.assert_close(y, expected, rtol=1e-15, atol=0)


def test_the_graph_neither_rounds_nor_drops():
    pytest.importorskip("transformers")
    graph = capture("hf-llama")
    assert any("float32" in repr(op) for c in graph.classes for op in c.ops)
    promoted = promote_graph(graph)
    assert "float32" not in repr(promoted.classes)
    assert not has_dropout(graph)
