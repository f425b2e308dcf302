"""`verify` passes for right plans and fails for each deliberate fault.

Item 7 of the walking skeleton: HF GPT-2 (tied embeddings) and HF Llama, unmodified, fp64
in spite of the casts written into them.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commands.render.checks import describe_verification
from planner.capture.source.model_file import ModelSource
from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.proofs import verify
from planner.runtime.proofs.one_process import build_with_values
from planner.runtime.proofs.promote import has_dropout, promote_graph
from planner.runtime.proofs.verify import (
    KINDS,
    VerifyReport,
    check_memory,
    compare_with_one_process,
    report_from_json,
)
from planner.runtime.step.engine import Engine
from tests.captures import capture_tiny
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
        for buckets in self.state.trained._all_buckets():
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


def compare_without_values(name: str, plan: Plan) -> VerifyReport | None:
    """The model is built on the meta device, as if its weights came from files."""

    def build() -> Any:
        with torch.device("meta"):
            return models()[name].build()

    source = replace(_source(name), build=build)
    first, again = (build_with_values(source) for _ in range(2))
    for ours, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, other)
    assert first.head.weight is first.token.weight
    return compare_with_one_process(plan, source, steps=2)


def test_a_model_without_values_is_verified_on_others():
    """Two ranks, a tied parameter: both sides have the same values, and it stays tied."""
    plan = default_plan(capture("tied-gpt"), tp=2)
    report = run_ranks(compare_without_values, 2, "tied-gpt", plan)[0]
    assert report.passed
    assert report.steps == 2


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


def _judge(
    found: dict[str, float],
    expected: dict[str, float],
    *others: dict[str, float],
    kind: str = "gradient",
) -> VerifyReport:
    """The report on one step whose only tensors are these numbers."""
    nothing: dict[str, Any] = {each: {} for each in KINDS}

    def step(values: dict[str, float]) -> dict[str, Any]:
        tensors = {n: torch.tensor([v], dtype=torch.float64) for n, v in values.items()}
        return nothing | {"loss": {"loss": torch.tensor(1.0)}, kind: tensors}

    report = VerifyReport(num_ranks=2, tolerance=verify.TOLERANCE, notes=())
    return report.after_step(step(found), step(expected), [step(o) for o in others or (expected,)])


def test_a_nan_fails():
    report = _judge({"a": float("nan"), "b": 2.0}, {"a": 1.0, "b": 1.0})
    assert report.gradient.name == "a"
    assert not report.passed
    assert not _judge({"a": float("nan")}, {"a": float("nan")}).passed


def test_a_missing_tensor_fails():
    report = _judge({}, {"a": 1.0}, kind="parameter")
    assert (report.parameter.name, report.parameter.relative) == ("a (missing)", float("inf"))
    assert not report.passed


def test_a_missing_gradient_is_zero():
    """N3: a parameter the forward does not use has none on one side, zeros on the other."""
    assert _judge({}, {"a": 0.0, "b": 0.0}).passed
    assert not _judge({}, {"a": 1e-6}).passed


def test_equal_infinities_are_no_difference():
    """A mask of minus infinity, kept in a buffer."""
    mask = {"mask": float("-inf"), "mean": 1.0}
    assert _judge(mask, mask, kind="buffer").passed
    assert not _judge(mask | {"mask": 0.0}, mask, kind="buffer").passed


def test_what_exceeds_its_measured_rounding_by_far_fails():
    """N3, X13: the same difference passes in a tensor whose rounding was measured as large."""
    expected = {"head": 1.0, "key": 1e-17, "small": 1e-6}
    wrong = expected | {"small": 1e-6 + 1e-12}
    assert not _judge(wrong, expected, expected | {"key": -1e-17}).passed
    assert _judge(wrong, expected, expected | {"small": 1e-6 + 1e-14}).passed
    rounded = expected | {"key": -3e-17}
    assert _judge(rounded, expected, expected | {"key": 2e-17}).passed
    report = _judge(expected | {"key": 1e-12}, expected, expected | {"key": 2e-17})
    assert not report.passed
    assert report.gradient.name == "key"


def test_what_two_runs_agree_on_by_chance_still_rounds():
    """A difference of one rounding of the largest gradient is none."""
    expected = {"head": 1.0, "bias": 0.0}
    assert _judge(expected | {"bias": 2e-16}, expected).passed
    assert not _judge(expected | {"bias": 1e-15}, expected).passed


def test_rounding_beyond_the_tolerance_excuses_nothing():
    """N3: a reference that comes apart from itself by more than rounding does proves nothing."""
    expected = {"a": 1.0}
    report = _judge({"a": 1 + 1e-6}, expected, {"a": 1 + 1e-5})
    assert not report.passed
    assert report.is_undecided
    assert "undecided: a differs by 1.00e-06" in _shown(report)
    assert not _judge({"a": 1 + 1e-4}, expected, {"a": 1 + 1e-5}).is_undecided


def _shown(report: VerifyReport) -> str:
    console = Console(width=120, file=StringIO())
    console.print(*describe_verification(report))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_shows_the_rounding_beside_each_difference():
    report = _judge({"a": 1.0, "b": 1e-6}, {"a": 1.0, "b": 1.1e-6})
    text = _shown(report)
    assert re.search(r"gradient +1\.00e-07 +2\.22e-19 +4\.5e\+11 +0 +b", text)
    assert "NOT the same as one process: b differs by 1.00e-07" in text
    assert "buffer" not in text.split("difference: the worst")[0]
    assert report_from_json(json.loads(json.dumps(asdict(report)))) == report


def test_the_graph_neither_rounds_nor_drops():
    pytest.importorskip("transformers")
    graph = capture("hf-llama")
    assert any("float32" in repr(op) for c in graph.classes for op in c.ops)
    promoted = promote_graph(graph)
    assert "float32" not in repr(promoted.classes)
    assert not has_dropout(graph)


def test_a_model_too_large_for_this_machine_is_refused_before_any_rank_starts():
    """Weights and gradients in fp64, in the one process and in all ranks together: 32 bytes."""
    graph = capture_tiny("mlp")
    count = sum(tensor.numel_at(1) for tensor in graph.tensors if tensor.kind == "param")
    check_memory(graph, "cpu", 32 * count)
    with pytest.raises(PlanError, match=r"parameters take .* in fp64 .* with `by_block`"):
        check_memory(graph, "cpu", 32 * count - 1)
