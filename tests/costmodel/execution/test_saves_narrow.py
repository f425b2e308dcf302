"""What is saved where layers multiply in 8 bits."""

import pytest

from costmodel.cache import CostCache
from costmodel.estimate import estimate
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_kernels import is_product, products_of_head
from costmodel.execution.execution import find_execution
from costmodel.execution.saves import NARROW, as_saved
from costmodel.table.kernels import load_rates
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import price_row, run_of
from costmodel.table.rows.run_row import RowError
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.plan import Recompute
from planner.language.templates.splits import tp_layouts
from profiles import load_profile
from tests.costmodel.execution.test_executed import GRAPH, LLAMA, plan_of

CORE = find_execution("megatron-core")
HIDDEN_BYTES, WIDE_BYTES = 2 * 4096 * 4096, 2 * 4096 * 14336
"""Of a sample in bf16: a layer's input, and what its last product takes."""


def costs_in(dtype: str) -> CostCache:
    profile = load_profile("h100-sxm5-80gb")
    executed = ExecutedProfile(
        profile, load_rates(profile), num_nodes=1, execution=CORE, product_dtype=dtype
    )
    return CostCache(GRAPH, executed, execution=CORE)


def test_products_of_layers_take_casts_and_the_head_does_not():
    costs = costs_in("float8_e4m3fn")
    layouts = tp_layouts(LLAMA, sequence_parallel=True, microbatch_size=1)
    degrees = plan_of(tp=2).degrees
    for index in range(len(costs.graph.classes)):
        mine = tuple(layout for layout in layouts if layout.class_index == index)
        local = costs.local(index, 1, degrees, mine)
        held = as_saved(local, costs.profile)
        in_head = products_of_head(held)
        known = {*held.inputs, *held.params}
        for op in held.ops:
            assert known.issuperset(op.inputs), op
            known.update(op.outputs)
            dtypes = {held.tensor[name].dtype for name in op.inputs}
            if is_product(op):
                assert (NARROW in dtypes) == (op.name not in in_head)
            if op.target == REDISTRIBUTE and op.name.endswith("8 bits"):
                assert dtypes == {NARROW}  # ranks gather what was cast
        assert as_saved(local, costs_in("bfloat16").profile) is local


def test_a_layer_saves_half_of_what_its_products_take():
    """The products of queries, keys and values take a norm, as do gate and up; down takes the
    activation. What attention made it keeps itself, so that its product's cast comes on top."""
    saved = {
        dtype: costs_in(dtype).block(1, 1).load.saved_bytes
        for dtype in ("bfloat16", "float8_e4m3fn")
    }
    less = saved["bfloat16"] - saved["float8_e4m3fn"]
    assert less == (HIDDEN_BYTES + WIDE_BYTES) / 2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_it_is_never_more(recompute):
    peaks = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        costs = costs_in(dtype)
        plan = plan_of(dp=1, num_microbatches=2)
        stages = tuple(s.model_copy(update={"recompute": recompute}) for s in plan.stages)
        plan = plan.model_copy(update={"stages": stages})
        peaks[dtype] = estimate(costs.graph, costs.profile, plan, costs=costs).peak_bytes
    assert peaks["float8_e4m3fn"] <= peaks["bfloat16"]
    assert peaks["float8_e4m3fn"] < peaks["bfloat16"] or recompute != "none"


def test_frozen_weights_and_what_gates_take_may_lie_in_8_bits():
    """Llama-2-70B with adapters: 80 layers of h^2 (2 + 2/8) + 3 h f weights, and of what a gate
    takes 2 f a position.
    """
    row = {"gpu": "H200", "model": "Llama2-70B-LoRA-r16", "dtype": "fp8", "stack": "megatron-core"}
    row |= {"gpus": "8", "tp": "1", "cp": "2", "pp": "1", "dp": "4", "seq_len": "8192"}
    row |= {"micro_batch": "1", "global_batch": "8", "recompute": "none"}
    wide, weights, both = (
        price_row({**row, "keeps_narrow": kept}).estimate.memory[0]
        for kept in ("", "weights", "weights activations")
    )
    halved = 80 * (8192**2 * (2 + 2 / 8) + 3 * 8192 * 28672)
    assert wide.parameter_bytes - weights.parameter_bytes == pytest.approx(halved, rel=0.01)
    taken = 80 * 4096 * 2 * 28672
    assert float(weights.tensor_bytes - both.tensor_bytes) == pytest.approx(taken, rel=0.1)
    assert price_row(row).predicted["predicted_fits"] == "no"
    assert price_row({**row, "keeps_narrow": "weights activations"}).predicted[
        "predicted_fits"
    ] == ("yes")
    with pytest.raises(RowError, match="keeps_narrow=gradients is not priced; use some of weights"):
        price_row({**row, "keeps_narrow": "gradients"})


LATENT = {
    "gpu": "H100", "stack": "megatron-core", "model": "DeepSeek-V3", "gpus": "64", "tp": "1",
    "pp": "1", "dp": "64", "ep": "64", "seq_len": "4096", "micro_batch": "1", "global_batch": "64",
    "notes": "force-balanced",
}  # fmt: skip
"""Layers of 7,168 with 128 heads, of 192 queries and keys and 128 values."""
DENSE, EXPERTS = 1, 2
"""Classes of its layers."""


def kept_of(class_index: int, dtype: str, recompute: str) -> int:
    """Return what a layer keeps for its backward, where the row recomputes this; a search's bound
    counts the same.
    """
    run, profile, rates = run_of({**LATENT, "dtype": dtype, "recompute": recompute})
    plan, costs = RowPrices().plan(run, profile, rates)
    chosen = {choice.class_index: choice.ops for choice in plan.recomputed}
    of_class = class_index, 1, plan.degrees, plan.layouts_of(class_index, degrees=plan.degrees)
    again = chosen.get(class_index)
    mode: Recompute = "selective" if chosen else "none"
    kept = costs.block_bytes(*of_class, recompute=mode, recomputed=again).kept_bytes
    if chosen:
        load = costs.block(*of_class, recomputed=again).load
        assert load.selective_bytes - load.input_bytes == kept
    return kept


@pytest.mark.parametrize("class_index", [DENSE, EXPERTS])
def test_up_projections_that_run_again_leave_queries_keys_and_values(class_index):
    """In 8 bits the wide inputs of the projections, 1,536 and 512 columns of norms' results, take
    the place of their casts (Transformer Engine, set_save_original_input).
    """
    gone = 4096 * 2 * 128 * (192 + 192 + 128)
    less = {
        dtype: kept_of(class_index, dtype, "none")
        - kept_of(class_index, dtype, "selective: mla_up_proj")
        for dtype in ("bf16", "mxfp8")
    }
    assert less["bf16"] == gone
    assert less["mxfp8"] == gone - 4096 * (1536 + 512)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("mxfp8", 1)])
def test_activations_of_experts_that_run_again_leave_no_cast(dtype, size):
    """8 rows of 2,048 a token, in 16 and in 8 bits."""
    recomputed = kept_of(EXPERTS, dtype, "selective: moe_act")
    assert kept_of(EXPERTS, dtype, "none") - recomputed == 4096 * 8 * 2048 * size


@pytest.mark.parametrize(
    ("class_index", "modules"),
    [(DENSE, "core_attn"), (EXPERTS, "layernorm"), (DENSE, "mlp"), (EXPERTS, "shared_experts")],
)
def test_modules_that_run_again_leave_less_in_8_bits(class_index, modules):
    recomputed = kept_of(class_index, "mxfp8", f"selective: {modules}")
    assert recomputed < kept_of(class_index, "mxfp8", "none")
