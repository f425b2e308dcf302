"""N5: `verify` over models × layouts: each computes in fp64 what its unmodified module computes.

Every model runs under dp, tp and pp on two ranks; the three that newcomers try first on
four ranks as well. The rest of the matrix is marked slow: `make test-slow`.
"""

from pathlib import Path

import pytest

from planner.capture import capture_source
from planner.capture.source.model_file import ModelSource
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.verify import compare_with_one_process
from tests.builders import telling_first, tiny_models
from tests.model_matrix import REFUSED, model_matrix
from tests.spawn import run_ranks

TWO_RANKS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}
FOUR_RANKS = {
    "dp2-tp2": {"dp": 2, "tp": 2},
    "dp2-pp2": {"dp": 2, "pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
}
TWO_RANKS_MORE = {
    "dp2-zero1": {"dp": 2, "zero_stage": 1},
    "dp2-zero2": {"dp": 2, "zero_stage": 2},
    "dp2-zero3-recompute": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "tp2-recompute": {"tp": 2, "recompute": "full"},
    "pp2-fthenb": {"pp": 2, "schedule": "fthenb", "recompute": "full"},
    "pp2-zb_h1": {"pp": 2, "schedule": "zb_h1"},
    "tp2-selective": {"tp": 2, "recompute": "selective"},
    "pp2-zb_h1-selective": {"pp": 2, "schedule": "zb_h1", "recompute": "selective"},
    "dp2-zero3-selective": {"dp": 2, "zero_stage": 3, "recompute": "selective"},
}
FOUR_RANKS_MORE = {
    "dp2-tp2-zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
    "dp2-tp2-zero3": {"dp": 2, "tp": 2, "zero_stage": 3},
    "dp2-pp2-zero3": {"dp": 2, "pp": 2, "zero_stage": 3},
    "tp2-pp2-recompute": {"tp": 2, "pp": 2, "recompute": "full"},
    "dp4": {"dp": 4},
    "tp4": {"tp": 4},
}
VIRTUAL = {
    "pp2-vpp2": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "pp2-fold": {"pp": 2, "vpp": 2, "schedule": "fold_all_in_all_out"},
    "pp2-zb_v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
}
CONTEXT = {
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp2-dp2-zero3": {"cp": 2, "dp": 2, "zero_stage": 3},
    "cp2-pp2": {"cp": 2, "pp": 2},
    "cp4": {"cp": 4},
}
OWN_MESHES = {
    "tp2-then-dp2": {"tp": 2, "pp": 2, "by_stage": {"tp": (2, 1)}},
    "dp2-then-tp2": {"tp": 2, "pp": 2, "by_stage": {"tp": (1, 2)}},
    "dp2-then-tp2-zero3": {"dp": 2, "pp": 2, "by_stage": {"tp": (1, 2)}, "zero_stage": 3},
}
EXPERTS_ON_TWO = {
    "ep2": {"dp": 2, "ep": 2},
    "ep2-zero1-recompute": {"dp": 2, "ep": 2, "zero_stage": 1, "recompute": "full"},
}
EXPERTS_ON_FOUR = {
    "dp4-ep2-zero3": {"dp": 4, "ep": 2, "zero_stage": 3},
    "tp2-ep2": {"dp": 2, "tp": 2, "ep": 2},
    "cp2-ep4": {"dp": 2, "cp": 2, "ep": 4},
    "pp2-ep2": {"dp": 2, "pp": 2, "ep": 2},
}
ROUTED = (
    *("hf-qwen3-moe", "hf-olmoe", "hf-gpt-oss"),
    *("hf-deepseek-v2", "hf-deepseek-v3"),
)
FUNCTIONS = ("hf-phimoe", "hf-bloom")
"""Those with autograd functions of their own, which may compute across samples for all a plan can
tell: `accept` says that they do not."""
COMPARED = ("hf-clip",)
"""Those that compare samples with each other: a plan keeps the batch whole."""
WHOLE = {
    "tp2-whole": {"tp": 2, "num_microbatches": 1},
    "tp2-whole-recompute": {"tp": 2, "num_microbatches": 1, "recompute": "full"},
}
FIRST_TRIED = ("gpt", "hf-gpt2", "hf-llama")
WITHOUT_SEQUENCES = ("mlp", "batchnorm-mlp", "resnet", "unet", "vit")


def source_of(name):
    tiny = model_matrix()[name]
    return ModelSource(
        path=Path(f"{name}.py"), build=tiny.build, batch=tiny.batch, loss=tiny.loss, dependencies=()
    )


def verify_layouts(name, captured, layouts, precision):
    """On each rank: verify a model under each layout; rank 0 returns what is too far apart."""
    graph = from_json(captured)
    apart = {}
    for label, layout in layouts.items():
        plan = default_plan(graph, microbatch_size=2, **layout)
        accept = ("unknown-ops",) if name in FUNCTIONS else ()
        plan = plan.model_copy(update={"precision": precision, "accept": accept})
        report = compare_with_one_process(plan, source_of(name), steps=2, graph=graph)
        if report is not None and not report.passed:
            apart[label] = str(report)
    return apart


def check(name, num_ranks, layouts, precision="model"):
    if model_matrix()[name].needs_transformers:
        pytest.importorskip("transformers")
    captured = to_json(capture_source(source_of(name), precision=precision))
    apart = run_ranks(verify_layouts, num_ranks, name, captured, layouts, precision)[0]
    assert not apart, f"apart by more than rounding: {apart}"


@pytest.mark.parametrize("name", telling_first())
def test_two_ranks(name):
    """P1, P2, P3, D19, M20, M22, X8, X13: each kind of parallelism, no model changed."""
    check(name, 2, TWO_RANKS | ({"cp2": {"cp": 2}} if name in FIRST_TRIED else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in model_matrix() if n not in tiny_models() and n not in REFUSED]
)
def test_two_ranks_of_many_families(name):
    """N3: no false alarm on the wide matrix, whose gradients span seven decades."""
    check(name, 2, WHOLE if name in COMPARED else TWO_RANKS)


WINDOWED = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "cp2-selective": {"cp": 2, "recompute": "selective"},
}
MASKED = (
    *("hf-mistral", "hf-gemma2", "hf-gemma3", "hf-olmo3", "hf-llama-padded", "hf-llama-packed"),
    "hf-mistral-packed",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_windows_documents_and_padding_on_two_ranks(name):
    """N9: attention that is told of its mask, of some heads, stages and positions."""
    check(name, 2, WINDOWED)


def test_experts_on_ranks_of_their_own():
    """N7, B9: Mixtral's experts, in fp64 and with fp32 copies of bf16 weights."""
    check("hf-mixtral", 2, EXPERTS_ON_TWO)
    check("hf-mixtral", 2, EXPERTS_ON_TWO, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_experts_of_many_families(name):
    """N7, B9: rows of experts exchanged between two ranks."""
    check(name, 2, EXPERTS_ON_TWO)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-mixtral", "hf-gpt-oss", "hf-deepseek-v3"])
def test_experts_beside_other_axes(name):
    """N7, B9: replicas of experts, parts of their matrices, parts of sequences, stages."""
    check(name, 4, EXPERTS_ON_FOUR)


@pytest.mark.parametrize("name", telling_first(FIRST_TRIED, {"gpt"}))
def test_four_ranks(name):
    """P5, D12, X8: two kinds of parallelism at once; stages with meshes of their own."""
    check(name, 4, FOUR_RANKS | {"tp2-then-dp2": OWN_MESHES["tp2-then-dp2"]})


def test_deferred_weight_gradients_of_a_stage_that_only_the_batch_feeds():
    """P11: with its weights' gradients put aside, the first stage of an MLP has no other."""
    check("mlp", 2, {"pp2-zb_h1": {"pp": 2, "schedule": "zb_h1"}})


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in tiny_models() if n not in FIRST_TRIED])
def test_four_ranks_rest(name):
    """P5, X8: the other models on four ranks."""
    check(name, 4, FOUR_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_models()))
def test_two_ranks_more(name):
    """G5, P6, D14: ZeRO stages, recompute and other schedules."""
    check(name, 2, TWO_RANKS_MORE)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_models()))
def test_two_ranks_in_bf16(name):
    """V14: the captures of cast models, with the casts written out in them, divide as well."""
    check(name, 2, {"tp2": {"tp": 2}, "pp2": {"pp": 2}}, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_models()))
def test_four_ranks_more(name):
    """D14: ZeRO beside tensor and pipeline parallelism; four-way splits."""
    check(name, 4, FOUR_RANKS_MORE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in tiny_models() if n != "mlp"])
def test_virtual_stages(name):
    """V2, V6, V10: several stages on a rank, looped, folded and in a V (an MLP is too short)."""
    check(name, 2, VIRTUAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in tiny_models() if n not in WITHOUT_SEQUENCES])
def test_context_parallelism_beside_the_rest(name):
    """D19, P5: cp beside each other kind on four ranks, and alone on four."""
    if name not in FIRST_TRIED:
        check(name, 2, {"cp2": {"cp": 2}})
    check(name, 4, CONTEXT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in tiny_models() if n != "batchnorm-mlp"])
def test_stages_of_their_own_mesh_rest(name):
    """D12: the other models, both orders, and ZeRO 3 (BatchNorm's batches would differ)."""
    check(name, 4, OWN_MESHES)
