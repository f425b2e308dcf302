"""Casts of products in 8 bits, by hand."""

from dataclasses import replace

import pytest

from costmodel.execution import find_execution
from costmodel.execution.casts import CASTS, CUTLASS_PART, TILES_PART
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_exchange import executed_exchange
from costmodel.execution.executed_kernels import is_layer_product, kernel_seconds
from costmodel.execution.narrow import gradient_is_ready, input_is_ready
from costmodel.memory.saved import saved_tensors
from costmodel.table.kernels import load_rates
from costmodel.table.rows.run_row import parse_row
from planner.language.plan.replication import Replication
from profiles import Group, load_profile
from tests.costmodel.execution.test_executed import GRAPH
from tests.costmodel.programs import program_of
from tests.costmodel.table.rows_of_runs import ROW

TITAN = find_execution("torchtitan-compiled")
H100 = load_profile("h100-sxm5-80gb")
RATES = load_rates(H100)
SIDE = 32


def profile_of(scaling: str, dtype: str = "float8_e4m3fn") -> ExecutedProfile:
    execution = replace(TITAN, scaling=scaling)
    return ExecutedProfile(H100, RATES, num_nodes=1, execution=execution, product_dtype=dtype)


@pytest.mark.parametrize(
    ("scaling", "there_bytes", "back_bytes", "part", "weight_dtype"),
    [
        ("delayed", 4, 0, 1.0, "float8_e4m3fn"),
        ("current", 6, 4, 1.0, "float8_e4m3fn"),
        ("tensorwise", 6, 4 + 2, 1.0, "float8_e4m3fn"),
        ("rowwise", 8 + 3, 6 + 7, CUTLASS_PART, "float8_e4m3fn"),
        ("rowwise-forward", 3 + 3, 1 + 3, CUTLASS_PART, "bfloat16"),
        ("blocks", 6 + 3, 4 + 3, 1.0, "float8_e4m3fn"),
        ("tiles", 6 + 3, 4 + 3, TILES_PART, "float8_e4m3fn"),
    ],
)
def test_bytes_of_a_product_of_a_blocks_input(scaling, there_bytes, back_bytes, part, weight_dtype):
    """Of (32, 32) by (32, 32): its input comes from outside, and a pass makes its gradient."""
    local = program_of(
        {"y": ("aten.mm.default", ("x", "w")), "z": ("aten.relu.default", ("y",))},
        outputs=("z",), params=("w",), dtype="bfloat16", inputs=("x",),
    )  # fmt: skip
    profile = profile_of(scaling)
    saved = saved_tensors(local, device_type="cuda")
    found = kernel_seconds(local.ops[:1], local, profile, saved, frozenset())

    def product(dtype: str) -> float:
        seconds = RATES.matmul_seconds(SIDE, SIDE, SIDE, dtype=dtype)
        return seconds if dtype == "bfloat16" else seconds / part

    def moved(num_bytes: float) -> float:
        return RATES.pass_seconds(num_bytes * SIDE * SIDE, 0)

    narrow = product("float8_e4m3fn")
    assert found.forward_s == pytest.approx(narrow + moved(there_bytes))
    weight_s = product(weight_dtype)
    assert found.weight_s == pytest.approx(weight_s)
    assert found.backward_s == pytest.approx(narrow + weight_s + moved(back_bytes))


def test_which_kernels_do_their_part_of_a_cast():
    """A compiler casts what any pass makes, and gradients that passes make: not those of values,
    which attention makes. A library of layers casts in its norms alone.
    """
    layer = GRAPH.classes[1]
    core = find_execution("megatron-core")
    ready = {
        op.module: (
            input_is_ready([op], layer, TITAN),
            gradient_is_ready(op, layer, TITAN),
            input_is_ready([op], layer, core),
            gradient_is_ready(op, layer, core),
        )
        for op in layer.ops
        if is_layer_product(op, layer)
    }
    assert ready == {
        "self_attention.qkv": (True, False, True, False),
        "self_attention.proj": (True, True, False, False),
        "mlp.fc1": (True, True, True, False),
        "mlp.fc2": (True, True, False, False),
    }


def test_a_norm_of_several_products_that_are_one_kernel_casts_once():
    """As captures write queries, keys and values, which a runtime multiplies at once."""
    taken = {
        "n": ("aten.rms_norm.default", ("x", "g")),
        "q": ("aten.mm.default", ("n", "wq")),
        "k": ("aten.mm.default", ("n", "wk")),
    }
    core = find_execution("megatron-core")
    options = {"params": ("g", "wq", "wk"), "dtype": "bfloat16", "inputs": ("x",)}
    local = program_of(taken, outputs=("q", "k"), **options)
    assert input_is_ready(local.ops[1:], local, core)
    assert not input_is_ready(local.ops[1:2], local, core)


def test_weights_are_gathered_in_8_bits_where_each_rank_casts_its_shard():
    group = Group(ranks_per_node=8, num_nodes=1)

    def gather_s(profile: ExecutedProfile) -> float:
        return executed_exchange(
            profile,
            profile.execution,
            group,
            Replication(zero_stage=3, replicas=8, precision="bf16"),
            param_bytes=16e9,
            num_blocks=32,
            num_tensors=200,
        ).forward_s

    wide = gather_s(profile_of("tensorwise", "bfloat16"))
    assert gather_s(profile_of("rowwise")) == wide
    assert gather_s(profile_of("tensorwise")) == pytest.approx(wide / 2, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "scaling"),
    [
        ("fp8", "tensorwise"),
        ("fp8 tensorwise + fp8 all-gather", "tensorwise"),
        ("fp8 rowwise", "rowwise"),
        ("fp8 rowwise_with_gw_hp", "rowwise-forward"),
        ("mxfp8_cublas", "blocks"),
    ],
)
def test_a_row_names_torchaos_recipe(dtype, scaling):
    row = {**ROW, "dtype": dtype, "gpu": "H100-SXM"}
    assert parse_row({**row, "stack": "torchtitan"}).stack.scaling == scaling
    assert parse_row({**row, "stack": "megatron-core"}).stack.scaling == "delayed"
    assert scaling in CASTS


def test_megatrons_scale_a_tensor_is_that_of_the_tensor_at_hand():
    row = {**ROW, "dtype": "fp8 current", "gpu": "H100-SXM", "stack": "megatron-core"}
    assert parse_row(row).stack.scaling == "current"


@pytest.mark.parametrize(("gpu", "scaling"), [("H100-SXM", "tiles"), ("B200", "delayed")])
def test_megatrons_blocks_are_tiles_before_blackwell(gpu, scaling):
    row = {**ROW, "dtype": "fp8 blockwise", "gpu": gpu, "stack": "megatron-core"}
    assert parse_row(row).stack.scaling == scaling
