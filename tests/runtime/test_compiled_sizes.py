"""Compiled blocks of each size that batches bring: trainings are those of one process.

Most run the graphs' own ops instead of a compiler's kernels, as in `test_compiled`.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from planner.capture import capture_source
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.promote import (
    ReferenceMode,
    in_fp64,
    promote_graph,
    promote_module,
)
from planner.runtime.stage.compiled.kernels import compiled, op_by_op
from planner.runtime.step import compiling
from planner.runtime.step import engine as engine_module
from planner.runtime.step.engine import Engine
from tests.model_matrix import model_matrix
from tests.runtime import test_buckets
from tests.runtime.beside import OneProcess, adamw, gap_by_tensor, worst
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


def train_beside(name, captured, layouts, compiler, most_sizes=compiling.MOST_SIZES):
    """On a rank, in fp64: by layout, how far from one process it is, and how many compiled programs
    of which sizes it has.
    """
    compiling.MOST_SIZES = most_sizes
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
        plan = plan.model_copy(update={"kernels": "compiled"})
        alone = OneProcess(module, adamw, loss=tiny.loss)
        mesh = build_mesh(plan, torch.device("cpu"))
        engine = Engine(plan, graph, module, mesh, optimizer=adamw(module), compiler=compiler)
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
