"""Compiled blocks of each size that batches bring: trainings are those of one process.

Most run the graphs' own ops instead of a compiler's kernels, as in `test_compiled`.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from contextlib import nullcontext, redirect_stderr

import pytest
import torch

from planner.capture import capture_source
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.process.watchdog import STALL_S
from planner.runtime.proofs.promote import (
    ReferenceMode,
    in_fp64,
    promote_graph,
    promote_module,
)
from planner.runtime.stage.compiled.kernels import CompilerFailed, compiled, op_by_op
from planner.runtime.step import compiling
from planner.runtime.step import engine as engine_module
from planner.runtime.step.engine import Engine
from tests.builders import HIDDEN, SEQUENCE
from tests.model_matrix import model_matrix
from tests.runtime import test_buckets
from tests.runtime.beside import OneProcess, adamw, gap_by_tensor, worst
from tests.runtime.stage.test_graphs import replaying
from tests.runtime.test_compiled import failing
from tests.runtime.test_verify_matrix import source_of
from tests.spawn import run_ranks

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2-zb_h1": {"pp": 2, "schedule": "zb_h1"},
    "dp2-zero3-full": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "tp2-selective": {"tp": 2, "recompute": "selective"},
    "pp2-zb_h1-selective": {"pp": 2, "schedule": "zb_h1", "recompute": "selective"},
    "pp2-full": {"pp": 2, "recompute": "full"},
    "dp2-selective": {"dp": 2, "recompute": "selective"},
}
QUICK = ("dp2", "pp2-zb_h1-selective")
MODELS = ("gpt", "hf-llama", "vit", "hf-mixtral")


def steps_of(most: int, least: int) -> list[tuple[int, ...]]:
    """Numbers of samples of the batches of updates: several are added up for one."""
    return [(most,), (most - 1,), (least,), (most,), (least + 2, most - 3), (most - 1,)]


def train_beside(name, captured, layouts, compiler, capture=None):
    """On a rank, in fp64: by layout, how far from one process it is, and how many compiled programs
    of which sizes it has.
    """
    tiny, graph = model_matrix()[name], promote_graph(from_json(captured))
    found = {}

    def batch_of(size, seed):
        torch.manual_seed(seed)
        return {key: in_fp64(value) for key, value in tiny.batch(size).items()}

    for label, layout in layouts.items():
        torch.manual_seed(0)
        module = tiny.build()
        promote_module(module)
        plan = default_plan(graph, microbatch_size=3, num_microbatches=2, **layout)
        plan = plan.model_copy(update={"kernels": "graphs" if capture else "compiled"})
        alone = OneProcess(module, adamw, loss=tiny.loss)
        mesh = build_mesh(plan, torch.device("cpu"))
        engine = Engine(
            plan,
            graph,
            module,
            mesh,
            optimizer=adamw(module),
            compiler=compiler,
            capture=capture,
        )
        gaps = []
        # (Sequences that tp cuts by samples take a few at least.)
        least = plan.least_batch * (2 if plan.tp > 1 else 1)
        for number, sizes in enumerate(steps_of(plan.global_batch, least)):
            batches = [batch_of(size, 10 * number + at) for at, size in enumerate(sizes)]
            engine.evaluate(batch_of(plan.global_batch - 2, number))
            losses = [engine.step(each, update=each is batches[-1]).item() for each in batches]
            if mesh.global_rank == 0:
                with ReferenceMode():
                    expected = alone.update(batches, [size / sum(sizes) for size in sizes])
                gaps += [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
            gradients = engine.full_gradients()
            gaps.append(gap_by_tensor(gradients, alone.gradients() if gradients else {}))
        state = engine.full_state_dict()
        gaps.append(gap_by_tensor(state, alone.parameters()) if state else 0.0)
        sizes = Counter(size.num_samples for _, size, _ in engine._programs._compiled)
        found[label] = worst(gaps), dict(sizes)
        engine.close()
    return found


def check(name, labels, compiler=op_by_op, *options):
    if model_matrix()[name].needs_transformers:
        pytest.importorskip("transformers")
    layouts = {label: LAYOUTS[label] for label in labels}
    captured = to_json(capture_source(source_of(name)))
    made = run_ranks(train_beside, 2, name, captured, layouts, compiler, *options)
    for label in labels:
        gap = max(found[label][0] for found in made)
        assert gap < 1e-9, f"{name} {label}: {gap}"
    return made


def test_batches_of_any_size_train_as_one_process():
    """Sizes that come again are compiled, on the ranks that have them."""
    first, second = check("gpt", QUICK)
    forms = {"dp2": 3, "pp2-zb_h1-selective": 2}
    for label, count in forms.items():
        assert first[label][1] == {3: count, 2: count, 1: count}
    # Of 4, 6, 9 and 11 samples in 2 microbatches: 1 1 | 1 1, 1 2 | 1 2, 2 2 | 2 3, 2 3 | 3 3.
    assert second["dp2"][1] == {3: 3, 2: 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_batches_of_any_size_train_as_one_process_under_more_layouts(name):
    check(name, [label for label in LAYOUTS if name != "gpt" or label not in QUICK])


@pytest.mark.slow
def test_graphs_of_any_size_train_as_one_process():
    check("gpt", ("dp2", "pp2-zb_h1-selective", "pp2-full"), op_by_op, replaying)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_any_size_train_as_one_process(name):
    labels = {
        "gpt": ("dp2", "pp2-zb_h1-selective"),
        "hf-llama": ("tp2-selective",),
        "vit": ("dp2-zero3-full",),
        "hf-mixtral": ("pp2-zb_h1",),
    }
    check(name, labels[name], compiled)


def gap_of_lengths(plan):
    """On a rank: how far from one process batches of several shapes are, and evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "compiled", op_by_op)
        torch.set_default_dtype(torch.float64)
        return test_buckets._gap_of(test_buckets.Case("gpt", plan, 2 * ((4, 8), (3, 2), (8, 8))))


def test_batches_of_each_shape_have_programs_of_their_own():
    """Evaluations, too, which run op by op."""
    plan = test_buckets.plan_of("gpt", dp=2, num_microbatches=2, microbatch_size=2)
    plan = plan.model_copy(update={"kernels": "compiled"})
    assert run_ranks(gap_of_lengths, 2, plan)[0] < 1e-9


def engine_of(graph, plan, compiler, **options):
    torch.manual_seed(0)
    module = model_matrix()["gpt"].build()
    plan = plan.model_copy(update={"kernels": "compiled"})
    mesh = build_mesh(plan, torch.device("cpu"))
    return Engine(plan, graph, module, mesh, optimizer=adamw(module), compiler=compiler, **options)


def batches(sizes):
    for number, size in enumerate(sizes):
        torch.manual_seed(number)
        yield model_matrix()["gpt"].batch(size)


def resumed(captured, folder):
    """On a rank: the last losses of a training in a row, of one that goes on from the middle of it,
    and of an engine that goes back there; and which sizes each has compiled.
    """
    graph = from_json(captured)
    plan = default_plan(graph, microbatch_size=4, num_microbatches=1, dp=2)
    given = list(batches((8, 5, 7, 5, 3, 7, 3, 5, 2, 8)))
    found = []

    def finish(engine):
        losses = [engine.step(batch).item() for batch in given[6:]]
        found.append((losses, engine._compiled.state_dict()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "MOST_SIZES", 2)
        engine = engine_of(graph, plan, compiled)
        for batch in given[:6]:
            engine.step(batch)
        engine.save(folder)
        finish(engine)
        engine.load(folder)
        finish(engine)
        engine.close()
        engine = engine_of(graph, plan, compiled)
        engine.load(folder)
        finish(engine)
        # (Another plan has sizes of its own.)
        other = engine_of(graph, default_plan(graph, microbatch_size=4, dp=2), compiled)
        other.load(folder)
        assert other._compiled.state_dict()["compiled"] == []
        for each in (engine, other):
            each.close()
    return found


def met_in_contexts(captured):
    """On a rank: losses of sizes that are met in contexts of a script, and which are compiled."""
    graph = from_json(captured)
    plan = default_plan(graph, microbatch_size=4, num_microbatches=1)
    found = []
    for compiler, contexts in (
        (failing, nullcontext),
        (op_by_op, torch.autograd.detect_anomaly),
        (op_by_op, torch.profiler.profile),
        (op_by_op, torch.autograd.graph.save_on_cpu),
    ):
        engine = engine_of(graph, plan, compiler)
        with contexts():
            losses = [engine.step(batch).item() for batch in batches((3, 3, 1, 1))]
        sizes = {size.num_samples for _, size, _ in engine._programs._compiled}
        found.append((losses, sizes))
        engine.close()
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_size_may_be_met_in_any_context():
    captured = to_json(capture_source(source_of("gpt")))
    (eager, none), *others = run_ranks(met_in_contexts, 1, captured)[0]
    assert none == set()
    assert [losses for losses, _ in others] == 3 * [eager]
    assert [sizes for _, sizes in others] == 3 * [{1, 3, 4}]


@pytest.mark.slow
def test_a_training_that_goes_on_runs_the_same_kernels(tmp_path):
    """To the last bit, though sizes that were met before are among those that may be compiled."""
    captured = to_json(capture_source(source_of("gpt")))
    for whole, *others in run_ranks(resumed, 2, captured, tmp_path):
        assert [size[1] for _, size in whole[1]["compiled"]] == [3, 2], "of 5: 2 3, of 7: 3 4"
        for other in others:
            assert other == whole


def slow_on_one(captured):
    """On a rank: what is told while rank 1 takes long to compile, which rank 0 waits for."""
    graph = from_json(captured)
    plan = default_plan(graph, microbatch_size=4, num_microbatches=1, dp=2)

    def slowly(module):
        if torch.distributed.get_rank():
            time.sleep(4)
        return op_by_op(module)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as told:
        patch.setenv(STALL_S, "2")
        engine = engine_of(graph, plan, slowly)
        for batch in batches((8, 7, 5, 5)):
            engine.step(batch)
        engine.close()
    return told.getvalue()


@pytest.mark.slow
def test_ranks_wait_for_those_that_compile():
    """For longer than an operation of theirs may take, and no watchdog calls it a stall."""
    captured = to_json(capture_source(source_of("gpt")))
    first, second = run_ranks(slow_on_one, 2, captured, timeout_s=16)
    assert second == ""
    # (Of 7 samples they have 3 and 4, of 5 they have 2 and 3.)
    sizes = ("", " for microbatches of 3 samples a rank")
    assert first.splitlines() == [
        f"planner: compiling blocks{size}, {number} of 3: {name}"
        for size in sizes
        for number, name in ((2, "norm"), (3, "token"))
    ]


def failing_on_one(captured):
    """On a rank: losses, which sizes of which classes are compiled and what is told, where rank 1
    fails at layers of one size.
    """
    graph = from_json(captured)
    plan = default_plan(graph, microbatch_size=4, num_microbatches=1, dp=2)

    def compiler(module):
        shapes = [tuple(n.meta["val"].shape) for n in module.graph.nodes if n.op == "placeholder"]
        is_layer = (3, SEQUENCE, HIDDEN) in shapes and shapes.count((HIDDEN, HIDDEN)) > 3
        if torch.distributed.get_rank() and is_layer:
            raise CompilerFailed("no")
        return op_by_op(module)

    engine = engine_of(graph, plan, compiler)
    with redirect_stderr(io.StringIO()) as told:
        losses = [engine.step(batch).item() for batch in batches((8, 5, 5, 6, 6))]
    found = {(graph.classes[at].name, s.num_samples) for at, s, _ in engine._programs._compiled}
    engine.close()
    return losses, sorted(found), told.getvalue()


def test_what_a_rank_fails_at_runs_op_by_op_on_all():
    captured = to_json(capture_source(source_of("gpt")))
    first, second = run_ranks(failing_on_one, 2, captured)
    assert first[0] == second[0]
    # Of 5 samples they have 2 and 3, which are compiled together or not at all.
    classes = {"token": (2, 3, 4), "layers.*": (4,), "norm": (2, 3, 4)}
    others = {"token": (3, 4), "layers.*": (4,), "norm": (3, 4)}
    for (_, found, _), expected in zip((first, second), (classes, others), strict=True):
        assert found == sorted((name, size) for name, sizes in expected.items() for size in sizes)
    assert second[2] == ""
    assert first[2] == (
        "planner: eager kernels run in layers.* (no), in microbatches of 2 and 3 samples a rank\n"
    )
