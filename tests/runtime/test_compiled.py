"""Compiled blocks train as one process does, with each kind of parallelism and recomputation.

Most run the graphs' own ops instead of a compiler's kernels: what is cut, saved, deferred and made
again is all the same, and a compiler takes half a minute for a model.
"""

import io
from contextlib import redirect_stderr
from functools import partial

import pytest

from planner.capture import capture_source
from planner.errors import PlanError
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.process.environment import KERNELS
from planner.runtime.proofs.dryrun import dry_run
from planner.runtime.proofs.verify import compare_with_one_process
from planner.runtime.stage.compiled.kernels import CompilerFailed, compiled, op_by_op
from planner.runtime.step.engine import Engine
from tests.model_matrix import REFUSED, model_matrix
from tests.runtime.stage.test_graphs import replaying
from tests.runtime.test_verify_matrix import COMPARED, FUNCTIONS, WHOLE, source_of
from tests.spawn import run_ranks

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2-zb_h1": {"pp": 2, "schedule": "zb_h1"},
    "dp2-zero3-recompute": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "tp2-selective": {"tp": 2, "recompute": "selective"},
}
MORE = {
    "pp2-recompute": {"pp": 2, "recompute": "full"},
    "pp2-zb_h1-selective": {"pp": 2, "schedule": "zb_h1", "recompute": "selective"},
    "dp2-zero3-selective": {"dp": 2, "zero_stage": 3, "recompute": "selective"},
    "dp2-zero1": {"dp": 2, "zero_stage": 1},
    "tp2-recompute": {"tp": 2, "recompute": "full"},
}
CHUNKED = {
    "tp2-selective": {"tp": 2, "recompute": "selective", "logit_rows": 7},
    "tp2-beside": {"tp": 2, "num_microbatches": 2, "overlap": "input-gradients", "logit_rows": 7},
    "pp2-zb_h1": {"pp": 2, "schedule": "zb_h1", "logit_rows": 7},
    "dp2-zero3-recompute": {"dp": 2, "zero_stage": 3, "recompute": "full", "logit_rows": 7},
}
MODELS = ("gpt", "hf-llama", "vit", "hf-mixtral")


def verify_layouts(name, captured, layouts, compiler, capture=None):
    """On each rank: verify a model under each layout; rank 0 returns what is too far apart."""
    graph = from_json(captured)
    apart, counts = {}, {}
    for label, layout in layouts.items():
        choices = {key: layout[key] for key in ("logit_rows", "overlap") if key in layout}
        sizes = {key: value for key, value in layout.items() if key not in choices}
        plan = default_plan(graph, microbatch_size=2, **sizes)
        choices["kernels"] = "graphs" if capture else "compiled"
        choices["accept"] = ("unknown-ops",) if name in FUNCTIONS else ()
        plan = plan.model_copy(update=choices)
        made = []

        def counting(module, made=made):
            made.append(module)
            return compiler(module)

        report = compare_with_one_process(
            plan,
            source_of(name),
            steps=2,
            graph=graph,
            make_engine=partial(Engine, compiler=counting, capture=capture),
        )
        counts[label] = len(made)
        if capture and report is not None:
            assert any("blocks were run compiled" in note for note in report.notes)
        if report is not None and not report.passed:
            apart[label] = str(report)
    return apart, counts


def check(name, layouts, compiler=op_by_op, capture=None):
    if model_matrix()[name].needs_transformers:
        pytest.importorskip("transformers")
    captured = to_json(capture_source(source_of(name)))
    apart, counts = run_ranks(verify_layouts, 2, name, captured, layouts, compiler, capture)[0]
    assert not apart, f"apart by more than rounding: {apart}"
    return counts


def test_graphs_equal_one_process():
    counts = check("gpt", LAYOUTS)
    # Embeddings, layers and head are a class each; each has a forward and a backward.
    assert counts["dp2"] == 6
    assert counts["pp2-zb_h1"] == 4
    # (Rows of a cut table are exchanged by the batch, which stays eager.)
    assert counts["tp2-selective"] == 4


def test_graphs_with_logits_in_chunks_equal_one_process():
    """With whole and divided vocabularies: the head has a graph as the others have; and with weight
    gradients beside collectives, of which a layer has two.
    """
    counts = check("gpt", CHUNKED)
    pieces = counts.pop("tp2-beside")
    assert counts == {"tp2-selective": 4, "pp2-zb_h1": 4, "dp2-zero3-recompute": 6}
    assert pieces > counts["tp2-selective"] + 1


def test_graphs_of_a_device_equal_one_process():
    """With what stands for CUDA's on a CPU; blocks on tp exchange values, and have none."""
    labels = ("dp2", "tp2", "pp2-zb_h1-selective", "pp2-recompute")
    layouts = LAYOUTS | MORE
    check("gpt", {label: layouts[label] for label in labels}, capture=replaying)


@pytest.mark.parametrize("label", ["dp2", "pp2-recompute"])
def test_a_dry_run_finds_what_is_saved_as_ever(label):
    """Between jobs to the byte; inside a backward output gradients of products stay to its end."""
    source = source_of("gpt")
    graph = capture_source(source)
    plan = default_plan(graph, microbatch_size=8, **(LAYOUTS | MORE)[label])
    eager, found = (
        dry_run(plan.model_copy(update={"kernels": kernels}), graph, source.build)
        for kernels in ("eager", "compiled")
    )
    assert found.rest_bytes == eager.rest_bytes
    assert [s.end_bytes for s in found.samples] == [s.end_bytes for s in eager.samples]
    assert found.peak_bytes == pytest.approx(eager.peak_bytes, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in model_matrix() if n in MODELS and n != "gpt"])
def test_graphs_of_more_models_equal_one_process(name):
    check(name, LAYOUTS | MORE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in model_matrix() if n not in {*MODELS, *REFUSED}])
def test_graphs_of_the_matrix_equal_one_process(name):
    layouts = LAYOUTS | MORE
    labels = ("tp2-selective", "pp2-zb_h1-selective")
    check(name, WHOLE if name in COMPARED else {label: layouts[label] for label in labels})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compiler_equals_one_process(name):
    names = ("dp2", "dp2-zero3-recompute") if name == "vit" else ("tp2", "pp2-zb_h1-selective")
    layouts = LAYOUTS | MORE
    check(name, {label: layouts[label] for label in names}, compiled)


def failing(module):
    raise CompilerFailed("InvalidCxxCompiler: no compiler")


def train_without_a_compiler(captured, kernels):
    """On a rank: what is told while a model is verified whose compiler fails, and if it passed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as told:
        if kernels is not None:
            patch.setenv(KERNELS, kernels)
        plan = default_plan(from_json(captured), microbatch_size=2)
        plan = plan.model_copy(update={"kernels": "compiled"})
        try:
            report = compare_with_one_process(
                plan,
                source_of("mlp"),
                steps=1,
                graph=from_json(captured),
                make_engine=partial(Engine, compiler=failing),
            )
        except PlanError as error:
            return str(error), False
    return told.getvalue(), report.passed


def test_a_failing_compiler_leaves_blocks_eager_unless_compiled_ones_are_asked_for():
    captured = to_json(capture_source(source_of("mlp")))
    told, passed = run_ranks(train_without_a_compiler, 1, captured, None)[0]
    assert passed
    assert told == (
        "planner: eager kernels run in fc1, fc2, fc3 (InvalidCxxCompiler: no compiler)\n"
    )
    told, passed = run_ranks(train_without_a_compiler, 1, captured, "compiled")[0]
    assert not passed
    assert told == (
        "compiled `kernels` were asked for, and the compiler fails here: InvalidCxxCompiler: no "
        "compiler; install what it lacks, or launch with eager `kernels`"
    )
